"""Training of an EAGLE3 head: texts, the unrolled head, its gradient, and a whole run in small."""

from __future__ import annotations

import json
import os
import re
import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from nwor_specpv import NworError
from nwor_specpv.drafters.eagle3_head import Eagle3Head
from nwor_specpv.models import stories
from nwor_specpv.train import acceptance, eagle3, measure, prompt_file, questions, unroll
from nwor_specpv.train.corpus import Corpus, CorpusWriter, WritingStyle
from nwor_specpv.train.prompts import KINDS, Opening, asked, held_out, openings
from nwor_specpv.train.target import TrainingTarget
from nwor_specpv.train.target import _decode_attention as decode_attention_of
from tests.python.drafters.slow_head import SlowHead

STOP = 2


@pytest.fixture(scope="module")
def target() -> TrainingTarget:
    return TrainingTarget(stories())


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> torch.Generator:
    seed = int(os.environ.get("NWOR_TEST_SEED", torch.seed() % 2**31))
    print(f"seed={seed}")
    torch.manual_seed(seed)
    return torch.Generator().manual_seed(seed)


def make_openings(rng: torch.Generator, count: int = 12) -> list[Opening]:
    made = []
    for index in range(count):
        kind = KINDS[index % len(KINDS)]
        tokens = torch.randint(3, 500, (1 + index % 4,), generator=rng).tolist()
        made.append(Opening(kind, tokens, (2, 5), [7, 8, 9] if kind == "chat" else []))
    return made


def write(target: TrainingTarget, rng: torch.Generator, rows: int = 6, length: int = 48) -> Corpus:
    corpus = Corpus.empty(rows, length, target)
    CorpusWriter(
        target, make_openings(rng), WritingStyle(answer=(4, 12), stop_tokens=(1, STOP))
    ).write(corpus, 0, rows)
    return corpus


def make_head(
    target: TrainingTarget, corpus: Corpus, tmp_path: Path, **plan: object
) -> eagle3.Training:
    settings = {"rows": 2, "length": 48, "tokens": 96, "draft_vocabulary": 300, "window": 20}
    training = eagle3.Training(
        target, make_openings(torch.Generator()), [Opening("chat", [5, 6], (0, 0), [])],
        eagle3.TrainingPlan(**{**settings, **plan}), tmp_path,
    )  # fmt: skip
    training._make_head(corpus)
    return training


def test_rows_hold_texts_as_the_target_would_write_them(
    target: TrainingTarget, rng: torch.Generator
) -> None:
    corpus = write(target, rng)
    for row in range(corpus.tokens.shape[0]):
        starts = sorted(set(corpus.start[row].tolist()))
        assert starts[0] == 0
        for begin, end in zip(starts, [*starts[1:], corpus.tokens.shape[1]], strict=True):
            text = corpus.tokens[row, begin:end].long()
            target.allocate(1, 48)
            features, normed = target.step(text[None], 0, torch.zeros(1, dtype=torch.int64))
            both = torch.cat([features, normed], dim=-1)[0]
            torch.testing.assert_close(corpus.features[row, begin:end], both, rtol=2e-3, atol=2e-3)
            chosen = target.logits(normed)[0].double()
            own = chosen.gather(1, corpus.best[row, begin:end].long()[:, None])
            assert (own >= chosen.max(-1, keepdim=True).values - 1e-3).all()


def test_given_tokens_do_not_count_and_answers_count_fully(
    target: TrainingTarget, rng: torch.Generator
) -> None:
    corpus = Corpus.empty(1, 24, target)
    opening = Opening("chat", [10, 11, 12], (3, 3), [7, 8, 9])
    style = WritingStyle(greedy_share=1.0, answer=(5, 5), stop_tokens=(STOP,))
    CorpusWriter(target, [opening], style).write(corpus, 0, 1)
    tokens, weight = corpus.tokens[0].tolist(), corpus.weight[0].tolist()
    assert tokens[:3] == [10, 11, 12]
    assert weight[:2] == [0, 0]
    question = tokens[3:].index(7) + 3  # the end marker stands before, written or given
    assert tokens[question : question + 3] == [7, 8, 9]
    assert tokens[question - 1] == STOP
    assert all(w in (0.0, 0.25) for w in weight[: question + 2])
    answer = [at for at, w in enumerate(weight) if w == 1 and corpus.start[0, at] == 0]
    assert answer[0] == question + 2
    assert len(answer) <= 5
    for at in answer:  # greedy: what came is what the target liked best
        assert tokens[at + 1] == corpus.best[0, at]


