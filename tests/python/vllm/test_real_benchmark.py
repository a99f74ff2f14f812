"""benchmarks/vllm/real.py without an engine: prompts, order, records, figures, table and plot."""

from __future__ import annotations

import fcntl
import hashlib
import importlib
import json
import os
import signal
import sys
import threading
import time
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "benchmarks" / "vllm"
NAMES = ("real", "real_engine", "real_measure", "real_prompts", "real_records", "real_summary")
NAMES += ("turns",)


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    monkeypatch.syspath_prepend(str(FOLDER))
    before = set(sys.modules)
    loaded = {name: importlib.import_module(name) for name in NAMES}
    loaded["table"] = importlib.import_module("tables.real")
    loaded["plot"] = importlib.import_module("tables.real_plot")
    yield SimpleNamespace(**loaded)
    for name in set(sys.modules) - before:
        if name in NAMES or name.partition(".")[0] == "tables":
            del sys.modules[name]


class Letters:
    """A tokenizer with a token for each letter."""

    bos_token_id = None
    chat_template = None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [*map(ord, text)]

    def __call__(self, texts: list[str], add_special_tokens: bool = True) -> dict[str, Any]:
        return {"input_ids": [self.encode(text, add_special_tokens) for text in texts]}

    def get_vocab(self) -> dict[str, int]:
        return {"<|im_start|>": 0}


class Marked(Letters):
    """With a token that begins every text, and turns of its own."""

    bos_token_id = 1
    chat_template = "yes"

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [1] * add_special_tokens + super().encode(text)

    def apply_chat_template(self, messages: Any, **_: Any) -> str:
        return f"[{messages[0]['content']}]"


def read(prompt: list[int]) -> str:
    return "".join(map(chr, prompt))


def story(modules: SimpleNamespace, length: int = 5000) -> Any:
    content = " ".join(str(number) for number in range(length))
    return modules.real_prompts.Text("numbers", content)


@pytest.mark.parametrize("kind", ["continue", "question", "edit"])
def test_prompts_have_the_length_asked_for_and_differ(modules: SimpleNamespace, kind: str) -> None:
    prompts = modules.real_prompts.Prompts(Letters(), story(modules))
    made = prompts.make(kind, 5, 6000)
    assert [len(prompt) for prompt in made] == [6000] * 5
    assert len({tuple(prompt) for prompt in made}) == 5
    assert made == modules.real_prompts.Prompts(Letters(), story(modules)).make(kind, 5, 6000)


def test_continued_texts_are_windows_that_begin_again(modules: SimpleNamespace) -> None:
    text = story(modules, 100)
    size = len(text.content)
    prompts = modules.real_prompts.Prompts(Letters(), text)
    first, second = prompts.make("continue", 2, 2 * size)
    assert read(first) == text.content * 2
    assert read(second) == (text.content * 3)[size // 2 :][: 2 * size]
    marked = modules.real_prompts.Prompts(Marked(), text).make("continue", 1, 10)
    assert marked == [[1, *map(ord, text.content[:9])]]


def test_questions_are_about_the_beginning(modules: SimpleNamespace) -> None:
    for tokenizer, begin, end in (
        (Letters(), "<|im_start|>user\nThe name", "about.<|im_end|>\n<|im_start|>assistant\n"),
        (Marked(), "[The name", "about.]"),
    ):
        prompts = modules.real_prompts.Prompts(tokenizer, story(modules))
        told = read(prompts.make("question", 1, 3000)[0])
        assert told.startswith(begin + " of the horse is ")
        assert told.endswith(end)
        assert told.index("Write a long letter") > 2500


def test_edits_rename_what_the_first_file_has(modules: SimpleNamespace) -> None:
    prompts = modules.real_prompts.Prompts(Letters(), story(modules))
    for index, prompt in enumerate(prompts.make("edit", 3, 200_000)):
        source = modules.real_prompts.library_sources()[index]
        told = read(prompt)
        assert f"# File: {source.name}\n{source.content}" in told
        assert f"Rename the {source.what} `{source.old}` of {source.name}" in told[-400:]
        kind = "def" if source.what == "function" else "class"
        assert f"{kind} {source.old}" in source.content


def test_a_prompt_too_short_for_its_question_is_refused(modules: SimpleNamespace) -> None:
    prompts = modules.real_prompts.Prompts(Letters(), story(modules))
    with pytest.raises(ValueError, match="100 tokens is too short for 'question'"):
        prompts.make("question", 1, 100)


def test_the_default_text_is_long_and_named_files_replace_it(
    modules: SimpleNamespace, tmp_path: Path
) -> None:
    text = modules.real_prompts.read_text()
    assert len(text.content) > 300_000
    assert "War and Peace" in text.name
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "b.txt").write_text("two")
    text = modules.real_prompts.read_text([str(tmp_path / "a.txt"), str(tmp_path / "b.txt")])
    assert (text.name, text.content) == ("a.txt, b.txt", "one\n\ntwo")


