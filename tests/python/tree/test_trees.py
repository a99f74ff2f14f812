"""Trees from parents and top-k steps: structure against sets and searches."""

from __future__ import annotations

import random
import struct

import pytest
import torch

from nwor_specpv import (
    _C,
    NworError,
    Tree,
    describe_status,
    tree_from_chain,
    tree_from_parents,
    tree_from_topk,
)
from tests.python.tree.forest import DEVICES, SEED, ancestors, links_of, random_parents

INT32 = torch.int32


def ints(values, device: str = "cpu") -> torch.Tensor:
    return torch.tensor(values, dtype=INT32, device=device)


def assert_is(tree: Tree, parents: list[list[int]], prefix_lens: list[int]) -> None:
    """Every field of the tree, against what the parents say."""
    rows = len(parents[0])
    assert tree.mask.shape == (len(parents), rows, (rows + 63) // 64)
    assert tree.positions.dtype == torch.int64
    assert tree.status.tolist() == [0] * len(parents)
    assert bool(tree.is_valid)
    dense = tree.dense_mask().cpu()
    for b, above in enumerate(parents):
        depths = [len(ancestors(above, row)) - 1 for row in range(rows)]
        assert tree.parents[b].tolist() == above
        assert tree.depths[b].tolist() == depths
        assert tree.positions[b].tolist() == [prefix_lens[b] + depth for depth in depths]
        first, following = links_of(above)
        assert tree.first_child[b].tolist() == first
        assert tree.next_sibling[b].tolist() == following
        for row in range(rows):
            words = [word % 2**64 for word in tree.mask[b, row].tolist()]
            seen = {i for i in range(64 * len(words)) if words[i // 64] >> (i % 64) & 1}
            assert seen == set(ancestors(above, row))
            assert set(dense[b, row].nonzero().flatten().tolist()) == seen


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rows", [1, 2, 7, 63, 64, 65, 128, 200, 256])
def test_follows_from_the_parents(device: str, rows: int) -> None:
    print(f"seed={SEED}")
    rng = random.Random(SEED + rows)
    parents = [random_parents(rows, rng) for _ in range(3)]
    lens = [rng.randrange(10**6) for _ in parents]
    tokens = torch.randint(0, 99, (3, rows), dtype=INT32).to(device)
    tree = tree_from_parents(ints(parents, device), ints(lens, device), tokens)
    assert_is(tree, parents, lens)
    assert torch.equal(tree.tokens, tokens.long())


@pytest.mark.parametrize("device", DEVICES)
def test_takes_any_strides_and_both_integer_types(device: str) -> None:
    parents = [[-1, 0, 0, 1], [-1, 0, 1, 2]]
    given = torch.tensor(parents, device=device).t().contiguous().t()
    lens = torch.tensor([5, 0, 6, 0], device=device)[::2]
    assert_is(tree_from_parents(given, lens), parents, [5, 6])


@pytest.mark.parametrize("device", DEVICES)
def test_padding_sees_nothing_and_leads_nowhere(device: str) -> None:
    given = ints([[-1, 0, 0, 77, -9], [-1, 0, 1, 2, 3]], device)
    tree = tree_from_parents(given, ints([5, 6], device), num_rows=ints([3, 5], device))
    assert tree.status.tolist() == [0, 0]
    assert tree.parents.tolist() == [[-1, 0, 0, -1, -1], [-1, 0, 1, 2, 3]]
    assert tree.first_child.tolist() == [[1, -1, -1, -1, -1], [1, 2, 3, 4, -1]]
    assert tree.next_sibling.tolist() == [[-1, 2, -1, -1, -1], [-1] * 5]
    assert tree.mask[0, :, 0].tolist() == [1, 3, 5, 0, 0]


@pytest.mark.parametrize("device", DEVICES)
def test_dense_mask_with_prefix_columns(device: str) -> None:
    tree = tree_from_parents(ints([[-1, 0, 0], [-1, 0, 1]], device), ints([2, 4], device))
    full = tree.dense_mask(ints([2, 4], device))
    assert full.shape == (2, 3, 7)
    assert full.int().tolist() == [
        [[1, 1, 1, 0, 0, 0, 0], [1, 1, 1, 1, 0, 0, 0], [1, 1, 1, 0, 1, 0, 0]],
        [[1, 1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1, 1]],
    ]
    assert torch.equal(tree.dense_mask([0, 0]), tree.dense_mask())
    with pytest.raises(NworError, match=r"prefix_lens: got sizes \[1\], expected \[2\]"):
        tree.dense_mask([3])


@pytest.mark.parametrize("device", DEVICES)
def test_chains_are_trees(device: str) -> None:
    tokens = torch.arange(8, device=device).view(2, 4)
    tree = tree_from_chain(tokens, ints([3, 4], device))
    assert_is(tree, [[-1, 0, 1, 2]] * 2, [3, 4])
    assert torch.equal(tree.tokens, tokens)


WRONG_TREES = [
    ([0, 0], "root_parent", 0, 0, r"parents\[0, 0\]: got 0, expected -1"),
    ([-1, 0, -1], "second_root", 2, -1, r"parents\[0, 2\]: got -1, expected 0 .. 1"),
    ([-1, 3, 0, 0], "forward_parent", 1, 3, r"parents\[0, 1\]: got 3, expected 0 .. 0"),
    ([-1, 2, 1, 0], "cycle", 1, 2, r"parents\[0, 1\]: got 2.*its own ancestor"),
    ([-1, 1, 0], "cycle", 1, 1, r"parents\[0, 1\]: got 1.*its own ancestor"),
    ([-1, 0, 3], "parent_range", 2, 3, r"parents\[0, 2\]: got 3, expected 0 .. 1"),
    ([-1, 0, -2], "parent_range", 2, -2, r"parents\[0, 2\]: got -2"),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", range(len(WRONG_TREES)))
def test_an_invalid_tree_is_named(device: str, case: int) -> None:
    parents, label, row, value, message = WRONG_TREES[case]
    if device == "cpu":
        with pytest.raises(NworError, match=message):
            tree_from_parents(ints([parents]), ints([7]))
        return
    good = list(range(-1, len(parents) - 1))
    tree = tree_from_parents(ints([good, parents, good], device), ints([7, 8, 9], device))
    words = tree.status.tolist()
    assert words[0] == words[2] == 0
    assert not bool(tree.is_valid)
    assert describe_status(words[1]).startswith(f"{label} at row {row} (value {value})")
    with pytest.raises(NworError, match="request 1"):
        tree.check()
    # A tree of its root alone: nothing can be accepted below it.
    assert tree.first_child[1].tolist() == [-1] * len(parents)
    assert tree.next_sibling[1].tolist() == [-1] * len(parents)
    assert tree.mask[1, :, 0].tolist() == [1 << i for i in range(len(parents))]
    assert tree.positions[1].tolist() == [8] * len(parents)
    assert tree.parents[0].tolist() == good


# ---- top-k steps ------------------------------------------------------------------------------


def drafted(batch: int, k: int, steps: int, rng: random.Random, values: int = 1000):
    """What a top-k drafter gives: candidates as dictionaries, and the three lists of tensors."""
    tokens, scores, kept = [], [], []
    requests = []
    for _ in range(batch):
        candidates: dict[int, dict] = {}
        parents = [None]
        lists: dict[str, list] = {"tokens": [], "scores": [], "kept": []}
        for step in range(steps):
            base = 0 if step == 0 else k + k * k * (step - 1)
            made = []
            for slot, parent in enumerate(parents):
                for child in range(k):
                    above = 1.0 if parent is None else candidates[parent]["score"]
                    share = rng.randrange(1, values + 1) / values
                    score = torch.tensor(above * share).item()  # float32, as a drafter's
                    one = {"token": rng.randrange(1000), "score": score, "parent": parent}
                    candidates[base + slot * k + child] = {**one, "step": step}
                    made.append(base + slot * k + child)
            best = sorted(made, key=lambda i: (-candidates[i]["score"], i))[:k]
            lists["tokens"].append([candidates[i]["token"] for i in made])
            lists["scores"].append([candidates[i]["score"] for i in made])
            lists["kept"].append(best)
            # EAGLE keeps all of step 0 as parents, in order.
            parents = made if step == 0 else best
            lists["kept"][-1] = parents
        requests.append(candidates)
        tokens.append(lists["tokens"])
        scores.append(lists["scores"])
        kept.append(lists["kept"])

    def per_step(lists, dtype):
        return [torch.tensor([one[s] for one in lists], dtype=dtype) for s in range(steps)]

    return (
        requests,
        per_step(tokens, torch.int64),
        per_step(scores, torch.float32),
        per_step(kept, torch.int64),
    )


def best_rows(candidates: dict[int, dict], count: int) -> tuple[list[int], list[int]]:
    """Parents and candidate ids of the rows: a child competes with no more than its parent has."""

    def standing(i: int) -> float:
        parent = candidates[i]["parent"]
        own = candidates[i]["score"]
        return own if parent is None else min(own, standing(parent))

    chosen = sorted(sorted(candidates, key=lambda i: (-standing(i), i))[:count])
    row_of = {i: row for row, i in enumerate(chosen, 1)}
    parents = [-1] + [
        0 if candidates[i]["parent"] is None else row_of[candidates[i]["parent"]] for i in chosen
    ]
    return parents, chosen


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("k", "steps", "rows", "values"),
    [(8, 5, 64, 1000), (4, 3, 8, 3), (3, 6, 40, 1), (1, 5, 6, 7), (2, 2, 7, 2), (10, 4, 256, 50),
     (16, 8, 200, 9), (1, 1, 1, 4), (5, 1, 6, 4)],
)  # fmt: skip
def test_takes_the_best_candidates_with_their_parents(
    device: str, k: int, steps: int, rows: int, values: int
) -> None:
    print(f"seed={SEED}")
    rng = random.Random(SEED + rows)
    requests, tokens, scores, kept = drafted(3, k, steps, rng, values)
    roots = torch.tensor([7, 8, 9], device=device)
    lens = ints([100, 0, 5], device)

    def on(parts):
        return [part.to(device) for part in parts]

    tree = tree_from_topk(on(tokens), on(scores), on(kept), roots, lens, rows)
    expected = [best_rows(candidates, rows - 1) for candidates in requests]
    assert_is(tree, [parents for parents, _ in expected], [100, 0, 5])
    for b, (_, chosen) in enumerate(expected):
        drafts = [requests[b][i]["token"] for i in chosen]
        assert tree.tokens[b].tolist() == [7 + b, *drafts]


@pytest.mark.parametrize("device", DEVICES)
def test_the_forms_engines_give_steps_in(device: str) -> None:
    rng = random.Random(5)
    _, tokens, scores, kept = drafted(2, 4, 3, rng)
    tokens, scores, kept = ([p.to(device) for p in parts] for parts in (tokens, scores, kept))
    roots, lens = torch.tensor([1, 2], device=device), ints([3, 4], device)
    expected = tree_from_topk(tokens, scores, kept, roots, lens, 12)
    root = torch.full((2, 1), -1, device=device)
    forms = [
        (tokens, scores, kept[:2]),
        (tokens, scores, [torch.cat([root, kept[0]], 1), *kept[1:]]),  # EAGLE: -1 and step 0's
        (tokens, scores, [root, kept[0], kept[1]]),
        (tokens, scores, [root.expand(2, 4), kept[0], kept[1]]),  # each step with its parents
        (tokens, scores, [torch.cat([root.expand(2, 4), *kept], 1)]),
        (tokens, scores, [torch.cat([root, *kept[:2]], 1)]),
        (
            [tokens[0].int(), *(t.view(2, 4, 4) for t in tokens[1:])],
            [scores[0].view(2, 1, 4), *(s.view(2, 4, 4) for s in scores[1:])],
            [k.int() for k in kept],
        ),
    ]
    for form in forms:
        got = tree_from_topk(*form, roots, lens, 12)
        for name in ("tokens", "parents", "mask", "first_child", "next_sibling"):
            assert torch.equal(getattr(got, name), getattr(expected, name))


@pytest.mark.parametrize("device", DEVICES)
def test_a_child_that_outscores_its_parent_does_not_dangle(device: str) -> None:
    tokens = [torch.tensor([[10, 11]]), torch.tensor([[20, 21, 22, 23]])]
    scores = [torch.tensor([[0.9, 0.1]]), torch.tensor([[0.2, 0.05, 0.8, 0.7]])]
    kept = [torch.tensor([[0, 1]])]
    parts = [[p.to(device) for p in parts] for parts in (tokens, scores, kept)]
    root, lens = torch.tensor([5], device=device), ints([0], device)
    tree = tree_from_topk(*parts, root, lens, 4)
    # 22 and 23 score above their parent 11 (0.1), so they stand with it: 10, 20, then 11.
    assert tree.tokens.tolist() == [[5, 10, 11, 20]]
    assert tree.parents.tolist() == [[-1, 0, 0, 1]]
    tree = tree_from_topk(*parts, root, lens, 5)
    assert tree.tokens.tolist() == [[5, 10, 11, 20, 22]]
    assert tree.parents.tolist() == [[-1, 0, 0, 1, 2]]


@pytest.mark.parametrize("device", DEVICES)
def test_a_parent_kept_twice_has_all_the_children(device: str) -> None:
    tokens = [torch.tensor([[10, 11]]), torch.tensor([[20, 21, 22, 23]])]
    scores = [torch.tensor([[0.9, 0.1]]), torch.tensor([[0.8, 0.7, 0.6, 0.5]])]
    parts = [[p.to(device) for p in parts] for parts in (tokens, scores, [torch.tensor([[0, 0]])])]
    root, lens = torch.tensor([5], device=device), ints([0], device)
    tree = tree_from_topk(*parts, root, lens, 7)
    assert_is(tree, [[-1, 0, 0, 1, 1, 1, 1]], [0])


@pytest.mark.parametrize("device", DEVICES)
def test_wrong_steps_are_named_or_marked(device: str) -> None:
    rng = random.Random(6)
    _, tokens, scores, kept = drafted(2, 3, 3, rng)
    tokens, scores, kept = ([p.to(device) for p in parts] for parts in (tokens, scores, kept))
    rest = (torch.tensor([1, 2], device=device), ints([3, 4], device))
    score = [s.clone() for s in scores]
    score[1][1, 4] = float("nan")
    keep = [s.clone() for s in kept]
    keep[1][1, 2] = 1  # a candidate of step 0
    for steps, label, message in (
        ((tokens, score, kept), "score", r"score_steps: got NaN for candidate 7 of request 1"),
        ((tokens, scores, keep), "kept_range", r"parent_steps: got candidate 1 in request 1"),
    ):
        if device == "cpu":
            with pytest.raises(NworError, match=message):
                tree_from_topk(*steps, *rest, 9)
            continue
        tree = tree_from_topk(*steps, *rest, 9)
        words = tree.status.tolist()
        assert words[0] == 0
        assert describe_status(words[1]).startswith(label)
        assert tree.first_child[1].tolist() == [-1] * 9
        assert tree.tokens[:, 0].tolist() == [1, 2]


def word(label: str, row: int, value: int | float) -> int:
    """A status word as a device would write it."""
    code = [name for name, _ in _C.TREE_FAULTS].index(label)
    kind = "<f" if isinstance(value, float) else "<i"
    (bits,) = struct.unpack("<i", struct.pack(kind, value))
    return code | row << 8 | bits << 32


@pytest.mark.parametrize(
    ("label", "row", "value", "said"),
    [
        ("coin", 2, 1.5, "coin at row 2 (value 1.5), expected ok: a coin is outside"),
        ("probability", 1, -0.25, "probability at row 1 (value -0.25), expected ok"),
        ("probability", 1, 0.0, "probability at row 1, expected ok"),
        ("probability_sum", 0, 0.5, "probability_sum at row 0 (value 0.5), expected ok"),
        ("draft_sum", 0, 2.5, "draft_sum at row 0 (value 2.5), expected ok"),
        ("parameter", 3, 1, "parameter at row 3 (temperature), expected ok"),
        ("parameter", 0, 3, "parameter at row 0 (top_p), expected ok"),
        ("parameter", 0, 7, "parameter at row 0 (presence_penalty), expected ok"),
        ("parameter", 0, 9, "parameter at row 0 (value 9), expected ok"),
        ("logits", 4, 0, "logits at row 4, expected ok"),
        ("link", 4, -2, "link at row 4 (value -2), expected ok"),
        ("ok", 0, 0, "ok"),
    ],
)
def test_status_words_are_described(label: str, row: int, value: float, said: str) -> None:
    assert describe_status(word(label, row, value)).startswith(said)


def test_a_status_word_of_no_fault_we_know_is_described() -> None:
    assert describe_status(200 | 3 << 8 | 7 << 32) == "unknown fault 200 at row 3 (value 7)"