def slow_chain(
    head: Eagle3Head, corpus: Corpus, row: int, anchor: int, steps: int, embedding: torch.Tensor
) -> list[torch.Tensor]:
    """Normalised outputs of a chain that is drafted from one row, with the tokens that came."""
    slow, outputs = SlowHead(head, embedding), []
    first = max(int(corpus.start[row, anchor]), anchor - head.shape.window + 1)
    hidden = None
    for at in range(first, anchor + steps):
        token = int(corpus.tokens[row, at + 1])
        if at <= anchor:
            hidden = slow.target_entry(corpus.features[row, at, : -head.shape.hidden], token)
        else:
            hidden = slow.entry(hidden, token)
        if at >= anchor:
            outputs.append(slow.normalized(hidden))
    return outputs


def test_unrolled_steps_see_what_a_drafted_chain_would_see(
    target: TrainingTarget, rng: torch.Generator, tmp_path: Path
) -> None:
    corpus = write(target, rng)
    training = make_head(target, corpus, tmp_path)
    head = training._head
    batch = training._batch(corpus, head, training._trained)
    run = unroll.Unroll(head, batch)
    outputs = [run.step().view(6, 48, -1) for _ in range(4)]
    checked = 0
    for row in range(6):
        for anchor in torch.randint(0, 43, (2,), generator=rng).tolist():
            if corpus.start[row, anchor] != corpus.start[row, anchor + 4]:
                continue
            wanted = slow_chain(head, corpus, row, anchor, 4, target.embedding)
            for step, expected in enumerate(wanted):
                got = outputs[step][row, anchor].double()
                torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3)
                checked += 1
    assert checked


def test_gradient_is_that_of_the_cross_entropy(rng: torch.Generator) -> None:
    normed = torch.randn(37, 8, dtype=torch.float64, requires_grad=True)
    output = torch.randn(21, 8, dtype=torch.float64)
    labels = torch.softmax(torch.randn(37, 21, dtype=torch.float64), -1)
    weight = torch.rand(37, dtype=torch.float64)
    unroll.soft_loss(normed, output, labels, weight, chunk=10).backward()
    got, normed.grad = normed.grad, None
    (-(labels * (normed @ output.T).log_softmax(-1)).sum(-1) * weight).sum().backward()
    torch.testing.assert_close(got, normed.grad)


def test_weights_ahead_stop_where_a_text_ends(
    target: TrainingTarget, rng: torch.Generator, tmp_path: Path
) -> None:
    corpus = write(target, rng)
    training = make_head(target, corpus, tmp_path)
    batch = training._batch(corpus, training._head, training._trained)
    kept = set(training._head.draft_to_target[:300].tolist())
    for step in range(3):
        got = batch.ahead(step)
        for place, value in enumerate(got.tolist()):
            row, at = divmod(place, 48)
            there = at + step + 1
            counts = (
                there < 48
                and corpus.start[row, there] == corpus.start[row, at]
                and int(corpus.best[row, there]) in kept
            )
            assert value == (float(corpus.weight[row, there]) if counts else 0.0)


def test_walks_count_tokens_and_steps() -> None:
    # One text: rows 2 .. 9 choose the answer. First guesses are right at entries 2, 3, 5.
    ranks = torch.full((2, 1, 12), 9)
    ranks[0, 0, [2, 3, 5]] = 0
    ranks[0, 0, [6]] = 1
    ranks[1, 0, [2, 6]] = 0
    counts = torch.zeros(1, 12, dtype=torch.bool)
    counts[0, 2:10] = True
    start = torch.zeros(1, 12)
    # 2: both depths right -> 3 tokens -> entry 5: one right -> entry 7, 8: none, 9 is the last.
    assert measure.tokens_per_step(ranks, counts, start, (1, 1)) == (7, 4)
    assert measure.tokens_per_step(ranks, counts, start, (2, 1)) == (7, 4)
    assert measure.tokens_per_step(ranks, counts, start, (1,)) == (2 + 1 + 2 + 1 + 1, 5)
    # All drafts are right, more than the answer has: row 2 chose its first token, 7 are left.
    ranks = torch.zeros(4, 1, 12)
    assert measure.tokens_per_step(ranks, counts, start, (1, 1, 1, 1)) == (7, 2)
    assert measure.tokens_per_step(ranks, counts, start, (1,)) == (7, 4)


