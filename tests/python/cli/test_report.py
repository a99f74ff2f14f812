"""The report: complete, self-contained, and looked at in a real browser."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shutil
import stat
import subprocess
import sys
from functools import partial
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from nwor_specpv import NworError
from nwor_specpv.cli import main as cli
from nwor_specpv.cli.report import check_place, render, write_page
from nwor_specpv.cli.report.sweep import Mode, compare, sweep
from nwor_specpv.transformers import Generator
from tests.python.cli.png import read_png
from tests.python.transformers.tiny_models import tiny

SECTIONS = ["summary", "speed", "accepted", "bytes", "coverage", "drift", "rows"]


def run(name: str, **values: object) -> dict:
    base = {
        "name": name,
        "specpv": "off",
        "prompt_tokens": 4000,
        "new_tokens": 64,
        "tokens_per_second": 31.5,
        "tokens_per_step": 2.5,
        "drafts": 90,
        "accepted": 40,
        "accepted_lengths": {"0": 5, "1": 9, "3": 11},
        "rejected_tokens": 50,
        "cache_bytes_written": 4_000_000,
        "draft_bytes_written": 7_600_000,
        "cache_bytes_avoided": 9_500_000,
        "coverage": [],
        "drift": None,
        "same_tokens": True,
        "pieces": [("Once", 0), (" <upon>", 1), (" a", 2), (" & time", 3), ("\nthere", 7)],
    }
    return base | values


REPORT = {
    "title": "A report <of> runs",
    "model": "a model",
    "machine": {"device": "CPU, 2 threads"},
    "row_costs": {"1": 0.03, "8": 0.04, "32": 0.11},
    "runs": [
        run("plain", drafts=0, accepted_lengths={}, same_tokens=None, tokens_per_second=20.0),
        run("NWOR & trees"),
        run("rectify", specpv="rectify", coverage=[(4000, 1024), (4040, 1030)], drift=0.02),
        run("refresh", specpv="refresh", coverage=[(4000, 900)]),
        run("lossless", specpv="lossless", coverage=[(4000, 1024)]),
    ],
}


class Outline(HTMLParser):
    """Sections, texts and everything that points somewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.sections: list[str] = []
        self.open: list[str] = []
        self.links: list[str] = []
        self.depths: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag != "meta":
            self.open.append(tag)
        if tag == "section":
            self.sections.append(given["id"])
        self.links += [v for k, v in attrs if k in ("src", "href", "xlink:href")]
        if "data-depth" in given:
            self.depths.append(given["data-depth"])
        assert tag not in ("script", "link", "img", "iframe")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_has_everything_and_fetches_nothing() -> None:
    html = render(REPORT)
    page = Outline()
    page.feed(html)
    assert page.open == []
    assert page.links == []
    assert "http" not in html.replace("<!doctype html>", "")
    assert "url(" not in html
    assert page.sections[: len(SECTIONS)] == SECTIONS
    for text in ("A report <of> runs", "NWOR & trees", "31.5", "9.5 MB", "2.0 %", "yes"):
        assert text in page.text
    assert page.depths[:5] == ["0", "1", "2", "3", "7"]
    assert "Once <upon> a & time" in page.text


def test_bytes_of_drafts_are_not_those_of_prompts() -> None:
    html = render(REPORT)
    assert html.count("7.6 MB / 9.5 MB") == 4
    assert "4.0 MB" not in html
    old = run("old", accepted=20)  # 50 rejected ones were 9.5 MB
    del old["draft_bytes_written"]
    assert "3.8 MB / 9.5 MB" in render(REPORT | {"runs": [old]})
    none = old | {"accepted": 90, "rejected_tokens": 0, "cache_bytes_avoided": 0}
    assert "0.0 MB / 0.0 MB" in render(REPORT | {"runs": [none]})


def test_a_report_without_drafts_or_views_says_so() -> None:
    html = render(REPORT | {"runs": [REPORT["runs"][0]], "row_costs": None})
    assert "No run had drafts." in html
    assert html.count("No run verified partially.") == 2


def test_runs_of_a_model_become_records() -> None:
    class Numbers:
        chat_template = None

        def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
            return " ".join(map(str, ids))

    first = Generator(tiny(), Numbers(), "none")
    records = sweep(first, [Mode("again"), Mode("plain")], [1, 2, 3, 4, 5], 12)
    assert [one["name"] for one in records] == ["again", "plain"]
    assert records[0]["same_tokens"] is True
    assert records[1]["reused_tokens"] == 4
    text = "".join(piece for piece, _ in records[0]["pieces"])
    assert text == Numbers().decode(records[0]["token_ids"])
    assert render(REPORT | {"runs": json.loads(json.dumps(records))})
    assert records[0]["agreed_tokens"] == 12
    other = {"token_ids": [*records[1]["token_ids"][:3], -1]}
    compare(other, records[1])
    assert (other["same_tokens"], other["agreed_tokens"]) == (False, 3)


