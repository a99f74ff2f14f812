"""benchmarks/vllm/soak.py: its books on made-up answers, and a short run of it."""

from __future__ import annotations

import importlib
import itertools
import json
import os
import random
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

FOLDER = Path(__file__).resolve().parents[3] / "benchmarks" / "vllm"
NAMES = ("soak", "soak_adapters", "soak_traffic", "soak_books", "http_client", "server_process")
SEED = int(os.environ.get("NWOR_TEST_SEED", random.randrange(2**31)))
TEXT = " ".join(str(number) for number in range(2000))
BALANCED = {"staged": 90, "committed": 50, "rejected": 40, "failed": 0}


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    monkeypatch.syspath_prepend(str(FOLDER))
    before = set(sys.modules)
    yield SimpleNamespace(**{name: importlib.import_module(name) for name in NAMES})
    for name in set(sys.modules) - before:
        if Path(getattr(sys.modules[name], "__file__", None) or "/").parent == FOLDER:
            del sys.modules[name]


def traffic(modules: SimpleNamespace, seed: int = SEED) -> Any:
    sizes = {"prompt_tokens": 40, "answer_tokens": 16}
    return modules.soak_traffic.Traffic(TEXT, seed, adapters=["a", "b"], **sizes)


def reply(modules: SimpleNamespace, text: str = "", finish: str = "length", **more: Any) -> Any:
    return modules.http_client.Reply(0.0, [1.0], [1], text, finish, **more)


def good_answer(modules: SimpleNamespace, request: Any) -> Any:
    """What a server without a fault could have said."""
    asked = request.body.get("structured_outputs", {})
    if request.leave_after:
        return reply(modules, "12", "")
    if "json" in asked:
        return reply(modules, '{"name": "oak", "age": 3}', "stop")
    if "regex" in asked:
        return reply(modules, "abbaab", "stop")
    return reply(modules, asked.get("choice", [request.key])[0], "stop")


def test_the_mix_has_every_kind_and_comes_again(modules: SimpleNamespace) -> None:
    print(f"seed={SEED}")
    made = list(itertools.islice(traffic(modules), 2000))
    assert made == list(itertools.islice(traffic(modules), 2000))
    kinds = Counter(request.kind for request in made)
    assert kinds.keys() == modules.soak_traffic.KINDS.keys()
    by_key: dict[str, Any] = {}
    for request in made:
        assert bool(request.leave_after) == (request.kind == "abort")
        assert 1 <= request.body["max_tokens"] <= 16
        assert len(request.body["prompt"]) <= 4 * (40 + 8)
        if request.key:
            assert request.body["temperature"] == 0
            assert by_key.setdefault(request.key, request.body) == request.body
    assert {request.body.get("model") for request in made} == {None, "a", "b"}
    assert len({json.dumps(r.body) for r in made if not r.key}) > 200
    moments = list(itertools.islice(modules.soak_traffic.arrivals(4.0, SEED), 4000))
    assert moments == sorted(moments)
    assert moments[-1] == pytest.approx(1000, rel=0.15)


def test_without_sampling_all_requests_are_greedy(modules: SimpleNamespace) -> None:
    sizes = {"prompt_tokens": 40, "answer_tokens": 16}
    calm = modules.soak_traffic.Traffic(TEXT, SEED, sampled=False, **sizes)
    made = list(itertools.islice(calm, 500))
    assert {request.body["temperature"] for request in made} == {0}
    assert {request.kind for request in made} == calm.weights.keys() - {"sampled", "lora"}


def test_answers_without_a_fault_raise_nothing(modules: SimpleNamespace) -> None:
    answers = modules.soak_books.Answers()
    made = list(itertools.islice(traffic(modules), 500))
    for request in made:
        answers.note(request, good_answer(modules, request))
    assert (answers.wrong, answers.different) == ([], [])
    told = answers.summary()
    assert sum(told["requests"].values()) == told["tokens"] == 500
    assert told["left"] == told["requests"]["abort"]
    assert told["finished"] == {"stop": 500 - told["left"]}
    keyed = [request.key for request in made if request.key]
    assert told["repeated"] == len(keyed) - len(set(keyed))


