"""The EAGLE3 drafter: its trees against a slow head, its caches, what it ships with."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import warnings
from pathlib import Path

import pytest
import torch

from nwor_specpv import NworError
from nwor_specpv.drafters import TreeConfig, eagle3, eagle3_products, make_drafter
from nwor_specpv.drafters.eagle3 import SHIPPED, Eagle3Drafter
from nwor_specpv.drafters.eagle3_head import Eagle3Head, HeadShape
from nwor_specpv.models.weights import save_weights
from tests.python.drafters.slow_head import slow_tree

SEED = int(os.environ.get("NWOR_TEST_SEED", torch.seed() % 2**31))
VOCABULARY, HIDDEN = 90, 16
WIDTH = 3 * HIDDEN


def make_head(window: int = 9) -> Eagle3Head:
    shape = HeadShape(
        hidden=HIDDEN,
        intermediate=24,
        num_heads=4,
        num_kv_heads=2,
        head_dim=4,
        target_vocabulary=VOCABULARY,
        feature_layers=(0, 1, 2),
        window=window,
        rope_theta=100.0,
        norm_epsilon=1e-5,
    )
    weights = {
        name: torch.randn(size) * (0.3 if len(size) == 2 and name != "feature_norm" else 1.0)
        for name, size in shape.sizes().items()
    }
    return Eagle3Head(shape, weights, torch.randperm(VOCABULARY)[:60])


class Text:
    """What a host would have told of one request."""

    def __init__(self, length: int) -> None:
        self.tokens = torch.randint(VOCABULARY, (length,)).tolist()
        self.features = torch.randn(length, WIDTH)
        self.seen = set(self.tokens)  # whatever was taken back later

    def grow(self, count: int) -> tuple[list[int], torch.Tensor]:
        more = Text(count)
        self.tokens += more.tokens
        self.features = torch.cat([self.features, more.features])
        self.seen |= more.seen
        return more.tokens, more.features

    def shrink(self, count: int) -> None:
        keep = len(self.tokens) - count
        self.tokens, self.features = self.tokens[:keep], self.features[:keep]


def paths_of(tree: object) -> set[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = [()]
    for token, parent in zip(tree.tokens[1:], tree.parents[1:], strict=True):
        paths.append((*paths[parent], token))
    return set(paths[1:])


def check(
    drafter: Eagle3Drafter, head: Eagle3Head, embedding: torch.Tensor, texts: dict[str, Text],
    tree: TreeConfig,
) -> None:  # fmt: skip
    drafted = drafter.draft(list(texts), tree)
    sizes = (tree.rows, tree.depth, tree.top_k)
    for text, got in zip(texts.values(), drafted, strict=True):
        got.validate()
        assert got.tokens[0] == text.tokens[-1]
        entries = (text.features, text.tokens)
        expected = slow_tree(head, embedding, *entries, sizes, text.seen)
        paths = paths_of(got)
        assert len(paths) == len(got.tokens) - 1 == len(expected)
        if paths == set(expected):
            continue
        # Equal but for rounding: what differs scores as the last one that was taken.
        every = slow_tree(head, embedding, *entries, (10**6, tree.depth, tree.top_k), text.seen)
        last = min(expected.values())
        for path in paths ^ set(expected):
            assert every[path] == pytest.approx(last, abs=1e-3)


def test_trees_are_those_of_a_slow_head_through_every_change() -> None:
    print(f"seed={SEED}")
    torch.manual_seed(SEED)
    head, embedding = make_head(), torch.randn(VOCABULARY, HIDDEN) * 0.5
    drafter = Eagle3Drafter(head, embedding, dtype=torch.float32, min_probability=0.0)
    texts = {"a": Text(3), "b": Text(25)}  # less and more than the window
    for name, text in texts.items():
        drafter.begin(name, [])
        drafter.observe(name, text.tokens, text.features)
    for tree in (TreeConfig(9, 3, 3), TreeConfig(4, 5, 1), TreeConfig(6, 2, 4)):
        check(drafter, head, embedding, texts, tree)
        for name, text in texts.items():
            for _ in range(2):
                drafter.observe(name, *text.grow(int(torch.randint(1, 4, ()))))
        # Some of what was observed is taken back before it was used, some afterwards.
        texts["a"].shrink(2)
        assert drafter.retract("a", 2)
        drafter.observe("a", *texts["a"].grow(1))
        check(drafter, head, embedding, {"a": texts["a"]}, TreeConfig(5, 2, 2))
        texts["a"].shrink(1)
        assert drafter.retract("a", 1)
        drafter.observe("a", *texts["a"].grow(2))
    drafter.end("a")
    with pytest.raises(NworError, match="'a', which has not begun"):
        drafter.draft(["a"], tree)


def test_a_cache_that_is_full_keeps_the_window() -> None:
    torch.manual_seed(SEED)
    head, embedding = make_head(window=5), torch.randn(VOCABULARY, HIDDEN) * 0.5
    drafter = Eagle3Drafter(head, embedding, dtype=torch.float32, min_probability=0.0)
    text = Text(4)
    drafter.begin("a", [])
    drafter.observe("a", text.tokens, text.features)
    state = drafter._requests["a"]
    for _ in range(40):  # far beyond the capacity of this small window
        drafter.draft(["a"], TreeConfig(2, 1, 1))
        for _ in range(16):
            drafter.observe("a", *text.grow(1))
            drafter._make_room(state, 0)
            drafter._take_in([state])
    # Entries see earlier ones only as keys and values, so a full cache shows in the next tree.
    assert len(text.tokens) > state.keys.shape[1]
    check(drafter, head, embedding, {"a": text}, TreeConfig(5, 2, 2))


def test_growth_stops_where_deeper_rows_cannot_be_kept() -> None:
    torch.manual_seed(0)  # a head that is sure of little
    head, embedding = make_head(), torch.randn(VOCABULARY, HIDDEN) * 0.5
    drafter = Eagle3Drafter(head, embedding, dtype=torch.float32, min_probability=0.0)
    text = Text(6)
    drafter.begin("a", [])
    drafter.observe("a", text.tokens, text.features)
    steps = []
    taken = drafter._step
    drafter._step = lambda *args: steps.append(1) or taken(*args)
    assert len(drafter.draft(["a"], TreeConfig(1, 8, 2))[0]) == 1
    assert not steps
    check(drafter, head, embedding, {"a": text}, TreeConfig(3, 8, 2))
    assert 1 <= len(steps) <= 3  # of the seven there could be


@pytest.mark.parametrize(
    ("tree", "depth", "children"),
    [
        (TreeConfig(rows=64, depth=64, top_k=1), 32, 1),
        (TreeConfig(rows=256, depth=64, top_k=64), 32, 11),
        (TreeConfig(rows=256, depth=6, top_k=32), 6, 28),
        (TreeConfig(rows=256, depth=2, top_k=64), 2, 63),
        (TreeConfig(rows=64, depth=5, top_k=4), 5, 4),
    ],
)
def test_trees_stay_within_what_a_builder_takes(
    tree: TreeConfig, depth: int, children: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """32 steps and 4096 candidates: fewer children of a row then, and no more than 32 drafts."""
    torch.manual_seed(1)
    head = make_head()
    head.draft_to_target = torch.arange(VOCABULARY)
    drafter = Eagle3Drafter(
        head, torch.randn(VOCABULARY, HIDDEN), min_probability=0.0, dtype=torch.float32
    )
    monkeypatch.setattr(drafter, "_complete", lambda *_: False)  # grown to the end
    drafter.begin(0, [1, 2, 3])
    drafter.observe(0, [2, 3, 5], torch.randn(3, WIDTH))
    grown = []
    original = drafter._grow
    monkeypatch.setattr(
        drafter, "_grow", lambda *given: grown.append(original(*given)) or grown[-1]
    )
    (drafted,) = drafter.draft([0], tree)
    assert len(drafted.tokens) == min(tree.rows, 1 + sum(t.shape[1] for t in grown[0].tokens))
    assert (len(grown[0].tokens), grown[0].tokens[0].shape[1]) == (depth, children)


def test_rows_the_head_does_not_believe_in_are_left_out() -> None:
    print(f"seed={SEED}")
    torch.manual_seed(SEED)
    head, embedding = make_head(), torch.randn(VOCABULARY, HIDDEN) * 0.5
    texts = {name: Text(5) for name in "abcd"}
    sizes = (10**6, 4, 3)
    expected = [
        slow_tree(head, embedding, t.features, t.tokens, sizes, t.seen) for t in texts.values()
    ]
    middle = sorted(score for one in expected for score in one.values())
    least = math.exp(middle[int(0.8 * len(middle))] + 1e-3)  # not the score of any row
    drafter = Eagle3Drafter(head, embedding, dtype=torch.float32, min_probability=least)
    for name, text in texts.items():
        drafter.begin(name, [])
        drafter.observe(name, text.tokens, text.features)
    drafted = drafter.draft(list(texts), TreeConfig(60, 4, 3))
    assert all(len(tree) < 60 for tree in drafted)
    for tree, all_rows in zip(drafted, expected, strict=True):
        wanted = {path for path, score in all_rows.items() if score >= math.log(least)}
        assert paths_of(tree) == wanted


def test_fewer_draft_tokens_are_the_most_frequent_ones() -> None:
    torch.manual_seed(SEED)
    head, embedding = make_head(), torch.randn(VOCABULARY, HIDDEN)
    options = {"draft_vocabulary": 4, "own_tokens": 0, "min_probability": 0.0}
    drafter = Eagle3Drafter(head, embedding, **options)
    text = Text(3)
    drafter.begin("a", [])
    drafter.observe("a", text.tokens, text.features)
    (tree,) = drafter.draft(["a"], TreeConfig(40, 4, 8))
    assert set(tree.tokens[1:]) <= set(head.draft_to_target[:4].tolist())
    assert len(tree.tokens) == 1 + 4 + 3 * 16 or len(tree.tokens) == 40


def test_the_latest_rare_tokens_of_a_text_can_be_drafted() -> None:
    torch.manual_seed(SEED)
    head, embedding = make_head(), torch.randn(VOCABULARY, HIDDEN)
    common = set(head.draft_to_target.tolist())
    rare = [token for token in range(VOCABULARY) if token not in common]
    drafter = Eagle3Drafter(head, embedding, own_tokens=3, min_probability=0.0)
    drafter.begin("a", rare[:5])
    drafter.observe("a", [rare[2], rare[7]], torch.randn(2, WIDTH))
    (tree,) = drafter.draft(["a"], TreeConfig(61, 1, 60))  # 60 of the 63 there are
    latest = [rare[4], rare[2], rare[7]]
    assert drafter._own(drafter._requests["a"])[0].tolist() == latest
    assert set(tree.tokens[1:]) < common | set(latest)
    assert len(set(tree.tokens[1:])) == 60


def test_a_head_is_read_as_it_was_saved(tmp_path: Path) -> None:
    torch.manual_seed(SEED)
    head = make_head()
    head.save(tmp_path / "head.safetensors", torch.float32)
    again = Eagle3Head.load(tmp_path / "head.safetensors")
    assert again.shape == head.shape
    assert again.draft_to_target.tolist() == head.draft_to_target.tolist()
    for name, weight in head.weights.items():
        assert torch.equal(again.weights[name], weight)
    data = (tmp_path / "head.safetensors").read_bytes()
    (tmp_path / "cut.safetensors").write_bytes(data[:-100])
    with pytest.raises(NworError, match="not a readable safetensors file"):
        Eagle3Head.load(tmp_path / "cut.safetensors")


def begun(
    window: int = 9, **lengths: int
) -> tuple[Eagle3Drafter, tuple[Eagle3Head, torch.Tensor], dict[str, Text]]:
    """A drafter with texts of these lengths, all of them drafted from once."""
    head, embedding = make_head(window), torch.randn(VOCABULARY, HIDDEN) * 0.5
    drafter = Eagle3Drafter(head, embedding, dtype=torch.float32, min_probability=0.0)
    texts = {name: Text(length) for name, length in lengths.items()}
    for name, text in texts.items():
        drafter.begin(name, [])
        drafter.observe(name, text.tokens, text.features)
    drafter.draft(list(texts), TreeConfig(5, 2, 2))
    return drafter, (head, embedding), texts


@pytest.mark.parametrize(
    ("name", "calls", "taken_in"),
    [
        ("_make_room", 2, False),
        ("_project", 1, False),
        ("_attend", 1, False),
        ("_attend", 2, False),
        ("_finish", 1, False),
        ("_guess", 1, True),
        ("_project", 2, True),
        ("_finish", 3, True),
    ],
)
def test_a_draft_that_fails_leaves_every_request_as_it_was(
    name: str, calls: int, taken_in: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    print(f"seed={SEED}")
    torch.manual_seed(SEED)
    drafter, target, texts = begun(a=3, b=5, c=7)
    drafter.observe("a", *texts["a"].grow(2))
    drafter.observe("b", *texts["b"].grow(25))  # more than the window
    left, original = [1] * calls, getattr(drafter, name)

    def failing(*given: object) -> object:
        left.pop()
        if not left:
            raise RuntimeError("out of memory")
        return original(*given)

    with monkeypatch.context() as patch:
        patch.setattr(drafter, name, failing)
        with pytest.raises(RuntimeError, match="out of memory"):
            drafter.draft(list(texts), TreeConfig(9, 3, 3))
    assert drafter.retract("b", 22) is not taken_in  # then only the window's entries are there
    if not taken_in:
        texts["b"].shrink(22)
        drafter.observe("b", *texts["b"].grow(1))
    check(drafter, *target, texts, TreeConfig(9, 3, 3))


def test_a_cache_that_cannot_grow_is_left_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(SEED)
    drafter, target, texts = begun(a=5)
    monkeypatch.setattr(eagle3, "_SPARE_ENTRIES", 0)
    drafter.end("a")
    drafter.begin("a", [])  # with no more room than the window
    drafter.observe("a", texts["a"].tokens, texts["a"].features)
    drafter.draft(["a"], TreeConfig(3, 2, 2))
    drafter.observe("a", *texts["a"].grow(4))
    made, original = [], torch.Tensor.new_zeros

    def failing(*given: object) -> torch.Tensor:
        made.append(1)
        if len(made) == 2:
            raise RuntimeError("out of memory")
        return original(*given)

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "new_zeros", failing)
        with pytest.raises(RuntimeError, match="out of memory"):
            drafter.draft(["a"], TreeConfig(60, 5, 4))
    check(drafter, *target, texts, TreeConfig(9, 3, 3))


def test_a_request_named_twice_is_refused() -> None:
    torch.manual_seed(SEED)
    drafter, target, texts = begun(a=3, b=5)
    drafter.observe("a", *texts["a"].grow(2))
    with pytest.raises(NworError, match="requests: got 'a' 2 times, expected every request once"):
        drafter.draft(["a", "b", "a"], TreeConfig(5, 2, 2))
    check(drafter, *target, texts, TreeConfig(5, 2, 2))


@pytest.mark.parametrize(
    ("wrong", "window"),  # few rows and many are projected in two ways
    [(math.nan, 9), (math.inf, 9), (math.nan, 40), (-math.inf, 40)],
)
def test_features_that_are_no_numbers_cost_their_own_request_its_past(
    wrong: float, window: int
) -> None:
    print(f"seed={SEED}")
    torch.manual_seed(SEED)
    drafter, target, texts = begun(window, a=3, b=5, c=7)
    others = {name: texts[name] for name in "ac"}
    for name in others:
        drafter.observe(name, *texts[name].grow(70))
    tokens, features = texts["b"].grow(4)
    features[3, 5] = wrong
    drafter.observe("b", tokens, features)
    for _ in range(2):
        drafted = drafter.draft(["a", "b", "c"], TreeConfig(5, 2, 2))
        assert [len(tree) for tree in drafted] == [5, 1, 5]
        assert (drafted[1].tokens, drafted[1].parents) == (tokens[-1:], [-1])
    check(drafter, *target, others, TreeConfig(5, 2, 2))
    # What follows is all the head looks at; a row before it cannot be taken back.
    tokens, features = texts["b"].grow(6)
    features[2, WIDTH - 1] = wrong
    drafter.observe("b", tokens, features)
    texts["b"].tokens, texts["b"].features = tokens[3:], features[3:]
    check(drafter, *target, texts, TreeConfig(9, 3, 3))
    assert not drafter.retract("b", 4)
    texts["b"].shrink(2)
    assert drafter.retract("b", 2)
    for count in (1, 12):
        drafter.observe("b", *texts["b"].grow(count))
        check(drafter, *target, texts, TreeConfig(9, 3, 3))


def test_a_request_that_begins_again_forgets_features_that_were_no_numbers() -> None:
    torch.manual_seed(SEED)
    drafter, target, texts = begun(a=5)
    drafter.observe("a", [1], torch.full((1, WIDTH), math.nan))
    assert len(drafter.draft(["a"], TreeConfig(5, 2, 2))[0]) == 1
    assert not drafter.retract("a", 1)
    drafter.end("a")
    drafter.begin("a", [1])
    texts["a"].seen.add(1)
    drafter.observe("a", texts["a"].tokens, texts["a"].features)
    check(drafter, *target, texts, TreeConfig(9, 3, 3))


@pytest.mark.parametrize("wrong", [-1, VOCABULARY, 10**12])
def test_tokens_the_target_does_not_have_are_refused(wrong: int) -> None:
    torch.manual_seed(SEED)
    drafter, target, texts = begun(a=5)
    message = f"got {wrong}, expected 0 to {VOCABULARY - 1}"
    with pytest.raises(NworError, match=f"^tokens: {message}"):
        drafter.observe("a", [3, wrong, 4], torch.randn(3, WIDTH))
    check(drafter, *target, texts, TreeConfig(9, 3, 3))
    with pytest.raises(NworError, match=f"^prompt_ids: {message}"):
        drafter.begin("b", [3, wrong])
    drafter.begin("b", [3])


def test_no_tokens_taken_back_changes_nothing() -> None:
    torch.manual_seed(SEED)
    drafter, target, texts = begun(a=5)
    assert drafter.retract("a", 0)
    check(drafter, *target, texts, TreeConfig(9, 3, 3))
    drafter.observe("a", *texts["a"].grow(3))
    assert drafter.retract("a", 0)
    with pytest.raises(NworError, match="num_tokens: got -1, expected 0 or more"):
        drafter.retract("a", -1)
    assert not drafter.retract("a", 9)  # one more than there are
    check(drafter, *target, texts, TreeConfig(9, 3, 3))


def test_a_burst_beyond_the_window_leaves_no_gap() -> None:
    print(f"seed={SEED}")
    torch.manual_seed(SEED)
    drafter, target, texts = begun(a=6)
    text = texts["a"]
    drafter.observe("a", *text.grow(25))
    check(drafter, *target, texts, TreeConfig(9, 3, 3))
    for count in (10, 25, 31):  # the window's entries are all there is
        assert not drafter.retract("a", count)
    assert drafter.retract("a", 5)
    text.tokens, text.features = text.tokens[-9:-5], text.features[-9:-5]
    drafter.observe("a", *text.grow(2))
    check(drafter, *target, texts, TreeConfig(9, 3, 3))
    assert not drafter.retract("a", 7)


def test_wrong_use_says_what_was_expected(tmp_path: Path) -> None:
    head = make_head()
    with pytest.raises(NworError, match=r"embedding: got sizes .* trained for another target"):
        Eagle3Drafter(head, torch.zeros(VOCABULARY + 1, HIDDEN))
    with pytest.raises(NworError, match="draft_vocabulary: got 61, expected 1 to 60"):
        Eagle3Drafter(head, torch.zeros(VOCABULARY, HIDDEN), draft_vocabulary=61)
    with pytest.raises(NworError, match=r"which does not exist; .*nwor_specpv.train.eagle3"):
        make_drafter("eagle3", target=object(), weights=tmp_path / "none")
    with pytest.raises(NworError, match="own_tokens: got -1, expected 0 or more"):
        Eagle3Drafter(head, torch.zeros(VOCABULARY, HIDDEN), own_tokens=-1)
    with pytest.raises(NworError, match="min_probability: got 1, expected 0 to less than 1"):
        Eagle3Drafter(head, torch.zeros(VOCABULARY, HIDDEN), min_probability=1)
    drafter = Eagle3Drafter(head, torch.zeros(VOCABULARY, HIDDEN))
    drafter.begin("a", [1])
    with pytest.raises(NworError, match="has already begun"):
        drafter.begin("a", [1])
    with pytest.raises(NworError, match="which has observed nothing; call observe first"):
        drafter.draft(["a"], TreeConfig())
    with pytest.raises(NworError, match=r"features: got sizes None, expected \[1, 48\]"):
        drafter.observe("a", [1], None)
    assert not drafter.retract("a", 1)
    weights = dict(head.weights) | {"down": torch.zeros(2, 2)}
    with pytest.raises(NworError, match=r"weight down: got sizes \(2, 2\), expected \(16, 24\)"):
        Eagle3Head(head.shape, weights, head.draft_to_target)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"window": 0}, "window: got 0, expected a whole number, 1 or more"),
        ({"window": -5}, "window: got -5, expected a whole number, 1 or more"),
        ({"window": "16"}, "window: got '16', expected a whole number, 1 or more"),
        ({"window": True}, "window: got True, expected a whole number, 1 or more"),
        ({"hidden": 16.0}, "hidden: got 16.0, expected a whole number, 1 or more"),
        ({"intermediate": 0}, "intermediate: got 0, expected a whole number, 1 or more"),
        ({"num_heads": 0}, "num_heads: got 0, expected a whole number, 1 or more"),
        ({"num_kv_heads": 0}, "num_kv_heads: got 0, expected a whole number, 1 or more"),
        ({"target_vocabulary": None}, "target_vocabulary: got None, expected a whole number"),
        ({"num_heads": 3}, "num_heads: got 3, expected a multiple of num_kv_heads, which is 2"),
        ({"head_dim": 7}, "head_dim: got 7, expected an even number"),
        ({"feature_layers": ()}, r"feature_layers: got \(\), expected one layer or more"),
        ({"feature_layers": (-1, 0, 1)}, r"feature_layers: got \(-1, 0, 1\), expected"),
        ({"feature_layers": ("0", "1")}, r"feature_layers: got \('0', '1'\), expected"),
        ({"rope_theta": math.nan}, "rope_theta: got nan, expected a finite number above 0"),
        ({"rope_theta": math.inf}, "rope_theta: got inf, expected a finite number above 0"),
        ({"rope_theta": 0}, "rope_theta: got 0, expected a finite number above 0"),
        ({"rope_theta": "1e4"}, "rope_theta: got '1e4', expected a finite number above 0"),
        ({"norm_epsilon": -1.0}, "norm_epsilon: got -1.0, expected a finite number above 0"),
        ({"norm_epsilon": True}, "norm_epsilon: got True, expected a finite number above 0"),
    ],
)
def test_a_shape_that_cannot_be_is_refused(
    tmp_path: Path, wrong: dict[str, object], message: str
) -> None:
    head = make_head()
    with pytest.raises(NworError, match=f"^{message}"):
        dataclasses.replace(head.shape, **wrong)
    fields = json.dumps(dataclasses.asdict(head.shape) | wrong)
    tensors = {**head.weights, "draft_to_target": head.draft_to_target}
    save_weights(tmp_path / "head.safetensors", tensors, {"eagle3": fields})
    with pytest.raises(NworError, match=f"head.safetensors: not an EAGLE3 head: {message}"):
        Eagle3Head.load(tmp_path / "head.safetensors")


def test_bases_and_epsilons_may_be_whole_numbers() -> None:
    assert dataclasses.replace(make_head().shape, rope_theta=10000).rope_theta == 10000


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (torch.arange(4) - 1, "got ids from -1 to 2, expected 0 to 89"),
        (torch.arange(4) + VOCABULARY - 3, "got ids from 87 to 90, expected 0 to 89"),
        (torch.arange(4) * 0.5, "got torch.float32, expected whole numbers"),
        (torch.ones(4, dtype=torch.bool), "got torch.bool, expected whole numbers"),
        (torch.tensor([3, 1, 3, 3]), "got 4 ids of 2 tokens, expected each token once"),
        (torch.arange(4).view(2, 2), r"got sizes \[2, 2\], expected \[draft vocabulary\]"),
        (torch.tensor(1), r"got sizes \[\], expected \[draft vocabulary\]"),
        (torch.arange(0), r"got sizes \[0\], expected \[draft vocabulary\]"),
        ([0, 1], "got list, expected a tensor"),
    ],
)
def test_a_draft_vocabulary_that_cannot_be_is_refused(ids: torch.Tensor, message: str) -> None:
    head = make_head()
    with pytest.raises(NworError, match=f"^draft_to_target: {message}"):
        Eagle3Head(head.shape, head.weights, ids)


@pytest.mark.parametrize("ids", [torch.arange(4) - 1, torch.arange(4) * 0.5])
def test_a_file_with_a_wrong_draft_vocabulary_is_refused(tmp_path: Path, ids: torch.Tensor) -> None:
    head, path = make_head(), tmp_path / "head.safetensors"
    fields = json.dumps(dataclasses.asdict(head.shape))
    save_weights(path, {**head.weights, "draft_to_target": ids}, {"eagle3": fields})
    with pytest.raises(NworError, match=r"head\.safetensors: .*draft_to_target: got "):
        Eagle3Head.load(path)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32])
def test_draft_vocabularies_of_any_integer_type_are_read_the_same(dtype: torch.dtype) -> None:
    head = make_head()
    again = Eagle3Head(head.shape, head.weights, head.draft_to_target.to(dtype))
    assert again.draft_to_target.dtype == torch.int64
    assert torch.equal(again.draft_to_target, head.draft_to_target)


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_weights_that_are_no_numbers_are_refused(tmp_path: Path, wrong: float) -> None:
    head, path = make_head(), tmp_path / "head.safetensors"
    head.weights["fuse"][0, :2] = wrong
    message = "weight fuse: got 2 of 768 values not finite, expected none"
    with pytest.raises(NworError, match=f"^{message}"):
        Eagle3Head(head.shape, head.weights, head.draft_to_target)
    head.save(path)
    with pytest.raises(NworError, match=rf"head\.safetensors: .*{message}"):
        Eagle3Head.load(path)


def test_the_shipped_head_is_small_and_fits_its_model() -> None:
    assert SHIPPED.stat().st_size <= 15_000_000
    head = Eagle3Head.load(SHIPPED)
    assert (head.shape.hidden, head.shape.target_vocabulary) == (576, 49152)
    assert len(head.shape.feature_layers) == 3
    assert head.num_parameters < 7_500_000
    assert len(set(head.draft_to_target.tolist())) == len(head.draft_to_target)
    assert all(bool(weight.isfinite().all()) for weight in head.weights.values())


@pytest.mark.parametrize("rows", [3, 200])
@pytest.mark.parametrize("multiplies", [True, False])
def test_products_of_bfloat16_weights(
    monkeypatch: pytest.MonkeyPatch, rows: int, multiplies: bool
) -> None:
    """By whatever way they are made, and without torch's warning where the CPU has none."""
    native = eagle3_products._multiplies_bfloat16()
    if multiplies and not native:
        pytest.skip("this CPU does not multiply bfloat16")
    monkeypatch.setattr(eagle3_products, "_multiplies_bfloat16", lambda: multiplies)
    given, weight = torch.randn(rows, 96), torch.randn(40, 96).bfloat16()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = eagle3_products.multiply(given, weight)
    assert found.dtype == torch.float32
    expected = given.double() @ weight.double().T
    assert (found - expected).abs().max() < 0.02 * expected.abs().max()


def test_long_contexts_are_read_without_a_warning_of_torch() -> None:
    """Its bfloat16 product warns, with a trace, where the CPU has none."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        eagle3_products.multiply(torch.randn(200, 96), torch.randn(40, 96).bfloat16())
