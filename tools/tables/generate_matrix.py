"""The transformers host with drafts and views beside plain decoding."""

from __future__ import annotations

from collections.abc import Iterator

from .records import head, load, row

_NAME = "cpu/generate_matrix.json"


def matrix_lines() -> Iterator[str]:
    data = load(_NAME)
    kinds = list(dict.fromkeys(cell["kind"] for cell in data["cells"]))
    ways = [name for name in data["cells"][0]["of_plain"] if name != "none"]
    loads = [cell["load_average"] for cell in data["cells"]]
    worst = min(share for cell in data["cells"] for share in cell["of_plain"].values())
    firsts = [share for cell in data["cells"] for share in cell["first_of_plain"].values()]
    same = all(same for cell in data["cells"] for same in cell["same_tokens"].values())
    told = "the same tokens" if same else "not always the same tokens"
    yield (
        f"{data['device']} ({data['processor']}): "
        f"{data['model']}, {data['dtype']}, greedy, {data['tokens']} new tokens "
        f"for each prompt, all {data['rounds']} calls of a generator together, the first included. "
        f"Tokens per second relative to plain decoding, for texts {' / '.join(kinds)}; {told}. "
        f"Least share {worst:.2f}, of first calls alone {min(firsts):.2f}; goal {data['goal']}. "
        f"Load average {min(loads):.1f} to {max(loads):.1f}."
    )
    yield ""
    yield from head("prompts x tokens", "plain, tokens per second", *ways)
    sizes = {(cell["context"], cell["batch"]) for cell in data["cells"]}
    for context, batch in sorted(sizes):
        found = {
            cell["kind"]: cell
            for cell in data["cells"]
            if (cell["context"], cell["batch"]) == (context, batch)
        }
        plain = [_rate(found.get(kind)) for kind in kinds]
        shares = [
            [f"{found[kind]['of_plain'][name]:.2f}" if kind in found else "-" for kind in kinds]
            for name in ways
        ]
        yield row(f"{batch} x {context}", *(" / ".join(cell) for cell in (plain, *shares)))


def _rate(cell: dict | None) -> str:
    """Of plain decoding, in all rounds together."""
    if cell is None:
        return "-"
    rates = cell["rates"]["none"]
    return f"{len(rates) / sum(1 / rate for rate in rates):.1f}"