def test_answers_with_a_fault_are_found(modules: SimpleNamespace) -> None:
    make = modules.soak_traffic.Request
    body = {"prompt": "1", "temperature": 0, "max_tokens": 4}
    bound = {"structured_outputs": {"json": modules.soak_traffic.SCHEMA}}
    cases = [
        (make("greedy", body), reply(modules, error="status 500"), "status 500"),
        (make("greedy", body), reply(modules, finish="abort"), "ended with 'abort'"),
        (make("stop", body | {"stop": [","]}), reply(modules, "1,"), "did not stop"),
        (make("json", body | bound), reply(modules, "{}", "stop"), "is not what was asked"),
        (make("json", body | bound), reply(modules, "oak", "stop"), "is not what was asked"),
    ]
    long = modules.http_client.Reply(0.0, [1.0, 2.0], [3, 2], "", "length")
    cases.append((make("greedy", body), long, "5 tokens are too many"))
    for request, came, problem in cases:
        answers = modules.soak_books.Answers()
        answers.note(request, came)
        (wrong,) = answers.wrong
        assert problem in wrong
    answers = modules.soak_books.Answers()
    for text in ("a", "a", "b"):
        answers.note(make("greedy", body, key="greedy 1"), reply(modules, text))
    assert answers.different == ["greedy 1: 'a', then 'b'"]
    assert answers.repeated == 2


def own(modules: SimpleNamespace, lines: str = "", **tokens: int) -> Any:
    told = "".join(f"nwor_{k}_tokens_total {v}\n" for k, v in (BALANCED | tokens).items())
    return modules.server_process.Samples("# HELP nwor_x y\n" + told + lines)


def engine(modules: SimpleNamespace, **values: int) -> Any:
    told = {"num_preemptions_total": 3, "prefix_cache_hits_total": 64}
    told |= {"spec_decode_num_draft_tokens_total": 90} | values
    return modules.server_process.Samples(
        "".join(f'vllm:{k}{{engine="0",model_name="m"}} {v}.0\n' for k, v in told.items())
    )


def test_counters_that_add_up_and_those_that_do_not(modules: SimpleNamespace) -> None:
    books = modules.soak_books
    counters = books.Counters(most_open=8)
    counters.note(own(modules, staged=40, committed=20, rejected=12))
    counters.note(own(modules))
    counters.end(own(modules), engine(modules))
    assert counters.problems == []

    fallback = 'nwor_fallback_total{reason="capacity",rank="0"} 2\n'
    while_running = {
        "9 staged tokens are neither": own(modules, staged=99),
        "-1 staged tokens are neither": own(modules, staged=89),
        "{'capacity': 2.0}": own(modules, fallback),
        "nwor_contract_violations_total is above 0": own(
            modules, "nwor_contract_violations_total 1\n"
        ),
        "nwor_failed_tokens_total is above 0": own(modules, failed=1, rejected=39),
        "nwor_committed_tokens_total went back to 50": own(modules),
    }
    for problem, seen in while_running.items():
        counters = books.Counters(most_open=8)
        if "went back" in problem:
            counters.note(own(modules, committed=51, rejected=39))
        counters.note(seen)
        (found,) = counters.problems
        assert problem in found
    at_the_end = {
        "1 staged tokens are unaccounted for": (own(modules, staged=91), engine(modules)),
        "nothing was committed": (
            own(modules, staged=40, committed=0),
            engine(modules, spec_decode_num_draft_tokens_total=40),
        ),
        "requests_running is 1": (own(modules), engine(modules, num_requests_running=1)),
        "are in use": (own(modules), engine(modules, kv_cache_usage_perc=1)),
        "more than were staged": (
            own(modules), engine(modules, spec_decode_num_draft_tokens_total=91)
        ),
        "num_preemptions_total is 0": (own(modules), engine(modules, num_preemptions_total=0)),
    }  # fmt: skip
    for problem, (ours, theirs) in at_the_end.items():
        counters = books.Counters(most_open=8)
        counters.end(ours, theirs)
        (found,) = counters.problems
        assert problem in found


def test_memory_that_grows_after_warming_up(modules: SimpleNamespace) -> None:
    memory = modules.soak_books.Memory()
    for second in range(400):
        warm = min(second, 90) * 10  # MiB, until a quarter of the time is over
        spike = 500 if second % 50 == 0 else 0
        memory.note(second, steady=(warm + spike) << 20, leak=(warm + second) << 20)
    assert memory.growth("steady")["grown"] == 0
    assert memory.growth("leak")["grown"] == pytest.approx(200, rel=0.02)
    assert memory.growth("leak")["per_hour"] == pytest.approx(3600, rel=0.05)
    (problem,) = memory.problems(32)
    assert problem.startswith("leak grew by 200")


