"""`nwor-specpv status`: the build, the machine, the hosts found here and what was bypassed.

`collect()` returns a dict for JSON, `describe()` makes text of it. Both work when the native
library does not load: `ok` is then false and `problem` says why.

Every process has its own counts. Those of a running server are read from its metrics endpoint,
which a URL or the settings in the environment name; without one they are those of this process.
"""

from __future__ import annotations

import http.client
import importlib
import importlib.metadata
import importlib.util
import platform
import re
import urllib.error
import urllib.request
from types import ModuleType
from typing import Any

from nwor_specpv import _stamp
from nwor_specpv.config import load_config, metrics_url

HOSTS = ("vllm", "transformers")

_FALLBACK = re.compile(r'^nwor_fallback_total\{(?:[^}]*,)?reason="([^"]*)"[^}]*\}\s+(\S+)', re.M)
_COUNTER = re.compile(r"^(\w+)(?:\{[^}]*\})?\s+(\S+)", re.M)
_PARTIAL = (
    "specpv_partial_steps_total",
    "specpv_probed_rows_total",
    "specpv_deviating_rows_total",
    "specpv_rechecked_tokens_total",
    "specpv_disagreed_tokens_total",
    "specpv_lossy_engines",
)
_TIMEOUT_S = 5.0


def load_native() -> tuple[ModuleType | None, str | None]:
    """The module `_C`, or one sentence that says why there is none."""
    try:
        return _stamp.load_native(), None
    except _stamp.StampMismatch as error:
        return None, " ".join(str(error).split())


def collect(url: str | None = None) -> dict[str, Any]:
    """Everything `nwor-specpv status` shows. `url`: the metrics endpoint of a running server."""
    native, problem = load_native()
    stamp = _read_stamp()
    metrics = _metrics(native, url)
    known, fallbacks, steps = (metrics.pop(k) for k in ("known", "fallbacks", "partial_steps"))
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
        "metrics": metrics,
        # If the endpoint does not answer, nothing is known: counts of this process would mislead.
        "bypasses": _bypasses(native, fallbacks) if known else None,
        "partial_steps": _partial_steps(native, steps) if known else None,
    }


def describe(status: dict[str, Any]) -> str:
    """A few aligned lines."""
    build, torch = status["build"], status["torch"]
    lines = [("nwor_specpv", _describe_build(build))]
    if status["problem"]:
        lines.append(("problem", status["problem"]))
    lines.append(("python", f"{status['python']} on {status['platform']}"))
    cuda = f"CUDA {torch['cuda']}" if torch["cuda"] else "without CUDA"
    lines.append(("torch", torch["problem"] or f"{torch['version']}, {cuda}"))
    if build:
        built = " ".join(build["architectures"]) or "none: a CPU build"
        lines.append(("architectures", built))
    for device in status["devices"]:
        covered = "covered by this build" if device["covered"] else "NOT covered by this build"
        text = f"{device['name']}, capability {device['capability']}, {covered}"
        lines.append((f"cuda:{device['index']}", text))
    if not status["devices"]:
        lines.append(("devices", "no CUDA device: everything runs on the CPU"))
    lines += _describe_routes(status["routes"])
    for name, version in status["hosts"].items():
        lines.append((name, version or "not installed"))
    lines.append(("metrics", _describe_metrics(status["metrics"])))
    lines += [("bypassed", text) for text in _describe_bypasses(status["bypasses"])]
    partial = status["partial_steps"]
    if partial and (partial["partial_steps"] or partial["lossy_engines"]):
        lines.append(("partial steps", _describe_drift(status["partial_steps"])))
    width = max(len(name) for name, _ in lines)
    return "\n".join(f"{name:<{width}}  {text}" for name, text in lines)


def installed_version(package: str, *, module: str | None = None) -> str | None:
    """The version of an installed package, without importing it; None if it is not installed."""
    spec = importlib.util.find_spec(module or package)
    if spec is None or spec.origin is None:  # a mere folder of that name is no package
        return None
    # vLLM for the CPU is a package with another name.
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
    """The attention routes, as the attention module reports them."""
    if native is None:
        return {"problem": "the native library is not loaded"}
    try:
        attention = importlib.import_module("nwor_specpv.ops.attention")
    except ImportError as error:
        return {"problem": f"nwor_specpv.ops.attention cannot be imported: {error}"}
    report = getattr(attention, "route_report", None)
    if report is None:
        return {"problem": "nwor_specpv.ops.attention has no route_report()"}
    try:
        return {"problem": None, "report": report()}
    except Exception as error:  # shown instead of the routes
        return {"problem": f"route_report() failed: {type(error).__name__}: {error}"}