def test_openings_are_of_every_kind_and_held_out_prompts_are_not_among_them() -> None:
    texts: list[str] = []

    def encode(text: str) -> list[int]:
        texts.append(text)
        return list(text.encode())

    made = openings(encode, 400, seed=3)
    given = set(texts)
    shares = {kind: sum(o.kind == kind for o in made) / 400 for kind in KINDS}
    assert shares == pytest.approx(
        {"chat": 0.52, "story": 0.18, "code": 0.2, "text": 0.1}, abs=0.01
    )
    texts.clear()
    chats = asked(encode, 300, seed=3)
    assert len({tuple(o.tokens) for o in chats if o.invented == (0, 0)}) > 200
    assert any(o.invented[1] and o.answer for o in chats)
    topics = (
        "season", "soup", "vaccine", "landlord", "bacteri", "recursi", "coffee shop", "curie",
        "fibonacci", "bicycle", "lighthouse", "refrigerator", "autumn", "hiking", "romeo", "guitar",
        "save water", "photosynthesis", "tuple", "a raise", "leader", "medieval",
    )  # fmt: skip
    entries = " ".join(entry for group in questions._ENTRIES.values() for entry in group).lower()
    assert not [topic for topic in topics if topic in entries]
    given |= set(texts)
    texts.clear()
    kept = held_out(encode)
    assert len(kept) == len(texts)
    assert not given & set(texts)
    assert all(opening.invented == (0, 0) for opening in kept)


@pytest.mark.parametrize("optimizer", ["adamw", pytest.param("muon", marks=pytest.mark.slow)])
def test_a_small_run_learns_and_leaves_a_head(
    target: TrainingTarget, rng: torch.Generator, tmp_path: Path, optimizer: str
) -> None:
    prompts = tmp_path / "prompts.json"
    entries = [o.__dict__ for o in make_openings(rng, 8)]
    # Enough texts that some odd ones, as random openings bring, do not decide the outcome.
    kept = [{**o.__dict__, "invented": (0, 0)} for o in make_openings(rng, 12)]
    prompts.write_text(json.dumps({"openings": entries, "held_out": kept}))
    command = [
        f"--out={tmp_path}", f"--target={stories()}", f"--prompts={prompts}", "--device=cpu",
        "--rows=8", "--length=40", "--tokens=640", "--batch-tokens=160", "--steps=2",
        "--intermediate=96", "--draft-vocabulary=256", f"--optimizer={optimizer}", "--updates=20",
        "--learning-rate=0.01", "--cycles=2", "--listed-vocabulary=300", "--early-steps=1",
        "--deepen-from=0.5",
    ]  # fmt: skip
    assert eagle3.main(command) == 0
    head = Eagle3Head.load(tmp_path / "eagle3.safetensors")
    assert head.shape.intermediate == 96
    assert head.draft_to_target.shape == (300,)
    assert len(set(head.draft_to_target.tolist())) == 300
    report = json.loads((tmp_path / "training.json").read_text())
    (measured,) = report["measured"]
    assert set(measured["held_out"]) == {o["kind"] for o in kept}
    assert measured["updates"] == 20
    assert measured["trained_tokens"] == 20 * 160
    # A guess at random would be right once in hundreds.
    hits = [kind["top1_by_depth"][0] for kind in measured["held_out"].values()]
    assert sum(hits) / len(hits) > 0.04


