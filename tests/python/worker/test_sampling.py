"""Sampled calls are lossless: exact distributions over all coins, and seeds that repeat."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nwor_specpv import DraftTree, NworError
from nwor_specpv.worker import Client, RemoteSession, Server, WorkerError, judging
from nwor_specpv.worker.rpc import messages
from tests.python.session.tiny_host import TinyHost
from tests.python.worker.serving import (
    MODEL,
    PATIENCE_S,
    PLAIN,
    PROMPT,
    Calls,
    decode,
    ngram_tree,
    serving,
)
from tests.python.worker.table_host import Table, coins_by_seed, emitted, plain, serving_table


def table(*rows: tuple[int, ...]) -> Table:
    return [[Fraction(value, sum(row)) for value in row] for row in rows]


# Quarters: what rejected siblings leave has a denominator of at most 4.
QUARTERS = table((1, 1, 2, 0), (0, 1, 3, 0), (2, 0, 1, 1), (4, 0, 0, 0))
HALVES = table((1, 1, 0), (0, 1, 1), (1, 0, 1))
OTHER_HALVES = table((0, 1, 1), (1, 1, 0), (0, 2, 0))


def sampled(
    client: Client, seeds: range, tree: DraftTree | None, root: int, **options: Any
) -> list[tuple[Fraction, list[int]]]:
    """One run for each seed, all as likely."""
    runs = []
    for seed in seeds:
        with client.session("s") as session:
            result = session.verify(tree, [root], seed=seed, **options)
        runs.append((Fraction(1, len(seeds)), [*result.tokens, result.next_token]))
    return runs


@pytest.mark.parametrize(
    ("tree", "longest"),
    [
        (None, 1),
        (DraftTree([0, 2]), 2),
        (DraftTree([0, 1, 2]), 3),
        (DraftTree([0, 3]), 1),  # it cannot follow
        (DraftTree([0, 1, 2, 2, 1], [-1, 0, 0, 1, 1]), 3),
        (DraftTree([0, 2, 0, 1, 2, 0], [-1, 0, 0, 0, 1, 1]), 3),
        (DraftTree([0, 2, 2, 0], [-1, 0, 0, 2]), 2),  # siblings with one token: the first counts
    ],
)
def test_drafts_change_no_distribution(
    monkeypatch: pytest.MonkeyPatch, tree: DraftTree | None, longest: int
) -> None:
    seeds = coins_by_seed(monkeypatch, 2, cells=4, final_cells=12)
    with serving_table(QUARTERS) as client:
        runs = sampled(client, seeds, tree, 0, temperature=1.0)
    assert emitted(runs, QUARTERS, 3) == plain(0, QUARTERS, 3)
    assert max(len(run) for _, run in runs) == longest


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("chunk_rows", [0, 2])
def test_drafts_drawn_from_their_distributions_change_none(
    monkeypatch: pytest.MonkeyPatch, sparse: bool, chunk_rows: int
) -> None:
    """All drafts that the drafter may draw, by their probabilities; all coins for each."""
    # A second chunk is the last draft alone.
    finals = (1, 3) if chunk_rows else (1,)
    seeds = coins_by_seed(monkeypatch, 2, cells=2, final_cells=2, finals=finals)
    runs = []
    with serving_table(HALVES) as client:
        for chain in itertools.product(range(3), repeat=2):
            rows = [OTHER_HALVES[0], OTHER_HALVES[chain[0]]]
            weight = rows[0][chain[0]] * rows[1][chain[1]]
            if not weight:
                continue
            options = distributions(rows, sparse)
            tree = DraftTree([0, *chain])
            own = sampled(client, seeds, tree, 0, temperature=1.0, chunk_rows=chunk_rows, **options)
            runs += [(weight * share, run) for share, run in own]
    assert emitted(runs, HALVES, 3) == plain(0, HALVES, 3)
    # Half of the first drafts are accepted: the mass that both have in common.
    assert sum(weight for weight, run in runs if len(run) > 1) == Fraction(1, 2)


def distributions(rows: Table, sparse: bool) -> dict[str, Any]:
    if not sparse:
        return {"draft_probs": torch.tensor([[float(value) for value in row] for row in rows])}
    return {
        "draft_log_probs": [
            {token: math.log(value) for token, value in enumerate(row) if value} for row in rows
        ]
    }


def test_distributions_let_more_drafts_be_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A drafter that is right about the distribution is always accepted, if it says so."""
    seeds = coins_by_seed(monkeypatch, 1, cells=2, final_cells=2)
    accepted = {}
    with serving_table(HALVES) as client:
        for told in (False, True):
            options = distributions([HALVES[0]], sparse=False) if told else {}
            runs = [
                run
                for draft in (0, 1)
                for run in sampled(
                    client, seeds, DraftTree([0, draft]), 0, temperature=1.0, **options
                )
            ]
            accepted[told] = Fraction(sum(len(run) > 1 for _, run in runs), len(runs))
    assert accepted == {False: Fraction(1, 2), True: Fraction(1)}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"temperature": 0.5}, (1, 1, 2, 0)),  # the logits are halved logarithms
        ({"temperature": 0.5, "top_k": 1}, (0, 0, 1, 0)),
        ({"temperature": 0.5, "top_k": 3}, (1, 1, 2, 0)),
        ({"temperature": 0.5, "top_k": 10**12}, (1, 1, 2, 0)),
        ({"temperature": 0.5, "top_p": 0.4}, (0, 0, 1, 0)),
        ({"temperature": 0.5, "top_p": 0.7}, (1, 1, 2, 0)),  # equals are kept
    ],
)
def test_options_shape_the_distribution(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], expected: tuple[int, ...]
) -> None:
    seeds = coins_by_seed(monkeypatch, 1, cells=4, final_cells=12)
    with serving_table(QUARTERS, temperature=0.5) as client:
        runs = sampled(client, seeds, DraftTree([0, 1]), 0, **options)
    (row,) = table(expected)
    wanted = {(token,): share for token, share in enumerate(row) if share}
    assert emitted(runs, QUARTERS, 1) == wanted


