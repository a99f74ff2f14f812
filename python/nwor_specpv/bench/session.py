"""`nwor-specpv bench session`: what a rollback costs at 1 thousand and at 1 million tokens.

Sessions, the slot allocator and a growing tensor that is sliced and concatenated (the way of
transformers' DynamicCache) each take back eight tokens of a short and of a long sequence. The
figure that counts is the ratio: a rollback that depends on no length has 1. On the CPU; every run
checks lengths and slots.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

import nwor_specpv
from nwor_specpv import DraftTree, Interceptor, NworConfig, SessionStore, SlotAllocator
from nwor_specpv.cli.parser import Parser, count

from .report import add_json_argument, machine, publish
from .timing import time_calls

PAGE_SIZE, HEADS, DIM, DRAFTS = 16, 1, 8, 8
GOAL = 2.0

# prepare() brings the eight tokens, take_back() is what is measured.
Variant = tuple[Callable[[], None], Callable[[], None]]


def session_variant(length: int) -> Variant:
    """A session of one small layer; the model is a function that accepts every draft."""
    pages = -(-(length + 2 * DRAFTS) // PAGE_SIZE) + 1
    keys, values = (torch.zeros(pages, PAGE_SIZE, HEADS, DIM) for _ in range(2))
    interceptor = Interceptor(NworConfig())
    interceptor.bind_layer("0", keys, values)
    rows = torch.zeros(512, HEADS, DIM)

    def forward(batch: nwor_specpv.SessionBatch) -> torch.Tensor:
        count = len(batch.tokens)
        interceptor.write("0", rows[:count], rows[:count], batch.slot_mapping)
        return torch.ones(count, dtype=torch.int64)

    store = SessionStore(interceptor, forward)
    result = store.verify("bench", None, [1] * (length - 1))
    tree = DraftTree([1] * (1 + DRAFTS))

    def prepare() -> None:
        nonlocal result
        result = store.verify("bench", tree, [1], length - 1)
        if result.length != length + DRAFTS:
            raise RuntimeError(f"session: {result.length} tokens, not {length + DRAFTS}")

    def take_back() -> None:
        store.rollback("bench", length - 1)

    return prepare, take_back


def allocator_variant(length: int) -> Variant:
    """Backup before eight tokens are brought, restore after."""
    allocator = SlotAllocator(-(-length // PAGE_SIZE) + 2, PAGE_SIZE)
    allocator.extend(0, length)
    last = allocator.slots(0, length - 1).tolist()
    state = allocator.backup()

    def prepare() -> None:
        nonlocal state
        if allocator.slots(0, length - 1).tolist() != last:
            raise RuntimeError("allocator: the slots are not what they were")
        state = allocator.backup()
        allocator.extend(0, DRAFTS)

    def take_back() -> None:
        allocator.restore(state)

    return prepare, take_back


def tensor_variant(length: int) -> Variant:
    """Slice, then concatenate the next token: what growing tensors pay to go on."""
    kept = torch.zeros(1, HEADS, length, DIM)
    drafts = torch.zeros(1, HEADS, DRAFTS, DIM)
    token = drafts[:, :, :1]
    grown = kept

    def prepare() -> None:
        nonlocal grown
        grown = torch.cat((kept, drafts), 2)

    def take_back() -> None:
        nonlocal grown
        grown = torch.cat((grown[:, :, :-DRAFTS], token), 2)
        if grown.shape[2] != length + 1:
            raise RuntimeError("tensor: the length is not what it should be")

    return prepare, take_back


VARIANTS = {
    "session rollback": session_variant,
    "allocator restore": allocator_variant,
    "tensor, slice and cat": tensor_variant,
}


def describe(report: dict) -> str:
    short, long = report["lengths"]
    lines = [
        f"{report['device']} · torch {report['torch']} · commit {report['revision']} · "
        f"{DRAFTS} tokens taken back · median of {report['replays']}, spread in brackets",
        f"{'':<24}{short:>12} tokens us {long:>12} tokens us     ratio",
    ]
    for name, one in report["results"].items():
        columns = [
            f"{us:.2f} [{spread:.2f}]"
            for us, spread in zip(one["us"], one["spread_us"], strict=True)
        ]
        goal = "" if name.startswith("tensor") else f" (goal <= {GOAL:.0f})"
        lines.append(f"{name:<24}{columns[0]:>22} {columns[1]:>22} {one['ratio']:9.2f}{goal}")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog="nwor-specpv bench session", description=__doc__)
    parser.add_argument("--short", type=count, default=1_000, help="tokens of the short sequence")
    parser.add_argument("--long", type=count, default=1_000_000, help="tokens of the long one")
    parser.add_argument("--replays", type=count, default=200, help="default: 200")
    add_json_argument(parser)
    arguments = parser.parse_args(argv)
    for name in ("short", "long"):
        if getattr(arguments, name) < 2:
            parser.error(f"--{name}: got {getattr(arguments, name)}, expected at least 2")
    lengths = (arguments.short, arguments.long)
    before, variants = {}, {}
    for name, make in VARIANTS.items():
        for length in lengths:
            before[f"{name}@{length}"], variants[f"{name}@{length}"] = make(length)
    timings = time_calls(variants, arguments.replays, before)
    results = {}
    for name in VARIANTS:
        pair = [timings[f"{name}@{length}"] for length in lengths]
        results[name] = {
            "us": [one.median_us for one in pair],
            "spread_us": [one.spread_us for one in pair],
            "ratio": pair[1].median_us / pair[0].median_us,
        }
    report = {
        **machine("cpu"),
        "lengths": lengths,
        "replays": arguments.replays,
        "goal": GOAL,
        "results": results,
    }
    return publish(report, describe, arguments.json)