def _metrics(native: ModuleType | None, url: str | None) -> dict[str, Any]:
    """The exporter of this process, or the endpoint that was asked.

    `fallbacks` and `partial_steps` are the endpoint's counts, None if no endpoint was asked;
    `known` is false if it has not answered.
    """
    own = native.metrics_status() if native is not None else {"built": None, "serving": False}
    answer = {"built": own["built"], "serving": own["serving"], "url": None, "problem": None}
    answer["fallbacks"], answer["partial_steps"], answer["known"] = None, None, True
    if own.get("problem"):
        answer["problem"] = own["problem"]
    if own["serving"]:
        answer["url"] = metrics_url(own["host"], own["port"])
    try:
        url = _configured_url() if url is None else url
    except ValueError as error:
        answer["problem"] = str(error)
    if url is not None:
        answer["url"] = url
        try:
            text = _read(url)
            answer["fallbacks"] = _fallbacks(text)
            answer["partial_steps"] = _counted(text)
            answer["serving"] = True
        except (OSError, ValueError, http.client.HTTPException) as error:
            answer["problem"], answer["known"] = f"{url} does not answer: {error}", False
    return answer


def _read(url: str) -> str:
    with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as response:
        return response.read().decode("utf-8", errors="replace")


def _counted(text: str) -> dict[str, int]:
    """Counts of partial verification in a server's metrics, summed over its ranks."""
    counts = dict.fromkeys(_PARTIAL, 0)
    for name, value in _COUNTER.findall(text):
        if name in counts:
            counts[name] += int(float(value))
    return counts


def _partial_steps(native: ModuleType | None, counts: dict[str, int] | None) -> dict[str, int]:
    """Partial steps and the drift that was found, by short names."""
    if counts is None:
        snapshot = native.metrics_snapshot() if native is not None else {}
        counts = {name: snapshot.get(name, 0) for name in _PARTIAL}
    return {name.removeprefix("specpv_").removesuffix("_total"): counts[name] for name in _PARTIAL}


def _describe_drift(counts: dict[str, int]) -> str:
    text = f"{counts['partial_steps']}, "
    if counts["lossy_engines"]:
        text += f"NOT lossless in {counts['lossy_engines']} engines or generators"
    else:
        text += "NOT lossless unless specpv_mode is lossless"
    if counts["probed_rows"]:
        text += f", {counts['deviating_rows']} of {counts['probed_rows']} probed rows deviate"
    if counts["rechecked_tokens"]:
        text += f", {counts['disagreed_tokens']} of {counts['rechecked_tokens']} tokens disagree"
    return text


def _fallbacks(text: str) -> dict[str, int]:
    """Bypass counts of a server, summed over its ranks."""
    found = _FALLBACK.findall(text)
    if not found:
        raise ValueError("it has no series nwor_fallback_total")
    counts: dict[str, int] = {}
    for reason, value in found:
        counts[reason] = counts.get(reason, 0) + int(float(value))
    return counts


def _configured_url() -> str | None:
    settings = load_config()
    if not settings.metrics_port:
        return None
    return metrics_url(settings.metrics_host, settings.metrics_port)


def _bypasses(native: ModuleType | None, counts: dict[str, int] | None) -> list[dict[str, Any]]:
    sentences = dict(native.BYPASS_REASONS) if native is not None else {}
    if counts is None:
        counts = native.metrics_snapshot()["nwor_fallback_total"] if native is not None else {}
    return [
        {"reason": reason, "count": count, "sentence": sentences.get(reason, "")}
        for reason, count in counts.items()
        if count > 0
    ]


def _describe_bypasses(bypasses: list[dict[str, Any]] | None) -> list[str]:
    if bypasses is None:
        return ["unknown: the endpoint does not answer"]
    return [f"{b['count']} x {b['reason']}: {b['sentence']}" for b in bypasses] or ["nothing"]


def _describe_build(build: dict[str, Any] | None) -> str:
    if build is None:
        return "not built"
    cuda = f"CUDA {build['cuda']}" if build["cuda"] else "no CUDA"
    return f"{build['version']} ({build['revision']}), built for torch {build['torch']}, {cuda}"


def _describe_routes(routes: dict[str, Any]) -> list[tuple[str, str]]:
    if routes["problem"]:
        return [("attention", f"routes unknown: {routes['problem']}")]
    report = routes["report"]
    items = report.items() if isinstance(report, dict) else enumerate(report)
    return [("attention", f"{name}: {text}") for name, text in items]


def _describe_metrics(metrics: dict[str, Any]) -> str:
    if metrics["problem"]:
        return str(metrics["problem"])
    if metrics["serving"]:
        return str(metrics["url"])
    if metrics["built"] is None:
        return "unknown: the native library is not loaded"
    return "off" if metrics["built"] else "built without the exporter (prometheus-cpp-dev)"
