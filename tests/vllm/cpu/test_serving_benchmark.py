"""benchmarks/vllm/serving.py: its loads, order and figures; with a made-up server and a real one.

What is measured is not looked at.
"""

from __future__ import annotations

import asyncio
import importlib
import itertools
import json
import math
import random
import statistics
import sys
import threading
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "benchmarks" / "vllm"
NAMES = ("serving", "serving_load", "serving_measure", "serving_models", "serving_records")
NAMES += ("serving_summary", "http_client", "model_shapes", "server_process")
TEXT = "one two three four five six seven eight nine ten " * 40


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    monkeypatch.syspath_prepend(str(FOLDER))
    before = set(sys.modules)
    loaded = {name: importlib.import_module(name) for name in NAMES}
    loaded["table"] = importlib.import_module("tables.serving")
    loaded["plot"] = importlib.import_module("tables.serving_plot")
    yield SimpleNamespace(**loaded)
    for name in set(sys.modules) - before:
        file = Path(getattr(sys.modules[name], "__file__", None) or "/")
        if file.parent == FOLDER or name.partition(".")[0] == "tables":
            del sys.modules[name]


@pytest.mark.parametrize("table", ["chat", "long", "long32k", "tiny"])
def test_lengths_follow_their_table(modules: SimpleNamespace, table: str) -> None:
    load, told = modules.serving_load, modules.serving_load.tables()
    for what, lengths in told["tables"][table].items():
        assert lengths == sorted(set(lengths))
        for share, length in zip(told["quantiles"], lengths, strict=True):
            assert load.length_at(table, what, share) == length
        found = [load.length_at(table, what, n / 1000) for n in range(1001)]
        assert found == sorted(found)
    made = load.draw(table, 400, 1)
    assert made == load.draw(table, 400, 1) != load.draw(table, 400, 2)
    prompts = sorted(sizes.prompt for sizes in made)
    for share, length in zip(told["quantiles"], told["tables"][table]["prompt"], strict=True):
        place = min(399, round(share * 400))
        assert prompts[max(0, place - 2)] / 1.1 <= length <= prompts[min(399, place + 2)] * 1.1
    assert load.longest(table) >= max(one.prompt + one.answer for one in made)


def test_loads_are_clients_rates_and_shares(modules: SimpleNamespace) -> None:
    load = modules.serving_load
    assert load.Load.parse("8c").clients == 8
    assert load.Load.parse("2.5").rate(10.0) == 2.5
    assert load.Load.parse("50%").rate(10.0) == 5.0
    assert load.Load.parse("all").rate(10.0) == math.inf
    for wrong in ("0", "-1", "0%", "x"):
        with pytest.raises(ValueError):  # noqa: PT011
            load.Load.parse(wrong)
    found = load.moments(3000, 5.0, 7)
    assert found == load.moments(3000, 5.0, 7)
    gaps = [after - before for before, after in itertools.pairwise(found)]
    assert statistics.fmean(gaps) == pytest.approx(0.2, rel=0.08)
    assert statistics.stdev(gaps) == pytest.approx(0.2, rel=0.12), "as of a Poisson process"
    assert set(load.moments(5, math.inf, 7)) == {0.0}


def test_sides_take_turns_and_all_at_once_comes_first(modules: SimpleNamespace) -> None:
    records, load = modules.serving_records, modules.serving_load.Load
    jobs = records.plan([load("2c"), load("50%")], ["stock", "nwor"], 2)
    assert [(job.load.name, job.side, job.turn) for job in jobs] == [
        ("all", "stock", 0), ("all", "nwor", 0), ("2c", "stock", 0), ("2c", "nwor", 0),
        ("50%", "stock", 0), ("50%", "nwor", 0), ("all", "nwor", 1), ("all", "stock", 1),
        ("2c", "nwor", 1), ("2c", "stock", 1), ("50%", "nwor", 1), ("50%", "stock", 1),
    ]  # fmt: skip
    assert [job.load.name for job in records.plan([load("2")], ["nwor"], 1)] == ["2"]
    with pytest.raises(ValueError, match="need the side stock"):
        records.plan([load("50%")], ["nwor"], 1)


