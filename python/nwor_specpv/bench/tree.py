"""`nwor-specpv bench tree`: building and accepting draft trees against the plain formulations.

On CUDA every variant runs inside a CUDA graph over rotating inputs, in turn with the others; on the
CPU by the clock. Each run compares what it got with the plain Python formulation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

import nwor_specpv
from nwor_specpv.cli.parser import Parser, count

from . import tree_peers
from .report import add_machine_arguments, choose_device, machine, publish
from .timing import Timing, capture, time_calls, time_graphs

GOALS_US = {"build": 15.0, "greedy": 4.0, "sampling": 45.0}
CPU_GOAL = 10.0  # times the plain Python formulation


@dataclass(frozen=True)
class Shape:
    requests: int
    rows: int
    best: int  # top-k
    steps: int
    vocabulary: int


@dataclass
class Inputs:
    """One round of a batch: a drafter's steps, and a target that likes some of its drafts."""

    steps: tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]
    roots: torch.Tensor
    lens: torch.Tensor
    tree: nwor_specpv.Tree
    targets: torch.Tensor
    probs: torch.Tensor
    coins: torch.Tensor
    final: torch.Tensor

    @property
    def build(self) -> tuple:
        return (*self.steps, self.roots, self.lens, self.tree.rows)

    @property
    def links(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.tree.first_child, self.tree.next_sibling

    @property
    def sampling(self) -> tuple:
        return (self.tree.tokens, self.probs, *self.links, self.coins, self.final)


def make_inputs(shape: Shape, device: str) -> Inputs:
    batch, k = shape.requests, shape.best
    tokens, scores, kept = [], [], []
    standing = torch.ones(batch, 1, device=device)
    base = 0
    for _ in range(shape.steps):
        chance = torch.softmax(torch.randn(batch, standing.shape[1], k, device=device) * 2, -1)
        candidates = (standing[:, :, None] * chance).flatten(1)
        scores.append(candidates)
        tokens.append(torch.randint(shape.vocabulary, candidates.shape, device=device))
        best = candidates.topk(k, dim=1)
        kept.append(best.indices + base)
        standing = best.values
        base += candidates.shape[1]
    roots = torch.randint(shape.vocabulary, (batch,), device=device)
    lens = torch.randint(4096, (batch,), dtype=torch.int32, device=device)
    tree = nwor_specpv.tree_from_topk(tokens, scores, kept, roots, lens, shape.rows)
    logits = torch.randn(batch, shape.rows, shape.vocabulary, device=device)
    parents = tree.parents.long().clamp(min=0)
    every = torch.arange(batch, device=device)[:, None].expand(-1, shape.rows - 1)
    # About half of a row's mass is on its children, where it has some.
    logits[every, parents[:, 1:], tree.tokens[:, 1:]] = torch.log(
        torch.tensor(shape.vocabulary * 0.5, device=device)
    )
    probs = torch.softmax(logits, -1)
    child = tree.tokens.gather(1, tree.first_child.long().clamp(min=0))
    other = torch.randint(shape.vocabulary, child.shape, device=device)
    liked = (torch.rand(child.shape, device=device) < 0.6) & (tree.first_child >= 0)
    return Inputs(
        (tokens, scores, kept),
        roots,
        lens,
        tree,
        torch.where(liked, child, other),
        probs,
        torch.rand(batch, shape.rows, device=device),
        torch.rand(batch, device=device),
    )


def check_accepted(name: str, got: tuple[torch.Tensor, ...], expected: list) -> float:
    """Raises unless the outcome is the expected one; returns the mean number of accepted drafts."""
    path, counts, following = (part.tolist() for part in got)
    for b, (rows, token) in enumerate(expected):
        if path[b][: counts[b]] != rows or following[b] != token:
            got_text = f"{path[b][: counts[b]]} and {following[b]}"
            raise RuntimeError(f"{name}: request {b}: got {got_text}, expected {rows} and {token}")
    return sum(counts) / len(counts)


def check_built(name: str, tree: dict[str, torch.Tensor], expected: list) -> None:
    for b, parts in enumerate(expected):
        for field, values in zip(
            ("tokens", "parents", "first_child", "next_sibling"), parts, strict=True
        ):
            if tree[field][b].tolist() != values:
                raise RuntimeError(f"{name}: {field} of request {b} is not what it should be")


def variants(shape: Shape, inputs: Inputs) -> dict[str, dict]:
    """what -> name -> a call; `ours` first."""
    depth, width = shape.steps, shape.best
    tree, links = inputs.tree, inputs.links
    return {
        "build": {
            "ours": lambda: vars(nwor_specpv.tree_from_topk(*inputs.build)),
            "torch": lambda: tree_peers.torch_build(*inputs.build),
            "python": lambda: tree_peers.python_build(*inputs.build),
        },
        "greedy": {
            "ours": lambda: nwor_specpv.accept_greedy(tree.tokens, inputs.targets, *links),
            "torch": lambda: tree_peers.torch_greedy(
                tree.tokens, inputs.targets, tree.parents, depth
            ),
            "python": lambda: tree_peers.python_greedy(tree.tokens, inputs.targets, *links),
        },
        "sampling": {
            "ours": lambda: nwor_specpv.accept_sampling(*inputs.sampling),
            "torch": lambda: tree_peers.torch_sampling(*inputs.sampling, depth, width),
            "python": lambda: tree_peers.python_sampling(*inputs.sampling),
        },
    }


def check(shape: Shape, inputs: Inputs) -> dict[str, float]:
    accepted = {}
    for what, calls in variants(shape, inputs).items():
        expected = calls["python"]()
        for name in ("ours", "torch"):
            got = calls[name]()
            if what == "build":
                check_built(f"build by {name}", got, expected)
            else:
                accepted[what] = check_accepted(f"{what} by {name}", got, expected)
    return accepted


def bench(shape: Shape, device: str, replays: int) -> list[dict]:
    """Several sets of inputs in turn: together more than a cache holds."""
    sets = [make_inputs(shape, device) for _ in range(4 if device == "cuda" else 1)]
    accepted = check(shape, sets[0])
    results = []
    for what in GOALS_US:
        if device == "cpu":
            timings = time_often(variants(shape, sets[0])[what], replays)
        else:
            calls = [variants(shape, one)[what] for one in sets]
            rounds = 1 if what == "sampling" else 8
            graphs, counts = {}, {}
            for name in ("ours", "torch"):

                def run(name: str = name, calls: list = calls, rounds: int = rounds) -> None:
                    for _ in range(rounds):
                        for call in calls:
                            call[name]()

                graphs[name] = capture(run)
                counts[name] = rounds * len(sets)
            if what == "sampling":
                graphs["read_all"] = capture(lambda: sets[0].probs.sum())
                counts["read_all"] = 1
            timings = time_graphs(graphs, counts, replays)
        results.append(result(what, timings, accepted.get(what)))
    return results


def time_often(calls: dict, replays: int) -> dict[str, Timing]:
    """CPU calls of microseconds: a sample is as many as take about a millisecond."""
    once = time_calls(calls, 1)
    repeats = {name: max(1, round(1000 / timing.median_us)) for name, timing in once.items()}

    def repeated(name: str) -> Callable[[], None]:
        def run() -> None:
            for _ in range(repeats[name]):
                calls[name]()

        return run

    timings = time_calls({name: repeated(name) for name in calls}, replays)
    return {
        name: Timing(t.median_us / repeats[name], t.spread_us / repeats[name], t.replays)
        for name, t in timings.items()
    }


def result(what: str, timings: dict[str, Timing], accepted: float | None) -> dict:
    mine = timings["ours"].median_us
    return {
        "what": what,
        "us": {name: timing.median_us for name, timing in timings.items()},
        "spread_us": {name: timing.spread_us for name, timing in timings.items()},
        "ratios": {name: t.median_us / mine for name, t in timings.items() if name != "ours"},
        "accepted": accepted,
    }


LABELS = {
    "ours": "ours",
    "torch": "plain torch",
    "python": "plain Python",
    "read_all": "reading all target probabilities",
}


def describe(report: dict) -> str:
    shape = report["shape"]
    lines = [
        f"device {report['device']} · torch {report['torch']} · nwor_specpv {report['revision']} · "
        f"B {shape['requests']}, R {shape['rows']}, top-k {shape['best']}, {shape['steps']} steps, "
        f"V {shape['vocabulary']} · median of {report['replays']}, spread in brackets",
    ]
    cuda = report["goal_unit"] == "us"
    for one in report["results"]:
        note = "" if one["accepted"] is None else f", {one['accepted']:.1f} drafts accepted"
        lines += ["", one["what"] + note]
        for name, us in one["us"].items():
            line = f"  {LABELS[name]:<34}{us:12.2f} us [{one['spread_us'][name]:.2f}]"
            if name == "ours" and cuda:
                line += f"   goal <= {report['goals'][one['what']]} us"
            elif name == "python" and not cuda:
                line += f"   this/ours {one['ratios'][name]:.1f} (goal >= {CPU_GOAL:.0f})"
            elif name != "ours":
                line += f"   this/ours {one['ratios'][name]:.1f}"
            lines.append(line)
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog="nwor-specpv bench tree", description=__doc__)
    parser.add_argument("--requests", type=count, default=32, help="of a batch, default: 32")
    parser.add_argument("--rows", type=count, default=64, help="of a tree, default: 64, the most")
    parser.add_argument("--best", type=count, default=8, help="the drafter's top-k, default: 8")
    parser.add_argument("--steps", type=count, default=5, help="of the drafter, default: 5")
    parser.add_argument("--vocabulary", type=count, help="default: 128256, on the CPU 32000")
    parser.add_argument("--replays", type=count, default=25, help="default: 25")
    add_machine_arguments(parser)
    arguments = parser.parse_args(argv)
    if not 2 <= arguments.rows <= 64:
        parser.error(f"--rows: got {arguments.rows}, expected 2 .. 64 (plain torch has one word)")
    device = choose_device(arguments)
    torch.manual_seed(0)
    vocabulary = arguments.vocabulary or (128256 if device == "cuda" else 32000)
    if vocabulary < arguments.best:
        parser.error(f"--vocabulary: got {vocabulary}, expected at least --best {arguments.best}")
    shape = Shape(arguments.requests, arguments.rows, arguments.best, arguments.steps, vocabulary)
    report = {
        **machine(device),
        "replays": arguments.replays,
        "shape": vars(shape),
        "goals": GOALS_US if device == "cuda" else dict.fromkeys(GOALS_US, CPU_GOAL),
        "goal_unit": "us" if device == "cuda" else "times plain Python",
        "results": bench(shape, device, arguments.replays),
    }
    return publish(report, describe, arguments.json)