def test_a_page_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "page.html"
    assert write_page(REPORT, target) == target
    before = target.read_text()
    with pytest.raises(KeyError):
        write_page({"title": "half", "runs": [{}]}, target)
    assert target.read_text() == before
    assert [p.name for p in target.parent.iterdir()] == ["page.html"]
    (tmp_path / "file").write_text("")
    inside = tmp_path / "file" / "page.html"
    with pytest.raises(NworError, match=f"page: got '{inside}', which cannot be written"):
        write_page(REPORT, inside)


def test_a_page_goes_where_a_link_leads_and_keeps_the_mode_of_what_was_there(
    tmp_path: Path,
) -> None:
    real, link, nowhere = tmp_path / "real.html", tmp_path / "link.html", tmp_path / "a" / "new"
    real.write_text("before")
    real.chmod(0o640)
    link.symlink_to("real.html")
    assert write_page(REPORT, link) == real
    assert link.is_symlink()
    assert real.read_text() == render(REPORT)
    assert stat.S_IMODE(real.stat().st_mode) == 0o640
    link.unlink()
    link.symlink_to(nowhere)
    assert write_page(REPORT, link) == nowhere
    assert link.is_symlink()
    umask = os.umask(0)
    os.umask(umask)
    assert stat.S_IMODE(nowhere.stat().st_mode) == 0o666 & ~umask
    assert {path.name for path in tmp_path.iterdir()} == {"real.html", "link.html", "a"}


def test_a_page_is_written_into_what_is_no_file(tmp_path: Path) -> None:
    """A device or a pipe is not replaced by a file."""
    pipe, link = tmp_path / "pipe", tmp_path / "link"
    os.mkfifo(pipe)
    link.symlink_to(pipe)
    for place in (pipe, link):
        check_place(place)
        reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
        fcntl.fcntl(reader, fcntl.F_SETPIPE_SZ, 1 << 20)  # room for the page
        write_page(REPORT, place)
        assert stat.S_ISFIFO(pipe.lstat().st_mode)
        assert os.read(reader, 1 << 20).decode() == render(REPORT)
        os.close(reader)
    assert link.is_symlink()
    check_place(Path(os.devnull))
    before = os.stat(os.devnull)
    if os.geteuid() != 0:  # root could lose it
        write_page(REPORT, Path(os.devnull))
        assert os.stat(os.devnull).st_rdev == before.st_rdev


def test_a_page_for_the_standard_output_is_appended_to_it(tmp_path: Path) -> None:
    """Also where that is a file, which others have written to and will."""
    log = tmp_path / "log.txt"
    log.write_text("earlier\n")
    script = (
        "import pathlib, sys\n"
        "from nwor_specpv._files import write_whole\n"
        "from nwor_specpv.cli.report import check_place\n"
        "place = pathlib.Path('/dev/stdout')\n"
        "check_place(place)\n"
        "print('before', flush=True)\n"
        "write_whole(place, 'page\\n')\n"
        "print('behind')\n"
    )
    with log.open("a") as out:
        subprocess.run([sys.executable, "-c", script], stdout=out, check=True)
    assert log.read_text().splitlines() == ["earlier", "before", "page", "behind"]