def continued(session: RemoteSession, count: int, branches: int, seed: int) -> list[int]:
    return decode(session, PROMPT, count, branches, temperature=0.9, top_k=40, seed=seed)


def test_a_seed_repeats_and_others_differ() -> None:
    with serving() as worker:
        texts = [
            continued(worker.client.session(f"s{run}"), 20, 2, seed)[: len(PROMPT) + 20]
            for run, seed in enumerate((7, 7, 8))
        ]
    assert texts[0] == texts[1] != texts[2]


def test_without_a_seed_each_call_has_a_new_one(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = itertools.count(100)
    monkeypatch.setattr(judging, "secrets", SimpleNamespace(randbits=lambda bits: next(drawn)))
    with serving() as worker:
        free = [
            worker.client.session(f"f{run}").verify(None, PROMPT, temperature=1.0).next_token
            for run in range(5)
        ]
        told = [
            worker.client.session(f"t{seed}")
            .verify(None, PROMPT, temperature=1.0, seed=seed)
            .next_token
            for seed in range(100, 105)
        ]
    assert free == told
    assert len(set(free)) > 1


def test_a_seed_gives_the_same_tokens_whatever_shares_the_pass() -> None:
    tree = ngram_tree(PROMPT, 2)

    def call(worker: Any, index: int) -> Any:
        """Greedy, sampled, and a chain with its distributions."""
        options = [
            {},
            {"temperature": 0.8, "seed": 3},
            {"temperature": 1.2, "top_p": 0.9, "seed": 4},
            {"temperature": 1.0, "seed": 5, "draft_probs": torch.full((2, 512), 1 / 512)},
        ][index]
        drafts = DraftTree([PROMPT[-1], 300, 301]) if index == 3 else tree
        result = worker.client.session(f"s{index}").verify(drafts, PROMPT, **options)
        return result.tokens, result.next_token, result.length

    with serving() as worker:
        alone = [call(worker, index) for index in range(4)]
    with serving() as worker:
        worker.target.gate.clear()
        busy = Calls(lambda: worker.client.session("busy").verify(None, PROMPT))
        assert worker.target.entered.wait(PATIENCE_S)
        calls = Calls(*(lambda index=index: call(worker, index) for index in range(4)))
        worker.until_waiting(4)
        worker.target.gate.set()
        together = calls.outcomes()
        busy.outcomes()
        assert [len(batch) for batch in worker.target.batches] == [1, 4]
    assert together == alone
    assert [*together[0][0], together[0][1]] == PLAIN[len(PROMPT) : together[0][2] + 1]


def test_sampling_is_forgotten_after_its_pass() -> None:
    with serving() as worker:
        session = worker.client.session("a")
        session.verify(None, PROMPT, temperature=5.0, seed=1)
        session.end()
        assert session.verify(None, PROMPT).next_token == PLAIN[len(PROMPT)]


def test_the_answer_says_what_the_call_took() -> None:
    drafts = PLAIN[len(PROMPT) : len(PROMPT) + 2]
    with serving() as worker:
        session = worker.client.session("a")
        result = session.verify(DraftTree([PROMPT[-1], *drafts, 7, 7]), PROMPT)
        assert result.acceptance_rate == 0.5
        assert result.run_seconds > 0
        assert result.wait_seconds >= 0
        assert session.verify(None, [result.next_token]).acceptance_rate == 0
        info = worker.client.ping()
        assert (info.samples, info.has_token_bytes, info.max_distribution_bytes) == (
            True,
            False,
            16 << 20,
        )


CHAIN = DraftTree([PROMPT[-1], 5, 6])
UNIFORM = torch.full((2, 512), 1 / 512)
HOT = {"temperature": 1.0}


def replaced(row: int, token: int, value: float) -> torch.Tensor:
    probs = UNIFORM.clone()
    probs[row, 0] += probs[row, token] if value == 0 else 0
    probs[row, token] = value
    return probs


@pytest.mark.parametrize(
    ("tree", "options", "message"),
    [
        (None, {"temperature": -1.0}, r"temperature: got -1\.0, expected 0 or more"),
        (None, {"temperature": math.inf}, "temperature: got inf, expected 0 or more"),
        (None, {"temperature": math.nan}, "temperature: got nan, expected a number"),
        (None, {"temperature": "hot"}, "temperature: got 'hot', expected a number"),
        (None, {**HOT, "top_p": 0.0}, r"top_p: got 0\.0, expected more than 0, at most 1"),
        (None, {**HOT, "top_p": 1.5}, r"top_p: got 1\.5, expected more than 0, at most 1"),
        (None, {**HOT, "top_k": -1}, "top_k: got -1, expected 0"),
        (None, {**HOT, "top_k": 1.5}, "top_k, seed: got 1.5 and None"),
        (None, {**HOT, "seed": 2**63}, "top_k, seed: got 0 and 9223372036854775808"),
        (None, {"top_k": 3}, "top_k: got 3 beside temperature 0"),
        (None, {"top_p": 0.5}, "top_p: got 0.5 beside temperature 0"),
        (CHAIN, {"draft_probs": UNIFORM}, "distributions: got some beside temperature 0"),
        (None, {**HOT, "draft_probs": UNIFORM}, "distributions: got some beside no drafts"),
        (
            DraftTree([PROMPT[-1], 5, 6], [-1, 0, 0]),
            {**HOT, "draft_probs": UNIFORM},
            "a tree that branches, expected a chain",
        ),
        (CHAIN, {**HOT, "draft_probs": UNIFORM[:1]}, "got 2048 bytes, expected 4096: 2 drafts x"),
        (CHAIN, {**HOT, "draft_probs": UNIFORM[0]}, r"draft_probs: got sizes \[512\], expected"),
        (CHAIN, {**HOT, "draft_probs": "x"}, "draft_probs: got str"),
        (CHAIN, {**HOT, "draft_probs": replaced(1, 9, math.nan)}, "probability NaN for row 2"),
        (CHAIN, {**HOT, "draft_probs": replaced(0, 9, -0.5)}, r"probability -0\.5 for row 1"),
        (CHAIN, {**HOT, "draft_probs": replaced(0, 9, math.inf)}, "probability inf for row 1"),
        (CHAIN, {**HOT, "draft_probs": UNIFORM / 2}, "that sum to 0.5 for row 1, expected 1"),
        (CHAIN, {**HOT, "draft_probs": replaced(1, 6, 0.0)}, "got probability 0 for token 6 of ro"),
        (CHAIN, {**HOT, "draft_log_probs": [{5: 0.0}]}, r"counts \[1\] for 2 drafts"),
        (CHAIN, {**HOT, "draft_log_probs": [{5: 0.0}, {}]}, r"counts \[1, 0\] for 2 drafts"),
        (CHAIN, {**HOT, "draft_log_probs": [{5: -1.0}, {6: 0.0}]}, "that sum to 0.3679 for row 1"),
        (CHAIN, {**HOT, "draft_log_probs": [{5: math.nan}, {6: 0.0}]}, "NaN for row 1"),
        (CHAIN, {**HOT, "draft_log_probs": [{5: 0.0}, {7: 0.0}]}, "probability 0 for token 6 of"),
        (CHAIN, {**HOT, "draft_log_probs": [{5: 0.0}, {512: 0.0}]}, "token 512 for row 2"),
        (CHAIN, {**HOT, "draft_log_probs": [{5: "x"}, {6: 0.0}]}, "draft_log_probs: a value does"),
        (CHAIN, {**HOT, "draft_log_probs": [0.0, 0.0]}, "draft_log_probs: got float, expected a m"),
        (
            CHAIN,
            {**HOT, "draft_probs": UNIFORM, "draft_log_probs": [{5: 0.0}]},
            "draft_probs, draft_log_probs: got both",
        ),
        (None, {"token_bytes": True}, "want_token_bytes: got true, expected false"),
    ],
)
def test_wrong_options_are_named_and_lose_nothing(
    tree: DraftTree | None, options: dict[str, Any], message: str
) -> None:
    with serving() as worker:
        session = worker.client.session("a")
        session.verify(None, PROMPT[:-1])
        with pytest.raises(NworError, match=message) as raised:
            session.verify(tree, [PROMPT[-1]], **options)
        assert type(raised.value) is NworError
        assert "\n" not in str(raised.value)
        assert session.verify(CHAIN, [PROMPT[-1]]).next_token == PLAIN[len(PROMPT)]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"probs": b"1234", "counts": [1, 1], "tokens": [5, 6], "log_probs": [0.0, 0.0]},
            "got dense and sparse ones",
        ),
        (
            {"counts": [1, 2], "tokens": [5, 6], "log_probs": [0.0, 0.0]},
            "got 2 tokens and 2 log-probabilities, expected 3 as the counts say",
        ),
        ({"counts": [2, -1], "tokens": [5], "log_probs": [0.0]}, r"got counts \[2, -1\] for 2"),
        ({"tokens": [5, 6], "log_probs": [0.0, 0.0]}, r"got counts \[\] for 2 drafts"),
        (
            {"counts": [2, 1], "tokens": [5, 5, 6], "log_probs": [-0.7, -0.7, 0.0]},
            "got a token twice for row 1",
        ),
        (
            {"counts": [1, 1], "tokens": [5, -6], "log_probs": [0.0, 0.0]},
            "got token -6 for row 2, expected 0 to 511",
        ),
        ({}, "got 0 bytes, expected 4096"),
    ],
)
def test_messages_of_other_clients_are_checked(fields: dict[str, Any], message: str) -> None:
    request = messages.VerifyDraftsRequest(
        session="a",
        tree=messages.DraftTree(tokens=list(CHAIN.tokens)),
        new_tokens=PROMPT,
        sampling=messages.Sampling(temperature=1.0),
        distributions=messages.DraftDistributions(**fields),
    )
    with serving() as worker:
        with pytest.raises(NworError, match=f"distributions: {message}"):
            worker.client.call("VerifyDrafts", request)
        assert worker.client.ping().sessions == 0


