"""Makes the plots and the tables of README.md, docs/ and benchmarks/results from what is recorded.

    tools/readme_results.py            rewrites what stands between the markers, and the plots
    tools/readme_results.py --check    exits 1 if they are not what the results say

A page takes a section by its name: `<!-- NAME:begin (...) -->` and `<!-- NAME:end -->`.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from tables import (
    attention,
    attention_cpu,
    commit,
    compatibility,
    coverage_plot,
    gains,
    generate,
    generate_matrix,
    long_context_plot,
    pass_profile,
    real,
    real_plot,
    recorded,
    serving,
    serving_plot,
    soak,
    specpv,
    timeline,
    tree,
    vllm,
    vllm_trees,
    worker,
)
from tables.records import RESULTS, ROOT, load

DOCS = ROOT / "docs"
PAGES = (
    ROOT / "README.md",
    RESULTS / "README.md",
    DOCS / "generate.md",
    DOCS / "measured.md",
    DOCS / "measured_transformers.md",
    DOCS / "measured_attention.md",
    DOCS / "metrics.md",
    DOCS / "vllm_long_context.md",
    DOCS / "vllm_trees.md",
    DOCS / "vllm_validation.md",
    DOCS / "vllm_versions.md",
    DOCS / "worker.md",
)
PLOTS: dict[Path, Callable[[], str]] = {
    DOCS / "attention.svg": attention.plot,
    DOCS / "coverage.svg": lambda: coverage_plot.render(load("cpu/coverage.json")),
    DOCS / "vllm_long_context.svg": lambda: long_context_plot.render(load("h200/vllm_specpv.json")),
    **{
        DOCS / f"vllm_{name}.svg": functools.partial(real_plot.render, data)
        for name, data in real.results().items()
    },
    **{
        DOCS / f"vllm_{name}.svg": functools.partial(serving_plot.render, data)
        for name, data in serving.results().items()
    },
    **timeline.plots(DOCS),
}
SECTIONS: dict[str, Callable[[], Iterator[str]]] = {
    "gains": gains.gains_lines,
    "summary": vllm.summary_lines,
    "demo": generate.demo_lines,
    "vllm_steps": vllm.step_lines,
    "vllm_traffic": vllm.traffic_lines,
    "prefix_reuse": vllm.prefix_reuse_lines,
    "long_context": vllm.long_context_lines,
    "pass_profile": pass_profile.pass_profile_lines,
    "vllm_trees": vllm_trees.vllm_tree_lines,
    "compatibility": compatibility.compatibility_lines,
    "real": real.real_lines,
    "serving": serving.serving_lines,
    "soak": soak.soak_lines,
    "timeline": timeline.timeline_lines,
    "generate_cpu": generate.cpu_lines,
    "generate_gpu": generate.gpu_lines,
    "generate_matrix": generate_matrix.matrix_lines,
    "offload": generate.offload_lines,
    "commit": commit.commit_lines,
    "commit_cpu": commit.cpu_commit_lines,
    "commit_traffic": commit.traffic_lines,
    "trees": tree.tree_lines,
    "retrieval": specpv.retrieval_lines,
    "views": specpv.view_lines,
    "compact_commit": specpv.compact_commit_lines,
    "attention": attention.attention_lines,
    "attention_rows64": attention.rows64_lines,
    "attention_odd": attention.odd_lines,
    "attention_float8": attention.float8_lines,
    "attention_models": attention.models_lines,
    "attention_torch": attention.torch_lines,
    "attention_dram": attention.dram_lines,
    "attention_errors": attention.error_lines,
    "attention_chain": attention.chain_lines,
    "attention_cpu": attention_cpu.cpu_attention_lines,
    "worker": worker.worker_lines,
    "h200_files": recorded.h200_lines,
    "cpu_files": recorded.cpu_lines,
    "gpu_tests": recorded.gpu_test_lines,
}
MARKED = re.compile(r"(<!-- (\w+):begin[^\n]*\n).*?(<!-- \2:end -->)", re.DOTALL)


def filled(text: str) -> str:
    """`text` with every marked part replaced by what the results say."""
    return MARKED.sub(lambda part: part[1] + "\n".join(SECTIONS[part[2]]()) + "\n" + part[3], text)


def main(arguments: list[str]) -> int:
    wanted = {page: filled(page.read_text(encoding="utf-8")) for page in PAGES}
    wanted |= {path: draw() for path, draw in PLOTS.items()}
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