def test_figures_of_answers(modules: SimpleNamespace) -> None:
    measure, load = modules.serving_measure, modules.serving_load
    Reply = modules.http_client.Reply  # noqa: N806
    asked = [measure.Asked([1] * 7, load.Sizes(7, 5), 0.0), measure.Asked([1], load.Sizes(1, 1), 0)]
    replies = [Reply(10.0, [10.5, 10.6, 10.8], [1, 2, 2]), Reply(10.0, [11.0], [1])]
    found = measure.figures(asked, replies, 10.0, 2.0)
    assert (found["requests"], found["prompt_tokens"], found["tokens"]) == (2, 8, 6)
    assert (found["requests_per_s"], found["tokens_per_s"]) == (1.0, 3.0)
    assert found["first_ms"]["p50"] == pytest.approx(750)
    assert found["output_gap_ms"]["mean"] == pytest.approx(150)
    assert found["token_ms"]["mean"] == pytest.approx((50 * 2 + 100 * 2) / 4)
    assert found["whole_s"]["p99"] == pytest.approx(0.998)
    replies[1].sizes = [2]
    with pytest.raises(RuntimeError, match="got 2 tokens, not 1"):
        measure.figures(asked, replies, 10.0, 2.0)
    steady = [(n / 10, 1) for n in range(100)]
    late = [(moment + 50, size) for moment, size in steady]
    assert measure.middle_rate(steady) == measure.middle_rate(late) == pytest.approx(10)


# ---- with a made-up server ----


class Double:
    """Answers like vLLM, with tokens that come in pieces of one to three."""

    def __init__(self) -> None:
        self.url = ""
        self.asked: list[dict[str, Any]] = []
        self.fails = False
        self._chance = random.Random(1)
        self._drafts = 0

    async def metrics(self, _: web.Request) -> web.Response:
        return web.Response(
            text="# HELP x\n"
            'vllm:kv_cache_usage_perc{engine="0"} 0.25\n'
            f'vllm:spec_decode_num_draft_tokens_total{{engine="0"}} {4 * self._drafts}\n'
            f'vllm:spec_decode_num_accepted_tokens_total{{engine="0"}} {self._drafts}\n'
        )

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.asked.append(body)
        if self.fails:
            return web.Response(status=500, text="no more")
        answer = web.StreamResponse()
        await answer.prepare(request)
        done = 0
        while done < body["max_tokens"]:
            done = min(body["max_tokens"], done + self._chance.randint(1, 3))
            self._drafts += 1
            last = done == body["max_tokens"]
            piece = {"choices": [{"text": "a", "finish_reason": "length" if last else None}]}
            piece["usage"] = {"completion_tokens": done}
            await answer.write(f"data: {json.dumps(piece)}\n\n".encode())
            await asyncio.sleep(0)
        await answer.write(b"data: [DONE]\n\n")
        return answer


@contextmanager
def served(double: Double) -> Iterator[None]:
    """In a thread of its own."""
    loop = asyncio.new_event_loop()

    async def begin() -> web.AppRunner:
        app = web.Application()
        app.router.add_get("/metrics", double.metrics)
        app.router.add_post("/v1/completions", double.complete)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        double.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        return runner

    runner = loop.run_until_complete(begin())
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield
    asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(30)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(30)
    loop.close()


class Letters:
    """A tokenizer with a token for each letter."""

    bos_token_id = 1
    chat_template = None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [1] * add_special_tokens + [*map(ord, text)]

    def get_vocab(self) -> dict[str, int]:
        return {}


