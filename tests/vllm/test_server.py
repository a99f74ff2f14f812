"""The OpenAI-compatible server with the plugin: real clients, and a scrape that adds up."""

from __future__ import annotations

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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from nwor_specpv.models import smollm2

pytestmark = pytest.mark.slow


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


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """URLs of the API and of our metrics; the log is shown when a test fails."""
    model, port, metrics = smollm2("float32"), free_port(), free_port()
    log = tmp_path_factory.mktemp("server") / "log"
    speculation = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4}
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--served-model-name", "smol", "--port", str(port), "--host", "127.0.0.1"]
    command += ["--dtype", "float32", "--max-model-len", "1024", "--enforce-eager"]
    command += ["--max-num-batched-tokens", "512", "--max-num-seqs", "8"]
    command += ["--kv-cache-memory-bytes", str(256 << 20)]
    command += ["--speculative-config", json.dumps(speculation)]
    settings = {"metrics_port": metrics, "check_contract": True}
    command += ["--additional-config", json.dumps({"nwor_specpv": settings})]
    env = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_LOGGING_LEVEL": "INFO"}
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=env)
        try:
            wait_until_ready(process, f"http://127.0.0.1:{port}/health", log)
            yield f"http://127.0.0.1:{port}", f"http://127.0.0.1:{metrics}/metrics"
        finally:
            process.terminate()
            process.wait(timeout=60)


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


def complete(url: str, prompt: str) -> str:
    from openai import OpenAI

    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    answer = client.chat.completions.create(
        model="smol",
        messages=[{"role": "user", "content": prompt}],
        temperature=0,
        max_tokens=48,
    )
    return answer.choices[0].message.content or ""


def test_clients_are_served_while_metrics_are_scraped(server: tuple[str, str]) -> None:
    url, metrics = server
    prompts = [f"Write the number {i} ten times, separated by commas." for i in range(6)]
    with ThreadPoolExecutor(3) as pool:
        answers = [pool.submit(complete, url, prompt) for prompt in prompts]
        seen = []
        while not all(answer.done() for answer in answers):
            try:
                seen.append(scrape(metrics))
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.2)  # the endpoint opens with the first step
        texts = [answer.result() for answer in answers]
    assert all(texts)
    assert complete(url, prompts[0]) == texts[0]  # from the prefix cache, alone: the same

    for name in ("nwor_staged_tokens_total", "nwor_rounds_total"):
        values = [sample[name] for sample in seen]
        assert values == sorted(values)
    last = scrape(metrics)
    assert last["nwor_staged_tokens_total"] > 0
    assert last["nwor_committed_tokens_total"] > 0
    assert last["nwor_staged_tokens_total"] == (
        last["nwor_committed_tokens_total"] + last["nwor_rejected_tokens_total"]
    )
    assert last["nwor_contract_violations_total"] == 0
    own = dict(
        re.findall(
            r"^(vllm:spec_decode_num_\w+_total)\{[^}]*\} (\S+)$", get(f"{url}/metrics"), re.M
        )
    )
    drafts = float(own["vllm:spec_decode_num_draft_tokens_total"])
    assert drafts == last["nwor_staged_tokens_total"]


def test_the_command_line_reads_the_running_server(server: tuple[str, str]) -> None:
    command = [sys.executable, "-m", "nwor_specpv", "status", "--url", server[1], "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    status = json.loads(done.stdout)
    assert status["metrics"]["serving"] is True
    assert status["bypasses"] == []
