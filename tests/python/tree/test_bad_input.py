"""Wrong arguments of acceptance: named, with what was got and expected; on CUDA marked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from nwor_specpv import (
    NworError,
    accept_chain_sampling,
    accept_greedy,
    accept_sampling,
    describe_status,
    make_coins,
    target_probs,
    tree_from_chain,
    tree_from_parents,
    tree_from_topk,
)
from tests.python.tree.forest import DEVICES, links_of

INT32 = torch.int32
NAN = float("nan")


def good(device: str) -> dict[str, torch.Tensor]:
    first, following = links_of([-1, 0, 0, 1])
    return {
        "tokens": torch.tensor([[0, 1, 2, 3]] * 2, device=device),
        "target_probs": torch.full((2, 4, 5), 0.2, device=device),
        "first_child": torch.tensor([first] * 2, dtype=INT32, device=device),
        "next_sibling": torch.tensor([following] * 2, dtype=INT32, device=device),
        "coins": torch.full((2, 4), 0.1, device=device),
        "final_coins": torch.full((2,), 0.5, device=device),
    }


def changed(argument: str, index: Any, value: float) -> Callable[[dict], torch.Tensor]:
    def change(given: dict[str, torch.Tensor]) -> torch.Tensor:
        tensor = given[argument].clone()
        tensor[index] = value
        return tensor

    return change


# label of the fault, the argument, its change, the message on the CPU
VALUES = [
    ("token", "tokens", changed("tokens", (1, 2), 5), r"tokens\[1, 2\]: got 5, expected a token"),
    ("token", "tokens", changed("tokens", (1, 1), -1), r"tokens\[1, 1\]: got -1"),
    ("coin", "coins", changed("coins", (1, 2), 1.5), r"coins\[1, 2\]: got 1.5, expected 0 .. 1"),
    ("coin", "coins", changed("coins", (1, 0), -0.1), r"coins\[1, 0\]: got -0.1"),
    ("coin", "coins", changed("coins", (1, 0), NAN), r"coins\[1, 0\]: got nan"),
    ("coin", "final_coins", changed("final_coins", 1, 2.0), r"final_coins\[1\]: got 2, expected"),
    ("link", "first_child", changed("first_child", (1, 1), 1), r"first_child .*\[1, 1\]: got 1"),
    ("link", "first_child", changed("first_child", (1, 1), 4), r"\[1, 1\]: got 4, .* at most 3"),
    ("link", "next_sibling", changed("next_sibling", (1, 2), 0), r"next_sibling\[1, 2\]: got 0"),
    ("link", "next_sibling", changed("next_sibling", (1, 2), -2), r"\[1, 2\]: got -2"),
    (
        "shared_row",
        "first_child",
        changed("first_child", (1, 2), 3),
        r"got 2 links to row 3 of request 1, expected one at most",
    ),
    (
        "shared_row",
        "next_sibling",
        changed("next_sibling", (1, 2), 3),
        r"got 2 links to row 3 of request 1, expected one at most",
    ),
    ("token", "tokens", changed("tokens", (1, 2), 2**32 + 1), r"tokens\[1, 2\]: got 2147483647"),
    (
        "probability",
        "target_probs",
        changed("target_probs", (1, 0, 1), -0.2),
        r"^target_probs\[1, 0\]: got -0.2",
    ),
    ("probability", "target_probs", changed("target_probs", (1, 0, 1), NAN), r"\[1, 0\]: got nan"),
    ("probability", "target_probs", changed("target_probs", (1, 3, 4), NAN), r"\[1, 3\]: got nan"),
    ("probability", "target_probs", changed("target_probs", (1, 0, 1), 1.5), r"\[1, 0\]: got 1.5"),
    (
        "probability_sum",
        "target_probs",
        changed("target_probs", (1, 3, 4), 0.4),
        r"target_probs\[1, 3\]: got a sum of 1.2, expected 1",
    ),
    (
        "probability_sum",
        "target_probs",
        changed("target_probs", (1, 3), 0.0),
        r"target_probs\[1, 3\]: got a sum of 0",
    ),
    (
        "probability_sum",
        "target_probs",
        changed("target_probs", (1, 3), 1.0),
        r"target_probs\[1, 3\]: got a sum of 5",
    ),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", range(len(VALUES)))
def test_wrong_values_are_named_or_marked(device: str, case: int) -> None:
    label, argument, change, message = VALUES[case]
    given = good(device)
    given[argument] = change(given)
    if device == "cpu":
        with pytest.raises(NworError, match=message):
            accept_sampling(**given)
        return
    status = torch.full((2,), 7, device=device)
    path, counts, following = accept_sampling(**given, status=status)
    words = status.tolist()
    assert words[0] == 0
    assert describe_status(words[1]).startswith(label + " "), describe_status(words[1])
    assert path[1].tolist() == [-1] * 4
    assert (int(counts[1]), int(following[1])) == (0, -1)
    assert (path[0, :2].tolist(), int(counts[0])) == ([1, 3], 2)


@pytest.mark.parametrize("device", DEVICES)
def test_what_the_walk_does_not_read_may_be_anything(device: str) -> None:
    given = good(device)
    given["target_probs"][:, 2] = NAN  # the walk goes 0, 1, 3
    path, *_ = accept_sampling(**given)
    assert path.tolist() == [[1, 3, -1, -1]] * 2


@pytest.mark.parametrize("device", DEVICES)
def test_greedy_marks_wrong_links(device: str) -> None:
    given = good(device)
    wrong = changed("next_sibling", (1, 1), 1)(given)
    tokens, first = given["tokens"], given["first_child"]
    if device == "cpu":
        with pytest.raises(NworError, match=r"\[1, 1\]: got 1, expected -1 or a later row"):
            accept_greedy(tokens, tokens, first, wrong)
        return
    status = torch.full((2,), 7, device=device)
    _, counts, following = accept_greedy(tokens, tokens, first, wrong, status=status)
    assert describe_status(status.tolist()[1]).startswith("link")
    assert (int(counts[1]), int(following[1])) == (0, -1)
    assert int(following[0]) >= 0


@pytest.mark.parametrize("device", DEVICES)
def test_chains_mark_their_own(device: str) -> None:
    given = good(device)
    chain = [given[name] for name in ("tokens", "target_probs")]
    coins = [given[name] for name in ("coins", "final_coins")]
    draft = torch.full((2, 3, 5), 0.2, device=device)
    draft[1, 0, 1] = NAN
    short = torch.tensor([3, 4], device=device)
    for table, drafts, label, message in (
        (draft, None, "probability", r"draft_probs\[1, 0\]: got nan"),
        (None, short, "row_count", r"num_drafts\[1\]: got 4, expected 0 .. 3"),
        (None, -short, "row_count", r"num_drafts\[0\]: got -3"),
    ):
        if device == "cpu":
            with pytest.raises(NworError, match=message):
                accept_chain_sampling(*chain, table, *coins, num_drafts=drafts)
            continue
        status = torch.full((2,), 7, device=device)
        _, _, following = accept_chain_sampling(
            *chain, table, *coins, num_drafts=drafts, status=status
        )
        assert describe_status(status.tolist()[1]).startswith(label)
        assert int(following[1]) == -1


@pytest.mark.parametrize("device", DEVICES)
def test_greedy_marks_rows_with_two_parents(device: str) -> None:
    given = good(device)
    shared = changed("first_child", (1, 2), 3)(given)
    tokens, following = given["tokens"], given["next_sibling"]
    if device == "cpu":
        with pytest.raises(NworError, match="got 2 links to row 3 of request 1"):
            accept_greedy(tokens, tokens, shared, following)
        return
    status = torch.full((2,), 7, device=device)
    _, counts, next_token = accept_greedy(tokens, tokens, shared, following, status=status)
    assert status.tolist()[0] == 0
    assert describe_status(status.tolist()[1]).startswith("shared_row at row 3 (value 2)")
    assert (int(counts[1]), int(next_token[1])) == (0, -1)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("token", [5, -1, 2**32])
def test_sampling_looks_at_tokens_off_the_walk(device: str, token: int) -> None:
    """A row that links lead to has a token, whether the walk comes by or not."""
    given = good(device)
    given["tokens"][1, 3] = token  # below row 1, which nothing accepts
    given["target_probs"][:] = torch.tensor([0.0, 0.0, 0.0, 0.0, 1.0])
    if device == "cpu":
        with pytest.raises(NworError, match=r"tokens\[1, 3\]: got "):
            accept_sampling(**given)
        return
    status = torch.full((2,), 7, device=device)
    _, counts, following = accept_sampling(**given, status=status)
    assert describe_status(status.tolist()[1]).startswith("token at row 3 ")
    assert (int(counts[1]), int(following[1])) == (0, -1)
    assert (status.tolist()[0], int(following[0])) == (0, 4)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("rest", "total"), [(0.3, "2.1"), (0.0, "0.9")])
@pytest.mark.parametrize("vocabulary", [5, 3000])
def test_draft_probabilities_sum_to_one_where_all_are_read(
    device: str, rest: float, total: str, vocabulary: int
) -> None:
    given = good(device)
    given["coins"].fill_(0.9)
    target, draft = (torch.zeros(2, rows, vocabulary, device=device) for rows in (4, 3))
    target[..., :5] = 0.2
    draft[0, :, 1] = 1.0
    draft[1, :, :5] = rest
    draft[1, :, 1] = 0.9  # rejects, as the coin is above 0.2 / 0.9
    chain = (given["tokens"], target, draft, given["coins"], given["final_coins"])
    if device == "cpu":
        with pytest.raises(NworError, match=rf"draft_probs\[1, 0\]: got a sum of {total}"):
            accept_chain_sampling(*chain)
        return
    status = torch.full((2,), 7, device=device)
    _, counts, following = accept_chain_sampling(*chain, status=status)
    words = status.tolist()
    assert words[0] == 0
    assert describe_status(words[1]).startswith(f"draft_sum at row 0 (value {total}")
    assert (int(counts[1]), int(following[1])) == (0, -1)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("length", [-3, -(2**31), -(2**32), 2**31, 2**32 + 7])
def test_prefix_lengths_are_named_or_marked(device: str, length: int) -> None:
    lens = torch.tensor([4, length], device=device)
    tokens = torch.zeros(2, 3, dtype=torch.int64, device=device)
    scores = torch.zeros(2, 3, device=device)
    for build in (
        lambda: tree_from_chain(tokens, lens),
        lambda: tree_from_topk([tokens], [scores], [], tokens[:, 0], lens, 3),
    ):
        if device == "cpu":
            told = max(-(2**31), min(length, 2**31 - 1))
            with pytest.raises(NworError, match=rf"prefix_lens\[1\]: got {told}, expected 0 .. "):
                build()
            continue
        tree = build()
        words = tree.status.tolist()
        assert words[0] == 0
        assert describe_status(words[1]).startswith("prefix_len ")
        assert tree.positions[1].tolist() == [0, 0, 0]
        assert tree.first_child[1].tolist() == [-1, -1, -1]
        assert tree.positions[0].tolist()[0] == 4


WRAPPED = [2**32, 2**32 + 1, 2**63 - 1, -(2**32) + 1, -(2**63)]


@pytest.mark.parametrize("wide", WRAPPED)
@pytest.mark.parametrize("device", DEVICES)
def test_numbers_beyond_32_bits_do_not_wrap_around(device: str, wide: int) -> None:
    """int64 where 32 bits are kept: such a number is none of those that are fine."""
    given = good(device)
    tokens, links = (
        given["tokens"],
        [given[name].long() for name in ("first_child", "next_sibling")],
    )
    lens, two = torch.tensor([4, 4], device=device), torch.tensor([1, wide], device=device)
    parents = torch.tensor([[-1, 0], [-1, wide]], device=device)
    first = links[0].clone()
    first[1, 1] = wide
    status = torch.zeros(2, dtype=torch.int64, device=device)

    def tree(**more: Any) -> None:
        built = tree_from_parents(
            more.get("parents", parents[:1].expand(2, 2)),
            lens,
            num_rows=more.get("num_rows"),
        )
        status.copy_(built.status)

    chain = (tokens, given["target_probs"], None, given["coins"], given["final_coins"])
    calls = {
        "parents": lambda: tree(parents=parents),
        "num_rows": lambda: tree(num_rows=two),
        "first_child": lambda: accept_greedy(tokens, tokens, first, links[1], status=status),
        "num_drafts": lambda: accept_chain_sampling(*chain, num_drafts=two, status=status),
    }
    told = max(-(2**31), min(wide, 2**31 - 1))
    for name, run in calls.items():
        if device == "cpu":
            with pytest.raises(NworError, match=rf"{name}.*\[1(, 1|, 0)?\]: got {told}, expected"):
                run()
            continue
        run()
        words = status.tolist()
        assert words[0] == 0
        assert f"(value {told})" in describe_status(words[1]), name


@pytest.mark.parametrize("device", DEVICES)
def test_more_than_32_bits_may_mean_all(device: str) -> None:
    logits = torch.tensor([[[1.0, 2.0, 3.0]]] * len(WRAPPED[:3]), device=device)
    large = torch.tensor(WRAPPED[:3], device=device)
    assert torch.equal(target_probs(logits, top_k=large), target_probs(logits))


@pytest.mark.parametrize("device", DEVICES)
def test_counts_of_output_do_not_wrap_around(device: str) -> None:
    """The largest count there is, and a draft more."""
    logits = torch.zeros(1, 2, 3, device=device)
    tree = torch.tensor([[0, 1]], device=device), torch.tensor([[-1, 0]], device=device)
    for many in (2**31 - 1, 2**32):
        counts = torch.tensor([[0, many, 0]], device=device)
        probs = target_probs(
            logits, presence_penalty=50.0, output_counts=counts, tokens=tree[0], parents=tree[1]
        )
        assert probs[0, 1].tolist() == pytest.approx([0.5, 0.0, 0.5])


# argument, its change, the message
SHAPES: list[tuple[str, Callable[[dict], Any], str]] = [
    ("tokens", lambda g: g["tokens"][0], r"tokens: got sizes \[4\], expected \[any, any\]"),
    ("tokens", lambda g: g["tokens"].float(), "tokens: got dtype Float, expected int32 or int64"),
    ("tokens", lambda g: g["tokens"][:, :0], "tokens: got 0 rows, expected 1 .. 256"),
    ("tokens", lambda g: g["tokens"].repeat(1, 65), "tokens: got 260 rows, expected 1 .. 256"),
    ("target_probs", lambda g: g["target_probs"][:1], "target_probs: got sizes"),
    ("target_probs", lambda g: g["target_probs"][:, :3], "target_probs: got sizes"),
    ("target_probs", lambda g: g["target_probs"][..., :0], "target_probs: got a vocabulary of 0"),
    ("target_probs", lambda g: g["target_probs"].half(), "target_probs: got dtype Half"),
    ("first_child", lambda g: g["first_child"][:, :3], "first_child: got sizes"),
    ("next_sibling", lambda g: g["next_sibling"].float(), "next_sibling: got dtype Float"),
    ("coins", lambda g: g["coins"][:, :3], r"coins: got sizes \[2, 3\], expected \[2, 4\]"),
    ("coins", lambda g: g["coins"].double(), "coins: got dtype Double, expected float32"),
    ("final_coins", lambda g: g["final_coins"][:1], r"final_coins: got sizes \[1\]"),
    ("threshold_single", lambda g: 0.0, "threshold_single: got 0, expected more than 0, at most 1"),
    ("threshold_acc", lambda g: 1.1, "threshold_acc: got 1.1, expected"),
    ("threshold_acc", lambda g: NAN, "threshold_acc: got nan, expected"),
    ("status", lambda g: torch.zeros(3).long().to(g["coins"].device), "status: got sizes"),
    ("status", lambda g: torch.zeros(2).to(g["coins"].device), "status: got dtype Float"),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", range(len(SHAPES)))
def test_wrong_shapes_types_and_numbers_are_named(device: str, case: int) -> None:
    argument, change, message = SHAPES[case]
    given: dict[str, Any] = good(device)
    given[argument] = change(given)
    with pytest.raises(NworError, match=message):
        accept_sampling(**given)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda t, n: tree_from_parents(n(1, 257).long(), n(1).int()), "parents: got 257 rows"),
        (lambda t, n: tree_from_parents(n(1, 0).int(), n(1).int()), "parents: got 0 rows"),
        (lambda t, n: tree_from_parents(n(1, 2), n(1).int()), "parents: got dtype Float"),
        (lambda t, n: tree_from_parents(t, n(2).int()), r"prefix_lens: got sizes \[2\]"),
        (lambda t, n: tree_from_parents(t, n(1).int() - 3), r"prefix_lens\[0\]: got -3"),
        (lambda t, n: tree_from_parents(t, n(1).int(), n(1, 3).int()), "tokens: got sizes"),
        (
            lambda t, n: tree_from_parents(t, n(1).int(), n(1, 2)),
            "tokens: got dtype torch.float32, expected torch.int32 or torch.int64",
        ),
        (
            lambda t, n: tree_from_parents(t, n(1).int(), t.to("meta")),
            "tokens: got device meta, expected cpu as parents",
        ),
        (lambda t, n: tree_from_chain(n(1, 2), n(1).int()), "tokens: got dtype torch.float32"),
        (lambda t, n: tree_from_chain(n(1, 300).int(), n(1).int()), "tokens: got 300 rows"),
        (lambda t, n: tree_from_chain(n(1, 0).int(), n(1).int()), "tokens: got 0 rows"),
        (
            lambda t, n: tree_from_parents(t, n(1).int(), num_rows=n(1).int() + 5),
            r"num_rows\[0\]: got 5, expected 1 .. 2",
        ),
        (lambda t, n: tree_from_topk([], [], [], n(1).long(), n(1).int(), 2), "token_steps: got 0"),
        (
            lambda t, n: tree_from_topk(
                [n(1, 3).long()], [n(1, 3)], [], n(1).long(), n(1).int(), 5
            ),
            "num_rows: got 5, expected at most 4",
        ),
        (
            lambda t, n: tree_from_topk(
                [n(1, 3).long()] * 2, [n(1, 3)] * 2, [n(1, 3).long()], n(1).long(), n(1).int(), 2
            ),
            r"token_steps\[1\]: got sizes \[1, 3\], expected \[1, 9\]",
        ),
        (
            lambda t, n: tree_from_topk(
                [n(1, 3).long(), n(1, 9).long()], [n(1, 3), n(1, 9)], [n(1, 2).long()],
                n(1).long(), n(1).int(), 2,
            ),
            "parent_steps: got 2 entries per request, expected 3",
        ),
        (
            lambda t, n: tree_from_topk(
                [n(1, 65).long(), n(1, 65 * 65).long()], [n(1, 65), n(1, 65 * 65)],
                [n(1, 65).long()], n(1).long(), n(1).int(), 2,
            ),
            "token_steps: got 2 steps of the best 65, expected 1 .. 4096 candidates",
        ),
        (lambda t, n: make_coins(n(2), n(2).long(), 3), "seeds: got dtype Float"),
        (lambda t, n: make_coins(n(2).long(), n(3).long(), 3), "positions: got sizes"),
        (lambda t, n: make_coins(n(2).long(), n(2).long(), 999), "num_rows: got 999 rows"),
        (
            lambda t, n: accept_chain_sampling(
                t, n(1, 2, 4), n(1, 3, 4), n(1, 2), n(1)
            ),
            r"draft_probs: got sizes \[1, 3, 4\], expected \[1, 1 or 2, 4\]",
        ),
    ],
)  # fmt: skip
def test_wrong_builders_are_named(call, message: str) -> None:
    tree = torch.tensor([[-1, 0]])
    with pytest.raises(NworError, match=message):
        call(tree, torch.zeros)