def cell(modules: SimpleNamespace, requests: int = 2, temperature: float = 0.0) -> Any:
    return modules.real_records.Cell(requests, 2048, "continue", temperature)


def test_sides_alternate_and_are_started_twice(modules: SimpleNamespace) -> None:
    cells = [cell(modules), cell(modules, temperature=0.6)]
    visits = modules.real_records.plan(cells, ["plain", "ngram"], 5)
    assert [(v.side, v.number) for v in visits] == [
        ("plain", 0), ("ngram", 0), ("plain", 1), ("ngram", 1)
    ]  # fmt: skip
    turns = [[job.turn for job in visit.jobs] for visit in visits]
    assert turns == [[0, -1, 0, 1, 1], [0, 0, 1, 1], [2, 2, 3, 3, 4, 4], [2, 2, 3, 3, 4, 4]]
    jobs = [job.key for visit in visits for job in visit.jobs]
    assert len(set(jobs)) == len(jobs) == 2 * 2 * 5 + 1
    assert len(modules.real_records.plan(cells, ["plain", "ngram"], 1)) == 2


def test_records_survive_a_line_that_was_cut(modules: SimpleNamespace, tmp_path: Path) -> None:
    records = modules.real_records.Records(tmp_path / "records.jsonl")
    jobs = [modules.real_records.Job(cell(modules), "plain", turn) for turn in range(3)]
    assert records.pending(jobs) == jobs
    records.add(jobs[0].record("measured", wall_s=2.0))
    with (tmp_path / "records.jsonl").open("a") as file:
        file.write('{"requests": 2, "con')
    records.add(jobs[1].record("failed", reason="no"))
    assert records.pending(jobs) == jobs[2:]
    assert records.job_seconds(cell(modules)) == pytest.approx(2.4)
    records.forget_failures()
    assert records.pending(jobs) == jobs[1:]


def test_percentiles(modules: SimpleNamespace) -> None:
    percentile = modules.real_measure.percentile
    assert percentile([3.0], 0.99) == 3
    assert percentile([4.0, 1.0, 2.0, 3.0], 0.5) == 2.5
    assert percentile(range(101), 0.99) == 99
    assert modules.real_measure.spread([]) == {}


def test_times_are_those_after_the_cut(modules: SimpleNamespace) -> None:
    answer = modules.real_measure.Answer
    answers = {
        "a": answer([0] * 7, [1.0, 2.0, 4.0, 5.0], [1, 1, 4, 1]),
        "b": answer([0] * 4, [1.5, 2.0, 4.0, 5.0], [1, 1, 1, 1]),
    }
    told = modules.real_measure.timing(answers, {"a": 2, "b": 2}, 2.0, [4.0, 5.0])
    assert told["tokens_per_s"] == pytest.approx(7 / 3)
    assert told["tokens_per_step"] == pytest.approx(7 / 4)
    assert (told["steps"], told["seconds"]) == (2, 3.0)
    assert told["step_ms"]["mean"] == pytest.approx(1500)
    assert told["output_gap_ms"]["p50"] == pytest.approx(1500)
    assert told["token_ms"]["p50"] == pytest.approx(500)  # 4 tokens of 500 ms, 2000, 2 of 1000


