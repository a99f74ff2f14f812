"""The OpenAI-compatible server with the plugin, as a process of its own, and a client of it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from nwor_specpv.models import smollm2

FAULTY = Path(__file__).parent / "processes" / "faulty_server.py"
SPECULATION = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4}


@dataclass
class Server:
    url: str
    metrics: str
    process: subprocess.Popen
    log: Path


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=30) as response:
        return response.read().decode()


def scrape(url: str) -> dict[str, float]:
    """Samples without labels other than rank, by name."""
    found = re.findall(r'^(nwor_\w+)(?:\{rank="\d+"\})? (\S+)$', get(url), re.M)
    return {name: float(value) for name, value in found}


@contextmanager
def serve(folder: Path, fault: str = "", **settings: object) -> Iterator[Server]:
    """SmolLM2 in float32, n-gram drafts; its log is in the folder. `fault`: of those that
    `faulty_server.py` has."""
    port, metrics = free_port(), free_port()
    program = [str(FAULTY)] if fault else ["-m", "vllm.entrypoints.openai.api_server"]
    command = [sys.executable, *program]
    command += ["--model", str(smollm2("float32")), "--served-model-name", "smol"]
    command += ["--port", str(port), "--host", "127.0.0.1"]
    command += ["--dtype", "float32", "--max-model-len", "1024", "--enforce-eager"]
    command += ["--max-num-batched-tokens", "512", "--max-num-seqs", "8"]
    command += ["--kv-cache-memory-bytes", str(256 << 20)]
    command += ["--speculative-config", json.dumps(SPECULATION)]
    settings = {"metrics_port": metrics, **settings}
    command += ["--additional-config", json.dumps({"nwor_specpv": settings})]
    env = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_LOGGING_LEVEL": "INFO"}
    env["NWOR_TEST_FAULT"] = fault
    log = folder / f"server-{port}.log"
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=env)
        url = f"http://127.0.0.1:{port}"
        try:
            wait_until_ready(process, f"{url}/health", log)
            yield Server(url, f"http://127.0.0.1:{metrics}/metrics", process, log)
        finally:
            stop(process)


def stop(process: subprocess.Popen) -> None:
    """Ends a server and, if it does not go, every process of it: none outlives its test."""
    if process.poll() is not None:
        return
    family = [process, *psutil.Process(process.pid).children(recursive=True)]
    process.terminate()
    try:
        process.wait(timeout=60)
    finally:
        for member in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()


def wait_until_ready(process: subprocess.Popen, url: str, log: Path) -> None:
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()[-4000:]
        try:
            get(url)
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.5)
        else:
            return
    raise AssertionError(log.read_text()[-4000:])


def complete(url: str, prompt: str, max_tokens: int = 48) -> str:
    from openai import OpenAI

    client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    answer = client.chat.completions.create(
        model="smol",
        messages=[{"role": "user", "content": prompt}],
        temperature=0,
        max_tokens=max_tokens,
    )
    return answer.choices[0].message.content or ""
