"""`nwor-specpv bench coverage`: how much of the true attention partial views see, on a real model.

SmolLM2-135M reads a text; at several positions the last rows are taken as a tree. Every layer's
blocks are chosen by their queries, through the same ops a host uses. Then, in float64, the share of
each row's softmax mass that falls on the view's tokens: for the rows that chose, and for rows some
tokens later, as partial steps before the next refresh have them. Peers of the same number of
tokens: the last ones (sliding window), sink and last ones (streaming), and the best blocks that
exist, found by looking at the attention itself (oracle).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from nwor_specpv.cli.demo.texts import BOOK
from nwor_specpv.cli.parser import Parser, count, counts
from nwor_specpv.errors import NworError
from nwor_specpv.ops.retrieval import block_summaries, select_blocks

from .report import add_json_argument, choose_device, machine, publish

BLOCK, SINK, WINDOW, ROWS = 16, 2, 8, 8
BUDGETS = [256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096]
SCHEMES = ("oracle", "specpv", "quest", "shared", "streaming", "sliding")


class Recorded:
    """Q and K after RoPE of one pass, layer by layer: [heads, tokens, D] float32."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self.queries: list[torch.Tensor] = []
        self.keys: list[torch.Tensor] = []

    def attend(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **_: Any,
    ) -> tuple[torch.Tensor, None]:
        """transformers' attention interface, recording what goes by."""
        self.queries.append(query[0].clone())
        self.keys.append(key[0].clone())
        out = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=True, scale=module.scaling
        )
        return out.transpose(1, 2), None


def read_text(path: Path | None) -> str:
    path = path or BOOK
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise NworError(f"--text: got {str(path)!r}, which cannot be read: {error}") from None


def record(text: str, tokens: int) -> Recorded:
    try:
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
    except ImportError as error:
        raise NworError(f"transformers: {error}, expected it to be installed") from None
    from nwor_specpv.models import smollm2

    folder = smollm2("float32")
    ids = AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt").input_ids[:, :tokens]
    if ids.shape[1] < tokens:
        raise NworError(f"--text: got {ids.shape[1]} tokens, expected at least {tokens}")
    recorded = Recorded(tokens)
    ALL_ATTENTION_FUNCTIONS["nwor_recorded"] = recorded.attend
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.set_attn_implementation("nwor_recorded")
    with torch.no_grad():
        model.model(ids, use_cache=False)
    return recorded


