"""`nwor-specpv bench commit`: stage and commit against the writes they replace.

On CUDA every variant runs inside a CUDA graph of many calls over rotating data, in turn with the
others; on the CPU a commit runs beside memcpy. Each run checks the bytes it wrote.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

import nwor_specpv
from nwor_specpv import cache_views
from nwor_specpv.cli.parser import Parser, count

from . import peers
from .report import add_machine_arguments, choose_device, machine, publish
from .timing import Timing, capture, time_calls, time_graphs

LAYERS, HEADS, DIM, PAGE_SIZE = 32, 8, 128, 16
COMMIT_TOKENS, STAGE_TOKENS = (8, 64), (8, 64, 512)
DEPTH = 4  # drafts per request of a commit
ROTATING_BYTES = 320 << 20
GOALS = {"commit/vllm": 0.25, "commit/copy": 1.5, "stage/vllm": 1.05, "memcpy/commit": 0.6}


class Caches:
    """Paged caches of all layers in one engine layout, full of noise."""

    def __init__(self, layout: str, pages: int, device: str, dtype: torch.dtype):
        shape = {
            "kv_first": (2, pages, PAGE_SIZE, HEADS, DIM),
            "kv_second": (pages, 2, PAGE_SIZE, HEADS, DIM),
            "packed": (pages, HEADS, PAGE_SIZE, 2 * DIM),
            "head_major": (2, pages, HEADS, PAGE_SIZE, DIM),
        }[layout]
        self.memory = torch.randn(LAYERS, *shape, device=device, dtype=dtype)
        self.before = self.memory.clone()
        self.keys, self.values = map(
            list, zip(*(cache_views(layer, layout) for layer in self.memory), strict=True)
        )
        self.layout = layout
        self.num_slots = pages * PAGE_SIZE

    def first_rows(self, tokens: int, side: int) -> torch.Tensor:
        """Slots 0 .. tokens-1 of all layers as one view [L, pages, tokens of a page, H, D]."""
        one = (self.keys, self.values)[side][0]
        everything = self.memory.as_strided(
            (LAYERS, *one.shape),
            (self.memory.stride(0), *one.stride()),
            one.storage_offset(),
        )
        pages = max(1, tokens // PAGE_SIZE)
        return everything[:, :pages, : tokens // pages]

    def reset(self) -> None:
        self.memory.copy_(self.before)

    def check(self, staged: torch.Tensor, slots: torch.Tensor, what: str) -> None:
        """staged [2, L, tokens, H, D] must be at `slots` and all else as before."""
        expected = self.before.clone()
        for layer in range(LAYERS):
            for side, view in enumerate(cache_views(expected[layer], self.layout)):
                view[slots // PAGE_SIZE, slots % PAGE_SIZE] = staged[side, layer]
        if not torch.equal(expected, self.memory):
            raise RuntimeError(f"{what}: the caches are not what they should be")


def bench_commit_cuda(tokens: int, layout: str, replays: int, write: peers.Peer) -> dict:
    row_bytes = 2 * LAYERS * HEADS * DIM * 2
    sets = max(4, ROTATING_BYTES // (tokens * row_bytes))
    shape = (tokens // DEPTH, DEPTH)
    # Each set has pages of its own; path, counts and slots are those of every set, and so in L2,
    # where acceptance leaves them. A request's accepted tokens are consecutive within a page.
    pages_per_set = 2 * shape[0]
    caches = Caches(layout, sets * pages_per_set, "cuda", torch.bfloat16)
    staged = torch.randn(sets, 2, LAYERS, tokens, HEADS, DIM, device="cuda", dtype=torch.bfloat16)
    first = torch.randperm(pages_per_set, device="cuda")[: shape[0]] * PAGE_SIZE
    first += torch.randint(PAGE_SIZE - DEPTH + 1, first.shape, device="cuda")
    table = first[:, None] + torch.arange(DEPTH, device="cuda")
    slots = table.flatten()

    def pages_of(i: int, side: list[torch.Tensor]) -> list[torch.Tensor]:
        return [cache[i * pages_per_set : (i + 1) * pages_per_set] for cache in side]

    keys = [pages_of(i, caches.keys) for i in range(sets)]
    values = [pages_of(i, caches.values) for i in range(sets)]
    path = torch.arange(tokens, dtype=torch.int32, device="cuda").view(shape)
    counts = torch.full((shape[0],), DEPTH, dtype=torch.int32, device="cuda")
    status = torch.zeros(8, dtype=torch.int64, device="cuda")
    target = torch.empty_like(staged)

    def commit() -> None:
        for i in range(sets):
            nwor_specpv.commit(*staged[i], keys[i], values[i], path, counts, table, status)

    def copy() -> None:
        for i in range(sets):
            target[i].copy_(staged[i])

    pages, offsets = slots // PAGE_SIZE, slots % PAGE_SIZE

    def index_put() -> None:
        for i in range(sets):
            for layer in range(LAYERS):
                keys[i][layer].index_put_((pages, offsets), staged[i, 0, layer])
                values[i][layer].index_put_((pages, offsets), staged[i, 1, layer])

    def vllm() -> None:
        for i in range(sets):
            for layer in range(LAYERS):
                write.call(*staged[i, :, layer], keys[i][layer], values[i][layer], slots)

    variants = {"commit": commit, "copy": copy, "index_put": index_put}
    if write.call is not None:
        variants["vllm"] = vllm
    everything = staged.permute(1, 2, 0, 3, 4, 5).reshape(2, LAYERS, sets * tokens, HEADS, DIM)
    offset = torch.arange(sets, device="cuda") * pages_per_set * PAGE_SIZE
    everywhere = (offset[:, None] + slots).flatten()
    graphs = {}
    for name, run in variants.items():
        graphs[name] = capture(run)
        if name == "copy":
            continue
        caches.reset()
        graphs[name].replay()
        caches.check(everything, everywhere, name)
    if status.tolist() != [0, 0, 0, 0, tokens, 0, 0, 0]:
        raise RuntimeError(f"commit: got status {status.tolist()}")
    timings = time_graphs(graphs, dict.fromkeys(graphs, sets), replays)
    return result("commit", tokens, timings, "commit", tokens * row_bytes, layout)


def bench_stage_cuda(tokens: int, layout: str, replays: int, write: peers.Peer) -> dict:
    row_bytes = 2 * LAYERS * HEADS * DIM * 2
    sets = max(2, ROTATING_BYTES // (tokens * row_bytes))
    caches = Caches(layout, tokens // PAGE_SIZE + 64, "cuda", torch.bfloat16)
    rows = torch.randn(sets, LAYERS, tokens, 3 * HEADS, DIM, device="cuda", dtype=torch.bfloat16)
    keys, values = rows[..., HEADS : 2 * HEADS, :], rows[..., 2 * HEADS :, :]
    staged = torch.zeros(2, LAYERS, tokens, HEADS, DIM, device="cuda", dtype=torch.bfloat16)
    slots = torch.randperm(caches.num_slots, device="cuda")[:tokens]
    stage_rows = torch.arange(tokens, dtype=torch.int32, device="cuda")
    not_staged = torch.full_like(stage_rows, -1)
    status = torch.zeros(8, dtype=torch.int64, device="cuda")

    def given(i: int, layer: int) -> tuple[torch.Tensor, ...]:
        caches_of = caches.keys[layer], caches.values[layer]
        return keys[i, layer], values[i, layer], *caches_of, slots

    def stage(rows_to: torch.Tensor) -> None:
        for i in range(sets):
            for layer in range(LAYERS):
                to = (rows_to, *staged[:, layer])
                nwor_specpv.write_kv(*given(i, layer), *to, exclusive=True, status=status)

    def vllm() -> None:
        for i in range(sets):
            for layer in range(LAYERS):
                write.call(*given(i, layer))

    variants = {"stage": lambda: stage(stage_rows), "direct": lambda: stage(not_staged)}
    if write.call is not None:
        variants["vllm"] = vllm
    last = torch.stack([keys[-1], values[-1]])
    graphs = {}
    for name, run in variants.items():
        graphs[name] = capture(run)
        caches.reset()
        staged.zero_()
        graphs[name].replay()
        if name == "stage":
            if not torch.equal(staged, last) or not torch.equal(caches.memory, caches.before):
                raise RuntimeError("stage: staging or caches are not what they should be")
        else:
            caches.check(last, slots, name)
    timings = time_graphs(graphs, dict.fromkeys(graphs, sets * LAYERS), replays)
    return result("stage", tokens, timings, "stage", tokens * row_bytes // LAYERS, layout)


def bench_commit_cpu(tokens: int, layout: str, replays: int) -> dict:
    dtype = torch.bfloat16
    caches = Caches(layout, tokens // PAGE_SIZE + 64, "cpu", dtype)
    staged = torch.randn(2, LAYERS, tokens, HEADS, DIM, dtype=dtype)
    slots = torch.arange(tokens)  # consecutive positions, as accepted tokens have
    shape = (tokens // DEPTH, DEPTH)
    path = torch.arange(tokens, dtype=torch.int32).view(shape)
    counts = torch.full((shape[0],), DEPTH, dtype=torch.int32)
    status = torch.zeros(8, dtype=torch.int64)
    target = torch.empty_like(staged)
    pages, offsets = slots // PAGE_SIZE, slots % PAGE_SIZE
    tables = slots.view(shape)

    def commit() -> None:
        nwor_specpv.commit(*staged, caches.keys, caches.values, path, counts, tables, status)

    def memcpy() -> None:
        target.copy_(staged)

    places = [caches.first_rows(tokens, side) for side in range(2)]

    def same_places() -> None:
        for side, place in enumerate(places):
            place.copy_(staged[side].view(place.shape))

    def index_put() -> None:
        for layer in range(LAYERS):
            caches.keys[layer].index_put_((pages, offsets), staged[0, layer])
            caches.values[layer].index_put_((pages, offsets), staged[1, layer])

    variants = {
        "commit": commit,
        "memcpy": memcpy,
        "same_places": same_places,
        "index_put": index_put,
    }
    for name in ("commit", "same_places", "index_put"):
        caches.reset()
        variants[name]()
        caches.check(staged, slots, name)
    timings = time_calls(variants, replays)
    return result("commit", tokens, timings, "commit", staged.nbytes, layout)


def result(
    what: str, tokens: int, timings: dict[str, Timing], ours: str, num_bytes: int, layout: str
) -> dict:
    mine = timings[ours].median_us
    ratios = {
        f"{ours}/{name}": mine / timing.median_us
        for name, timing in timings.items()
        if name != ours
    }
    return {
        "what": what,
        "tokens": tokens,
        "layout": layout,
        "bytes": num_bytes,
        "gb_per_s": 2 * num_bytes / mine / 1000,
        "us": {name: timing.median_us for name, timing in timings.items()},
        "spread_us": {name: timing.spread_us for name, timing in timings.items()},
        "replays": timings[ours].replays,
        "ratios": ratios,
    }


LABELS = {
    "commit": "commit of all layers",
    "stage": "write_kv to staging, one layer",
    "direct": "write_kv to cache, one layer",
    "vllm": "vLLM reshape_and_cache_flash",
    "index_put": f"{2 * LAYERS} x index_put_",
    "copy": "one copy kernel, same bytes",
    "memcpy": "memcpy (copy_), same bytes",
    "same_places": "copy_ to the same places",
}


def describe(report: dict) -> str:
    lines = [
        f"device {report['device']} · torch {report['torch']} · nwor_specpv {report['revision']} · "
        f"{LAYERS} layers, {HEADS} KV heads, D {DIM}, bf16, page {PAGE_SIZE}, {report['layout']} · "
        f"median of {report['replays']}, spread in brackets",
    ]
    for one in report["results"]:
        lines.append("")
        lines.append(f"{one['what']} of {one['tokens']} tokens, {one['bytes'] / 1e6:.2f} MB")
        for name, us in one["us"].items():
            label = LABELS[name]
            if name == "vllm" and one["what"] == "commit":
                label = f"{LAYERS} x {label}"
            line = f"  {label:<42}{us:10.2f} us [{one['spread_us'][name]:.2f}]"
            ratio = one["ratios"].get(f"{one['what']}/{name}")
            if ratio is not None:
                goal = GOALS.get(f"{one['what']}/{name}")
                if name == "memcpy":
                    line += f"   memcpy/commit {1 / ratio:.2f} (goal >= {GOALS['memcpy/commit']})"
                else:
                    line += f"   {one['what']}/this {ratio:.3f}"
                    line += f" (goal <= {goal})" if goal is not None else ""
            lines.append(line)
    for missing in report["missing"]:
        lines.append(f"missing peer: {missing}")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog="nwor-specpv bench commit", description=__doc__)
    parser.add_argument(
        "--layout",
        choices=sorted(nwor_specpv.LAYOUTS),
        default="packed",
        help="of the cache, default: packed",
    )
    parser.add_argument("--replays", type=count, default=25, help="20 or more, default: 25")
    add_machine_arguments(parser)
    arguments = parser.parse_args(argv)
    if arguments.replays < 20:
        parser.error(f"--replays: got {arguments.replays}, expected at least 20")
    device = choose_device(arguments)
    torch.manual_seed(0)

    results, missing = [], []
    layout, replays = arguments.layout, arguments.replays
    if device == "cuda":
        write = peers.vllm_cache_write()
        if write.call is None:
            missing.append(f"{write.name} ({write.missing})")
        results += [bench_commit_cuda(tokens, layout, replays, write) for tokens in COMMIT_TOKENS]
        results += [bench_stage_cuda(tokens, layout, replays, write) for tokens in STAGE_TOKENS]
    else:
        missing.append(f"{peers.VLLM_NAME} (runs on CUDA only)")
        results += [bench_commit_cpu(tokens, layout, replays) for tokens in COMMIT_TOKENS]
    report = {
        **machine(device),
        "layout": layout,
        "replays": replays,
        "goals": GOALS,
        "results": results,
        "missing": missing,
    }
    return publish(report, describe, arguments.json)