def test_a_head_of_no_numbers_is_last_and_is_not_saved(
    target: TrainingTarget, rng: torch.Generator, tmp_path: Path
) -> None:
    corpus = write(target, rng)
    training = make_head(target, corpus, tmp_path, intermediate=32, measure_tokens=8)
    training.measure()
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    training._head.weights["norm"].data[3] = float("nan")
    working = training._head.to(target.dtype)
    batch = training._batch(corpus, working, training._listed)
    found = unroll.ranks(working, batch, training._listed[1], 2)
    assert (found == len(training._listed[1])).all()
    with pytest.raises(NworError, match=r"norm: 1 of \d+ weights are not finite after 0 updates"):
        training.measure()
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"rows": 0}, "rows: got 0, expected 1 or more"),
        ({"length": 6}, "length: got 6, expected 7 to 32767"),
        ({"length": 16, "steps": 16}, "length: got 16, expected 17 to 32767"),
        ({"steps": 0}, "steps: got 0, expected 1 to 64"),
        ({"steps": 65}, "steps: got 65, expected 1 to 64"),
        ({"early_steps": 0}, "early_steps: got 0, expected 1 to 64"),
        ({"cycles": 0}, "cycles: got 0, expected 1 or more"),
        ({"draft_vocabulary": 0}, "draft_vocabulary: got 0, expected 1 or more"),
        ({"window": 0}, "window: got 0, expected 1 or more"),
        ({"answer_tokens": 0}, "answer_tokens: got 0, expected 1 or more"),
        ({"updates": -1}, "updates: got -1, expected 0 or more"),
        ({"keep_start": 1.5}, "keep_start: got 1.5, expected 0 to 1"),
        ({"keep_start": float("nan")}, "keep_start: got nan, expected 0 to 1"),
        ({"label_temperature": 0.0}, "label_temperature: got 0.0, expected more than 0"),
        ({"sharpen_from": 1.0}, "sharpen_from: got 1.0, expected 0 to less than 1"),
        ({"learning_rate": float("inf")}, "learning_rate: got inf, expected a finite number"),
        ({"learning_rate": -1.0}, "learning_rate: got -1.0, expected a finite number"),
        ({"minutes": 0.0}, "minutes: got 0.0, expected a finite number above 0"),
        ({"optimizer": "sgd"}, "optimizer: got sgd, expected muon or adamw"),
        ({"step_decay": 0.0}, "step_decay: got 0.0, expected more than 0, 1 at most"),
        ({"step_decay": 1.5}, "step_decay: got 1.5, expected more than 0, 1 at most"),
        ({"step_decay": float("nan")}, "step_decay: got nan, expected more than 0, 1 at most"),
        ({"deepen_from": -0.5}, "deepen_from: got -0.5, expected 0 to 1"),
        ({"deepen_from": 2.0}, "deepen_from: got 2.0, expected 0 to 1"),
        ({"measure_seconds": 0.0}, "measure_seconds: got 0.0, expected more than 0"),
        ({"measure_seconds": float("nan")}, "measure_seconds: got nan, expected more than 0"),
        ({"seed": 2**64}, f"seed: got {2**64}, expected {-(2**63)} to {2**64 - 1}"),
        ({"seed": -(2**63) - 1}, f"seed: got {-(2**63) - 1}, expected {-(2**63)} to"),
        ({"start": "/no/such/head"}, "start: got /no/such/head, expected a file"),
        ({"keep_start": 0.5}, "keep_start: got 0.5 without start; give the file of a head"),
    ],
)
def test_a_plan_that_cannot_be_is_refused(wrong: dict[str, float], message: str) -> None:
    with pytest.raises(NworError, match=message):
        eagle3.TrainingPlan(**wrong)


def test_a_run_goes_on_from_a_head(
    target: TrainingTarget, rng: torch.Generator, tmp_path: Path
) -> None:
    corpus, small = write(target, rng), {"intermediate": 32, "cycles": 1, "measure_tokens": 8}
    start = tmp_path / "start.safetensors"
    make_head(target, corpus, tmp_path, **small)._head.save(start)
    small |= {"start": str(start), "updates": 1, "learning_rate": 0.0, "optimizer": "adamw"}
    again = make_head(target, corpus, tmp_path, **small)
    assert [entry["updates"] for entry in again.history] == [0]  # measured before it goes on
    again.run()
    assert again.updates == 1
    begun = Eagle3Head.load(start)
    for name, weight in Eagle3Head.load(tmp_path / "eagle3.safetensors").weights.items():
        torch.testing.assert_close(weight, begun.weights[name], rtol=0, atol=0)
    mixed = make_head(target, corpus, tmp_path, **{**small, "keep_start": 0.25})
    trained = {name: torch.randn_like(weight) for name, weight in mixed._head.weights.items()}
    for name, weight in mixed._head.weights.items():
        weight.data.copy_(trained[name])
    mixed.run()
    for name, weight in mixed._head.weights.items():
        expected = 0.75 * trained[name] + 0.25 * begun.weights[name].float()
        torch.testing.assert_close(weight.detach(), expected)