def test_lines_that_come_again(modules: SimpleNamespace) -> None:
    again = "(EngineCore pid=7) WARNING 11-18 20:00:0{} [file.py:3] odd"
    lines = [
        again.format(1),
        again.format(2).replace("pid=7", "pid=8"),  # another process
        "(APIServer pid=8) INFO 11-18 20:00:00 [loggers.py:1] Avg throughput",
        "(APIServer pid=8) INFO 11-18 20:00:10 [loggers.py:1] Avg throughput",
        "(EngineCore pid=7) INFO 11-18 20:00:00 [plugin.py:1] nwor_specpv: on",
    ]
    assert modules.soak_books.repeated_lines("\n".join(lines)) == []
    (found,) = modules.soak_books.repeated_lines("\n".join([*lines, again.format(3)]))
    assert "odd" in found
    (found,) = modules.soak_books.repeated_lines("\n".join([*lines, lines[-1]]))
    assert "nwor_specpv: on" in found


def test_a_verdict_names_what_is_wrong(modules: SimpleNamespace) -> None:
    books = modules.soak_books
    answers, counters = books.Answers(), books.Counters(8)
    assert books.verdict(answers, counters, [], "fine", exact=True) == []
    answers.different += [f"greedy {i}: a, then b" for i in range(7)]
    assert books.verdict(answers, counters, [], "", exact=False) == []
    (told,) = books.verdict(answers, counters, [], "", exact=True)
    assert told.startswith("texts that differ, 7 of them: greedy 0")
    assert "greedy 5" not in told
    assert books.verdict(answers, counters, ["grew"], "Traceback (most recent)", exact=False) == [
        "grew", "the log has a traceback"
    ]  # fmt: skip


def test_adapters_leave_the_last_place_empty(modules: SimpleNamespace, tmp_path: Path) -> None:
    from nwor_specpv.models import stories

    told = modules.soak_adapters.make(tmp_path, str(stories()))
    adapters = [word for word in told if "=" in word]
    assert len(adapters) == len(modules.soak_adapters.NAMES)
    assert int(told[told.index("--max-loras") + 1]) == len(adapters) + 1


def test_a_result_can_be_recorded(
    modules: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The table of docs/vllm_validation.md is made from it."""
    monkeypatch.syspath_prepend(str(FOLDER.parents[1] / "tools"))
    copy = tmp_path / "copy.json"
    args = modules.soak.parse(["--model", "made-up", "--out", str(tmp_path), "--json", str(copy)])
    run = SimpleNamespace(answers=modules.soak_books.Answers(), memory=modules.soak_books.Memory())
    run.own = dict(zip(("staged", "committed", "rejected", "failed"), (9, 5, 4, 0), strict=True))
    run.engine = {"num_preemptions": 3.0, "prefix_cache_hits": 64.0}
    for second in range(100):
        run.memory.note(second, engine=(100 + second) << 20)
    run.answers.note(modules.soak_traffic.Request("greedy", {"max_tokens": 1}), reply(modules))
    assert modules.soak.report(args, run, []) == 0
    assert modules.soak.report(args, run, ["a | b\nc"]) == 1
    assert copy.read_text() == (tmp_path / "soak.json").read_text()
    table = importlib.import_module("tables.soak")
    lines = list(table.result_lines([json.loads(copy.read_text())]))
    for module in [name for name in sys.modules if name.partition(".")[0] == "tables"]:
        del sys.modules[module]
    assert "| staged = committed + rejected + failed | 9 = 5 + 4 + 0 |" in lines
    assert "| requests | 1: 1 greedy |" in lines
    assert "| wrong | a / b c |" in lines
    assert any("engine 199 (+50.0)" in line for line in lines)


@pytest.mark.slow
def test_a_short_run(
    modules: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real server. Memory is looked at over half an hour, not here."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "INFO")
    arguments = ["--out", str(tmp_path), "--minutes", "1.5", "--growth-mib", "1000"]
    assert modules.soak.main([*arguments, "--seed", str(SEED)]) == 0
    told = json.loads((tmp_path / "soak.json").read_text())
    assert told["problems"] == []
    assert told["counters"]["staged"] > 0
    assert min(told["requests"].values()) > 0