def test_a_page_of_somebody_else_stays_readable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their group is kept if it can be; otherwise the mode is that of a new file."""
    page, given = tmp_path / "page.html", []
    page.write_text("before")
    page.chmod(0o640)

    def chown(file: int, user: int, group: int, may: bool) -> None:
        given.append((user, group))
        if not may or user != -1:
            raise PermissionError

    owner = page.stat()
    for may, mode in ((True, 0o640), (False, None)):
        given.clear()
        monkeypatch.setattr(os, "fchown", partial(chown, may=may))
        write_page(REPORT, page)
        assert given == [(owner.st_uid, owner.st_gid), (-1, owner.st_gid)]
        umask = os.umask(0)
        os.umask(umask)
        assert stat.S_IMODE(page.stat().st_mode) == (mode or 0o666 & ~umask)


def test_pages_for_one_place_can_be_written_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, replace = tmp_path / "page.html", Path.replace

    def replace_after_another(staged: Path, place: Path) -> Path:
        monkeypatch.setattr(Path, "replace", replace)
        write_page(REPORT | {"title": "another"}, target)
        return replace(staged, place)

    monkeypatch.setattr(Path, "replace", replace_after_another)
    write_page(REPORT, target)
    assert target.read_text() == render(REPORT)
    assert list(tmp_path.iterdir()) == [target]


def test_a_page_that_cannot_be_written_is_found_out_before_the_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("demo", "report"):
        monkeypatch.setattr(f"nwor_specpv.cli.{module}.load", lambda _: pytest.fail("began"))
    (tmp_path / "file").write_text("")
    for out in (tmp_path, tmp_path / "file" / "page.html"):
        for arguments in (["report", "--out", str(out)], ["demo", "--report", str(out)]):
            assert cli.main(arguments) == 2
            line = f"page: got '{out}', expected a file in a writable folder"
            assert capsys.readouterr().err == f"nwor-specpv: {line}\n"
    for modes, line in (
        ("none,eagel3", "drafter: got 'eagel3', expected one of none, draft_model"),
        ("none:lossles", "specpv_mode: got 'lossles'"),
    ):
        assert cli.main(["report", "--out", str(tmp_path / "page.html"), "--modes", modes]) == 2
        assert line in capsys.readouterr().err


def test_recorded_runs_are_read_from_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, target = tmp_path / "runs.json", tmp_path / "page.html"
    source.write_text(json.dumps(REPORT))
    arguments = ["report", "--from", str(source), "--out", str(target), "--json"]
    assert cli.main(arguments) == 0
    assert json.loads(capsys.readouterr().out) == {"page": str(target)}
    source.write_text("{}")
    assert cli.main(arguments) == 2
    assert capsys.readouterr().err.startswith(f"nwor-specpv: --from: {source} has no runs")
    for report in ({"runs": []}, {"title": "a", "runs": [{}]}, {"title": "a", "runs": ["b"]}):
        source.write_text(json.dumps(report))
        assert cli.main(arguments) == 2
        assert f"--from: {source} is no record of runs" in capsys.readouterr().err


@pytest.mark.parametrize(
    "damage",
    [
        {"tokens_per_second": "fast"},
        {"coverage": [[1, 2, 3]]},
        {"coverage": [[0, 0]]},
        {"coverage": [[1, float("nan")]]},
        {"coverage": [[1, float("inf")]]},
        {"accepted_lengths": {"a": 1}},
        {"pieces": [["Once", -100]]},
        {"pieces": [["\ud800", 1]]},
    ],
)
def test_damaged_records_are_no_records(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: dict
) -> None:
    source, target = tmp_path / "runs.json", tmp_path / "page.html"
    source.write_text(json.dumps(REPORT | {"runs": [run("damaged", **damage)]}))
    assert cli.main(["report", "--from", str(source), "--out", str(target)]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith(f"nwor-specpv: --from: {source} is no record of runs (")
    assert not target.exists()


def test_damaged_files_are_no_records(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no room")

    source, target = tmp_path / "runs.json", tmp_path / "page.html"
    costs = json.dumps(REPORT | {"row_costs": {"a": "b"}})
    for text, told in (
        (costs, f"--from: {source} is no record of runs (ValueError: "),
        ("[" * 100_000, f"--from: got '{source}', which cannot be read: maximum recursion depth"),
    ):
        source.write_text(text)
        assert cli.main(["report", "--from", str(source), "--out", str(target)]) == 2
        assert capsys.readouterr().err.startswith(f"nwor-specpv: {told}")
    # What is wrong with the place is not the record's fault.
    source.write_text(json.dumps(REPORT))
    monkeypatch.setattr(Path, "replace", no_room)
    assert cli.main(["report", "--from", str(source), "--out", str(target)]) == 2
    line = f"page: got '{target}', which cannot be written: no room"
    assert capsys.readouterr().err == f"nwor-specpv: {line}\n"


def test_a_browser_shows_it(tmp_path: Path) -> None:
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("chromium is not installed: apt-get install chromium")
    page, picture = tmp_path / "page.html", tmp_path / "page.png"
    page.write_text(render(REPORT), encoding="utf-8")
    command = [
        chromium,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        "--disable-dev-shm-usage",
        f"--user-data-dir={tmp_path / 'profile'}",
        "--window-size=900,3000",
        f"--screenshot={picture}",
        page.as_uri(),
    ]
    home = os.environ | {"HOME": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=home)
    assert picture.is_file(), done.stderr[-500:]
    pixels = read_png(picture)
    assert pixels.shape[:2] == (3000, 900)
    # Every bar of the first chart has its colour, and the drafts theirs.
    for color in ("#4269d0", "#efb118", "#3ca951", "#ff725c", "#a463f2", "#d6f0d8"):
        wanted = np.array([int(part, 16) for part in re.findall("..", color[1:])])
        close = (np.abs(pixels.astype(int) - wanted).max(-1) <= 3).sum()
        assert close > 50, color
    ink = (pixels.astype(int).sum(-1) < 250).sum()
    assert ink > 3000  # text was drawn
