"""Where runs are cut: against slices of lists. Nothing after the cut is committed or emitted."""

from __future__ import annotations

import random

import pytest
import torch

from nwor_specpv import (
    FINISH_REASONS,
    GrammarCut,
    NworError,
    StopStrings,
    cut_on_host,
    cut_path,
    describe_status,
)
from tests.python.tree.forest import DEVICES, SEED


def run_of(paths: list[list[int]], tokens: list[list[int]], following: list[int], device: str):
    rows = len(tokens[0])
    padded = [path + [-1] * (rows - len(path)) for path in paths]
    return (
        torch.tensor(tokens, device=device),
        torch.tensor(padded, dtype=torch.int32, device=device),
        torch.tensor([len(path) for path in paths], dtype=torch.int32, device=device),
        torch.tensor(following, device=device),
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rows", [1, 5, 70, 256])
@pytest.mark.parametrize("per_request", [False, True])
def test_ends_where_the_sequence_ends(device: str, rows: int, per_request: bool) -> None:
    print(f"seed={SEED}")
    rng = random.Random(SEED + rows)
    batch = 40
    tokens = [[rng.randrange(30) for _ in range(rows)] for _ in range(batch)]
    paths = [sorted(rng.sample(range(1, rows), rng.randrange(min(rows, 12)))) for _ in range(batch)]
    following = [rng.randrange(30) if rng.random() < 0.9 else -1 for _ in range(batch)]
    limits = [rng.randrange(-1, 14) for _ in range(batch)]
    keeps = [rng.choice([-1, -1, 0, 1, 3, 9]) for _ in range(batch)]
    stops = [[rng.randrange(30), rng.choice([-1, 7]), 9] for _ in range(batch)]
    given = stops if per_request else stops[0]
    status = torch.full((batch,), 4, device=device)
    cut = cut_path(
        *run_of(paths, tokens, following, device),
        stop_ids=torch.tensor(given, device=device),
        max_new_tokens=torch.tensor(limits, device=device),
        keep=torch.tensor(keeps, device=device),
        status=status,
    )
    assert status.tolist() == [0] * batch
    for b in range(batch):
        run = [tokens[b][row] for row in paths[b]] + [following[b]]
        if following[b] < 0:
            run = []
        reason = ""
        if limits[b] <= len(run):
            run, reason = run[: max(limits[b], 0)], "length"
        if 0 <= keeps[b] <= len(run):
            run, reason = run[: keeps[b]], "callback"
        hits = [i for i, token in enumerate(run) if token in (stops[b] if per_request else given)]
        if hits:
            run, reason = run[: hits[0] + 1], "stop"
        assert cut.emitted[b].tolist() == run + [-1] * (rows - len(run))
        assert int(cut.num_emitted[b]) == len(run)
        assert FINISH_REASONS[int(cut.finish[b])] == reason
        committed = paths[b][: max(len(run) - 1, 0)]
        assert cut.path[b].tolist() == committed + [-1] * (rows - len(committed))
        assert int(cut.counts[b]) == len(committed)
        assert int(cut.next_token[b]) == (run[-1] if run else -1)


@pytest.mark.parametrize("device", DEVICES)
def test_without_an_end_everything_stays(device: str) -> None:
    run = run_of([[1, 3], []], [[5, 6, 7, 8], [1, 2, 3, 4]], [9, 10], device)
    cut = cut_path(*run)
    assert torch.equal(cut.path, run[1])
    assert torch.equal(cut.counts, run[2])
    assert torch.equal(cut.next_token, run[3])
    assert cut.emitted.tolist() == [[6, 8, 9, -1], [10, -1, -1, -1]]
    assert cut.finish.tolist() == [0, 0]


@pytest.mark.parametrize("device", DEVICES)
def test_paths_outside_the_tree_are_named_or_marked(device: str) -> None:
    for paths, counts, message in (
        ([[1, 4], [1]], [2, 1], r"path\[0, 1\]: got 4, expected a row, 0 .. 3"),
        ([[1], [-1]], [1, 1], r"path\[1, 0\]: got -1"),
        ([[1], [1]], [4, 1], r"counts\[0\]: got 4, expected 0 .. 3"),
        ([[1], [1]], [1, -1], r"counts\[1\]: got -1"),
    ):
        tokens, path, _, following = run_of(paths, [[5, 6, 7, 8]] * 2, [9, 10], device)
        count = torch.tensor(counts, dtype=torch.int32, device=device)
        if device == "cpu":
            with pytest.raises(NworError, match=message):
                cut_path(tokens, path, count, following)
            continue
        status = torch.full((2,), 4, device=device)
        cut = cut_path(tokens, path, count, following, status=status)
        wrong = 0 if "[0" in message else 1
        words = status.tolist()
        assert words[1 - wrong] == 0
        assert describe_status(words[wrong]).startswith("path")
        assert cut.emitted[wrong].tolist() == [-1] * 4
        assert (int(cut.counts[wrong]), int(cut.next_token[wrong])) == (0, -1)
        assert int(cut.num_emitted[1 - wrong]) == 2


# ---- callbacks --------------------------------------------------------------------------------


def spell(tokens: list[int]) -> str:
    return "".join(chr(token) for token in tokens)


def letters(text: str) -> list[int]:
    return [ord(letter) for letter in text]


@pytest.mark.parametrize("device", DEVICES)
def test_a_stop_string_may_span_rounds(device: str) -> None:
    stop = StopStrings(["END", "xx"], spell)
    first = run_of([[1, 2], [1, 2]], [letters("?abE"), letters("?abc")], letters("Ez"), device)
    cut = cut_on_host(*first, stop)
    assert cut.finish.tolist() == [0, 0]
    second = run_of([[1, 2, 3], [1]], [letters("?NDq"), letters("?dxx")], letters("rs"), device)
    cut = cut_on_host(*second, stop)
    assert [FINISH_REASONS[reason] for reason in cut.finish.tolist()] == ["callback", ""]
    assert cut.emitted[0].tolist() == [*letters("ND"), -1, -1]
    assert cut.path[0].tolist() == [1, -1, -1, -1]  # N is committed, D emitted, q nowhere
    assert cut.num_emitted.tolist() == [2, 2]
    assert stop.text(0) == "ab"
    assert stop.text(1) == "abzds"
    stop.forget(0)
    assert stop.text(0) == ""


@pytest.mark.parametrize("device", DEVICES)
def test_a_grammar_ends_before_what_it_refuses(device: str) -> None:
    class Digits:
        def __init__(self) -> None:
            self.taken: list[int] = []

        def accept_token(self, token_id: int) -> bool:
            if token_id > 9:
                return False
            self.taken.append(token_id)
            return True

    one, two = Digits(), Digits()
    run = run_of([[1, 2], [1, 2], [3]], [[0, 1, 2, 3]] * 2 + [[0, 7, 8, 77]], [12, 4, 5], device)
    cut = cut_on_host(*run, GrammarCut([one, two, Digits()]))
    assert cut.emitted.tolist() == [[1, 2, -1, -1], [1, 2, 4, -1], [-1] * 4]
    assert cut.counts.tolist() == [1, 2, 0]
    assert cut.next_token.tolist() == [2, 4, -1]
    assert (one.taken, two.taken) == ([1, 2], [1, 2, 4])


@pytest.mark.parametrize("device", DEVICES)
def test_callbacks_do_not_hide_paths_outside_the_tree(device: str) -> None:
    tokens, path, counts, following = run_of([[1, 4], [1]], [[5, 6, 7, 8]] * 2, [9, 10], device)
    run, shown = (tokens, path, counts, following), []

    def callback(request: int, tokens: list[int]) -> int:
        shown.append(request)
        return 1

    with pytest.raises(NworError, match="path"):
        cut_on_host(*run, callback)
    assert shown == []
    if device == "cpu":
        return
    status = torch.full((2,), 4, device=device)
    cut = cut_on_host(*run, callback, status=status)
    words = status.tolist()
    assert (describe_status(words[0])[:5], words[1]) == ("path ", 0)
    assert (shown, cut.num_emitted.tolist()) == ([1], [0, 1])


@pytest.mark.parametrize("device", DEVICES)
def test_a_callback_on_the_host_clears_the_status(device: str) -> None:
    run = run_of([[1], [1]], [[5, 6, 7, 8]] * 2, [9, 10], device)
    status = torch.full((2,), 4, device=device)
    assert cut_on_host(*run, lambda request, tokens: None, status=status).counts.tolist() == [1, 1]
    assert status.tolist() == [0, 0]


def test_texts_hold_what_a_later_callback_left() -> None:
    run = run_of([[1, 2]], [letters("?cd?")], letters("e"), "cpu")
    for kept, text in ((None, "abcde"), (3, "abcde"), (1, "abc"), (0, "ab")):
        again = StopStrings(["xx"], spell)
        cut_on_host(*run_of([[1]], [letters("?a?")], letters("b"), "cpu"), again)
        cut = cut_on_host(*run, [again, lambda request, tokens, kept=kept: kept])
        assert again.text(0) == text
        assert int(cut.num_emitted) == len(text) - 2
    # Its own cut comes first, a later one is shorter.
    end = StopStrings(["d"], spell)
    cut_on_host(*run, [end, lambda request, tokens: 1])
    assert end.text(0) == "c"


def test_a_request_may_be_forgotten_in_its_last_round() -> None:
    run = run_of([[1, 2]], [letters("?cd?")], letters("e"), "cpu")
    stop = StopStrings(["xx"], spell)
    cut = cut_on_host(*run, [stop, lambda request, tokens: stop.forget(request)])
    assert int(cut.num_emitted) == 3
    assert stop.text(0) == ""


def test_texts_hold_nothing_of_a_round_that_failed() -> None:
    run = run_of([[1, 2]], [letters("?cd?")], letters("e"), "cpu")
    stop = StopStrings(["xx"], spell)
    with pytest.raises(NworError, match="callback: got 9 for request 0"):
        cut_on_host(*run, [stop, lambda request, tokens: 9])
    assert stop.text(0) == ""
    cut_on_host(*run, stop)
    assert stop.text(0) == "cde"


def test_the_earliest_of_several_cuts_counts() -> None:
    run = run_of([[1, 2, 3]], [[0, 65, 66, 67]], [68], "cpu")
    seen = []

    def second(request: int, tokens: list[int]) -> int | None:
        seen.append(tokens)
        return None

    cut = cut_on_host(*run, [StopStrings(["C"], spell), second], stop_ids=torch.tensor([68]))
    assert cut.emitted.tolist() == [[65, 66, 67, -1]]
    assert seen == [[65, 66, 67]]
    cut = cut_on_host(
        *run,
        StopStrings(["C"], spell),
        stop_ids=torch.tensor([66]),
        max_new_tokens=torch.tensor([3]),
    )
    assert cut.emitted.tolist() == [[65, 66, -1, -1]]
    assert FINISH_REASONS[int(cut.finish)] == "stop"
    with pytest.raises(NworError, match="callback: got 9 for request 0, expected None or 0"):
        cut_on_host(*run, lambda request, tokens: 9)
    for kept in (False, True, 1.5, "1"):
        with pytest.raises(NworError, match=f"callback: got {kept} for request 0, expected None"):
            cut_on_host(*run, lambda request, tokens, kept=kept: kept)
    for strings in ("END", b"END", [], [""], [b"END"], [69]):
        with pytest.raises(NworError, match="strings: got"):
            StopStrings(strings, spell)