def test_a_store_without_a_judge_does_not_sample() -> None:
    server = Server(TinyHost(model=MODEL).store, model="m", vocab_size=512)
    with server, Client(server.address, timeout=PATIENCE_S) as client:
        with pytest.raises(NworError, match=r"temperature: got 0\.7, expected 0: this worker"):
            client.session("a").verify(None, PROMPT, temperature=0.7)
        assert client.session("a").verify(None, PROMPT).next_token == PLAIN[len(PROMPT)]
        assert not client.ping().samples


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_logits_that_are_no_numbers_fail_their_call_alone(
    monkeypatch: pytest.MonkeyPatch, temperature: float, value: float
) -> None:
    with serving() as worker:
        forward = MODEL.forward

        def damaged(tokens: torch.Tensor, *rest: Any) -> torch.Tensor:
            logits = forward(tokens, *rest)
            return torch.where((tokens == 400)[:, None], value, logits)

        monkeypatch.setattr(MODEL, "forward", damaged)
        session = worker.client.session("a")
        session.verify(None, PROMPT)
        with pytest.raises(WorkerError, match="the model's logits are NaN or inf") as raised:
            session.verify(None, [400], temperature=temperature)
        assert raised.value.code == "INTERNAL"
        result = session.verify(None, [PLAIN[len(PROMPT)]])
        assert result.next_token == PLAIN[len(PROMPT) + 1]
