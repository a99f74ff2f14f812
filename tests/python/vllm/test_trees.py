"""Draft trees in vLLM without vLLM: steps of random batches against a walk by hand, and a head that
grows trees against the same done with dictionaries."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch

from nwor_specpv import Tree, likeliest_tokens, tree_from_parents
from nwor_specpv.errors import NworError
from nwor_specpv.vllm.tree.growth import grow
from nwor_specpv.vllm.tree.shape import shape_of
from nwor_specpv.vllm.tree.store import TreeStore, WholeTrees, causal_words
from tests.python.tree.forest import SEED, ancestors, greedy_walk, random_parents

WORDS = 3  # tokens: matches are frequent
REQUESTS, TOKENS = 6, 512


def make_tree(parents: list[list[int]], tokens: list[list[int]]) -> Tree:
    nothing = torch.zeros(len(parents), dtype=torch.int32)
    return tree_from_parents(
        torch.tensor(parents, dtype=torch.int32), nothing, torch.tensor(tokens)
    )


def bits(words: torch.Tensor) -> set[int]:
    return {
        64 * index + bit
        for index, word in enumerate(words.tolist())
        for bit in range(64)
        if word >> bit & 1
    }


@dataclass
class Request:
    """A request of a step: its index, its rows, and how many of them are drafts."""

    index: int
    prefix: int
    rows: int
    drafts: int
    ids: list[int]


class Batch:
    """A step of model runner V2: rows of all requests one after another."""

    def __init__(self, requests: list[Request]) -> None:
        self.requests = requests
        self.lens = [one.rows for one in requests]
        self.drafts = [one.drafts for one in requests]
        self.starts = torch.tensor([0, *self.lens]).cumsum(0).int()
        self.logit_starts = torch.tensor([0, *(1 + n for n in self.drafts)]).cumsum(0).int()
        self.ids = torch.tensor([token for one in requests for token in one.ids]).int()
        self.positions = torch.tensor(
            [one.prefix + row for one in requests for row in range(one.rows)]
        )
        self.plain = self.positions.clone()
        self.logit_rows = torch.tensor(
            [
                start + one.rows - 1 - one.drafts + row
                for one, start in zip(requests, self.starts.tolist(), strict=False)
                for row in range(1 + one.drafts)
            ]
        )

    def begin(self, store: TreeStore) -> None:
        indices = torch.tensor([one.index for one in self.requests]).int()
        drafts = self.drafts if any(self.drafts) else None
        where = (indices, self.starts, self.logit_starts, self.positions)
        store.begin(*where, self.lens, drafts)


@pytest.mark.parametrize("rows", [2, 5, 16, 70])
def test_steps_of_random_trees_against_a_walk_by_hand(rows: int) -> None:
    """Mixed batches: whole trees, cut ones, single rows, prompts, drafts behind a prompt's rows;
    chains where they must be chains. Positions, masks, accepted rows, what is emitted, and where
    rows go before the head sees them."""
    print(f"seed={SEED}")
    rng, shape = random.Random(SEED + rows), shape_of(rows)
    torch.manual_seed(SEED)
    for _ in range(16):
        store = TreeStore(shape, REQUESTS, TOKENS, torch.device("cpu"))
        chained = [rng.random() < 0.3 for _ in range(REQUESTS)]
        for index, chain in enumerate(chained):
            store.forget(index, chain=chain)
        parents = [random_parents(rows, rng) for _ in range(REQUESTS)]
        tokens = [[rng.randrange(WORDS) for _ in range(rows)] for _ in range(REQUESTS)]
        chains = torch.randint(0, WORDS, (REQUESTS, shape.depth))
        order = torch.tensor(rng.sample(range(REQUESTS), REQUESTS))
        made = make_tree([parents[i] for i in order], [tokens[i] for i in order])
        drafts = torch.zeros(REQUESTS, rows - 1, dtype=torch.int64)
        drafted = store.drafted(made, chains[order], store.chains[order])
        drafts[order] = store.put(order, drafted)
        for index in range(REQUESTS):
            if not chained[index]:
                assert drafts[index].tolist() == tokens[index][1:]
                continue
            length = min(shape.depth, rows - 1)
            assert drafts[index, :length].tolist() == chains[index, :length].tolist()
            parents[index] = [*range(-1, length), *([-2] * (rows - 1 - length))]

        same = rng.choice([None, None, rows - 1, rng.randrange(1, rows)])
        batch = Batch(
            [random_request(i, rows, drafts[i].tolist(), rng, same) for i in order.tolist()]
        )
        batch.begin(store)
        check_step(store, batch, parents, chained)


def random_request(
    index: int, rows: int, drafts: list[int], rng: random.Random, same: int | None
) -> Request:
    """With `same` drafts, as many as the others have."""
    prefix = rng.randrange(50)
    if same is not None:
        ids = [rng.randrange(WORDS), *drafts[:same]]
        return Request(index, prefix, same + 1, same, ids)
    kind = rng.choice(["whole", "whole", "cut", "single", "prompt", "filled"])
    number = {"whole": rows - 1, "cut": rng.randrange(rows)}.get(kind, 0)
    before = 0
    if kind == "prompt":
        before = rng.choice([3, 69])
    elif kind == "filled":
        before, number = rng.randrange(1, 5), rows - 1
    ids = [rng.randrange(WORDS) for _ in range(before + 1)] + drafts[:number]
    return Request(index, prefix, before + 1 + number, number, ids)


def check_step(
    store: TreeStore, batch: Batch, parents: list[list[int]], chained: list[bool]
) -> None:
    step = store.step
    if step is None:
        assert torch.equal(batch.positions, batch.plain)
        assert not any(batch.drafts)
        return
    drawn = torch.randint(0, WORDS, (len(batch.logit_rows),))
    whole = type(step) is WholeTrees
    assert whole is (set(batch.lens) == {batch.drafts[0] + 1} and len(set(batch.drafts)) == 1)
    emitted, counts = step.accept(batch.ids[batch.logit_rows].long(), drawn, staged=True)
    row_order, logit_order = step.row_order(len(batch.ids)), step.logit_order(len(drawn))
    expected_ids = batch.ids.tolist()
    for b, one in enumerate(batch.requests):
        start, at = int(batch.starts[b]), int(batch.logit_starts[b])
        has_tree = one.rows == 1 + one.drafts
        above = parents[one.index][: one.rows] if has_tree else [-1]
        linked = [row for row in range(len(above)) if above[row] != -2]
        for row in range(one.rows):
            place = start + row
            depth, seen = row, set(range(row + 1))
            if has_tree and row in linked:
                line = ancestors(above, row)
                depth, seen = len(line) - 1, set(line)
            assert int(batch.positions[place]) == one.prefix + depth
            if b < step.num_requests:
                assert bits(step.mask[place]) == seen
        targets = drawn[at : at + 1 + one.drafts].tolist()
        path, _ = greedy_walk([above[row] for row in linked], one.ids[: len(linked)], targets)
        width = one.rows if whole else store.shape.rows
        assert step.path[b].tolist() == path + [-1] * (width - len(path))
        assert int(counts[b]) == len(path) + 1
        walk = [0, *path]
        assert emitted[b, : len(walk)].tolist() == [targets[row] for row in walk]
        for i, row in enumerate(walk):
            assert int(logit_order[at + i]) == at + row
            assert int(row_order[start + i]) == start + row
            expected_ids[start + i] = one.ids[row] if has_tree else one.ids[i]
        rest = range(start + len(walk), start + one.rows)
        assert whole or row_order[rest.start : rest.stop].tolist() == list(rest)
        places = step.slot_places(store.shape.depth)[b, : len(path)].tolist()
        assert places == list(range(start + 1, start + 1 + len(path)))
    order = store.restore(batch.ids, batch.positions)
    assert torch.equal(order, row_order)
    assert torch.equal(batch.positions, batch.plain)
    found = batch.ids.tolist()
    if whole:  # rejected rows are anything
        for b in range(len(batch.requests)):
            first, count = int(batch.starts[b]), int(counts[b])
            assert found[first : first + count] == expected_ids[first : first + count]
    else:
        assert found == expected_ids
    assert store.step is None


def whole_batch(store: TreeStore, parents: list[int], tokens: list[int]) -> Batch:
    store.forget(0, chain=False)
    nothing = torch.zeros(1, 2, dtype=torch.int64)
    drafted = store.drafted(make_tree([parents], [tokens]), nothing, store.chains[:1])
    store.put(torch.tensor([0]), drafted)
    batch = Batch([Request(0, 7, len(tokens), len(tokens) - 1, tokens)])
    batch.begin(store)
    return batch


def test_nothing_is_accepted_where_rows_were_not_staged() -> None:
    store = TreeStore(shape_of(4), 1, 64, torch.device("cpu"))
    batch = whole_batch(store, [-1, 0, 0, 2], [1, 2, 3, 4])
    drawn = torch.tensor([3, 9, 4, 8])
    for staged, path in ((False, []), (True, [2, 3])):
        emitted, counts = store.step.accept(batch.ids.long(), drawn, staged=staged)
        assert int(counts) == 1 + len(path)
        assert emitted[0, : int(counts)].tolist() == [3, 4, 8][: int(counts)]
        assert store.step.path.tolist() == [path + [-1] * (4 - len(path))]


def test_a_request_that_begins_has_no_tree() -> None:
    store = TreeStore(shape_of(4), 1, 64, torch.device("cpu"))
    whole_batch(store, [-1, 0, 0, 2], [1, 2, 3, 4])
    store.forget(0, chain=False)
    batch = Batch([Request(0, 0, 4, 3, [1, 2, 3, 4])])
    batch.begin(store)
    _, counts = store.step.accept(batch.ids.long(), torch.tensor([2, 3, 4, 8]), staged=True)
    assert int(counts) == 1


def test_the_mask_of_graphs_keeps_its_address() -> None:
    store = TreeStore(shape_of(4), 2, 128, torch.device("cpu"))
    address = store.mask.data_ptr()
    captured = store.mask_of(8, capture=True)
    assert captured.data_ptr() == address
    assert store.mask_of(4, capture=False) is None
    whole_batch(store, [-1, 0, 0, 2], [1, 2, 3, 4])
    padded = store.mask_of(8, capture=False)
    assert padded.data_ptr() == address
    assert [bits(row) for row in padded[:4]] == [{0}, {0, 1}, {0, 2}, {0, 2, 3}]
    # A graph reads it also in a step of prompts that are as long as a tree.
    batch = Batch([Request(0, 0, 4, 0, [1] * 4), Request(1, 0, 4, 0, [1] * 4)])
    batch.begin(store)
    assert [bits(row) for row in store.mask_of(8, capture=False)] == 2 * [
        {0}, {0, 1}, {0, 1, 2}, {0, 1, 2, 3}
    ]  # fmt: skip
    # A long prompt in front of drafts needs more words than a tree has.
    batch = Batch([Request(1, 0, 100, 0, [1] * 100), Request(0, 7, 4, 3, [1] * 4)])
    batch.begin(store)
    mask = store.mask_of(104, capture=False)
    assert mask.shape == (104, 2)
    assert bits(mask[99]) == set(range(100))
    assert bits(mask[103]) == {0, 2, 3}


def test_causal_masks() -> None:
    rows = torch.tensor([0, 1, 62, 63, 64, 127, 128])
    for row, words in zip(rows.tolist(), causal_words(rows, 3), strict=True):
        assert bits(words) == set(range(row + 1))


def test_shapes() -> None:
    assert [(s.depth, s.width) for s in map(shape_of, (2, 3, 4, 8, 16, 32, 64, 256))] == [
        *((1, 1), (2, 1), (3, 2), (5, 4), (6, 8), (7, 8), (8, 8), (10, 7))
    ]
    for rows in range(2, 257):
        shape = shape_of(rows)
        assert shape.width + (shape.depth - 1) * shape.width**2 >= rows - 1
        assert (shape.depth - 1) * shape.width <= 64
    for rows in (0, 1, 257):
        with pytest.raises(NworError, match="draft_tree"):
            shape_of(rows)


HIDDEN, VOCABULARY = 5, 40


def table_head(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """A head whose output depends on the tokens that a row sees, and on nothing else."""
    return torch.randn(VOCABULARY, HIDDEN, generator=generator), torch.randn(
        HIDDEN, VOCABULARY, generator=generator
    )


@pytest.mark.parametrize("rows", [2, 6, 16])
def test_grown_trees_are_those_of_a_search_with_dictionaries(rows: int) -> None:
    """Rows see their ancestors by the mask, states of their parents, and stand where they should.
    The reference walks from node to node and scores each by the tokens above it."""
    print(f"seed={SEED}")
    generator = torch.Generator().manual_seed(SEED)
    shape, batch = shape_of(rows), 3
    embed, output = table_head(generator)
    start = torch.randn(batch, HIDDEN, generator=generator)
    chained = torch.tensor([False, True, False])

    def run(
        tokens: torch.Tensor, states: torch.Tensor, seen: torch.Tensor, levels: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        count = tokens.shape[1]
        shown = (seen[..., None] >> torch.arange(count) & 1).double()
        summed = shown @ (embed[tokens].double() * levels[:, None])
        after = torch.tanh(states.double() + summed)
        return after.float(), after.float()

    def best(outputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return likeliest_tokens(outputs @ output, shape.width)

    tokens, scores = best(start)
    grown = grow(shape, tokens, scores, start, chained, run, best)
    for b in range(batch):
        expected, chain = search(shape, start[b], embed, output)
        if chained[b]:
            assert grown.chain[b].tolist() == chain
            continue
        tree = {
            tuple(int(grown.tree.tokens[b, r]) for r in reversed(ancestors(list_of(grown, b), row)))
            for row in range(1, rows)
        }
        # The root's own token is not known to the head.
        assert {path[1:] for path in tree} == expected


def list_of(grown: object, request: int) -> list[int]:
    return grown.tree.parents[request].tolist()


def search(shape, start, embed, output) -> tuple[set[tuple[int, ...]], list[int]]:
    """Paths of the best rows, and the likeliest chain."""

    def after(path: tuple[int, ...], state: torch.Tensor) -> torch.Tensor:
        summed = sum(embed[token].double() * (i + 1) for i, token in enumerate(path))
        return torch.tanh(state.double() + summed).float()

    def children(state: torch.Tensor) -> list[tuple[float, int]]:
        chances = (state @ output).float().log_softmax(-1)
        found = chances.topk(shape.width)
        return list(zip(found.values.tolist(), found.indices.tolist(), strict=True))

    level = [((token,), score, start) for score, token in children(start)]
    every, chain = list(level), [level[0][0][0]]
    path, state = level[0][0], start
    for _ in range(1, shape.depth):
        state = after(path, state)
        path = (*path, children(state)[0][1])
        chain.append(path[-1])
        grown = []
        for parent, score, before in level:
            state_here = after(parent, before)
            grown += [
                ((*parent, token), score + chance, state_here)
                for chance, token in children(state_here)
            ]
        every += grown
        level = sorted(grown, key=lambda one: -one[1])[: shape.width]
    best = sorted(every, key=lambda one: -one[1])[: shape.rows - 1]
    return {path for path, _, _ in best}, chain
