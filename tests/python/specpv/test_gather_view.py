"""gather_view: contiguous views hold what paged ones show, and attention cannot tell them apart."""

from __future__ import annotations

import random

import pytest
import torch

from nwor_specpv import (
    CompactView,
    NworError,
    PartialView,
    gather_view,
    pinned_cache,
    verify_attention,
)
from tests.python.specpv.contexts import DEVICES, FLOAT8, Pages, make_pages, seeded

POISON = 44.0


def ints(values: object, device: torch.device | str) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


class Views:
    """Random lists of blocks of some requests in two layers, and room for their copies."""

    def __init__(
        self,
        rng: random.Random,
        device: str,
        dtype: torch.dtype,
        dim: int = 16,
        sizes: list[tuple[int, int]] | None = None,
    ) -> None:
        self.size, page_size = rng.choice(sizes or [(4, 8), (8, 8), (4, 4)])
        self.lengths = [rng.randrange(1, 15 * self.size) for _ in range(3)]
        seed = rng.randrange(1 << 30)
        self.layers: list[Pages] = []
        for _ in range(2):
            torch.manual_seed(seed)  # the same pages in every layer
            self.layers.append(
                make_pages(
                    self.lengths,
                    dim=dim,
                    page_size=page_size,
                    dtype=dtype,
                    device=device,
                    layout="kv_first",
                )
            )
        parts = page_size // self.size
        self.room = 16
        shape = (2, len(self.lengths), 2, self.room)
        self.blocks = torch.full(shape, -1, dtype=torch.int32)
        self.tokens: dict[tuple[int, int, int], list[int]] = {}
        self.lens = []
        for b, length in enumerate(self.lengths):
            of_tokens = range(-(-length // self.size))
            chosen = min(len(of_tokens), rng.randrange(1, self.room))
            for layer in range(2):
                for head in range(2):
                    middle = rng.sample(of_tokens[:-1], min(chosen - 1, len(of_tokens) - 1))
                    blocks = [*sorted(middle), of_tokens[-1]]
                    seen: list[int] = []
                    for i, block in enumerate(blocks):
                        page = int(self.layers[0].table[b, block // parts])
                        self.blocks[layer, b, head, i] = page * parts + block % parts
                        end = min(length, (block + 1) * self.size)
                        seen += range(block * self.size, end)
                    self.tokens[layer, b, head] = seen
            self.lens.append(len(self.tokens[0, b, 0]))
        self.blocks = self.blocks.to(device)
        self.device = device
        self.dtype = dtype
        view = (2, len(self.lengths), 2, self.room * self.size + 3, dim)
        self.keys = torch.full(view, POISON, dtype=self.dtype, device=device)
        self.values = self.keys.clone()

    def gather(self, lens: torch.Tensor, held: torch.Tensor, /, **changes: object) -> None:
        arguments = {
            "key_caches": [layer.key for layer in self.layers],
            "value_caches": [layer.value for layer in self.layers],
            "blocks": self.blocks,
            "lens": lens,
            "held": held,
            "keys": self.keys,
            "values": self.values,
            "block_size": self.size,
        }
        gather_view(**(arguments | changes))

    def expected(self, side: str, layer: int, b: int, head: int, index: int) -> torch.Tensor:
        pages = self.layers[layer]
        token = self.tokens[layer, b, head][index]
        cache = getattr(pages, side)
        return cache[int(pages.table[b, token // cache.shape[1]]), token % cache.shape[1], head]

    def check(self, begin: list[int], end: list[int]) -> None:
        for layer in range(2):
            for b in range(len(self.lengths)):
                for head in range(2):
                    for got, side in ((self.keys, "key"), (self.values, "value")):
                        row = got[layer, b, head]
                        for i in range(begin[b], end[b]):
                            assert torch.equal(row[i], self.expected(side, layer, b, head, i))
                        assert (row[: begin[b]] == POISON).all()
                        assert (row[max(begin[b], end[b]) :] == POISON).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_copies_what_is_not_held_and_nothing_else(device: str, dtype: torch.dtype) -> None:
    rng = seeded()
    views = Views(rng, device, dtype, dim=rng.choice([5, 16, 80]))
    begin = [rng.randrange(length + 1) for length in views.lens]
    lens = [length if rng.random() < 0.8 else -1 for length in views.lens]
    held = ints(begin, device)
    views.gather(ints(lens, device), held)
    views.check(begin, [max(a, b) for a, b in zip(begin, lens, strict=True)])
    assert held.tolist() == [
        length if length >= 0 else old for old, length in zip(begin, lens, strict=True)
    ]


@pytest.mark.parametrize("device", DEVICES)
def test_a_request_to_be_left_alone_may_hold_anything(device: str) -> None:
    views = Views(random.Random(4), device, torch.float32)
    held = ints([0, -3, 0], device)
    lens = ints([views.lens[0], -1, views.lens[2]], device)
    views.gather(lens, held)
    assert held.tolist() == [views.lens[0], -3, views.lens[2]]
    # Three tokens before a view of request 1 is the end of another one.
    views.check([0, 0, 0], [views.lens[0], 0, views.lens[2]])


@pytest.mark.parametrize("device", DEVICES)
def test_compact_attention_is_paged_attention(device: str) -> None:
    """Bit for bit: the same tokens in the same order, wherever they lie."""
    rng = seeded()
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    for _ in range(3):
        # Attention on CUDA takes blocks and pages that 16 divides.
        sizes = [(16, 16), (16, 32), (32, 32)] if device == "cuda" else None
        views = Views(rng, device, dtype, dim=64, sizes=sizes)
        lens = ints(views.lens, device)
        views.gather(lens, torch.zeros_like(lens))
        for layer in views.layers:
            layer.key.nan_to_num_()
            layer.value.nan_to_num_()
        rows = 3 * len(views.lens)
        query = torch.randn(rows, 4, 64, dtype=dtype, device=device)
        key, value = torch.randn(2, rows, 2, 64, dtype=dtype, device=device)
        start = ints(range(0, rows + 1, 3), device)
        counts = ints([-(-n // views.size) for n in views.lens], device)
        for layer, pages in enumerate(views.layers):
            common = (
                query, key, value, pages.key, pages.value, pages.table,
                ints(views.lengths, device), start, None, 0.125,
            )  # fmt: skip
            paged = PartialView(views.blocks[layer], counts, lens, views.size)
            compact = CompactView(views.keys[layer], views.values[layer], lens)
            wanted = verify_attention(*common, view=paged)
            assert torch.isfinite(wanted).all()
            assert torch.equal(verify_attention(*common, view=compact), wanted)


def test_a_block_or_length_out_of_range_raises_and_nothing_is_written() -> None:
    views = Views(random.Random(4), "cpu", torch.float32)
    held = ints([0, 0, 0], "cpu")
    blocks = views.blocks.clone()
    blocks[1, 2, 1, 0] = 10**6
    with pytest.raises(NworError, match=r"blocks\[1, 2, 1, 0\]: got 1000000"):
        views.gather(ints(views.lens, "cpu"), held, blocks=blocks)
    with pytest.raises(NworError, match=r"lens\[1\]: got 100000"):
        views.gather(ints([1, 100000, 1], "cpu"), held)
    assert (views.keys == POISON).all()
    assert held.tolist() == [0, 0, 0]


def test_a_wrong_block_of_the_last_of_many_layers_writes_nothing_either() -> None:
    """More layers than one launch takes on CUDA are copied in several parts."""
    layers = 70
    cache = torch.randn(2, 4, 1, 8)
    blocks = torch.zeros(layers, 1, 1, 2, dtype=torch.int32)
    keys = torch.full((layers, 1, 1, 8, 8), POISON)
    values, lens, held = keys.clone(), ints([5], "cpu"), ints([0], "cpu")
    given = ([cache] * layers, [cache] * layers, blocks, lens, held, keys, values)
    blocks[69, 0, 0, 1] = 2
    with pytest.raises(NworError, match=r"blocks\[69, 0, 0, 1\]: got 2, expected 0 to 1"):
        gather_view(*given, block_size=4)
    assert (keys == POISON).all()
    assert (values == POISON).all()
    assert held.tolist() == [0]
    blocks[69, 0, 0, 1] = 1
    gather_view(*given, block_size=4)
    assert torch.equal(keys[69, 0, 0, :5], torch.cat([cache[0, :, 0], cache[1, :1, 0]]))
    assert held.tolist() == [5]


@pytest.mark.skipif("cuda" not in DEVICES, reason="no CUDA device")
def test_on_cuda_a_view_that_cannot_be_made_becomes_the_whole_prefix() -> None:
    views = Views(random.Random(4), "cuda", torch.bfloat16)
    held = ints([0, 0, 0], "cuda")
    blocks = views.blocks.clone()
    blocks[1, 2, 1, 0] = 10**6
    lens = ints([views.lens[0], 100000, views.lens[2]], "cuda")
    views.gather(lens, held, blocks=blocks)
    assert lens.tolist() == [views.lens[0], -1, -1]
    assert held.tolist() == [views.lens[0], 0, 0]


@pytest.mark.parametrize("device", DEVICES)
def test_caches_in_host_memory(device: str) -> None:
    """specpv_offload: memory that is the host's and that the device reads where it lies."""
    rng = seeded()
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    views = Views(rng, device, dtype)
    caches = []
    for layer in views.layers:
        for side in (layer.key, layer.value):
            cache = pinned_cache(side.shape, dtype=dtype, device=device)
            assert cache.device.type == device
            cache.copy_(side)
            caches.append(cache)
    lens = ints(views.lens, device)
    views.gather(lens, torch.zeros_like(lens), key_caches=caches[::2], value_caches=caches[1::2])
    views.check([0, 0, 0], views.lens)
    if device == "cuda":  # and a host's own tensors, when they are pinned
        views.keys.fill_(POISON)
        views.values.fill_(POISON)
        pinned = [cache.cpu().pin_memory() for cache in caches]
        views.gather(
            lens, torch.zeros_like(lens), key_caches=pinned[::2], value_caches=pinned[1::2]
        )
        views.check([0, 0, 0], views.lens)
        with pytest.raises(NworError, match="pinned host memory"):
            views.gather(
                lens,
                torch.zeros_like(lens),
                key_caches=[c.cpu() for c in caches[::2]],
                value_caches=[c.cpu() for c in caches[1::2]],
            )
    with pytest.raises(NworError, match="pinned_cache: "):
        pinned_cache([1 << 60], dtype=dtype, device=device)
    # What failed has been told; whoever comes next is not blamed for it.
    assert float(pinned_cache([3], dtype=dtype, device=device).fill_(2).sum()) == 6


@pytest.mark.skipif("cuda" not in DEVICES, reason="no CUDA device")
def test_on_cuda_everything_must_be_readable_by_the_device() -> None:
    """Pageable memory of the host is refused by name, in whichever argument it comes."""
    views = Views(seeded(), "cuda", torch.bfloat16)
    lens = ints(views.lens, "cuda")
    layers = views.layers
    host = {
        "key_caches": [layer.key.cpu() for layer in layers],
        "value_caches": [layer.value.cpu() for layer in layers],
    }
    pinned = {name: [part.pin_memory() for part in parts] for name, parts in host.items()}
    views.gather(lens, torch.zeros_like(lens), **pinned)
    views.check([0, 0, 0], views.lens)
    for name, pageable in host.items():
        wrong = [pinned[name][0], pageable[1]]
        with pytest.raises(NworError, match=f"{name}: got .* or pinned host memory"):
            views.gather(lens, torch.zeros_like(lens), **(pinned | {name: wrong}))


WRONG = {
    "block size": (lambda v: {"block_size": 3}, "block_size: got 3"),
    "layers": (lambda v: {"value_caches": [v.layers[0].value]}, "value_caches: got 1"),
    "held": (lambda v: {"held": ints([0], "cpu")}, "held: got sizes"),
    "keys": (lambda v: {"keys": v.keys[:, :2]}, "keys: got"),
    "values": (lambda v: {"values": v.values.half()}, "values: got"),
    "dtype": (
        lambda v: {"keys": v.keys.half(), "values": v.values.half()},
        "keys: got dtype Half, expected float32 as key_caches",
    ),
    "float8": (
        lambda v: {
            "key_caches": [layer.key.to(FLOAT8) for layer in v.layers],
            "value_caches": [layer.value.to(FLOAT8) for layer in v.layers],
        },
        "keys: got dtype Float, expected float8_e4m3fn as key_caches",
    ),
    "negative": (lambda v: {"held": ints([0, -1, 0], "cpu")}, r"held\[1\]: got -1"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_use_is_named(name: str) -> None:
    change, message = WRONG[name]
    views = Views(random.Random(5), "cpu", torch.float32)
    with pytest.raises(NworError, match=message):
        views.gather(ints(views.lens, "cpu"), ints([0, 0, 0], "cpu"), **change(views))


def test_fakes_and_schemas() -> None:
    views = Views(random.Random(6), "cpu", torch.float32)
    torch.library.opcheck(
        torch.ops.nwor_specpv.gather_view.default,
        (
            [layer.key for layer in views.layers],
            [layer.value for layer in views.layers],
            views.blocks,
            ints(views.lens, "cpu"),
            ints([0, 0, 0], "cpu"),
            views.keys,
            views.values,
            views.size,
        ),
    )
