"""The n-gram drafter against a slow one that searches the whole text with lists."""

from __future__ import annotations

import os
import random

import pytest

from nwor_specpv import NworError
from nwor_specpv.drafters import TreeConfig, make_drafter
from nwor_specpv.drafters.ngram import NgramDrafter

SEED = int(os.environ.get("NWOR_TEST_SEED", random.SystemRandom().randrange(2**31)))


def slow_draft(
    text: list[int], tree: TreeConfig, low: int, high: int, matches: int
) -> dict[tuple[int, ...], int]:
    """Votes of the paths below the root that should be drafted."""
    found = []
    for count in range(high, low - 1, -1):
        if count > len(text):
            continue
        for end in range(len(text) - 2, count - 2, -1):
            same = text[end - count + 1 : end + 1] == text[-count:]
            longer = (
                count < high
                and end - count >= 0
                and text[end - count : end + 1] == text[-count - 1 :]
            )
            if same and not longer:
                found.append((end, 4 ** (count - low)))
    votes: dict[tuple[int, ...], int] = {}
    for end, weight in found[:matches]:
        repeated = list(text)
        for step in range(tree.depth):
            repeated.append(repeated[end + 1 + step])
            path = tuple(repeated[len(text) :])
            votes[path] = votes.get(path, 0) + weight
    # At most top_k children of a row, then the rows with the most votes.
    wanted = {()}
    for path in votes:
        family = [other for other in votes if other[:-1] == path[:-1]]
        family.sort(key=lambda other: -votes[other])
        if path[:-1] in wanted and path in family[: tree.top_k]:
            wanted.add(path)
    order = sorted((p for p in votes if p in wanted), key=lambda p: (-votes[p], len(p)))
    return {path: votes[path] for path in order[: tree.rows - 1]}


