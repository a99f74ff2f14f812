"""`nwor-specpv demo` with the story model: every way of decoding, its sentences and its page."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import pytest

from nwor_specpv.cli import demo
from nwor_specpv.cli import main as cli
from nwor_specpv.cli.demo.table import sentences, table
from nwor_specpv.cli.demo.texts import BOOK, book_prompt
from nwor_specpv.cli.report import render
from nwor_specpv.models import stories

CONTEXT, VIEW, COUNT = 384, 176, 112


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The story model with a tokenizer of one id for each of the commonest words."""
    path = stories(progress=lambda *_: None, destination=tmp_path_factory.mktemp("m") / "stories")
    words = Counter(re.findall(r"\w+|[^\w\s]+", BOOK.read_text(encoding="utf-8"))).most_common(511)
    vocabulary = {"<unk>": 0} | {word: index for index, (word, _) in enumerate(words, 1)}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "Whitespace"},
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<unk>"},
    }
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


@pytest.fixture(scope="module")
def report(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict:
    page = tmp_path_factory.mktemp("page") / "demo.html"
    given = {"--model": folder, "--report": page, "--threads": 1, "--drafter": "ngram"}
    given |= {"--context": CONTEXT, "--view-tokens": VIEW, "--max-new-tokens": COUNT}
    arguments = demo.build_parser().parse_args(
        [str(part) for pair in given.items() for part in pair]
    )
    made = demo.decode(*demo.load(arguments), arguments, lambda text: None)
    return json.loads(json.dumps(made))


def of_mode(report: dict, mode: str) -> dict:
    (run,) = [run for run in report["runs"] if run["specpv"] == mode]
    return run


def test_exact_ways_give_the_tokens_of_plain_decoding(report: dict) -> None:
    names = [run["name"] for run in report["runs"]]
    assert names == [
        "plain decoding",
        "NWOR, n-gram",
        f"plain decoding, {CONTEXT}",
        f"NWOR, n-gram, {CONTEXT}",
        f"SpecPV refresh, {CONTEXT}",
        f"SpecPV rectify, {CONTEXT}",
        f"SpecPV lossless, {CONTEXT}",
    ]
    for run in report["runs"]:
        assert run["exact"] is (run["specpv"] in ("off", "lossless"))
        if run["exact"]:
            assert run["same_tokens"] is (None if "plain" in run["name"] else True)


def test_lossless_verification_is_partial_whether_it_pays_or_not(report: dict) -> None:
    assert of_mode(report, "lossless")["step_kinds"]["partial"] > 0
    assert of_mode(report, "lossless")["view_coverage"] < 0.6


def test_drift_is_counted_where_a_full_step_rechecks(report: dict) -> None:
    assert of_mode(report, "rectify")["rechecked_tokens"] > 0
    assert of_mode(report, "rectify")["drift"] is not None
    assert of_mode(report, "refresh")["drift"] is None


@pytest.mark.parametrize("mode", ["refresh", "rectify", "lossless"])
def test_views_are_recorded_at_every_refresh(report: dict, mode: str) -> None:
    run = of_mode(report, mode)
    views = run["views"]
    assert 1 <= len(views) <= run["step_kinds"]["full_refresh"]
    for view in views:
        assert view["sink"] == 2 * 16
        assert view["window"] % 16 == 0
        assert view["sink"] < view["window"] < view["tail"] <= view["context"]
        assert view["context"] >= CONTEXT
        assert view["heads"] == 4
        blocks = [block for block, _ in view["chosen"]]
        assert blocks == sorted(set(blocks))
        assert all(view["sink"] <= 16 * block < view["window"] for block in blocks)
        # Every head reads one block: a view of 176 tokens has room for no more.
        assert sum(heads for _, heads in view["chosen"]) == view["heads"]
    assert [view["tail"] for view in views] == sorted({view["tail"] for view in views})
    assert all(run["views"] == [] for run in report["runs"] if run["specpv"] == "off")


def test_the_page_draws_the_blocks(report: dict) -> None:
    html = render(report)
    section = re.search('<section id="views">.*?</section>', html)[0]
    assert section.count("<figure>") == 3
    seen = len(of_mode(report, "rectify")["views"])
    figure = section.split("<figure>")[2]
    for color in ("#ff725c", "#4269d0", "#efb118", "var(--line)"):
        own = figure.count(f'fill="{color}"') - (0 if color.startswith("var") else 1)  # its key
        assert own == seen
    assert "No run verified partially." not in html


def test_the_table_ends_with_a_sentence_for_each_long_context(report: dict) -> None:
    assert len(table(report["runs"])) == 1 + len(report["runs"])
    nwor, refresh, rectify, lossless = sentences(report["runs"])
    assert re.fullmatch(
        r"NWOR, n-gram, 384: \d+\.\d\d times as fast as plain decoding; exact.", nwor
    )
    read = r"\d+ of \d+ steps were partial and read \d+ % of the context"
    start = r"SpecPV {}, 384: \d+\.\d\d times as fast as NWOR alone; " + read
    assert re.fullmatch(start.format("lossless") + "; exact.", lossless)
    assert re.match(start.format("refresh") + "; not exact: the ", refresh)
    assert refresh.endswith("plain decoding, and drift is not counted in this mode.")
    assert re.match(start.format("rectify") + "; not exact: the ", rectify)
    assert re.search(r"would have chosen \d+\.\d % of the rechecked tokens otherwise\.$", rectify)


def test_sentences_of_other_outcomes() -> None:
    run = {
        "drafter": "eagle3",
        "specpv": "off",
        "prompt_tokens": 9,
        "tokens_per_second": 10.0,
        "same_tokens": True,
        "agreed_tokens": 5,
        "drift": None,
        "step_kinds": {},
    }
    plain = run | {"name": "plain", "drafter": "none", "same_tokens": None}
    wrong = run | {
        "name": "a",
        "specpv": "lossless",
        "same_tokens": False,
        "tokens_per_second": 5.0,
    }
    lucky = run | {"name": "b", "specpv": "rectify", "drift": 0.0}
    short = run | {"name": "d", "specpv": "rectify", "same_tokens": False}
    off = run | {"name": "c"}
    assert list(sentences([plain, off])) == []  # no partial verification: nothing to compare
    assert list(sentences([plain, off, wrong, lucky, short])) == [
        "c: 1.00 times as fast as plain decoding; exact.",
        "a: 0.50 times as fast as NWOR alone; no step was partial; NOT exact, which is an error.",
        "b: 1.00 times as fast as NWOR alone; no step was partial; not exact: the tokens happen to "
        "be those of plain decoding, and full attention would have chosen 0.0 % of the rechecked "
        "tokens otherwise.",
        "d: 1.00 times as fast as NWOR alone; no step was partial; not exact: the first 5 tokens "
        "are those of plain decoding, and no token was rechecked.",
    ]


@pytest.mark.parametrize(
    ("mode", "same", "code"), [("lossless", False, 1), ("rectify", False, 0), ("lossless", True, 0)]
)
def test_wrong_tokens_fail_where_a_mode_is_exact(
    report: dict,
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    mode: str,
    same: bool,
    code: int,
) -> None:
    runs = [run | {"same_tokens": same} if run["specpv"] == mode else run for run in report["runs"]]
    monkeypatch.setattr(demo, "decode", lambda *_: report | {"runs": runs})
    command = ["demo", "--model", str(folder), "--report", str(tmp_path / "page.html")]
    assert cli.main(command) == code
    out, err = capsys.readouterr()
    assert "tokens/step" in out
    assert f"report: {tmp_path / 'page.html'}" in out
    assert ("an exact way of decoding gave other tokens" in err) is (code == 1)
    assert cli.main([*command, "--json"]) == code
    assert json.loads(capsys.readouterr().out)["table"][-1].startswith("SpecPV lossless")


def test_the_text_is_as_long_as_asked_for() -> None:
    class Words:
        def __call__(self, text: str) -> object:
            return type("Encoded", (), {"input_ids": text.split()})

    words = BOOK.read_text(encoding="utf-8").split()
    assert book_prompt(Words(), 10) == words[:10]
    assert book_prompt(Words(), len(words) + 5) == words + words[:5]
