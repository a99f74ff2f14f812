"""verify_in_chunks from Python; csrc's own tests play thousands of random chains."""

from __future__ import annotations

import pytest

from nwor_specpv import ChainChunk, Metrics, NworError, judge_greedy, verify_in_chunks


def successor(token: int) -> int:
    return (5 * token + 3) % 17


def chain_with_a_fault_at(row: int, length: int) -> list[int]:
    chain = [1]
    while len(chain) < length:
        chain.append(successor(chain[-1]))
    if row < length:
        chain[row] = (chain[row] + 1) % 17
    return chain


@pytest.mark.parametrize("fault", [1, 7, 8, 9, 16, 30, 99])
@pytest.mark.parametrize("chunk_rows", [1, 8, 64])
def test_equals_one_pass(fault: int, chunk_rows: int) -> None:
    chain = chain_with_a_fault_at(fault, 31)
    run: list[int] = []

    def verify(chunk: ChainChunk) -> tuple[int, int]:
        assert chunk.first_row == len(run)
        run.extend(chunk.tokens)
        return judge_greedy(chunk, [successor(token) for token in chunk.tokens])

    before = Metrics().snapshot()["nwor_chunk_rows_saved_total"]
    result = verify_in_chunks(chain, verify, chunk_rows)
    accepted = min(fault, 31) - 1
    assert result.accepted == accepted
    assert result.next_token == successor(chain[accepted])
    assert run == chain[: result.rows_run]
    assert result.rows_run == min(31, (accepted // chunk_rows + 1) * chunk_rows)
    assert result.rows_saved == 31 - result.rows_run
    assert Metrics().snapshot()["nwor_chunk_rows_saved_total"] == before + result.rows_saved


def test_what_verify_raises_passes_through() -> None:
    def verify(chunk: ChainChunk) -> tuple[int, int]:
        if chunk.first_row == 8:
            raise KeyError("mine")
        return 8, 0

    with pytest.raises(KeyError, match="mine"):
        verify_in_chunks(list(range(20)), verify)


@pytest.mark.parametrize(
    ("chain", "chunk_rows", "message"),
    [([], 8, "chain: got no rows"), ([1], 0, "chunk_rows: got 0"), ([1, 2], 8, "accepted: got 5")],
)
def test_wrong_use_is_named(chain: list[int], chunk_rows: int, message: str) -> None:
    with pytest.raises(NworError, match=message):
        verify_in_chunks(chain, lambda chunk: (5, 0), chunk_rows)


@pytest.mark.parametrize(
    ("returned", "kind"),
    [
        (None, "NoneType"),
        (3, "int"),
        ((1, "two"), "tuple of int, str"),
        ([1, 2, 3] * 9, "list of 27"),
    ],
)
def test_what_verify_returns_wrong_is_named(returned: object, kind: str) -> None:
    message = rf"^verify: got {kind}, expected integers \(accepted, next_token\)$"
    with pytest.raises(NworError, match=message):
        verify_in_chunks([1, 2], lambda chunk: returned)
