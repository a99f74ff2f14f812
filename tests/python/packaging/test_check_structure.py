"""tools/check_structure.py: a clean tree passes, each planted violation is caught at its line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = ROOT / "tools" / "check_structure.py"

CLEAN = {
    "csrc/base/types.h": "#pragma once\n#include <vector>\n",
    "csrc/metrics/counters.h": '#pragma once\n#include "base/types.h"\n',
    "csrc/metrics/exporter.cpp": '#include "base/types.h"\n#include <prometheus/registry.h>\n',
    "csrc/kv_interceptor/commit.h": '#pragma once\n#include "metrics/counters.h"\n',
    "csrc/kv_interceptor/commit.cpp": '#include "commit.h"\n#include <ATen/ATen.h>\n',
    "csrc/attention/params.h": '#pragma once\n#include "base/types.h"\n',
    "csrc/attention/verify.cuh": '#pragma once\n#include "attention/params.h"\n',
    "csrc/attention/verify.cu": '#include "attention/verify.cuh"\n#include <cuda_runtime.h>\n',
    "csrc/session/session.cpp": '#include "kv_interceptor/commit.h"\n',
    "csrc/bindings/ops.cpp": '#include "kv_interceptor/commit.h"\nTORCH_LIBRARY(nwor, m) {}\n',
    "csrc/bindings/module.h": "#pragma once\n#include <pybind11/pybind11.h>\n",
    "csrc/bindings/module.cpp": '#include "bindings/module.h"\n#include "base/types.h"\n',
    "csrc/bindings/module_session.cpp": '#include "module.h"\n#include "kv_interceptor/commit.h"\n',
    "python/nwor_specpv/__init__.py": "import torch\n\nfrom . import _C\nfrom .config import a\n",
    "python/nwor_specpv/config.py": "from .errors import b\nfrom . import _C\n",
    "python/nwor_specpv/errors.py": "import logging\n",
    "python/nwor_specpv/cli/main.py": "import nwor_specpv\nfrom nwor_specpv import errors\n",
    "python/nwor_specpv/vllm/plugin.py": "import vllm\n",
    "python/nwor_specpv/bench/peers.py": "import vllm\n",
}


def plant(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def run(root: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), str(root)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_clean_tree_passes(tmp_path: Path) -> None:
    plant(tmp_path, CLEAN)
    result = run(tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    assert f"{sum(name.startswith('csrc') for name in CLEAN)} C++ and CUDA files" in result.stdout


def test_this_repository_passes() -> None:
    result = run(ROOT)
    assert result.returncode == 0, result.stdout + result.stderr


VIOLATIONS = {
    "a lower layer includes a higher one": (
        {"csrc/metrics/bad.h": '#pragma once\n\n#include "attention/params.h"\n'},
        ["csrc/metrics/bad.h:3: metrics may not include attention/params.h (attention)"],
    ),
    "the lowest layer includes another": (
        {"csrc/base/check.h": '#include "metrics/counters.h"\n'},
        ["csrc/base/check.h:1: base may not include metrics/counters.h (metrics)"],
    ),
    "a file directly in csrc": (
        {"csrc/check.h": '#include "base/types.h"\n'},
        ["csrc/check.h:1: not in a folder of csrc/; expected one of base, metrics, "],
    ),
    "angle brackets do not hide it": (
        {"csrc/metrics/bad.h": "#include <attention/params.h>\n"},
        ["csrc/metrics/bad.h:1: metrics may not include attention/params.h"],
    ),
    "nor does a path relative to the file": (
        {"csrc/metrics/bad.h": '#include "../session/session.h"\n', "csrc/session/session.h": "\n"},
        ["csrc/metrics/bad.h:1: metrics may not include session/session.h (session)"],
    ),
    "a folder includes the bindings": (
        {"csrc/session/bad.cpp": '#include "bindings/ops.cpp"\n'},
        ["csrc/session/bad.cpp:1: session may not include bindings/ops.cpp (bindings)"],
    ),
    "an unknown folder": (
        {"csrc/utils/helper.h": "#pragma once\n"},
        ["csrc/utils/helper.h:1: not in a folder of csrc/; expected one of base, metrics, "],
    ),
    "a quoted include of nothing": (
        {"csrc/attention/bad.h": '#include "types.hpp"\n'},
        ['csrc/attention/bad.h:1: "types.hpp" is no file of csrc/'],
    ),
    "a cycle of two": (
        {
            "csrc/tree/a.h": '#include "tree/b.h"\n',
            "csrc/tree/b.h": '#pragma once\n#include "tree/a.h"\n',
        },
        ["csrc/tree/b.h:2: include cycle: tree/a.h -> tree/b.h -> tree/a.h"],
    ),
    "a cycle of three": (
        {
            "csrc/tree/a.h": '#include "tree/b.h"\n',
            "csrc/tree/b.h": '#include "tree/c.h"\n',
            "csrc/tree/c.h": '#include "tree/a.h"\n',
        },
        ["include cycle: tree/a.h -> tree/b.h -> tree/c.h -> tree/a.h"],
    ),
    "ops registered elsewhere": (
        {"csrc/tree/bad.cpp": "int x;\nTORCH_LIBRARY_IMPL(nwor_specpv, CPU, m) {}\n"},
        ["csrc/tree/bad.cpp:2: TORCH_LIBRARY_IMPL: only csrc/bindings/ops.cpp registers"],
    ),
    "a fragment registered in the module": (
        {"csrc/bindings/module.cpp": "TORCH_LIBRARY_FRAGMENT(nwor_specpv, m) {}\n"},
        ["csrc/bindings/module.cpp:1: TORCH_LIBRARY_FRAGMENT: only csrc/bindings/ops.cpp"],
    ),
    "pybind11 outside the module": (
        {"csrc/bindings/ops.cpp": "#include <pybind11/pybind11.h>\n"},
        ["csrc/bindings/ops.cpp:1: <pybind11/pybind11.h>: only csrc/bindings/module.cpp includes"],
    ),
    "pybind11 in a file that is no part of the module": (
        {"csrc/bindings/modules.cpp": "#include <pybind11/pybind11.h>\n"},
        ["csrc/bindings/modules.cpp:1: <pybind11/pybind11.h>: only csrc/bindings/module.cpp"],
    ),
    "a folder includes a part of the module": (
        {"csrc/session/bad.cpp": '#include "bindings/module.h"\n'},
        ["csrc/session/bad.cpp:1: session may not include bindings/module.h (bindings)"],
    ),
    "torch's own door to pybind11": (
        {"csrc/session/bad.cpp": "#include <torch/extension.h>\n"},
        ["csrc/session/bad.cpp:1: <torch/extension.h>: only csrc/bindings/module.cpp"],
    ),
    "prometheus outside the exporter": (
        {"csrc/metrics/bad.cpp": "#include <prometheus/counter.h>\n"},
        ["csrc/metrics/bad.cpp:1: <prometheus/counter.h>: only csrc/metrics/exporter.cpp"],
    ),
    "a kernel includes torch": (
        {"csrc/attention/bad.cu": "\n#include <c10/cuda/CUDAStream.h>\n"},
        ["csrc/attention/bad.cu:2: kernels include no torch header: <c10/cuda/CUDAStream.h>"],
    ),
    "a kernel reaches torch through our header": (
        {
            "csrc/attention/tensors.h": "#include <ATen/ATen.h>\n",
            "csrc/attention/bad.cuh": '#include "attention/tensors.h"\n',
        },
        ["csrc/attention/bad.cuh:1: kernels include no torch header: attention/tensors.h -> <ATen"],
    ),
    "a Python module imports the package that imports it": (
        {"python/nwor_specpv/config.py": "import json\nfrom nwor_specpv import NworError\n"},
        [
            "python/nwor_specpv/config.py:2: import cycle: "
            "nwor_specpv -> nwor_specpv.config -> nwor_specpv"
        ],
    ),
    "a Python cycle of three, closed by a relative import": (
        {
            "python/nwor_specpv/tree/a.py": "from .b import x\n",
            "python/nwor_specpv/tree/b.py": "from nwor_specpv.tree import c\n",
            "python/nwor_specpv/tree/c.py": "x = 1\nfrom .a import y\n",
        },
        [
            "python/nwor_specpv/tree/c.py:2: import cycle: nwor_specpv.tree.a -> "
            "nwor_specpv.tree.b -> nwor_specpv.tree.c -> nwor_specpv.tree.a"
        ],
    ),
    "a Python cycle closed in a function": (
        {
            "python/nwor_specpv/a.py": "import nwor_specpv.b\n",
            "python/nwor_specpv/b.py": "def f():\n    from . import a\n    return a\n",
        },
        [
            "python/nwor_specpv/b.py:2: import cycle: "
            "nwor_specpv.a -> nwor_specpv.b -> nwor_specpv.a"
        ],
    ),
    "a Python cycle closed for type checkers": (
        {
            "python/nwor_specpv/a.py": "from .b import x\n",
            "python/nwor_specpv/b.py": "if TYPE_CHECKING:\n    from .a import y\n",
        },
        [
            "python/nwor_specpv/b.py:2: import cycle: "
            "nwor_specpv.a -> nwor_specpv.b -> nwor_specpv.a"
        ],
    ),
    "vLLM imported at the top": (
        {"python/nwor_specpv/status.py": "import sys\nimport vllm.platforms\n"},
        ["python/nwor_specpv/status.py:2: imports vllm.platforms: vLLM is imported only under"],
    ),
    "vLLM imported by another benchmark": (
        {"python/nwor_specpv/bench/commit.py": "import vllm\n"},
        ["python/nwor_specpv/bench/commit.py:1: imports vllm:"],
    ),
    "vLLM imported in a function": (
        {"python/nwor_specpv/a/b.py": "def f():\n    from vllm import LLM\n    return LLM\n"},
        ["python/nwor_specpv/a/b.py:2: imports vllm:"],
    ),
    "vLLM imported by name": (
        {"python/nwor_specpv/c.py": "import importlib\nv = importlib.import_module('vllm.v1')\n"},
        ["python/nwor_specpv/c.py:2: imports vllm.v1:"],
    ),
}


@pytest.mark.parametrize("name", VIOLATIONS)
def test_violation_is_caught(tmp_path: Path, name: str) -> None:
    files, expected = VIOLATIONS[name]
    plant(tmp_path, CLEAN | files)
    result = run(tmp_path)
    assert result.returncode == 1, result.stdout + result.stderr
    for text in expected:
        assert any(text in line for line in result.stdout.splitlines()), result.stdout
    assert len(result.stdout.splitlines()) == len(expected), result.stdout


def test_comments_and_strings_are_no_code(tmp_path: Path) -> None:
    text = (
        '// TORCH_LIBRARY(x, m)\n/* #include <pybind11/pybind11.h>\n#include "session/none.h" */\n'
        'constexpr char kSlashes[] = "//"; constexpr char kQuote = \'"\';\n'
        "constexpr int kMany = 1'000;  // it's\n"
        "// the end\n"
    )
    plant(tmp_path, CLEAN | {"csrc/metrics/commented.cpp": text})
    result = run(tmp_path)
    assert result.returncode == 0, result.stdout


def test_a_string_does_not_hide_what_follows(tmp_path: Path) -> None:
    text = 'const char* kUrl = "https://x";\nTORCH_LIBRARY(nwor_specpv, m) {}\n'
    plant(tmp_path, CLEAN | {"csrc/metrics/bad.cpp": text})
    assert "csrc/metrics/bad.cpp:2: TORCH_LIBRARY" in run(tmp_path).stdout


def test_wrong_folder_is_wrong_use(tmp_path: Path) -> None:
    result = run(tmp_path)
    assert result.returncode == 2
    assert "has no csrc/" in result.stderr