def test_a_start_where_the_head_is_written_is_averaged_as_it_was(
    target: TrainingTarget, rng: torch.Generator, tmp_path: Path
) -> None:
    corpus, start = write(target, rng), tmp_path / "eagle3.safetensors"
    small = {"intermediate": 32, "cycles": 1, "measure_tokens": 8}
    make_head(target, corpus, tmp_path, **small)._head.save(start)
    begun = Eagle3Head.load(start).weights
    small |= {"start": str(start), "updates": 1, "learning_rate": 0.0, "optimizer": "adamw"}
    mixed = make_head(target, corpus, tmp_path, **small, keep_start=0.25)
    trained = {name: torch.randn_like(weight) for name, weight in mixed._head.weights.items()}
    for name, weight in mixed._head.weights.items():
        weight.data.copy_(trained[name])
    mixed.run()
    for name, weight in mixed._head.weights.items():
        expected = 0.75 * trained[name] + 0.25 * begun[name].float()
        torch.testing.assert_close(weight.detach(), expected)


def test_a_start_of_another_shape_is_refused_before_any_text_is_written(
    target: TrainingTarget, rng: torch.Generator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = tmp_path / "start.safetensors"
    make_head(target, write(target, rng), tmp_path, intermediate=32)._head.save(start)
    monkeypatch.setattr(CorpusWriter, "write", lambda *_: pytest.fail("texts were written"))
    plan = eagle3.TrainingPlan(intermediate=32, window=21, start=str(start))
    with pytest.raises(NworError, match=r"start: got a head of .*window=20.*expected.*window=21"):
        eagle3.Training(target, make_openings(rng), make_openings(rng), plan, tmp_path)


def test_a_run_without_an_update_leaves_what_was_there(
    target: TrainingTarget, rng: torch.Generator, tmp_path: Path
) -> None:
    (tmp_path / "eagle3.safetensors").write_bytes(b"a good head")
    training = make_head(
        target, write(target, rng), tmp_path, intermediate=32, measure_tokens=8, minutes=1e-6
    )
    line = r"minutes: got 1e-06, of which texts took \d+\.\d{3}: no time is left for an update"
    with pytest.raises(NworError, match=line):
        training.run()
    assert [path.name for path in tmp_path.iterdir()] == ["eagle3.safetensors"]
    assert (tmp_path / "eagle3.safetensors").read_bytes() == b"a good head"


def test_a_start_that_learns_nothing_is_left_as_it_was(
    target: TrainingTarget, rng: torch.Generator, tmp_path: Path
) -> None:
    make_head(target, write(target, rng), tmp_path, intermediate=32, measure_tokens=8).measure()
    names = ("eagle3.safetensors", "training.json")
    before = [(tmp_path / name).read_bytes() for name in names]
    options = {"intermediate": 32, "measure_tokens": 8, "minutes": 1e-6}
    options["start"] = str(tmp_path / "eagle3.safetensors")
    training = make_head(target, write(target, rng), tmp_path, **options)
    with pytest.raises(NworError, match="no time is left for an update"):
        training.run()
    assert [(tmp_path / name).read_bytes() for name in names] == before


def test_texts_that_end_before_their_answer_are_refused(
    target: TrainingTarget, rng: torch.Generator, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    long, short = (Opening("chat", [5] * size, (0, 0), []) for size in (13, 3))
    plan = eagle3.TrainingPlan(rows=2, length=12, tokens=24, intermediate=32, updates=1)
    training = eagle3.Training(target, [long, long], [short, long, short], plan, tmp_path)
    said = capsys.readouterr().err
    assert "held out: 1 of 3 prompts have no answer within length 12" in said
    line = r"length: got 12, too short: .* nothing in 2 rows; openings have 13 to 13 tokens"
    with pytest.raises(NworError, match=line):
        training.run()
    assert not list(tmp_path.iterdir())
    line = r"length: got 12, too short: no answer .* 2 held-out prompts; they have 13 to 13 tokens"
    with pytest.raises(NworError, match=line):
        eagle3.Training(target, [short], [long, long], plan, tmp_path)
    eagle3.Training(target, [short], [short], plan, tmp_path)
    assert "held out" not in capsys.readouterr().err


@contextmanager
def full_disk() -> Iterator[None]:
    """No file can be made longer than a few bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_what_was_measured_stays_when_the_disk_is_full(
    target: TrainingTarget, rng: torch.Generator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = make_head(target, write(target, rng), tmp_path, intermediate=32, measure_tokens=8)
    training.measure()
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    monkeypatch.setattr(Eagle3Head, "save", lambda *_: None)
    with full_disk(), pytest.raises(OSError, match="File too large"):
        training.measure()
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_half_a_file_of_prompts_is_never_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = {"<|endoftext|>": [0], "<|im_end|>": [2]}

    def encode(text: str) -> list[int]:
        parts = re.split(r"(<\|endoftext\|>|<\|im_end\|>)", text)
        return [token for part in parts for token in ends.get(part) or part.encode()]

    monkeypatch.setattr(prompt_file, "prompt_encoder", lambda _: encode)
    path = tmp_path / "prompts.json"
    with full_disk(), pytest.raises(OSError, match="File too large"):
        eagle3.write_prompts(tmp_path, path, 8)
    assert not list(tmp_path.iterdir())
    eagle3.write_prompts(tmp_path, path, 8)
    begun, kept = eagle3.read_prompts(path, 256)
    assert len(begun) == 13
    assert kept


@pytest.mark.parametrize(
    ("part", "change", "line"),
    [
        ("openings", None, "openings: got none, expected one or more"),
        ("held_out", None, "held_out: got none, expected one or more"),
        ("openings", {"kind": "poem"}, "openings[1]: kind: got 'poem', expected one of chat, s"),
        ("openings", {"tokens": []}, "openings[1]: tokens: got none, expected one or more"),
        ("openings", {"tokens": [5, 50]}, "openings[1]: tokens[1]: got 50, expected 0 to 49"),
        ("held_out", {"tokens": [-1]}, "held_out[1]: tokens[0]: got -1, expected 0 to 49"),
        ("openings", {"tokens": [True]}, "openings[1]: tokens[0]: got True, expected 0 to 49"),
        ("openings", {"tokens": "ab"}, "openings[1]: tokens: got 'ab', expected a list"),
        ("openings", {"answer": [7, 99]}, "openings[1]: answer[1]: got 99, expected 0 to 49"),
        ("openings", {"invented": [5, 2]}, "openings[1]: invented: got [5, 2], expected two"),
        ("openings", {"invented": [-1, 2]}, "openings[1]: invented: got [-1, 2], expected two"),
        ("openings", {"invented": [2]}, "openings[1]: invented: got [2], expected two"),
        ("openings", {"more": 1}, "openings[1]: got fields answer, invented, kind, more, tokens"),
    ],
)
def test_prompts_that_cannot_be_are_refused_with_their_place(
    tmp_path: Path, part: str, change: dict[str, object] | None, line: str
) -> None:
    path = tmp_path / "prompts.json"
    right = {"kind": "chat", "tokens": [49, 0], "invented": [0, 4], "answer": []}
    data = {"openings": [right, right], "held_out": [right, right]}
    path.write_text(json.dumps(data))
    assert [len(found) for found in eagle3.read_prompts(path, 50)] == [2, 2]
    data[part] = [] if change is None else [right, right | change]
    path.write_text(json.dumps(data))
    with pytest.raises(NworError, match=re.escape(f"{path}: {line}")):
        eagle3.read_prompts(path, 50)


def test_a_missing_tokenizer_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(NworError, match=r"package tokenizers: run `pip install tokenizers`"):
        prompt_file.prompt_encoder(stories())


def test_the_kernel_is_not_used_for_groups_it_would_not_finish(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kernel = pytest.importorskip("nwor_specpv.train.decode_kernel")
    launched: list[int] = []

    class Launch:
        def __getitem__(self, grid: tuple[int, int]) -> Callable[..., None]:
            return lambda *_, GROUPS, **__: launched.append(GROUPS)  # noqa: N803

    monkeypatch.setattr(kernel, "_decode_kernel", Launch())
    cpu = torch.device("cpu")
    for groups in (1, 9, 16):
        used = decode_attention_of(cpu, torch.float32, 8, groups)
        assert used is kernel.decode_attention
    assert launched == [1, 9, 16]  # tried with the target's own
    assert decode_attention_of(cpu, torch.float32, 8, 17) is None
    with pytest.raises(NworError, match=r"query: got 17 heads of a group, expected at most 16"):
        kernel.decode_attention(torch.ones(1, 1, 17, 8), *[torch.ones(1, 1, 64, 8)] * 2, 3, None)
    assert launched == [1, 9, 16]


def test_a_target_is_run_as_its_folder_says_or_refused(tmp_path: Path) -> None:
    """Of transformers' own making: the rotation stands elsewhere there than in our folders."""
    config = {
        "vocab_size": 32,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
    }
    LlamaForCausalLM(LlamaConfig(**config)).save_pretrained(tmp_path)
    target = TrainingTarget(tmp_path)
    assert target.rope_theta == 500.0
    file = tmp_path / "config.json"
    saved = json.loads(file.read_text())
    scaled = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0}
    for change, line in (
        ({"rope_parameters": scaled}, "got rope_type 'llama3', expected 'default'"),
        ({"rope_parameters": None, "rope_scaling": scaled}, "got rope_type 'llama3'"),
        ({"attention_bias": True}, "got attention_bias True, expected False"),
        ({"hidden_act": "gelu"}, "got hidden_act 'gelu', expected 'silu'"),
        ({"tie_word_embeddings": False}, "got no lm_head.weight, expected it or tied"),
        ({"model_type": "qwen3"}, "got 'qwen3', expected a llama or a qwen2"),
    ):
        file.write_text(json.dumps(saved | change))
        with pytest.raises(NworError, match=line):
            TrainingTarget(tmp_path)
    with pytest.raises(NworError, match=r"config.json cannot be read"):
        TrainingTarget(tmp_path / "nowhere")


def test_wrong_use_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "prompts.json").write_text("{}")
    command = [f"--out={tmp_path}", f"--target={stories()}", "--device=cpu"]
    assert eagle3.main(command) == 2
    said = capsys.readouterr().err
    assert "not a file of prompts" in said
    assert len(said.splitlines()) == 1
    other = tmp_path / "other"
    other.mkdir()
    words = {"type": "WordLevel", "vocab": {"a": 0, "b": 1}, "unk_token": "a"}
    (other / "tokenizer.json").write_text(json.dumps({"version": "1.0", "model": words}))
    for wrong, line in (
        (["--device=frob"], "--device: got 'frob', expected cpu or cuda"),
        (["--device=frob", "--rows=0"], "rows: got 0, expected 1 or more"),
        (["--device=cpu", f"--target={tmp_path}"], "got no tokenizer.json, expected a Hugging"),
        (["--device=cpu", f"--target={other}"], "got a tokenizer without a token that ends a turn"),
    ):
        assert eagle3.main([f"--out={tmp_path / 'new'}", *wrong]) == 2
        assert line in capsys.readouterr().err
    (tmp_path / "file").touch()
    assert eagle3.main([f"--out={tmp_path / 'file' / 'out'}", "--device=cpu"]) == 2
    assert capsys.readouterr().err.startswith("train.eagle3: [Errno 20] Not a directory")
    for place in ("/no/such/folder/x", str(tmp_path)):
        with pytest.raises(SystemExit) as ended:
            acceptance.main(["--weights=/nowhere", f"--json={place}"])
        assert ended.value.code == 2
        assert "expected a file in a folder that exists" in capsys.readouterr().err
    assert acceptance.main(["--weights=/nowhere"]) == 2
    assert capsys.readouterr().err.startswith("train.acceptance: /nowhere: cannot be read")
