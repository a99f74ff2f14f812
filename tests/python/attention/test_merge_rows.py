"""merge_rows: rows in flight added to attention over the prefix, and the write it takes along."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from nwor_specpv import (
    _C,
    Interceptor,
    NworConfig,
    NworError,
    RoundPlan,
    cache_views,
    merge_rows,
)
from tests.python.attention.steps import (
    DEVICES,
    HEAD_DIMS,
    SEED,
    Shape,
    Step,
    assert_close,
    make_step,
    row_dtypes,
)

OPS = torch.ops.nwor_specpv
INFINITY = float("inf")


def prefix_state(step: Step) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention to the prefix alone, by the reference; nothing is seen by rows that see no row."""
    blind = replace(step, visible=[[set() for _ in rows] for rows in step.visible])
    out, lse = blind.reference()
    query = step.arguments["query"]
    return (
        torch.from_numpy(out).to(query.dtype).to(query.device),
        torch.from_numpy(lse).float().to(query.device),
    )


def run(step: Step, prefix_out: torch.Tensor, prefix_lse: torch.Tensor, **options):
    names = ("query", "key", "value")
    given = {name: step.arguments[name] for name in (*names, "query_start")}
    return merge_rows(
        **given,
        prefix_out=prefix_out,
        prefix_lse=prefix_lse,
        tree_mask=step.tree_mask,
        scale=step.scale,
        softcap=step.shape.softcap,
        return_lse=True,
        **options,
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mask", ["causal", "tree", "random"])
def test_prefix_and_rows_are_what_verify_attention_promises(device: str, mask: str) -> None:
    """Heads that do and do not divide a warp's, empty prefixes, poisoned memory, 70 rows."""
    print(f"seed={SEED}")
    dtypes = row_dtypes(device)
    for index, head_dim in enumerate(HEAD_DIMS):
        dtype = dtypes[index % len(dtypes)]
        heads, kv_heads = [(4, 2), (9, 3), (8, 1)][index // 2]
        shape = Shape(
            rows=[5, 1, 70 if index == 0 else 9, 8, 2],
            prefix=[19, 0, 17, 16, 1],
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            dtype=dtype,
            mask=mask,
            softcap=0.0 if index % 2 else 20.0,
        )
        step = make_step(shape, SEED + index, device)
        prefix_out, prefix_lse = prefix_state(step)
        # What a kernel leaves where a row has no prefix is nobody's business.
        prefix_out[torch.isinf(prefix_lse)] = float("nan")
        out, lse = run(step, prefix_out, prefix_lse)
        assert_close(step, out, lse)
        # FlashAttention's order of the LSE, its other infinity, and in place.
        other = torch.where(torch.isinf(prefix_lse), INFINITY, prefix_lse).t().contiguous().t()
        again, _ = run(step, prefix_out, other, out=prefix_out)
        assert again is prefix_out
        assert torch.equal(again, out)


@pytest.mark.parametrize("device", DEVICES)
def test_rows_of_no_request_are_left_alone(device: str) -> None:
    step = make_step(Shape([3, 4], [20, 9], dtype=row_dtypes(device)[0]), SEED, device)
    prefix_out, prefix_lse = prefix_state(step)
    step.arguments["query_start"] = torch.tensor([0, 3, 3], dtype=torch.int32, device=device)
    out = torch.full_like(prefix_out, 7.0)
    run(step, prefix_out, prefix_lse, out=out)
    assert (out[3:] == 7.0).all()
    assert not (out[:3] == 7.0).any()
    step.arguments["query_start"] = torch.tensor([3, 5, 7], dtype=torch.int32, device=device)
    out.fill_(7.0)
    run(step, prefix_out, prefix_lse, out=out)
    assert (out[:3] == 7.0).all()
    assert not (out[3:] == 7.0).any()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_cuda_reads_no_rows_beyond_the_last() -> None:
    """There starts are device data that nobody has looked at; the mask lets all rows be seen."""
    step = make_step(Shape([3, 4], [20, 9], dtype=torch.float16, mask="tree"), SEED, "cuda")
    prefix_out, prefix_lse = prefix_state(step)
    step.tree_mask.fill_(-1)
    expected, _ = run(step, prefix_out, prefix_lse)
    step.arguments["query_start"] = torch.tensor([0, 3, 60], dtype=torch.int32, device="cuda")
    out, _ = run(step, prefix_out, prefix_lse)
    assert torch.equal(out, expected)


@pytest.mark.parametrize("device", DEVICES)
def test_rows_that_the_host_has_counted(device: str) -> None:
    """With `rows_per_request` nobody looks at query_start; the last request may be cut short."""
    for rows in ([5, 5, 5], [8, 8], [9, 9, 4], [1, 1, 1]):
        shape = Shape(rows, [19, 0, 33][: len(rows)], dtype=row_dtypes(device)[0])
        step = make_step(shape, SEED, device)
        prefix_out, prefix_lse = prefix_state(step)
        expected, _ = run(step, prefix_out, prefix_lse)
        given = [step.arguments[name] for name in ("query", "key", "value")]
        nonsense = torch.full((2,), 12345, dtype=torch.int32, device=device)
        out = torch.full_like(prefix_out, float("nan"))
        interceptor = Interceptor(NworConfig())
        arguments = (*given, prefix_out, prefix_lse, nonsense, step.scale, out)
        _C.merge_and_write_rows(interceptor, "layer", *arguments, rows_per_request=rows[0])
        assert torch.equal(out, expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rows_per_request", [7, 8, 1000, 2**31 - 1])
def test_one_request_may_be_counted_as_any_number_of_rows(
    device: str, rows_per_request: int
) -> None:
    step = make_step(Shape([7], [19], dtype=row_dtypes(device)[0]), SEED, device)
    prefix_out, prefix_lse = prefix_state(step)
    expected, _ = run(step, prefix_out, prefix_lse)
    given = [step.arguments[name] for name in ("query", "key", "value")]
    out = torch.full_like(prefix_out, float("nan"))
    arguments = (*given, prefix_out, prefix_lse, step.arguments["query_start"], step.scale, out)
    interceptor = Interceptor(NworConfig())
    _C.merge_and_write_rows(interceptor, "layer", *arguments, rows_per_request=rows_per_request)
    assert torch.equal(out, expected)


@pytest.mark.parametrize("device", DEVICES)
def test_further_tokens_instead_of_the_rows(device: str) -> None:
    """All rows of a request see its own tokens, as many as are said; what lies behind is not read.

    The merge is written out in float64, token by token.
    """
    print(f"seed={SEED}")
    random = torch.Generator().manual_seed(SEED)
    for index, head_dim in enumerate(HEAD_DIMS):
        dtype = row_dtypes(device)[index % len(row_dtypes(device))]
        rows, room, lens = [5, 1, 0, 7], 21, [20, 0, 4, 100 if index % 2 else 9]
        start = torch.tensor([0, 5, 6, 6, 13], dtype=torch.int32)
        heads, kv_heads, softcap = 6, 2, 0.0 if index % 2 else 15.0

        def draw(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
            return torch.randn(shape, generator=random).to(dtype)

        query, prefix_out = draw(15, heads, head_dim), draw(15, heads, head_dim)
        key, value = draw(4, room, kv_heads, head_dim), draw(4, room, kv_heads, head_dim)
        prefix_lse = 3 * torch.randn(15, heads, generator=random)
        prefix_lse[3, 1], prefix_lse[5] = -INFINITY, INFINITY  # saw nothing
        for request, count in enumerate(lens):
            key[request, count:], value[request, count:] = float("nan"), float("nan")
        expected = torch.full(query.shape, 7.0, dtype=torch.float64)
        scale = head_dim**-0.5
        for request, count in enumerate(rows):
            for row in range(int(start[request]), int(start[request]) + count):
                for head in range(heads):
                    own = head // (heads // kv_heads)
                    seen = min(lens[request], room)
                    tokens = key[request, :seen, own].double()
                    scores = tokens @ query[row, head].double() * scale
                    if softcap:
                        scores = softcap * (scores / softcap).tanh()
                    states = [*zip(scores, value[request, :seen, own].double(), strict=True)]
                    if prefix_lse[row, head].isfinite():
                        states.append((prefix_lse[row, head].double(), prefix_out[row, head]))
                    weights = torch.stack([score for score, _ in states] or [scores.new_zeros(())])
                    shares = weights.softmax(0)[: len(states)]
                    merged = [
                        share * state.double()
                        for share, (_, state) in zip(shares, states, strict=True)
                    ]
                    expected[row, head] = sum(merged, torch.zeros(head_dim, dtype=torch.float64))
        out = torch.full_like(query, 7.0).to(device)
        merge_rows(
            query.to(device),
            key.flatten(0, 1).to(device),
            value.flatten(0, 1).to(device),
            prefix_out.to(device),
            prefix_lse.to(device),
            start.to(device),
            None,
            scale,
            softcap=softcap,
            token_lens=torch.tensor(lens, dtype=torch.int32, device=device),
            out=out,
        )
        close = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}[dtype]
        torch.testing.assert_close(out.cpu().double(), expected, atol=close, rtol=close)


@pytest.mark.parametrize("device", DEVICES)
def test_torch_knows_the_op(device: str) -> None:
    step = make_step(Shape([3, 2], [40, 20], dtype=row_dtypes(device)[0], mask="tree"), 1, device)
    prefix_out, prefix_lse = prefix_state(step)
    names = ("query", "key", "value")
    given = tuple(step.arguments[name] for name in names)
    tail = (step.arguments["query_start"], step.tree_mask, step.scale)
    out, lse = torch.zeros_like(prefix_out), torch.zeros_like(prefix_lse)
    arguments = (*given, prefix_out, prefix_lse, *tail, out, lse)
    torch.library.opcheck(OPS.merge_rows.default, arguments)

    def merged(*arguments: torch.Tensor) -> torch.Tensor:
        return merge_rows(*arguments, *tail) * 2

    compiled = torch.compile(merged, fullgraph=True, backend="aot_eager")
    expected = merge_rows(*given, prefix_out, prefix_lse, *tail) * 2
    assert torch.equal(compiled(*given, prefix_out, prefix_lse), expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query": torch.zeros(3, 4)}, "query: got"),
        ({"query": torch.zeros(3, 4, 12)}, "12 channels, expected a multiple of 8"),
        ({"key": torch.zeros(2, 2, 64)}, "key: got"),
        ({"key": torch.zeros(3, 3, 64)}, "heads dividing the 4 of query"),
        ({"value": torch.zeros(3, 1, 64)}, "value: got"),
        ({"value": torch.zeros(3, 2, 64, dtype=torch.float16)}, "value: got"),
        ({"prefix_out": torch.zeros(3, 4, 32)}, "prefix_out: got"),
        ({"prefix_lse": torch.zeros(4, 3)}, "prefix_lse: got"),
        ({"prefix_lse": torch.zeros(3, 4, dtype=torch.float64)}, "prefix_lse: got"),
        ({"query_start": torch.tensor([0, 3])}, "query_start: got"),
        (
            {"query_start": torch.tensor([0, 4], dtype=torch.int32)},
            r"query_start\[1\]: got 4, expected 0 to 3",
        ),
        (
            {"query_start": torch.tensor([-1, 3], dtype=torch.int32)},
            r"query_start\[0\]: got -1, expected 0 to 3",
        ),
        (
            {"query_start": torch.tensor([0, 2, 1], dtype=torch.int32)},
            r"query_start\[2\]: got 1, expected 2 to 3",
        ),
        ({"tree_mask": torch.zeros(2, 1, dtype=torch.int64)}, "tree_mask: got"),
        (
            {"tree_mask": torch.zeros(3, 0, dtype=torch.int64)},
            "tree_mask: got 0 words per row, expected at least 1",
        ),
        ({"scale": INFINITY}, "scale: got"),
        ({"scale": 1e39}, "scale: got 1e[+]39"),
        ({"softcap": -1.0}, "softcap: got"),
        ({"softcap": 1e39}, "softcap: got 1e[+]39"),
        ({"softcap": 1e-50}, "softcap: got 1e-50"),
        ({"out": torch.zeros(3, 4, 32)}, "out: got"),
        ({"out": torch.zeros(1, 4, 64).expand(3, 4, 64)}, "out: got overlapping strides"),
        (
            {"out": torch.zeros(1000).as_strided((3, 4, 64), (192, 64, 1))},
            "out: got overlapping strides",
        ),
        ({"token_lens": torch.zeros(2, dtype=torch.int32)}, "token_lens: got"),
        (
            {
                "query_start": torch.tensor([0, 1, 3], dtype=torch.int32),
                "token_lens": torch.zeros(2, dtype=torch.int32),
            },
            "3 tokens, expected the same number for each of the 2 requests",
        ),
        (
            {
                "tree_mask": torch.zeros(3, 1, dtype=torch.int64),
                "token_lens": torch.zeros(1, dtype=torch.int32),
            },
            "token_lens: got tree_mask",
        ),
    ],
)
def test_wrong_arguments_name_themselves(change: dict, message: str) -> None:
    given = {
        "query": torch.zeros(3, 4, 64),
        "key": torch.zeros(3, 2, 64),
        "value": torch.zeros(3, 2, 64),
        "prefix_out": torch.zeros(3, 4, 64),
        "prefix_lse": torch.zeros(3, 4),
        "query_start": torch.tensor([0, 3], dtype=torch.int32),
        "tree_mask": None,
        "scale": 1.0,
    }
    with pytest.raises(NworError, match=message):
        merge_rows(**(given | change))


def test_out_must_not_be_an_input() -> None:
    query = torch.zeros(3, 4, 64)
    start = torch.tensor([0, 3], dtype=torch.int32)
    with pytest.raises(NworError, match="out: got memory that overlaps query"):
        merge_rows(
            query, query, query, query.clone(), torch.zeros(3, 4), start, None, 1.0, out=query
        )


@pytest.mark.parametrize("device", DEVICES)
def test_out_among_slices_of_the_inputs(device: str) -> None:
    """4 query heads, 2 of K, 2 of V, 4 of the prefix' output and 4 spare ones in every row."""
    generator = torch.Generator().manual_seed(3)
    buffer = torch.randn(9, 16, 64, generator=generator).to(row_dtypes(device)[-1]).to(device)
    lse = torch.zeros(9, 4, device=device)
    start = torch.tensor([0, 9], dtype=torch.int32, device=device)

    def merge(memory: torch.Tensor, first: int) -> torch.Tensor:
        parts = memory.split([4, 2, 2, 4, 4], dim=1)[:4]
        return merge_rows(*parts, lse, start, None, 0.125, out=memory[:, first : first + 4])

    parts = [part.contiguous() for part in buffer.split([4, 2, 2, 4, 4], dim=1)[:4]]
    expected = merge_rows(*parts, lse, start, None, 0.125)
    for first in (8, 12):
        assert torch.equal(merge(buffer.clone(), first), expected)
    for first, name in {0: "query", 3: "query", 4: "key", 7: "value", 9: "prefix_out"}.items():
        memory = buffer.clone()
        with pytest.raises(NworError, match=f"^out: got memory that overlaps {name},"):
            merge(memory, first)
        assert torch.equal(memory, buffer)


def test_out_must_not_be_prefix_out_a_row_further() -> None:
    rows = torch.randn(3, 4, 64)
    start = torch.tensor([0, 3], dtype=torch.int32)
    room = torch.zeros(4, 5, 64)
    given = (rows, rows, rows, room[:3, :4], torch.zeros(3, 4), start, None, 1.0)
    with pytest.raises(NworError, match="out: got memory that overlaps prefix_out"):
        merge_rows(*given, out=room[1:, :4])


def test_one_row_in_place_whatever_its_stride() -> None:
    rows, start = torch.randn(1, 4, 64), torch.tensor([0, 1], dtype=torch.int32)
    prefix = torch.randn(1, 4, 64)
    tail = (torch.zeros(1, 4), start, None, 1.0)
    expected = merge_rows(rows, rows, rows, prefix, *tail)
    out = prefix.as_strided((1, 4, 64), (7, 64, 1))
    assert torch.equal(merge_rows(rows, rows, rows, prefix, *tail, out=out), expected)


def test_a_mask_too_narrow_for_the_rows() -> None:
    rows = torch.randn(70, 2, 64)
    start = torch.tensor([0, 5, 70], dtype=torch.int32)
    mask = torch.full((70, 1), -1, dtype=torch.int64)
    given = (rows, rows, rows, torch.zeros(70, 2, 64), torch.zeros(70, 2))
    message = "^tree_mask: got 1 words per row, expected at least 2 for the 65 rows of request 1$"
    with pytest.raises(NworError, match=message):
        merge_rows(*given, start, mask, 1.0)
    start[1] = 6  # 64 rows
    merge_rows(*given, start, mask, 1.0)


@pytest.mark.parametrize("device", DEVICES)
def test_scores_of_minus_infinity_weigh_nothing(device: str) -> None:
    """The first rows see nothing else; the prefix has been seen by none, then by all."""
    dtype = row_dtypes(device)[-1]
    query = torch.ones(12, 4, 64, dtype=dtype, device=device)
    key = torch.zeros(12, 2, 64, dtype=dtype, device=device)
    key[:9] = -INFINITY
    value = torch.randn(12, 2, 64, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    start = torch.tensor([0, 12], dtype=torch.int32, device=device)
    prefix_out = torch.full((12, 4, 64), 3.0, dtype=dtype, device=device)
    prefix_lse = torch.full((12, 4), -INFINITY, device=device)
    given = (query, key, value, prefix_out)
    out, lse = merge_rows(*given, prefix_lse, start, None, 1.0, return_lse=True)
    assert (out[:9] == 0).all()
    assert torch.isneginf(lse[:9]).all()
    assert torch.equal(out[9], value[9].repeat_interleave(2, 0))
    out, lse = merge_rows(
        *given, torch.zeros(12, 4, device=device), start, None, 1.0, return_lse=True
    )
    assert (out[:9] == 3.0).all()
    assert (lse[:9] == 0.0).all()
    assert out.isfinite().all()


# ---- with the layer's write in the same launch ----


def open_round(device: str, dtype: torch.dtype, head_dim: int):
    """Two requests, of 1 + 4 and 1 + 2 rows; the interceptor, the cache and the rows."""
    interceptor = Interceptor(NworConfig(strict=True))
    cache = torch.zeros(6, 2, 16, 2 * head_dim, dtype=dtype, device=device)
    interceptor.bind_layer("layer", *cache_views(cache, "packed"))
    interceptor.begin(RoundPlan([5, 3], [4, 2]))
    generator = torch.Generator().manual_seed(SEED)
    rows = [torch.randn(8, heads, head_dim, generator=generator) for heads in (2, 2, 4)]
    key, value, query = (tensor.to(dtype).to(device) for tensor in rows)
    slots = torch.tensor([20, 21, 22, 23, 24, 50, 51, 52], device=device)
    return interceptor, cache, key, value, query, slots


def commit(interceptor: Interceptor, device: str) -> None:
    path = torch.tensor([[1, 2, 3, 4], [1, 2, -1, -1]], dtype=torch.int32, device=device)
    counts = torch.tensor([2, 1], dtype=torch.int32, device=device)
    assert interceptor.commit(path, counts, rows="request").ok


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
@pytest.mark.parametrize("overlaps", [False, True])
def test_a_deferred_write_is_done_with_the_rows(device: str, head_dim: int, overlaps: bool) -> None:
    print(f"seed={SEED}")
    for dtype in row_dtypes(device):
        caches, outs = [], []
        for defer in (False, True):
            interceptor, cache, key, value, query, slots = open_round(device, dtype, head_dim)
            outcome = interceptor.write("layer", key, value, slots, defer=defer)
            assert (outcome.action, outcome.staged_rows) == ("stage", 6)
            assert bool((cache == 0).all()) is defer
            start = torch.tensor([0, 5, 8], dtype=torch.int32, device=device)
            out = torch.zeros_like(query)
            lse = torch.full((8, 4), -INFINITY, device=device)
            _C.merge_and_write_rows(
                interceptor, "layer", query, key, value, out, lse, start, 0.125, out,
                overlaps=overlaps,
            )  # fmt: skip
            plain = merge_rows(query, key, value, torch.zeros_like(query), lse, start, None, 0.125)
            assert torch.equal(out, plain)
            written = (cache.transpose(1, 2).flatten(0, 1) != 0).flatten(1).any(1)
            assert written.nonzero().flatten().tolist() == [20, 50]  # each request's first row
            staged_key, staged_value = interceptor.staged()
            drafts = [1, 2, 3, 4, 6, 7]
            assert torch.equal(staged_key[0, :6], key[drafts])
            assert torch.equal(staged_value[0, :6], value[drafts])
            commit(interceptor, device)
            caches.append(cache)
            outs.append(out)
        assert torch.equal(*caches)
        assert torch.equal(*outs)


@pytest.mark.parametrize("device", DEVICES)
def test_a_deferred_write_beside_rows_of_trees(device: str) -> None:
    """The mask hides rows from one another; what is written and staged is the same."""
    dtype = row_dtypes(device)[-1]
    interceptor, cache, key, value, query, slots = open_round(device, dtype, 64)
    interceptor.write("layer", key, value, slots, defer=True)
    start = torch.tensor([0, 5, 8], dtype=torch.int32, device=device)
    seen = [[0], [0, 1], [0, 2], [0, 1, 3], [0, 2, 4], [0], [0, 1], [0, 2]]
    words = [[sum(1 << row for row in rows)] for rows in seen]
    mask = torch.tensor(words, dtype=torch.int64, device=device)
    lse = torch.full((8, 4), -INFINITY, device=device)
    out = torch.zeros_like(query)
    arguments = (query, key, value, out, lse, start, 0.125)
    expected = merge_rows(query, key, value, torch.zeros_like(query), lse, start, mask, 0.125)
    chain = merge_rows(query, key, value, torch.zeros_like(query), lse, start, None, 0.125)
    _C.merge_and_write_rows(interceptor, "layer", *arguments, out, tree_mask=mask)
    assert torch.equal(out, expected)
    differs = (out != chain).flatten(1).any(1).nonzero().flatten().tolist()
    assert differs == [2, 3, 4, 7]
    written = (cache.transpose(1, 2).flatten(0, 1) != 0).flatten(1).any(1)
    assert written.nonzero().flatten().tolist() == [20, 50]
    assert torch.equal(interceptor.staged()[0][0, :6], key[[1, 2, 3, 4, 6, 7]])
    with pytest.raises(NworError, match="rows_per_request: got 4"):
        _C.merge_and_write_rows(
            interceptor, "layer", *arguments, out, tree_mask=mask, rows_per_request=4
        )
    commit(interceptor, device)


@pytest.mark.parametrize("device", DEVICES)
def test_a_deferred_write_waits_on_when_the_rows_are_refused(device: str) -> None:
    interceptor, cache, key, value, query, slots = open_round(device, row_dtypes(device)[-1], 64)
    interceptor.write("layer", key, value, slots, defer=True)
    start = torch.tensor([0, 5, 8], dtype=torch.int32, device=device)
    lse = torch.full((8, 4), -INFINITY, device=device)
    out = torch.zeros_like(query)
    with pytest.raises(NworError, match="scale: got"):
        _C.merge_and_write_rows(
            interceptor, "layer", query, key, value, out, lse, start, INFINITY, out
        )
    commit(interceptor, device)
    tokens = cache.transpose(1, 2).flatten(0, 1)  # [slots, heads, K and V]
    for row, slot in enumerate(slots.tolist()):
        expected = torch.cat([key[row], value[row]], -1)
        accepted = row in (0, 1, 2, 5, 6)
        assert torch.equal(tokens[slot], expected if accepted else torch.zeros_like(expected))


@pytest.mark.parametrize("device", DEVICES)
def test_a_deferred_write_to_a_float8_cache(device: str) -> None:
    """The root is quantised by the write, drafts by the commit, and rows in flight not at all."""
    dtype = row_dtypes(device)[-1]
    _, _, key, value, query, slots = open_round(device, dtype, 64)
    scales = [torch.tensor(scale, device=device) for scale in (0.5, 2.0)]
    start = torch.tensor([0, 5, 8], dtype=torch.int32, device=device)
    lse = torch.full((8, 4), -INFINITY, device=device)
    expected = merge_rows(query, key, value, torch.zeros_like(query), lse, start, None, 0.125)
    for defer in (False, True):
        interceptor = Interceptor(NworConfig(strict=True))
        cache = torch.zeros(6, 2, 16, 128, dtype=torch.float8_e4m3fn, device=device)
        views = cache_views(cache, "packed")
        interceptor.bind_layer("layer", *views, 0, *scales, dtype=dtype)
        interceptor.begin(RoundPlan([5, 3], [4, 2]))
        interceptor.write("layer", key, value, slots, defer=defer)
        out = torch.zeros_like(query)
        arguments = (query, key, value, out, lse, start, 0.125, out)
        _C.merge_and_write_rows(interceptor, "layer", *arguments)
        assert torch.equal(out, expected)
        commit(interceptor, device)
        tokens = cache.transpose(1, 2).flatten(0, 1).float()
        for row, slot in ((0, 20), (1, 21), (2, 22), (5, 50), (6, 51)):
            for side, (rows, scale) in enumerate(zip((key, value), scales, strict=True)):
                codes = (rows[row].float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
                assert torch.equal(tokens[slot, :, 64 * side : 64 * side + 64], codes.float())
        left = [slot for slot in range(96) if slot not in (20, 21, 22, 50, 51)]
        assert not tokens[left].any()


@pytest.mark.parametrize("device", DEVICES)
def test_a_commit_does_what_was_deferred_and_an_abort_drops_it(device: str) -> None:
    dtype = row_dtypes(device)[0]
    interceptor, cache, key, value, _, slots = open_round(device, dtype, 64)
    interceptor.write("layer", key, value, slots, defer=True)
    commit(interceptor, device)
    tokens = cache.transpose(1, 2).flatten(0, 1)
    for row, slot in ((0, 20), (1, 21), (2, 22), (5, 50), (6, 51)):
        assert torch.equal(tokens[slot], torch.cat([key[row], value[row]], dim=-1))
    before = cache.clone()
    interceptor.begin(RoundPlan([5, 3], [4, 2]))
    interceptor.write("layer", key + 1, value + 1, slots, defer=True)
    interceptor.abort()
    interceptor.begin(RoundPlan([5, 3], [4, 2]))
    interceptor.write("layer", key + 2, value + 2, slots, defer=True)
    interceptor.write("layer", key + 3, value + 3, slots, defer=True)  # the first is done first
    assert torch.equal(cache.transpose(1, 2).flatten(0, 1)[20, :, :64], key[0] + 2)
    interceptor.abort()
    changed = (cache != before).transpose(1, 2).flatten(0, 1).flatten(1).any(1)
    assert changed.nonzero().flatten().tolist() == [20, 50]
