"""An OpenAI-compatible server of vLLM as a process of its own: its start, its metrics, its end."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

_SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
MODEL = "model"  # what requests call the model


@dataclass
class Server:
    name: str
    url: str
    process: subprocess.Popen[bytes]
    log: Path
    metrics: str = ""  # of the plugin; empty without it


@dataclass(frozen=True)
class End:
    """How a server went."""

    status: int | None  # None: it had to be killed
    left: int  # of its processes, those that outlived it


class Samples:
    """One scrape: values by the name of a series and its labels."""

    def __init__(self, text: str) -> None:
        self.series = [
            (name, dict(_LABEL.findall(labels)), float(value))
            for name, labels, value in _SAMPLE.findall(text)
        ]

    def total(self, name: str, **labels: str) -> float:
        """The sum of all series of a name that have these labels; 0 if there are none."""
        wanted = labels.items()
        return sum(v for own, found, v in self.series if own == name and wanted <= found.items())

    def split(self, name: str, label: str) -> dict[str, float]:
        """The series of a name that are not 0, by one of their labels."""
        found = [(labels.get(label, ""), v) for own, labels, v in self.series if own == name]
        return {kind: value for kind, value in found if value}


def has_gpu() -> bool:
    return shutil.which("nvidia-smi") is not None


def device() -> str:
    """What a result says it was measured on."""
    if not has_gpu():
        return f"{platform.machine()} CPU"
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\n")[0]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def launch(
    name: str, arguments: Sequence[str], log: Path, *,
    settings: Mapping[str, Any] | None, variables: Mapping[str, str] | None = None,
) -> Server:  # fmt: skip
    """Starts a server. `arguments`: vLLM's. `settings`: keys of the plugin; None: without it.
    `variables`: of its environment."""
    port = free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *arguments]
    command += ["--served-model-name", MODEL, "--host", "127.0.0.1", "--port", str(port)]
    command += ["--disable-uvicorn-access-log"]
    # Two servers that bind their threads to the same cores would wait for each other.
    env = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    env |= os.environ | dict(variables or {})
    metrics = ""
    if settings is None:
        env["VLLM_PLUGINS"] = "none"
    else:
        own = {"metrics_port": free_port(), **settings}
        metrics = f"http://127.0.0.1:{own['metrics_port']}/metrics"
        command += ["--additional-config", json.dumps({"nwor_specpv": own})]
        if has_gpu():
            command += ["--attention-backend", "CUSTOM"]
    with log.open("ab") as out:
        process = subprocess.Popen(command, env=env, stdout=out, stderr=subprocess.STDOUT)
    return Server(name, f"http://127.0.0.1:{port}", process, log, metrics)


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=30) as response:
        return response.read().decode()


def scrape(url: str) -> Samples:
    return Samples(get(url))


def is_ready(server: Server) -> bool:
    """Raises SystemExit if the server has gone."""
    if server.process.poll() is not None:
        tail = server.log.read_text(errors="replace")[-3000:]
        raise SystemExit(f"{tail}\nthe server {server.name} ended: {server.log}")
    try:
        get(f"{server.url}/health")
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False
    return True


def wait_until_ready(server: Server, seconds: float = 900.0) -> None:
    deadline = time.monotonic() + seconds
    while not is_ready(server):
        if time.monotonic() > deadline:
            raise SystemExit(
                f"the server {server.name} is not ready after {seconds:.0f} s: {server.log}"
            )
        time.sleep(0.5)


def end(server: Server, seconds: float = 60.0) -> End:
    """Asks a server to end, and kills what does not go."""
    family = []
    with contextlib.suppress(psutil.NoSuchProcess):
        family = psutil.Process(server.process.pid).children(recursive=True)
    server.process.terminate()
    status: int | None
    try:
        status = server.process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        status = None
        server.process.kill()
        server.process.wait()
    _, left = psutil.wait_procs(family, timeout=10)
    for member in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()
    return End(status, len(left))