def test_tokens_after_the_end_and_repeated_ones_are_counted(modules: SimpleNamespace) -> None:
    content = modules.real_measure.content
    told = content([[1, 2, 9, 3], [4, 5, 6, 7]], [1, 1], {9})
    assert told == {"after_end": pytest.approx(1 / 6), "repeated": 0}
    assert content([[*range(8), *range(8)]], [8], set())["repeated"] == pytest.approx(1 / 8)


def test_streaming_views_are_as_large_as_ours(modules: SimpleNamespace) -> None:
    from nwor_specpv.config import Settings

    for keys in ({}, {"specpv_n_retrieval_blocks": 48}):
        ours = modules.real_engine.plugin_settings("lossless", keys)
        peer = modules.real_engine.plugin_settings("streaming", keys)
        sizes = [Settings(**one).specpv().budget(1).static_tokens for one in (ours, peer)]
        assert sizes[0] == sizes[1]
        assert Settings(**peer).specpv_selector == "streaming"


def test_sides_have_their_own_drafters(modules: SimpleNamespace, tmp_path: Path) -> None:
    config = {"num_attention_heads": 4, "hidden_size": 64, "num_hidden_layers": 2}
    config |= {"max_position_embeddings": 32768}
    (tmp_path / "config.json").write_text(json.dumps(config | {"torch_dtype": "float32"}))
    arguments = ["--model", str(tmp_path), "--out", str(tmp_path)]
    found = {}
    for head in ("", "HEAD"):
        args = modules.real.parse([*arguments, "--head", head])
        assert ("eagle3" in args.sides) == bool(head)
        assert "idle" not in args.sides  # where it is asked for
        found[head] = {
            side: modules.real_engine.options(side, args, args.cells, gpu=False)
            for side in args.sides
        }
    assert "speculative_config" not in found["HEAD"]["plain"]
    assert found["HEAD"]["ngram"]["speculative_config"]["method"] == "ngram"
    assert found["HEAD"]["eagle3"]["speculative_config"]["num_speculative_tokens"] == 4
    assert found["HEAD"]["lossless"]["speculative_config"]["num_speculative_tokens"] == 15
    assert "speculative_config" not in found[""]["lossless"]  # one switch is enough
    assert found[""]["lossless"]["additional_config"] == {"nwor_specpv": {"enable_specpv": True}}
    sizes = {options["kv_cache_memory_bytes"] for options in found[""].values()}
    assert len(sizes) == 1
    assert sizes.pop() > 96 * 30720 * 2 * 2 * 64 * 4
    # One that repeats itself may go on for a while.
    assert {options["max_model_len"] for options in found[""].values()} == {30720 + 2 * 768}
    (tmp_path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 31000}))
    assert (
        modules.real_engine.options("plain", args, args.cells, gpu=False)["max_model_len"] == 31000
    )


def test_stock_sides_do_not_load_the_plugin(modules: SimpleNamespace) -> None:
    user = {"VLLM_PLUGINS": "nwor_specpv", "VLLM_LOGGING_LEVEL": "DEBUG"}
    for side in modules.real_engine.SIDES:
        found = modules.real_engine.environment(side, user)
        assert found["VLLM_LOGGING_LEVEL"] == "DEBUG"
        assert found["VLLM_PLUGINS"] == (
            "nwor_specpv" if side in ("lossless", "streaming", "idle") else "none"
        )


def steps_taken(decisions: Any, steps: int) -> Counter[str]:
    """Of requests whose steps with drafts yield three tokens in the time of one."""
    name, now, taken = "r", 0.0, Counter()
    requests = {name: SimpleNamespace(num_computed_tokens=20_000)}
    for _ in range(steps):
        output = SimpleNamespace(
            num_scheduled_tokens={name: 1},
            total_num_scheduled_tokens=1,
            scheduled_spec_decode_tokens={},
            scheduled_new_reqs=[],
            scheduled_cached_reqs=SimpleNamespace(num_computed_tokens=[20_000]),
        )
        arm = decisions.decide(output, requests, now)
        taken[str(arm)] += 1
        now += 0.01
        decisions.finish(output, [[1] * (3 if arm.drafts else 1)], now)
    return taken