@pytest.fixture
def doubles(
    modules: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[dict[str, Double]]:
    """Sides are made up, and so is the tokenizer."""
    import transformers

    found = {name: Double() for name in ("plain", "stock", "nwor", "long")}

    def launch(name: str, arguments: Any, log: Path, *, settings: Any, variables: Any) -> Any:
        assert variables["VLLM_CACHE_ROOT"].endswith(f"/{name}")
        assert (settings is None) == (name in ("plain", "stock"))
        return modules.server_process.Server(name, found[name].url, None, log)

    (tmp_path / "text.txt").write_text(TEXT)
    monkeypatch.setattr(modules.server_process, "launch", launch)
    monkeypatch.setattr(modules.server_process, "is_ready", lambda _: True)
    monkeypatch.setattr(modules.server_process, "end", lambda _: None)
    tokenizer = SimpleNamespace(from_pretrained=lambda _: Letters())
    monkeypatch.setattr(transformers, "AutoTokenizer", tokenizer)
    with ExitStack() as stack:
        for double in found.values():
            stack.enter_context(served(double))
        yield found


def command(tmp_path: Path, *more: str) -> list[str]:
    told = ["--model", "made-up", "--out", str(tmp_path / "out"), "--lengths", "tiny"]
    told += ["--text", str(tmp_path / "text.txt"), "--requests", "12", "--turns", "2"]
    return [*told, "--loads", "2c", "50%", *more]


def read(tmp_path: Path) -> list[dict[str, Any]]:
    lines = (tmp_path / "out" / "records.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if "status" in record]


def test_both_sides_are_asked_the_same(
    modules: SimpleNamespace, doubles: dict[str, Double], tmp_path: Path
) -> None:
    serving = modules.serving
    assert serving.main(command(tmp_path)) == 0
    found = read(tmp_path)
    assert len(found) == 3 * 2 * 2
    assert {record["status"] for record in found} == {"measured"}

    def bodies(double: Double) -> list[str]:
        """In any order: clients may overtake each other, and turns come the other way round."""
        return sorted(json.dumps(body, sort_keys=True) for body in double.asked)

    stock, nwor = (bodies(doubles[name]) for name in ("stock", "nwor"))
    assert stock == nwor
    prompts = [tuple(body["prompt"]) for body in doubles["stock"].asked]
    assert len(set(prompts)) > len(prompts) * 0.9
    assert all(prompt[0] == 1 for prompt in prompts)
    assert serving.main(command(tmp_path)) == 0, "nothing is left"
    assert len(read(tmp_path)) == len(found)
    with pytest.raises(SystemExit, match="holds a run with requests_of_a_load 12, not 13"):
        serving.main(command(tmp_path, "--requests", "13"))

    result = tmp_path / "serving_made_up.json"
    assert serving.main([*command(tmp_path), "--summary", str(result)]) == 0
    told = json.loads(result.read_text())
    assert [load["load"] for load in told["loads"]] == ["all", "2c", "50%"]
    most = told["most_requests_per_s"]
    offered = {load["load"]: load["offered_per_s"] for load in told["loads"]}
    assert offered["all"] is offered["2c"] is None
    assert 0 < offered["50%"] < most
    for load in told["loads"]:
        assert load["missing"] == {}
        for side in load["sides"].values():
            assert side["acceptance"] == 0.25
            assert side["cache_use"] == {"mean": 0.25, "most": 0.25}
            assert side["requests"] == 12
        ratios = load["sides"]["nwor"]["to_stock"]
        assert ratios.keys() == modules.serving_summary.RATIOS.keys()
        assert load["sides"]["stock"]["to_stock"]["tokens_per_s"] == 1
    lines = list(modules.table.result_lines(told))
    assert sum(line.startswith("| ") for line in lines) == 2 + 6
    assert not any("Not measured" in line for line in lines)
    picture = ET.fromstring(modules.plot.render(told))
    assert len(picture.findall(".//{http://www.w3.org/2000/svg}circle")) == 8
    assert (tmp_path / "out" / "plot.svg").exists()


def test_plain_vllm_is_a_peer(
    modules: SimpleNamespace, doubles: dict[str, Double], tmp_path: Path
) -> None:
    """Of its own or beside stock; shares are of what stock served where it is asked."""
    sides = command(tmp_path, "--turns", "1", "--temperature", "0.5", "--sides", "plain", "long")
    assert modules.serving.main(sides) == 0
    assert {body["temperature"] for body in doubles["plain"].asked} == {0.5}
    result = tmp_path / "serving_made_up.json"
    assert modules.serving.main([*sides, "--summary", str(result)]) == 0
    told = json.loads(result.read_text())
    assert told["drafter"] == {"plain": None, "long": None}
    served = {load["load"]: load["sides"]["plain"]["requests_per_s"] for load in told["loads"]}
    assert told["most_requests_per_s"] == served["all"]
    lines = list(modules.table.result_lines(told))
    assert "temperature 0.5" in lines[0]
    assert "to plain" in lines[2]
    assert "to stock" not in lines[2]

    three = [*command(tmp_path, "--turns", "1"), "--sides", "plain", "stock", "long"]
    three[three.index("--out") + 1] = str(tmp_path / "three")
    assert modules.serving.main(three) == 0
    assert modules.serving.main([*three, "--summary", str(result)]) == 0
    told = json.loads(result.read_text())
    for load in told["loads"]:
        assert load["sides"]["long"].keys() >= {"to_stock", "to_plain"}
        if load["load"] == "all":
            assert told["most_requests_per_s"] == load["sides"]["stock"]["requests_per_s"]
    columns = list(modules.table.result_lines(told))[2].split(" | ")
    assert columns[4:6] == ["to stock", "to plain"]
    picture = ET.fromstring(modules.plot.render(told))
    assert len(picture.findall(".//{http://www.w3.org/2000/svg}circle")) == 2 * 2 * 3
    with pytest.raises(ValueError, match="loads in % need the side stock or plain"):
        modules.serving_records.plan([modules.serving_load.Load("50%")], ["nwor"], 1)


def argument(told: list[str], name: str) -> str:
    return told[told.index(name) + 1]


@pytest.mark.parametrize("gpu", [False, True])
def test_what_servers_are_told(
    modules: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, gpu: bool
) -> None:
    """All sides the same, but for their drafts."""
    for name in ("serving", "serving_models"):
        monkeypatch.setattr(getattr(modules, name), "has_gpu", lambda: gpu)
    memory = SimpleNamespace(stdout="143771\n", total=1000 << 20)
    monkeypatch.setattr(modules.serving_models.subprocess, "run", lambda *_, **__: memory)
    monkeypatch.setattr(modules.serving_models.psutil, "virtual_memory", lambda: memory)
    told = ["--out", str(tmp_path), "--model", "m", "--lengths", "long32k"]
    told += ["--sides", "plain", "stock", "long", "--server-args", "--max-num-seqs 24"]
    args = modules.serving.parse(told)
    modules.serving_models.resolve(args)
    sides = {side: modules.serving.server_arguments(side, args) for side in args.sides}
    for side in sides.values():
        assert argument(side, "--max-num-seqs") == "24"
        assert 29_000 < int(argument(side, "--max-model-len")) < 32_768
        assert argument(side, "--generation-config") == "vllm"
        size = int(argument(side, "--kv-cache-memory-bytes"))
        total = (143771 if gpu else 1000) << 20
        assert size == pytest.approx(0.15 * total, rel=0.01)
        assert ("--gpu-memory-utilization" in side) == gpu
    drafting = {side for side, words in sides.items() if "--speculative-config" in words}
    assert drafting == {"stock"}
    settings = [modules.serving_models.settings(side, args) for side in sides]
    assert settings == [None, None, {"enable_specpv": True}]
    args = modules.serving.parse([*told, "--server-args", "--kv-cache-memory-bytes 7"])
    modules.serving_models.resolve(args)
    assert modules.serving.server_arguments("stock", args).count("--kv-cache-memory-bytes") == 1


def test_shapes_of_a_large_model(modules: SimpleNamespace, tmp_path: Path) -> None:
    """The folder has its configuration, and a tokenizer that knows every word of the vocabulary."""
    from transformers import AutoTokenizer

    from nwor_specpv.models import smollm2

    told = ["--out", str(tmp_path), "--model", "llama-3.1-8b", "--head", "dummy"]
    args = modules.serving.parse([*told, "--dtype", "float32"])
    modules.serving_models.resolve(args)
    real, ours = (AutoTokenizer.from_pretrained(f) for f in (smollm2("float32"), args.model))
    assert ours.encode(TEXT + "  wörd\n1234") == real.encode(TEXT + "  wörd\n1234")
    config = json.loads((Path(args.model) / "config.json").read_text())
    assert len(ours) == config["vocab_size"] == 128256
    assert ours.decode([128255]) == "word128255"
    words = modules.serving.server_arguments("nwor", args)
    assert argument(words, "--load-format") == "dummy"
    drafter = json.loads(argument(words, "--speculative-config"))
    assert drafter["num_speculative_tokens"] == len(drafter["synthetic_acceptance_rates"])
    head = json.loads((Path(drafter["model"]) / "config.json").read_text())
    assert head["hidden_size"] == config["hidden_size"]
    recorded = modules.serving.told_of(args)
    assert recorded["drafter"]["nwor"]["model"] == recorded["head"] == "head"
    data = recorded | {"device": "d", "vllm": "v", "commit": "c", "loads": []}
    (line, *_) = modules.table.result_lines(data)
    assert "accepted in 75 %, 55 %, 40 %, 30 % of steps" in line


def test_what_fails_is_recorded_and_tried_again(
    modules: SimpleNamespace, doubles: dict[str, Double], tmp_path: Path
) -> None:
    run, serving = modules.serving_measure.run, modules.serving
    seen: list[str] = []

    def failing(server: Any, load: Any, asked: Any) -> dict[str, Any]:
        seen.append(server.name)
        doubles["nwor"].fails = len(seen) == 4  # after both were warmed up, and stock's first load
        return run(server, load, asked)

    modules.serving_measure.run = failing
    assert serving.main(command(tmp_path, "--turns", "1")) == 0
    failed = [record for record in read(tmp_path) if record["status"] == "failed"]
    assert [(record["load"], record["side"]) for record in failed] == [("all", "nwor")]
    assert "12 requests failed, the first with status 500: no more" in failed[0]["reason"]
    result = tmp_path / "serving_made_up.json"
    assert serving.main([*command(tmp_path), "--summary", str(result)]) == 0
    lines = list(modules.table.result_lines(json.loads(result.read_text())))
    assert lines[-1].startswith("* Not measured: nwor at all: 12 requests failed")
    assert serving.main(command(tmp_path, "--turns", "1", "--retry")) == 0
    assert {record["status"] for record in read(tmp_path)} == {"measured"}


def test_a_call_ends_in_time_and_the_next_goes_on(
    modules: SimpleNamespace, doubles: dict[str, Double], tmp_path: Path
) -> None:
    assert modules.serving.main(command(tmp_path, "--seconds", "0.001")) == 75
    assert not [r for r in read(tmp_path) if r["status"] != "measured"]
    assert modules.serving.main(command(tmp_path)) == 0


@pytest.mark.slow
def test_a_real_server(
    modules: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both sides, a few short requests."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    arguments = ["--out", str(tmp_path), "--lengths", "tiny", "--requests", "6", "--turns", "1"]
    size = "--enforce-eager --kv-cache-memory-bytes 134217728 --max-num-seqs 8"
    arguments += ["--loads", "2c", "2", "--server-args", size]
    assert modules.serving.main(arguments) == 0
    assert modules.serving.main([*arguments, "--summary", str(tmp_path / "result.json")]) == 0
    told = json.loads((tmp_path / "result.json").read_text())
    for load in told["loads"]:
        assert load["missing"] == {}
        assert load["sides"].keys() == {"stock", "nwor"}
        assert load["sides"]["nwor"]["drafted"] > 0
