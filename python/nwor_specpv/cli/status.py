"""This machine: the build, the GPUs, the attention routes and the hosts that are installed.

`collect()` returns a JSON-able dict; `lines()` and `describe()` turn it into text. All work when
the native library cannot be loaded: `ok` is then false and `problem` says why.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import platform
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from nwor_specpv import _stamp
from nwor_specpv.config import load_config, metrics_url

HOSTS = ("vllm", "transformers")


def load_native() -> tuple[ModuleType | None, str | None]:
    """The module `_C`, or one sentence that says why it cannot be loaded."""
    try:
        return _stamp.load_native(), None
    except _stamp.StampMismatch as error:
        return None, " ".join(str(error).split())


def collect() -> dict[str, Any]:
    """Everything that `nwor-specpv status` shows of this machine."""
    native, problem = load_native()
    stamp = _read_stamp()
    return {
        "ok": native is not None,
        "problem": problem,
        "build": stamp and {**vars(stamp), "architectures": list(stamp.architectures)},
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "torch": _torch(),
        "devices": _devices(stamp),
        "routes": _routes(native),
        "hosts": {name: installed_version(name) for name in HOSTS},
        "metrics": _metrics(native),
    }


def lines(report: dict[str, Any]) -> list[tuple[str, str]]:
    """Names and texts."""
    build, torch = report["build"], report["torch"]
    found = [("nwor_specpv", _describe_build(build))]
    if report["problem"]:
        found.append(("problem", report["problem"]))
    found.append(("python", f"{report['python']} on {report['platform']}"))
    cuda = f"CUDA {torch['cuda']}" if torch["cuda"] else "no CUDA"
    found.append(("torch", torch["problem"] or f"{torch['version']}, {cuda}"))
    if build:
        found.append(("kernels", " ".join(build["architectures"]) or "CPU only"))
    for device in report["devices"]:
        covered = "this build has" if device["covered"] else "this build has NO"
        text = f"{device['name']}, capability {device['capability']}, {covered} kernels for it"
        found.append((f"cuda:{device['index']}", text))
    if not report["devices"]:
        found.append(("devices", "no CUDA device; everything runs on the CPU"))
    found += _describe_routes(report["routes"])
    found += [(name, version or "not installed") for name, version in report["hosts"].items()]
    found.append(("metrics", _describe_metrics(report["metrics"])))
    return found


def describe(report: dict[str, Any]) -> str:
    """The lines as one text."""
    return aligned(lines(report))


def aligned(found: Sequence[tuple[str, str]]) -> str:
    """One line each, the texts below one another."""
    width = max(len(name) for name, _ in found)
    return "\n".join(f"{name:<{width}}  {text}" for name, text in found)


def installed_version(package: str, *, module: str | None = None) -> str | None:
    """The version of an installed package, without importing it; None if it is not installed."""
    spec = importlib.util.find_spec(module or package)
    if spec is None or spec.origin is None:  # a mere folder of that name is no package
        return None
    # vLLM for the CPU is distributed under another name.
    for name in (package, f"{package}-cpu"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "unknown version"


def _read_stamp() -> _stamp.BuildStamp | None:
    try:
        return _stamp.read_stamp()
    except ImportError:
        return None


def _torch() -> dict[str, str | None]:
    torch, problem = _stamp.load_torch()
    if torch is None:
        return {"version": None, "cuda": None, "problem": problem}
    return {"version": str(torch.__version__), "cuda": torch.version.cuda, "problem": None}


def _devices(stamp: _stamp.BuildStamp | None) -> list[dict[str, Any]]:
    torch, _ = _stamp.load_torch()
    devices = []
    for index in range(torch.cuda.device_count() if torch and torch.cuda.is_available() else 0):
        major, minor = torch.cuda.get_device_capability(index)
        devices.append(
            {
                "index": index,
                "name": torch.cuda.get_device_name(index),
                "capability": f"{major}.{minor}",
                "covered": bool(stamp and _stamp.covers(stamp.architectures, (major, minor))),
            }
        )
    return devices


def _routes(native: ModuleType | None) -> dict[str, Any]:
    """The attention routes and which of them work here."""
    if native is None:
        return {"problem": "the native library is not loaded", "report": {}}
    try:
        from nwor_specpv.ops.attention import route_report

        return {"problem": None, "report": route_report()}
    except Exception as error:  # shown, so that the rest of the report is still there
        return {"problem": f"{type(error).__name__}: {error}", "report": {}}


def _metrics(native: ModuleType | None) -> dict[str, Any]:
    """Whether the exporter is built, and the endpoint that the environment's settings name."""
    found = {"built": native and native.metrics_status()["built"], "url": None, "problem": None}
    try:
        settings = load_config()
        if settings.metrics_port:
            found["url"] = metrics_url(settings.metrics_host, settings.metrics_port)
    except ValueError as error:
        found["problem"] = str(error)
    return found


def _describe_build(build: dict[str, Any] | None) -> str:
    if build is None:
        return "not built"
    cuda = f"CUDA {build['cuda']}" if build["cuda"] else "no CUDA"
    return f"{build['version']} ({build['revision']}), built for torch {build['torch']}, {cuda}"


def _describe_routes(routes: dict[str, Any]) -> list[tuple[str, str]]:
    if routes["problem"]:
        return [("attention", f"routes unknown: {routes['problem']}")]
    return [("attention", f"{name}: {text}") for name, text in routes["report"].items()]


def _describe_metrics(metrics: dict[str, Any]) -> str:
    if metrics["problem"]:
        return str(metrics["problem"])
    if metrics["built"] is None:
        return "unknown: the native library is not loaded"
    if not metrics["built"]:
        return "not in this build; install prometheus-cpp-dev and build again"
    return metrics["url"] or "off; set metrics_port to serve them"
