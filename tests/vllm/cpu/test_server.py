"""The OpenAI-compatible server with the plugin: real clients, and a scrape that adds up."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
import urllib.error
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from support.server import Server, complete, get, scrape, serve

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serve(tmp_path_factory.mktemp("server"), check_contract=True) as running:
        yield running


def test_clients_are_served_while_metrics_are_scraped(server: Server) -> None:
    url, metrics = server.url, server.metrics
    assert scrape(metrics)["nwor_rounds_total"] >= 0, "ready, but nothing to scrape"
    prompts = [f"Write the number {i} ten times, separated by commas." for i in range(6)]
    with ThreadPoolExecutor(3) as pool:
        answers = [pool.submit(complete, url, prompt) for prompt in prompts]
        seen = []
        while not all(answer.done() for answer in answers):
            seen.append(scrape(metrics))
            time.sleep(0.05)
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


def test_the_command_line_reads_the_running_server(server: Server) -> None:
    command = [sys.executable, "-m", "nwor_specpv", "status", "--url", server.metrics, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    status = json.loads(done.stdout)["server"]
    assert status["bypasses"] == {}
    assert status["staged_tokens"] == scrape(server.metrics)["nwor_staged_tokens_total"]
    assert status["engine"] == {
        "drafter": "ngram",
        "draft_tokens": "4",
        "mode": "full",
        "attention": "auto",
    }


def test_a_killed_worker_ends_its_requests_and_a_new_server_serves(tmp_path: Path) -> None:
    """The engine's process is killed in the middle of a round: vLLM tells its clients and ends.

    Staging dies with the process, and nothing of it outlives the process.
    """
    prompt = "Write the numbers from one to two hundred in words, separated by commas."
    with serve(tmp_path) as running, ThreadPoolExecutor(2) as pool:
        answers = [pool.submit(complete, running.url, prompt, 800) for _ in range(2)]
        while not in_a_round(running.metrics):
            assert not any(answer.done() for answer in answers)
            time.sleep(0.1)
        workers = psutil.Process(running.process.pid).children(recursive=True)
        (core,) = [worker for worker in workers if "EngineCore" in worker.name()]
        core.kill()
        for answer in answers:
            with pytest.raises(Exception, match=r"500|[Ee]ngine|[Cc]onnection"):
                answer.result(timeout=120)
        assert running.process.wait(timeout=120) is not None
    with serve(tmp_path) as again:
        assert complete(again.url, "Say hello.", 8)


def in_a_round(metrics: str) -> bool:
    try:
        return scrape(metrics).get("nwor_staged_tokens_total", 0) > 0
    except (urllib.error.URLError, ConnectionError):
        return False
