"""`nwor-specpv doctor`: what is missing on this machine, what it is for and how to get it.

The core works if the native library loads and one draft is staged and committed. Everything else is
for building, for a GPU or for a host; its absence is no failure.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nwor_specpv import _stamp

from . import status

_TIMEOUT_S = 60.0
_TRANSFORMERS = '"transformers>=5.16,<5.24"'
_WORKER_PACKAGES = (
    '"grpcio>=1.62" "grpcio-health-checking>=1.62" "grpcio-reflection>=1.62" "protobuf>=4.25"'
)

_WORKER_MODULES = {
    "grpcio": "grpc",
    "grpcio-health-checking": "grpc_health",
    "grpcio-reflection": "grpc_reflection",
}


@dataclass(frozen=True)
class Finding:
    """One line: what was checked, what was found, how to fix it."""

    name: str
    ok: bool
    detail: str
    fix: str
    needed_for: str  # "core", or what does not work without it

    def __str__(self) -> str:
        if self.ok:
            return f"ok       {self.name:<15} {self.detail}"
        return f"missing  {self.name:<15} {self.detail}; {self.fix} (needed for {self.needed_for})"


def examine() -> list[Finding]:
    """Checks everything, the core first."""
    findings = [_torch(), _native()]
    findings.append(_round_trip(findings[-1].ok))
    findings += [
        _tool("compiler", ("c++", "g++", "clang++"), "apt-get install g++", "building"),
        _tool("cmake", ("cmake",), "pip install cmake", "building"),
        _tool("ninja", ("ninja",), "pip install ninja", "building"),
        _nvcc(),
        _module("pybind11", "pip install pybind11", "building"),
        _header(
            "prometheus-cpp", "prometheus/text_serializer.h", "apt-get install prometheus-cpp-dev"
        ),
        _header("gtest", "gtest/gtest.h", "apt-get install libgtest-dev", "the C++ tests"),
        _gpu(),
        _module("vllm", _stamp.install_vllm(_wanted_torch() or ""), "the vLLM backend"),
        _module("transformers", f"pip install {_TRANSFORMERS}", "the transformers host"),
        _module("gguf", 'pip install "gguf>=0.17"', "the default model of the transformers host"),
        *(
            _module(name, f"pip install {_WORKER_PACKAGES}", "nwor-specpv worker", module=module)
            for name, module in _WORKER_MODULES.items()
        ),
        _module("pyyaml", "pip install pyyaml", "settings in YAML files", module="yaml"),
    ]
    return findings


def core_works(findings: list[Finding]) -> bool:
    return all(finding.ok for finding in findings if finding.needed_for == "core")


def as_json(findings: list[Finding]) -> dict[str, Any]:
    return {"ok": core_works(findings), "findings": [asdict(finding) for finding in findings]}


def describe(findings: list[Finding]) -> str:
    verdict = "the core works" if core_works(findings) else "the core does not work"
    return "\n".join([*map(str, findings), verdict])


def _torch() -> Finding:
    version = status.installed_version("torch")
    stamp = _wanted_torch()
    fix = _stamp.install_torch(stamp or "2.11.0")
    if version is None:
        return Finding("torch", False, "not installed", fix, "core")
    torch, problem = _stamp.load_torch()
    if torch is None:
        fix = _stamp.install_torch(stamp or "2.11.0", again=True)
        return Finding("torch", False, str(problem), fix, "core")
    found = str(torch.__version__)  # with the local part, which package metadata may lack
    if stamp is not None and not _stamp.fits_torch(stamp, found):
        return Finding("torch", False, f"{found}, but built for {stamp}", fix, "core")
    return Finding("torch", True, found, fix, "core")


def _wanted_torch() -> str | None:
    try:
        return _stamp.read_stamp().torch
    except ImportError:
        return None


def _native() -> Finding:
    module, problem = status.load_native()
    if module is None:
        return Finding("native library", False, "cannot be loaded", str(problem), "core")
    return Finding("native library", True, str(module.__file__), "make build", "core")


def _round_trip(loaded: bool) -> Finding:
    """One draft accepted, one rejected, on the CPU: the cache must hold exactly the first."""
    fix = "report it with the output of nwor-specpv status"
    if not loaded:
        return Finding(
            "round trip", False, "not tried: the library is not loaded", "make build", "core"
        )
    try:
        import torch

        from nwor_specpv import Interceptor, NworConfig, RoundPlan

        keys, values = torch.zeros(1, 4, 1, 64), torch.zeros(1, 4, 1, 64)
        rows = torch.arange(1.0, 4.0).repeat_interleave(64).reshape(3, 1, 64)
        interceptor = Interceptor(NworConfig())
        interceptor.bind_layer("layer", keys, values)
        interceptor.begin(RoundPlan(query_lens=[3], num_drafts=[2]))
        interceptor.write("layer", rows, rows, torch.tensor([0, 1, 2]))
        interceptor.commit(
            torch.tensor([[1, -1]], dtype=torch.int32), torch.tensor([1], dtype=torch.int32)
        )
        found = [cache[0, :, 0, 0].tolist() for cache in (keys, values)]
    except Exception as error:  # any failure is a finding
        return Finding("round trip", False, f"{type(error).__name__}: {error}", fix, "core")
    expected = [1.0, 2.0, 0.0, 0.0]
    if found != [expected, expected]:
        return Finding("round trip", False, f"got {found}, expected {expected}", fix, "core")
    return Finding("round trip", True, "stage, commit and reject on the CPU", fix, "core")


def _run(*command: str, text: str | None = None) -> subprocess.CompletedProcess[str] | None:
    try:
        return subprocess.run(
            command, input=text, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None


def _which(*names: str, folders: tuple[str, ...] = ()) -> str | None:
    """A program on the PATH, beside this interpreter, or in one of the folders."""
    places = [os.environ.get("PATH", os.defpath), str(Path(sys.executable).parent), *folders]
    for name in names:
        found = shutil.which(name, path=os.pathsep.join(places))
        if found:
            return found
    return None


def _tool(
    name: str,
    programs: tuple[str, ...],
    fix: str,
    needed_for: str,
    *,
    folders: tuple[str, ...] = (),
    version: Callable[[str], str | None] = lambda text: next(iter(text.splitlines()), None),
) -> Finding:
    path = _which(*programs, folders=folders)
    if path is None:
        return Finding(name, False, "not found", fix, needed_for)
    answer = _run(path, "--version")
    if answer is None or answer.returncode != 0:
        return Finding(name, False, f"{path} does not run", fix, needed_for)
    return Finding(name, True, f"{version(answer.stdout) or 'unknown'} ({path})", fix, needed_for)


def _nvcc() -> Finding:
    homes = [os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH")] + ["/usr/local/cuda"]
    folders = tuple(str(Path(home) / "bin") for home in homes if home)

    def release(text: str) -> str | None:
        match = re.search(r"release [\d.]+, V([\d.]+)", text)
        return match[1] if match else None

    fix = "install the CUDA toolkit or set CUDA_HOME"
    return _tool("nvcc", ("nvcc",), fix, "building CUDA kernels", folders=folders, version=release)


def _header(
    name: str, header: str, fix: str, needed_for: str = "building the metrics endpoint"
) -> Finding:
    compiler = _which("c++", "g++", "clang++")
    if compiler is None:
        return Finding(
            name, False, "unknown: there is no compiler to find it with", fix, needed_for
        )
    answer = _run(compiler, "-x", "c++", "-E", "-o", os.devnull, "-", text=f"#include <{header}>\n")
    if answer is None or answer.returncode != 0:
        return Finding(name, False, f"<{header}> not found", fix, needed_for)
    return Finding(name, True, f"<{header}>", fix, needed_for)


def _module(name: str, fix: str, needed_for: str, *, module: str | None = None) -> Finding:
    version = status.installed_version(name, module=module)
    if version is None:
        return Finding(name, False, "not installed", fix, needed_for)
    return Finding(name, True, version, fix, needed_for)


def _gpu() -> Finding:
    fix = "everything works on the CPU; a GPU needs its driver and a CUDA build of torch"
    torch, problem = _stamp.load_torch()
    if torch is None:
        return Finding("GPU", False, f"unknown: torch is {problem}", fix, "CUDA kernels")
    try:
        if not torch.cuda.is_available():
            return Finding("GPU", False, "torch finds none", fix, "CUDA kernels")
        major, minor = torch.cuda.get_device_capability()
        name = f"{torch.cuda.get_device_name()} (capability {major}.{minor})"
        _stamp.check_device()
    except _stamp.StampMismatch as error:
        wanted = _stamp.architecture_for((major, minor))
        if wanted is not None:
            fix = f"TORCH_CUDA_ARCH_LIST={wanted} make build"
        return Finding("GPU", False, str(error), fix, "CUDA kernels")
    except (ImportError, RuntimeError) as error:
        return Finding("GPU", False, f"unknown: {error}", fix, "CUDA kernels")
    return Finding("GPU", True, name, fix, "CUDA kernels")