def test_the_idle_side_takes_plain_steps_alone(modules: SimpleNamespace) -> None:
    """And measures them, as the loop does where it has a choice."""
    from nwor_specpv.config import Settings
    from nwor_specpv.vllm.specpv.decisions import LongContextDecisions
    from nwor_specpv.vllm.specpv.lengths import Lengths

    keys = modules.real_engine.plugin_settings("idle", {"specpv_draft_passes": 3})
    found = {}
    for side in ("lossless", "idle"):
        decisions = LongContextDecisions(Lengths(Settings(**keys), 16), matches=(2, 5))
        if side == "idle":
            core = SimpleNamespace(scheduler=SimpleNamespace(decisions=decisions))
            engine = SimpleNamespace(engine_core=SimpleNamespace(engine_core=core))
            modules.real_engine.take_plain_steps(SimpleNamespace(llm_engine=engine))
        found[side] = steps_taken(decisions, 200)
        assert decisions.choice.rates(decisions.choice.choose(1, 20_000, passes=True).cell)
    assert found["idle"] == {"plain": 200}
    assert found["lossless"]["plain"] < 100


def test_arguments_that_make_no_sense_are_refused(
    modules: SimpleNamespace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments, message in (
        (["--out", str(tmp_path)], "--model is missing"),
        (["--model", "m", "--out", str(tmp_path), "--sides", "eagle3"], "needs --head"),
    ):
        with pytest.raises(SystemExit):
            modules.real.parse(arguments)
        assert message in capsys.readouterr().err


def measured(job: Any, speed: float, **more: Any) -> dict[str, Any]:
    times = {"mean": 1.0, "p50": 1.0, "p99": 2.0}
    spreads = dict.fromkeys(("step_ms", "first_token_s", "output_gap_ms", "token_ms"), times)
    told = {"tokens_per_s": speed, "tokens_per_step": speed / 10, "steps": 5, "stopped": ""}
    return job.record("measured", wall_s=1.0, drafted=8, accepted=4, **told, **spreads, **more)


ENGINE = {
    "device": "a GPU", "python": "3", "torch": "2", "cuda": "13", "vllm": "0", "dtype": "bfloat16",
    "text_tokens": 9, "quantisation": None, "runner": "V2", "scheduler": "S",
    "async_scheduling": True, "drafter": None, "drafts": 0, "cudagraph_mode": "FULL",
    "options": {}, "start_s": 30.0,
}  # fmt: skip


@pytest.fixture
def summary(modules: SimpleNamespace, tmp_path: Path) -> dict[str, Any]:
    """Of two sides: one cell with outputs, one that failed on a side, one that was skipped."""
    records = modules.real_records.Records(tmp_path / "records.jsonl")
    job = modules.real_records.Job
    greedy, sampled, long = (cell(modules, n, t) for n, t in ((2, 0.0), (8, 0.6), (96, 0.0)))
    records.add({"engine": "plain"} | ENGINE, {"engine": "lossless"} | ENGINE)
    second = [[[7, 0.5], [8, 0.25], [9, 1.0]], [[7, 0.5], [8, 0.25], [9, 1.0]]]
    told = {"outputs": [[1, 2, 3], [1, 2, 3]]}
    records.add(measured(job(greedy, "plain", -1), 1.0, second_best=second, **told))
    for turn, speed in ((0, 10.0), (1, 14.0)):
        records.add(measured(job(greedy, "plain", turn), speed, **told))
        outputs = [[1, 8, 3], [1, 2, 3, 4]] if turn else [[1, 2, 5], [1, 2]]
        more = {"passes_per_step": 3.0, "views_drafted": 9, "views_confirmed": 6}
        more["arms"] = {"plain": 2, f"{turn + 1} passes": 5}
        more["arm_steps"] = [["plain", 3.0 + turn, 1.0], [f"{turn + 1} passes", 9.0, 4.0]]
        records.add(measured(job(greedy, "lossless", turn), 2 * speed, outputs=outputs, **more))
        records.add(measured(job(sampled, "plain", turn), speed))
        records.add(job(sampled, "lossless", turn).record("failed", reason="out of memory"))
        for side in ("plain", "lossless"):
            records.add(job(long, side, turn).record("skipped", reason="the model has 2 positions"))
    run = {"model": "M", "revision": "abc", "quantisation": "4 bit", "weights_sha256": "00"}
    run |= {"text": "T", "text_sha256": "11", "tokens": 4, "warm_tokens": 0, "head": None}
    (tmp_path / "run.json").write_text(json.dumps(run))
    assert modules.real_summary.write(tmp_path, tmp_path / "result.json", "def") == 0
    return json.loads((tmp_path / "result.json").read_text())


def test_the_summary_has_medians_and_speeds(summary: dict[str, Any]) -> None:
    assert (summary["revision"], summary["device"], summary["vllm"]) == ("def", "a GPU", "0")
    assert summary["quantisation"] == "4 bit"
    greedy, sampled, long = summary["cells"]
    ours = greedy["sides"]["lossless"]
    assert ours["runs_tokens_per_s"] == [20, 28]
    assert (ours["tokens_per_s"], ours["speed"]) == (24, 2.0)
    assert (ours["passes_per_step"], ours["views_confirmed"]) == (3, 6)
    assert ours["arms"] == {"plain": 4, "1 passes": 5, "2 passes": 5}
    assert ours["arm_means"]["plain"] == {"measured": 2, "ms": 3.5, "tokens": 1.0}
    assert ours["arm_means"]["2 passes"] == {"measured": 1, "ms": 9.0, "tokens": 4.0}
    assert ours["token_ms"] == {"mean": 1.0, "p50": 1.0, "p99": 2.0}
    assert greedy["sides"]["plain"]["speed"] == 1
    assert list(sampled["sides"]) == ["plain"]
    assert sampled["missing"] == {"lossless": "out of memory"}
    assert long["sides"] == {}


def test_the_summary_names_the_first_other_token(summary: dict[str, Any]) -> None:
    sides = summary["cells"][0]["sides"]
    assert sides["plain"]["greedy"] == [{"requests": 2, "equal": 2, "differences": []}] * 2
    first, second = sides["lossless"]["greedy"]
    assert first["differences"] == [{"request": 0, "position": 2, "gap": 1.0, "third": True}]
    assert second["differences"] == [{"request": 0, "position": 1, "gap": 0.25, "third": False}]
    assert first["equal"] == second["equal"] == 1
    assert "greedy" not in summary["cells"][1]["sides"]["plain"]


def test_the_table(modules: SimpleNamespace, summary: dict[str, Any], tmp_path: Path) -> None:
    lines = (tmp_path / "table.md").read_text().splitlines()
    assert lines == list(modules.table.result_lines(summary))
    assert "geometric mean (range): `lossless` 2.00 (2.00 to 2.00, 1 cells)." in lines[0]
    assert "quantisation 4 bit" in lines[0]
    greedy = "2 of 4, gap 1.000 (plain: 4 of 4)"
    assert lines[4] == f"| continue | 0 | 2 x 2048 | 12 | 24 | 2.00 | 2.40 | 3.00 | {greedy} |"
    assert lines[5] == "| continue | 0.6 | 8 x 2048 | 12 | - | - | - | - | - |"
    assert lines[7:] == [
        "* Not measured: lossless 8 x 2048: out of memory.",
        "* Not measured: plain 96 x 2048, lossless 96 x 2048: the model has 2 positions.",
    ]


def test_the_plot(modules: SimpleNamespace, summary: dict[str, Any], tmp_path: Path) -> None:
    text = (tmp_path / "plot.svg").read_text()
    assert text == modules.plot.render(summary)
    bars = [e for e in ET.fromstring(text).iter() if e.tag.endswith("title")]
    assert [bar.text for bar in bars] == ["lossless, 2 x 2048: 2.00 (2.00 to 2.00)"]


def test_a_folder_keeps_to_one_run(modules: SimpleNamespace, tmp_path: Path) -> None:
    args = SimpleNamespace(
        out=tmp_path, model=str(tmp_path), model_name="M", head="", text=[], dtype="auto",
        tokens=4, warm_tokens=0, set={}, revision="abc", quantisation="",
    )  # fmt: skip
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    modules.real_summary.identify(args)
    told = json.loads((tmp_path / "run.json").read_text())
    assert told["weights_sha256"] == hashlib.sha256(b"weights").hexdigest()
    args.revision = ""
    modules.real_summary.identify(args)
    assert json.loads((tmp_path / "run.json").read_text()) == told
    args.revision = "def"
    with pytest.raises(SystemExit, match="holds a run with revision 'abc', not 'def'"):
        modules.real_summary.identify(args)
    args.revision, args.tokens = "abc", 8
    with pytest.raises(SystemExit, match="holds a run with tokens 4, not 8"):
        modules.real_summary.identify(args)


class Engines:
    """Stands in for engine processes: each does two jobs, and the second one fails on a side."""

    def __init__(self, modules: SimpleNamespace, out: Path) -> None:
        self._modules, self._out = modules, out
        self.started: list[str] = []

    def __call__(self, command: list[str], *_: Any) -> Any:
        side = command[command.index("--child") + 1]
        self.started.append(side)
        path = self._out / f"{side}.state.json"
        state = json.loads(path.read_text())
        records = self._modules.real_records.Records(self._out / "records.jsonl")
        if side == "ngram":
            path.write_text(json.dumps(state | {"reason": "no such drafter"}))
            return SimpleNamespace(wait=lambda timeout=0: 1, poll=lambda: 1)
        jobs = [self._modules.real_records.Job.of(job) for job in state["jobs"]]
        records.add(measured(jobs[0], 1.0))
        if jobs[1:]:
            path.write_text(json.dumps({"stage": "job", "job": jobs[1].record("running")}))
            return SimpleNamespace(wait=lambda timeout=0: -9, poll=lambda: -9)
        return SimpleNamespace(wait=lambda timeout=0: 0, poll=lambda: 0)


INNER = """
import fcntl, sys, time
file = open(sys.argv[1], "w")
fcntl.flock(file, fcntl.LOCK_EX)
print("up", flush=True)
time.sleep(600)
"""
OUTER = "import subprocess, sys; subprocess.run([sys.executable, '-c', *sys.argv[1:]])"


def test_a_process_that_outlasts_the_deadline_is_ended(
    modules: SimpleNamespace, tmp_path: Path
) -> None:
    """And what it has started: a process that holds a lock."""
    lock, log = tmp_path / "lock", tmp_path / "log"
    command = [sys.executable, "-c", OUTER, INNER, str(lock)]
    child = modules.real.launch(command, dict(os.environ), log)
    while log.read_text() != "up\n":
        time.sleep(0.05)
    assert modules.real.wait(child, time.time(), lambda: None) == modules.real.UNFINISHED
    assert child.returncode == -signal.SIGKILL
    with lock.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)