def paths_of(tokens: list[int], parents: list[int]) -> list[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = [()]
    for token, parent in zip(tokens[1:], parents[1:], strict=True):
        paths.append((*paths[parent], token))
    return paths[1:]


def test_drafts_are_what_a_search_of_the_whole_text_finds() -> None:
    print(f"seed={SEED}")
    rng = random.Random(SEED)
    for _ in range(150):
        low = rng.randint(1, 3)
        high, matches = rng.randint(low, 6), rng.randint(1, 9)
        tree = TreeConfig(rng.randint(1, 24), rng.randint(1, 8), rng.randint(1, 4))
        drafter = NgramDrafter(low, high, matches)
        text = [rng.randrange(4) for _ in range(rng.randint(1, 12))]
        drafter.begin("r", text)
        first = rng.randrange(4)
        drafter.observe("r", [*text[1:], first], None)
        text = [*text, first]
        for _ in range(8):
            (got,) = drafter.draft(["r"], tree)
            got.validate()
            assert got.tokens[0] == text[-1]
            paths = paths_of(got.tokens, got.parents)
            assert len(set(paths)) == len(paths)
            assert set(paths) == set(slow_draft(text, tree, low, high, matches))
            more = [rng.randrange(4) for _ in range(rng.randint(1, 5))]
            drafter.observe("r", more, None)
            text += more
            if rng.random() < 0.3:
                back = rng.randrange(len(more) + 1)
                assert drafter.retract("r", back)
                text = text[: len(text) - back]
        drafter.end("r")


def test_requests_do_not_see_each_other() -> None:
    drafter = make_drafter("ngram", min_tokens=1)
    drafter.begin("a", [1, 2, 3, 1])
    drafter.begin("b", [1, 9, 9, 1])
    drafter.observe("a", [2, 3, 1, 2], None)
    drafter.observe("b", [9], None)  # most of its prompt was cached already
    one, other = drafter.draft(["a", "b"], TreeConfig(2, 1, 1))
    assert (one.tokens, other.tokens) == ([2, 3], [9, 9])
    drafter.begin("c", [1, 2])  # told of a prompt and of what was answered to it at once
    drafter.observe("c", [2, 7, 5, 7], None)
    assert drafter.draft(["c"], TreeConfig(2, 1, 1))[0].tokens == [7, 5]


def test_nothing_observed_leaves_the_prompt_known() -> None:
    drafter = NgramDrafter(min_tokens=1)
    drafter.begin("x", [1, 2, 3, 4])
    drafter.observe("x", [], None)
    drafter.observe("x", [2, 3, 4, 1], None)
    assert drafter.draft(["x"], TreeConfig(9, 8, 4))[0].tokens == [1, 2, 3, 4, 1, 2, 3, 4, 1]
    assert drafter.retract("x", 5)  # the prompt and one token
    assert not drafter.retract("x", 1)


def test_tokens_that_were_refused_are_refused_again() -> None:
    drafter = NgramDrafter(min_tokens=1)
    drafter.begin("x", [1, 2, 3])
    for _ in range(2):
        with pytest.raises(NworError, match="after the prompt, expected the prompt's own tokens"):
            drafter.observe("x", [7, 7, 4], None)
    drafter.observe("x", [2, 3, 1], None)
    assert drafter.draft(["x"], TreeConfig(3, 2, 1))[0].tokens == [1, 2, 3]


def test_wrong_use_says_what_was_expected() -> None:
    with pytest.raises(NworError, match="min_tokens: got 5, expected 1 to max_tokens, which is 3"):
        NgramDrafter(5, 3)
    drafter = NgramDrafter()
    with pytest.raises(NworError, match="'x', which has not begun"):
        drafter.draft(["x"], TreeConfig())
    drafter.begin("x", [1, 2, 3])
    with pytest.raises(NworError, match="has already begun"):
        drafter.begin("x", [1])
    with pytest.raises(NworError, match="after the prompt, expected the prompt's own tokens"):
        drafter.observe("x", [7, 7, 4], None)
    assert not drafter.retract("x", 100)
    with pytest.raises(NworError, match="num_tokens: got -1, expected 0 or more"):
        drafter.retract("x", -1)
    with pytest.raises(NworError, match="requests: got 'x' 2 times, expected every request once"):
        drafter.draft(["x", "x"], TreeConfig())
    drafter.end("x")
    drafter.end("x")


def lookup_chain(text: list[int], depth: int) -> list[int]:
    """Prompt lookup by the same least match: what followed the last three or two tokens before."""
    for count in (3, 2):
        for start in range(len(text) - count - 1, -1, -1):
            if text[start : start + count] == text[-count:]:
                return text[start + count : start + count + depth]
    return []


def a_log(rng: random.Random, days: int) -> list[int]:
    """Lines of one pattern with changing words, as token ids."""
    line: list[int] = []
    for day in range(days):
        who, what = rng.randrange(100, 108), rng.randrange(200, 206)
        line += [1, 300 + day, 2, who, what, 3, 4, 400 + rng.randrange(12), 5, 6, 7]
        line += [8, 9, 500 + rng.randrange(90), 10, 11]
    return line


@pytest.mark.parametrize("rows", [5, 8, 16])
def test_steps_bring_what_prompt_lookup_brings(rows: int) -> None:
    """Verified against a text that is known: tokens per step, a correction or bonus included."""
    print(f"seed={SEED}")
    text = a_log(random.Random(SEED), 60)
    begin, depth = 320, rows - 1
    at, steps = begin, 0
    while at < len(text):
        chain = lookup_chain(text[:at], depth)
        agreed = next((i for i, t in enumerate(chain) if text[at + i : at + i + 1] != [t]), None)
        at += (len(chain) if agreed is None else agreed) + 1
        steps += 1
    theirs = (len(text) - begin) / steps
    drafter = make_drafter("ngram")
    drafter.begin("log", text[: begin - 1])
    drafter.observe("log", text[1:begin], None)
    at, steps = begin, 0
    while at < len(text):
        (tree,) = drafter.draft(["log"], TreeConfig(rows=rows, depth=depth, top_k=4))
        drafted = set(paths_of(tree.tokens, tree.parents))
        coming = tuple(text[at : at + depth])
        taken = next((n for n in range(len(coming), 0, -1) if coming[:n] in drafted), 0)
        run = text[at : at + taken + 1]
        drafter.observe("log", run, None)
        at += len(run)
        steps += 1
    ours = (len(text) - begin) / steps
    assert ours > 0.95 * theirs  # which of the words that change come again is chance
    assert ours > 1.5
