"""The OpenAI-compatible server with the plugin: real clients, and a scrape that adds up."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
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


PROMPTS = [
    "Write the numbers from one to two hundred in words, separated by commas.",
    "Say hello.",
    "Write the number 7 twenty times, separated by commas.",
]


@pytest.fixture(scope="module")
def plain_answers(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What vLLM alone answers."""
    with serve(tmp_path_factory.mktemp("plain"), enable_nwor=False) as running:
        return [complete(running.url, prompt) for prompt in PROMPTS]


def test_a_killed_worker_ends_its_requests_and_a_new_server_serves(
    plain_answers: list[str], tmp_path: Path
) -> None:
    """The worker is killed in the middle of a round: vLLM tells its clients and ends.

    Staging dies with the process, and nothing of it outlives the process.
    """
    told = tmp_path / "place.json"
    with serve(tmp_path, fault=f"block:{told}") as running, ThreadPoolExecutor(2) as pool:
        answers = [pool.submit(complete, running.url, PROMPTS[0], 800) for _ in range(2)]
        while not told.exists():
            assert not any(answer.done() for answer in answers)
            time.sleep(0.1)
        place = json.loads(told.read_text())
        assert place["round_open"]
        assert 0 < place["written"] < place["layers"], "some layers have staged, others have not"
        worker = psutil.Process(place["pid"])
        assert worker in psutil.Process(running.process.pid).children(recursive=True)
        rounds = scrape(running.metrics)["nwor_rounds_total"]
        time.sleep(2)
        assert scrape(running.metrics)["nwor_rounds_total"] == rounds, "it did not stay there"
        assert not any(answer.done() for answer in answers)
        worker.kill()
        for answer in answers:
            with pytest.raises(Exception, match=r"500|[Ee]ngine|[Cc]onnection"):
                answer.result(timeout=120)
        assert running.process.wait(timeout=120) is not None
    with serve(tmp_path) as again:
        assert [complete(again.url, prompt) for prompt in PROMPTS] == plain_answers


def test_refused_commits_are_survived_by_clients(plain_answers: list[str], tmp_path: Path) -> None:
    """Scheduler and worker are two processes here. Nothing wrong is answered, and nobody is sent
    away; drafts go on, as there is no pause."""
    with serve(tmp_path, fault="refuse") as running, ThreadPoolExecutor(3) as pool:
        for _ in range(2):
            assert list(pool.map(lambda p: complete(running.url, p), PROMPTS)) == plain_answers
        assert scrape(running.metrics)["nwor_committed_tokens_total"] > 0
        deadline = time.monotonic() + 60
        while len(set(told := refusals(running))) > 1:  # a step may be under way yet
            assert time.monotonic() < deadline, told
            time.sleep(0.1)
        assert told[0] > 1


def refusals(server: Server) -> tuple[float, float]:
    """As counted, and as logged."""
    line = "missing from the cache; running requests are computed again"
    return scrape(server.metrics)["nwor_recoveries_total"], server.log.read_text().count(line)