def test_failures_are_recorded_and_the_rest_goes_on(
    modules: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = {"num_attention_heads": 4, "hidden_size": 64, "num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 4096}))
    engines = Engines(modules, tmp_path)
    monkeypatch.setattr(modules.real, "launch", engines)
    arguments = ["--model", str(tmp_path), "--out", str(tmp_path), "--sides", "plain", "ngram"]
    arguments += ["--cells", "1x2048", "2x2048", "1x8192", "--prompts", "continue"]
    arguments += ["--temperatures", "0.6", "--turns", "2"]
    assert modules.real.main([*arguments, "--seconds", "30"]) == modules.real.UNFINISHED
    assert engines.started == []  # an engine would not start in time
    assert modules.real.main(arguments) == 0
    assert engines.started == ["plain", "ngram", "plain"]
    records = modules.real_records.Records(tmp_path / "records.jsonl")
    found: dict[tuple[str, int], list[str]] = {}
    for record in records.jobs():
        found.setdefault((record["side"], record["context"]), []).append(record["status"])
    assert sorted(found["plain", 2048]) == ["failed", "failed", "measured", "measured"]
    assert found["ngram", 2048] == ["failed"] * 4
    assert found["plain", 8192] == found["ngram", 8192] == ["skipped"] * 2
    reasons = {record["reason"] for record in records.jobs() if record["status"] == "failed"}
    assert reasons == {
        "the engine process ended with status -9",
        "the engine did not start: no such drafter",
    }
    assert modules.real.main(arguments) == 0
    assert len(engines.started) == 3  # nothing is done twice
    assert modules.real.main([*arguments, "--retry"]) == 0
    assert engines.started[3:] == ["plain", "ngram", "plain"]


def test_engines_that_are_up_at_once_are_started_once(
    modules: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = {"num_attention_heads": 4, "hidden_size": 64, "num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 4096}))
    engines = Engines(modules, tmp_path)
    monkeypatch.setattr(modules.real, "launch", engines)
    arguments = ["--model", str(tmp_path), "--out", str(tmp_path), "--sides", "ngram", "plain"]
    arguments += ["--cells", "1x2048", "--prompts", "continue", "--temperatures", "0.6"]
    assert modules.real.main([*arguments, "--turns", "2", "--together"]) == 0
    assert engines.started == ["ngram", "plain"]
    records = modules.real_records.Records(tmp_path / "records.jsonl")
    found = [(record["side"], record["turn"], record["status"]) for record in records.jobs()]
    assert sorted(found) == [
        ("ngram", 0, "failed"), ("ngram", 1, "failed"),
        ("plain", 0, "measured"), ("plain", 1, "failed"),
    ]  # fmt: skip


def test_engines_wait_for_each_other_and_take_turns(
    modules: SimpleNamespace, tmp_path: Path
) -> None:
    started, events = threading.Event(), []
    (tmp_path / "late.up").touch()  # of a run before
    gate = modules.turns.Gate(tmp_path)

    def engine(name: str) -> None:
        turns = modules.turns.Turns(tmp_path, name)
        if name == "late":
            assert started.wait(30)
        turns.wait()
        for _ in range(3):
            with turns:
                events.append(("begin", name))
                time.sleep(0.05)
                events.append(("end", name))

    names = ("first", "late")
    threads = [threading.Thread(target=engine, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for _ in range(10):
        gate.look(names)
        time.sleep(0.02)
    assert events == []
    started.set()
    while any(thread.is_alive() for thread in threads):
        gate.look(names)
        time.sleep(0.02)
    order = [name for what, name in events if what == "begin"]
    assert events == [(what, name) for name in order for what in ("begin", "end")]
    assert order in (["first", "late"] * 3, ["late", "first"] * 3)


def test_engines_pass_their_turn_on(modules: SimpleNamespace, tmp_path: Path) -> None:
    events: list[str] = []
    all_here = threading.Barrier(2)

    def engine(name: str) -> None:
        turns = modules.turns.Turns(tmp_path, name)
        turns.pass_on()  # without a turn there is nothing to pass on
        all_here.wait(30)
        with turns:
            for _ in range(4):
                events.append(name)
                time.sleep(0.05)
                turns.pass_on()

    threads = [threading.Thread(target=engine, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert events in (list("abababab"), list("babababa"))


def test_all_sides_measure_a_cell_on_one_core(modules: SimpleNamespace) -> None:
    cores, found = sorted(os.sched_getaffinity(0)), []

    def side(number: int) -> None:
        modules.turns.take_core(number)
        found.append(os.sched_getaffinity(0))

    numbers = (0, 0, 1, len(cores))
    for number in numbers:
        thread = threading.Thread(target=side, args=(number,))
        thread.start()
        thread.join()
    assert found == [{cores[number % len(cores)]} for number in numbers]
    assert sorted(os.sched_getaffinity(0)) == cores, "other threads stay where they are"


def test_the_clock_stands_while_others_have_their_turn(
    modules: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    measure = modules.real_measure
    monkeypatch.setattr(measure.time, "perf_counter", lambda: now[0])

    def pass_on() -> None:
        now[0] += 5.0

    clock = measure.Clock(SimpleNamespace(pass_on=pass_on))
    clock.begin()
    now[0] += 0.06
    assert not clock.rest()
    now[0] += 0.06
    assert clock.rest()
    assert clock.now() == pytest.approx(100.12)
    now[0] += 0.06
    assert not clock.rest(), "a new turn has begun"
    assert clock.now() == pytest.approx(100.18)
    assert not measure.Clock(None).rest()


def test_an_engine_that_has_ended_holds_up_nobody(modules: SimpleNamespace, tmp_path: Path) -> None:
    gate = modules.turns.Gate(tmp_path)
    (tmp_path / "first.up").touch()
    gate.look(["first", "broken"])
    assert not (tmp_path / "gate.open").exists()
    gate.look(["first"])
    assert (tmp_path / "gate.open").exists()
