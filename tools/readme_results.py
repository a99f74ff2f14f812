"""Makes the tables of README.md and docs/measured.md, and the plots, from benchmarks/results.

tools/readme_results.py            rewrites what stands between the markers, and the plots
tools/readme_results.py --check    exits 1 if they are not what the results say
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator

from tables import (
    attention,
    commit,
    coverage_plot,
    gains,
    generate,
    long_context_plot,
    specpv,
    tree,
    vllm,
)
from tables.records import ROOT, load

README, MEASURED = ROOT / "README.md", ROOT / "docs" / "measured.md"
PLOT, COVERAGE = ROOT / "docs" / "attention.svg", ROOT / "docs" / "coverage.svg"
LONG_CONTEXT = ROOT / "docs" / "vllm_long_context.svg"

# What a reader of the README asks first; everything else is told in docs/measured.md.
IN_README = (
    vllm.vllm_lines,
    attention.attention_lines,
    generate.generate_lines,
    generate.gpu_lines,
)
IN_MEASURED = (
    commit.commit_lines,
    commit.cpu_commit_lines,
    commit.traffic_lines,
    vllm.vllm_traffic_lines,
    vllm.long_context_lines,
    tree.tree_lines,
    specpv.retrieval_lines,
    attention.rows64_lines,
    attention.odd_lines,
    attention.fp8_lines,
    attention.torch_lines,
    attention.dram_lines,
    attention.cpu_attention_lines,
)


def render(sections: Iterable[Callable[[], Iterator[str]]]) -> str:
    made = ("\n".join(section()) for section in sections)
    return "\n\n".join(text for text in made if text)


def put(text: str, name: str, made: str) -> str:
    """`text` with the part between the markers of that name replaced."""
    begin, end = f"<!-- {name}:begin", f"<!-- {name}:end -->"
    head, rest = text.split(begin)
    marker, rest = rest.split("\n", 1)
    _, tail = rest.split(end)
    lines = f"{made}\n" if made else ""
    return f"{head}{begin}{marker}\n{lines}{end}{tail}"


def main(arguments: list[str]) -> int:
    readme = put(README.read_text(encoding="utf-8"), "results", render(IN_README))
    readme = put(readme, "gains", "\n".join(gains.gains_lines()))
    measured = put(MEASURED.read_text(encoding="utf-8"), "results", render(IN_MEASURED))
    wanted = {
        README: put(readme, "demo", "\n".join(generate.demo_lines())),
        MEASURED: measured,
        PLOT: attention.plot(),
        COVERAGE: coverage_plot.render(load("cpu/coverage.json")),
        LONG_CONTEXT: long_context_plot.render(load("h200/vllm_specpv.json")),
    }
    if "--check" in arguments:
        stale = [
            str(path.relative_to(ROOT))
            for path, made in wanted.items()
            if not path.exists() or path.read_text(encoding="utf-8") != made
        ]
        if stale:
            files = ", ".join(stale)
            print(f"not what benchmarks/results holds: {files}: run tools/readme_results.py")
        return 1 if stale else 0
    for path, made in wanted.items():
        path.write_text(made, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