class Layer:
    """One layer's keys up to a position, as pages of one block each, and what rows attend to."""

    def __init__(self, queries: torch.Tensor, keys: torch.Tensor, position: int) -> None:
        self.queries, self.position = queries, position
        self.keys = keys[:, :position]
        self.kv_heads, _, self.dim = self.keys.shape
        self.group = queries.shape[0] // self.kv_heads
        self.window_begin = position // BLOCK - WINDOW
        self.candidates = self.window_begin - SINK
        pages = position // BLOCK
        cache = self.keys[:, : pages * BLOCK].transpose(0, 1)
        cache = cache.reshape(pages, BLOCK, self.kv_heads, self.dim)
        shape = (1, self.candidates, self.kv_heads, self.dim)
        self.kmax, self.kmin = torch.empty(shape), torch.empty(shape)
        block_summaries(
            cache,
            torch.arange(pages, dtype=torch.int32)[None],
            torch.tensor([SINK * BLOCK], dtype=torch.int32),
            torch.tensor([self.window_begin * BLOCK], dtype=torch.int32),
            self.kmax,
            self.kmin,
            BLOCK,
        )

    def mass(self, first: int) -> torch.Tensor:
        """[Hkv, group * ROWS, position] float64: softmax over the context for rows from `first`.

        Rows after the position see tokens in between as well; those are in every view and left out.
        """
        query = self.queries[:, first : first + ROWS].double()
        query = query.reshape(self.kv_heads, self.group * ROWS, self.dim)
        scores = query @ self.keys.double().transpose(1, 2) / self.dim**0.5
        rows = torch.arange(first, first + ROWS).repeat(self.group)
        unseen = torch.arange(self.position) > rows[:, None]
        return scores.masked_fill(unseen, -torch.inf).softmax(-1)

    def choose(self, budget: int, scheme: str) -> torch.Tensor:
        """[Hkv, k] candidates chosen by the rows right before the position."""
        query = self.queries[:, self.position - ROWS : self.position].transpose(0, 1)[None]
        k = budget // BLOCK - SINK - WINDOW
        ids = select_blocks(
            query.contiguous(),
            self.kmax,
            self.kmin,
            torch.tensor([self.candidates], dtype=torch.int32),
            min(k, self.candidates),
            "quest" if scheme == "quest" else "specpv",
            selection="shared" if scheme == "shared" else "per_head",
        )
        return ids[0].long()

    def covered(self, mass: torch.Tensor, budget: int, scheme: str) -> float:
        """The mean share of `mass` that a view of `budget` tokens has."""
        if scheme == "sliding":
            return float(mass[..., self.position - budget :].sum(-1).mean())
        blocks = self.position // BLOCK
        by_block = mass[..., : blocks * BLOCK].unflatten(-1, (blocks, BLOCK)).sum(-1)
        rest = mass[..., blocks * BLOCK :].sum(-1)  # a last block that is not full
        if scheme == "oracle":
            best = by_block.mean(1).topk(min(budget // BLOCK, blocks), -1).indices
            return float((by_block.mean(1).gather(1, best).sum(-1) + rest.mean(1)).mean())
        taken = torch.zeros(self.kv_heads, blocks, dtype=torch.bool)
        taken[:, :SINK] = True
        taken[:, self.window_begin :] = True
        if scheme == "streaming":
            taken[:, blocks - (budget // BLOCK - SINK) :] = True
        else:
            taken.scatter_(1, SINK + self.choose(budget, scheme), True)
        return float(((by_block * taken[:, None]).sum(-1) + rest).mean())


def positions(tokens: int, later: int) -> Iterator[int]:
    """Every 512 tokens of the second half, a few tokens into a block."""
    yield from range(tokens // 2 + 5, tokens - later - ROWS, 512)


def least_tokens(budget: int, later: int) -> int:
    """Of a text in which a view of so many tokens is measured anywhere."""
    return next(t for t in itertools.count() if any(p >= budget for p in positions(t, later)))


def measure(recorded: Recorded, budgets: list[int], later: int) -> list[dict[str, Any]]:
    sums: dict[tuple[str, int, str], list[float]] = {}
    for queries, keys in zip(recorded.queries, recorded.keys, strict=True):
        for position in positions(recorded.tokens, later):
            layer = Layer(queries, keys, position)
            for when, first in (("now", position - ROWS), ("later", position + later)):
                mass = layer.mass(first)
                for budget in budgets:
                    if budget > position:
                        continue
                    for scheme in SCHEMES:
                        share = layer.covered(mass, budget, scheme)
                        sums.setdefault((scheme, budget, when), []).append(share)
    return [
        {
            "scheme": scheme,
            "budget": budget,
            "when": when,
            "mass": sum(shares) / len(shares),
            "worst_layer_and_position": min(shares),
            "samples": len(shares),
        }
        for (scheme, budget, when), shares in sums.items()
    ]


def describe(report: dict[str, Any]) -> str:
    lines = [
        f"device {report['device']} · torch {report['torch']} · commit {report['revision']} · "
        f"{report['model']}, {report['tokens']} tokens, {report['layers']} layers · share of the "
        f"attention mass on a view's tokens, in percent; in brackets {report['later']} tokens on",
        f"{'tokens seen':>12}" + "".join(f"{scheme:>16}" for scheme in SCHEMES),
    ]
    found = {(r["scheme"], r["budget"], r["when"]): r["mass"] for r in report["results"]}
    for budget in report["budgets"]:
        cells = [f"{budget:>12}"]
        for scheme in SCHEMES:
            now, later = (found.get((scheme, budget, when)) for when in ("now", "later"))
            cells.append(f"{100 * now:>8.1f} [{100 * later:.1f}]" if now else "")
        lines.append("".join(f"{cell:>16}" if i else cell for i, cell in enumerate(cells)))
    return "\n".join(lines)


def _parser() -> Parser:
    parser = Parser(prog="nwor-specpv bench coverage", description=__doc__)
    parser.add_argument("--text", type=Path, help="a text file, default: War and Peace")
    parser.add_argument("--tokens", type=count, default=6144, help="of the text, default: 6144")
    parser.add_argument("--budgets", type=counts, default=BUDGETS, help="tokens a view shows")
    parser.add_argument("--later", type=count, default=64, help="tokens until the rows in brackets")
    parser.add_argument("--threads", type=count, help="CPU threads, default: torch's")
    add_json_argument(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    arguments.device = "cpu"
    choose_device(arguments)
    least = (SINK + WINDOW + 1) * BLOCK
    if min(arguments.budgets) < least or arguments.tokens < 2 * max(least, arguments.later):
        raise NworError(
            f"--budgets, --tokens: got {arguments.budgets}, {arguments.tokens}, expected budgets "
            f"of at least {least} tokens (sink, window and a block) and a longer text"
        )
    if min(arguments.budgets) >= arguments.tokens:
        raise NworError(
            f"--budgets: got {arguments.budgets}, expected less than the {arguments.tokens} tokens "
            "of the text"
        )
    few = least_tokens(min(arguments.budgets), arguments.later)
    if arguments.tokens < few:
        raise NworError(
            f"--tokens: got {arguments.tokens}, expected {few} or more: a position behind "
            f"{min(arguments.budgets)} tokens, and {arguments.later} later"
        )
    recorded = record(read_text(arguments.text), arguments.tokens)
    report = {
        **machine("cpu"),
        "model": "SmolLM2-135M-Instruct, float32",
        "text": (arguments.text or BOOK).name,
        "tokens": arguments.tokens,
        "layers": len(recorded.keys),
        "positions": list(positions(arguments.tokens, arguments.later)),
        "rows": ROWS,
        "later": arguments.later,
        "budgets": arguments.budgets,
        "results": measure(recorded, arguments.budgets, arguments.later),
    }
    return publish(report, describe, arguments.json)
