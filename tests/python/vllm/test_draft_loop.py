"""Head and partial passes in turns on the device, against models written in plain Python."""

from __future__ import annotations

import os
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nwor_specpv import SpecPVConfig
from nwor_specpv.vllm.specpv.chain import Chains, matching_guesses, slots_of, window_of
from nwor_specpv.vllm.specpv.draft_loop import DraftLoop
from nwor_specpv.vllm.specpv.partial_pass import PartialPass
from nwor_specpv.vllm.specpv.tail import Tail
from nwor_specpv.vllm.specpv.views import ViewStore

SEED = int(os.environ.get("NWOR_TEST_SEED", random.randrange(2**31)))
POISON = 777_777
VOCABULARY = 50
PAGE = 16


@pytest.fixture(autouse=True)
def _seed() -> None:
    print(f"seed={SEED}")
    torch.manual_seed(SEED)
    random.seed(SEED)


def next_token(text: list[int]) -> int:
    """A language model: any change of the last six tokens changes what it says."""
    state = 17
    for token in text[-6:]:
        state = (state * 31 + token + 7) % 1_000_003
    return state % VOCABULARY


def continued(text: list[int], count: int) -> list[int]:
    text = list(text)
    for _ in range(count):
        text.append(next_token(text))
    return text[-count:] if count else []


class Texts:
    """What requests have said, tails by slot, and a head that is right now and then."""

    def __init__(self, texts: list[list[int]], skill: float) -> None:
        self.texts, self.skill = texts, skill
        self.capacity = 0
        self.tail: list[int] = []
        self.chains: Chains | None = None
        self.known = [list(text) for text in texts]  # what the head has been told
        self.runs = 0
        self.closed = False
        self.guessed = torch.zeros(0)

    # ---- the target ----

    def run(
        self,
        passed: PartialPass,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        columns: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.runs += 1
        rows, said = passed.num_rows, []
        slots = passed.slots.tolist()
        for row, (token, slot) in enumerate(zip(tokens.tolist(), slots, strict=True)):
            if slot >= 0:
                assert row // rows == slot // self.capacity, "another request's tail"
                self.tail[slot] = token
        for b in range(passed.num_requests):
            prefix, length = int(passed.prefix_lens[b]), int(passed.tail_lens[b])
            first = b * rows
            live = b < len(self.texts) and prefix > 0
            seen = self.texts[b][:prefix] if live else []
            seen = seen + self.tail[b * self.capacity : b * self.capacity + length] if live else []
            for j in range(rows):
                seen = [*seen, int(tokens[first + j])]
                if live:
                    assert int(positions[first + j]) == len(seen) - 1
                said.append(next_token(seen))
        # What the head wants of a row: where it stands.
        return torch.tensor(said), positions[:, None].float()

    # ---- the head ----

    def go_on(self, count: int) -> torch.Tensor:
        return self._guesses(count)

    def tell(self, chains: Chains, count: int) -> None:
        self.closed = True

    def take_up(
        self, chains: Chains, count: int, hidden: torch.Tensor, *, last: bool
    ) -> torch.Tensor:
        self.closed = False
        for b in range(min(count, len(self.texts))):
            if not chains.active[b]:
                continue
            start, right = int(chains.starts[b]), int(chains.accepted[b])
            if start + right + 1 > int(chains.prefix[b] + chains.lens[b]):
                continue  # it was full before: nothing of it counts
            for j in range(right + 1):
                assert hidden[b * chains.rows + j, 0] == start + j
                token = int(chains.said[b, j])
                self.known[b] = [*self.known[b][: start + j + 1], token]
        return self._guesses(count)

    def _guesses(self, count: int) -> torch.Tensor:
        assert self.chains is not None
        width = self.chains.rows - 1
        found = torch.randint(0, VOCABULARY, (count, width))
        for b in range(min(count, len(self.texts))):
            right = continued(self.known[b], width)
            for j in range(width):
                if random.random() < self.skill:
                    found[b, j] = right[j]
        self.guessed = found
        return found


def make_loop(
    world: Texts, *, batch: int, rows: int, limit: int, max_len: int = 4096, by_root: bool = False
) -> DraftLoop:
    config = SpecPVConfig(
        enable_specpv=True,
        specpv_mode="lossless",
        specpv_n_sink_blocks=1,
        specpv_n_retrieval_blocks=1,
        specpv_n_window_blocks=1,
    )
    caches = [torch.zeros(8, PAGE, 1, 16) for _ in range(2)]
    store = ViewStore(
        config, caches, max_requests=batch, max_batch=batch, max_tokens=max_len, max_rows=rows
    )
    tail = Tail(caches, batch, limit + rows)
    assert tail.capacity >= limit + rows - 1
    world.capacity = tail.capacity
    world.tail = [POISON] * (len(world.texts) * tail.capacity)
    chains = world.chains = Chains(batch, rows, limit, max_len, torch.device("cpu"))
    for buffer in (chains.tokens, chains.drafts, chains.said):
        buffer.fill_(POISON)
    loop = DraftLoop(chains, store, tail, {"a": 0, "b": 1}, world, world)
    loop.by_root = by_root
    return loop


@pytest.mark.parametrize("skill", [0.0, 0.7, 1.0])
@pytest.mark.parametrize(("rows", "limit"), [(2, 5), (5, 16), (4, 15)])
def test_chains_are_what_the_target_says(rows: int, limit: int, skill: float) -> None:
    """Whatever the head guesses, the chain is the target's own text, as far as it goes."""
    for _ in range(6):
        real, padded = random.randint(1, 4), 5
        texts = [
            [random.randrange(VOCABULARY) for _ in range(random.randint(2, 90))]
            for _ in range(real)
        ]
        world = Texts(texts, skill)
        loop = make_loop(world, batch=6, rows=rows, limit=limit)
        active = torch.tensor([random.random() < 0.8 for _ in range(real)])
        prefix = torch.tensor([len(text) - 1 for text in texts], dtype=torch.int32)
        roots = torch.tensor([text[-1] for text in texts])
        table = torch.zeros(padded, 6, dtype=torch.int32)
        view_rows = torch.arange(real, dtype=torch.int32)
        select = random.random() < 0.5
        loop.begin(table, view_rows, prefix, active, roots, select=select)
        (loop.first if select else loop.kept)(table)
        passes = random.randint(1, 6)
        for _ in range(passes - 1):
            loop.later(table)
        chains = loop.chains
        before, lens = chains.drafts.clone(), chains.lens.clone()
        assert not world.closed
        loop.close(table)
        assert world.closed
        assert world.runs == passes
        assert torch.equal(chains.lens, lens), "guesses that nobody has confirmed are no chain"
        for b, text in enumerate(texts):
            length = int(chains.lens[b])
            if not active[b]:
                assert length == 0
                continue
            assert length >= min(passes, limit)
            if skill == 1.0:
                assert length >= min(limit, passes * rows)
            drafts = chains.drafts[b, : min(length, limit)].tolist()
            assert drafts == continued(text, len(drafts))
            # Then come the head's guesses, as many as there is room for, and nothing else is new.
            behind = chains.drafts[b, length:limit].tolist()
            assert behind[: rows - 1] == world.guessed[b, : len(behind)].tolist()
            assert behind[rows - 1 :] == before[b, length + rows - 1 : limit].tolist()
            if skill == 1.0:
                reached = min(limit, length + rows - 1)
                assert chains.drafts[b, :reached].tolist() == continued(text, reached)
        assert not chains.active[real:].any()
        assert chains.lens[real:].sum() == 0


@pytest.mark.parametrize("by_root", [False, True])
def test_who_chooses_blocks(by_root: bool) -> None:
    """Where tokens are drawn, guesses have no say: they share the noise of what is drawn."""
    world = Texts([[1, 2, 3]], 1.0)
    loop = make_loop(world, batch=4, rows=4, limit=12, by_root=by_root)
    table, one = torch.zeros(2, 6, dtype=torch.int32), torch.tensor([2], dtype=torch.int32)
    run, asked = world.run, []

    def watched(passed: PartialPass, *args: Any) -> Any:
        rows = passed.query_rows
        asked.append((passed.select, None if rows is None else rows.tolist()))
        return run(passed, *args)

    world.run = watched
    loop.begin(table, one * 0, one, torch.tensor([True]), torch.tensor([3]))
    loop.first(table)
    loop.later(table)
    loop.kept(table)
    assert asked == [(True, [[0, 1]] * 2 if by_root else None), (False, None), (False, None)]


def test_requests_that_take_no_part_write_nothing() -> None:
    world = Texts([[1, 2, 3], [4, 5, 6]], 1.0)
    loop = make_loop(world, batch=4, rows=4, limit=12)
    table = torch.zeros(4, 6, dtype=torch.int32)
    nobody = torch.zeros(0, dtype=torch.int32)
    loop.chains.tokens.zero_()
    loop.begin(table, nobody, nobody, nobody.bool(), nobody.long())
    loop.first(table)
    loop.later(table)
    assert set(world.tail) == {POISON}
    assert loop.chains.lens.sum() == 0


def test_who_sees_a_view() -> None:
    """Long requests with a row; the others see their whole context."""
    world = Texts([[1] * 200] * 4, 1.0)
    loop = make_loop(world, batch=5, rows=4, limit=12)
    static = loop.store.budget.static_tokens
    prefix = torch.tensor([static + 1, static, static + 50, static + 9], dtype=torch.int32)
    active = torch.tensor([True, True, True, False])
    table = torch.zeros(5, 20, dtype=torch.int32)
    roots = torch.zeros(4, dtype=torch.int64)
    given = torch.tensor([3, 1, -1, 2], dtype=torch.int32)
    loop.begin(table, given, prefix, active, roots)
    assert loop.store.rows(5).tolist() == [3, -1, -1, -1, -1]
    assert loop.store.lens(5).tolist() == [static + 1, static, static + 50, 0, 0]


def test_a_choice_serves_later_rounds_for_a_while() -> None:
    """Whoever has none, or has grown beyond the tail since, sees everything in such proposals."""
    world = Texts([[1] * 400] * 3, 1.0)
    loop = make_loop(world, batch=3, rows=4, limit=12)
    store, room = loop.store, loop.store.budget.tail_capacity
    table = torch.zeros(3, 40, dtype=torch.int32)
    roots, everybody = torch.zeros(3, dtype=torch.int64), torch.tensor([True] * 3)
    rows = torch.tensor([store.open() for _ in range(3)], dtype=torch.int32)
    lens = torch.tensor([100, 120, 140], dtype=torch.int32)
    loop.begin(table, rows, lens, torch.tensor([True, True, False]), roots)
    loop.first(table)
    loop.begin(table, rows, lens + room, everybody, roots, select=False)
    assert store.rows(3).tolist() == [rows[0], rows[1], -1]
    loop.kept(table)
    # The window is where it was, and what came after it is seen too.
    held = store.view_lens[:3].tolist()
    first = (100 // PAGE - 1) * PAGE  # the window's first token
    assert held[0] == PAGE + 100 + room - first  # the sink; this target chooses nothing
    grown = torch.tensor([room + 1, 0, 0], dtype=torch.int32)
    loop.begin(table, rows, lens + grown, everybody, roots, select=False)
    assert store.rows(3).tolist() == [-1, rows[1], -1]
    assert store.anchors[rows[0]] == 100


def test_guesses_match_from_the_first_on() -> None:
    for _ in range(50):
        count, width = random.randint(1, 5), random.randint(1, 6)
        said = torch.randint(0, 2, (count, width + 1))
        guesses = torch.randint(0, 2, (count, width))
        expected = []
        for b in range(count):
            right = 0
            while right < width and said[b, right] == guesses[b, right]:
                right += 1
            expected.append(right)
        assert matching_guesses(said, guesses).tolist() == expected


def test_chains_stop_at_their_limit_and_at_the_models_length() -> None:
    chains = Chains(3, 4, 6, 100, torch.device("cpu"))
    prefix = torch.tensor([95, 10], dtype=torch.int32)
    chains.begin(prefix, torch.tensor([True, True]), torch.tensor([1, 1]))
    assert chains.positions(2).tolist() == [[95, 96, 97, 98], [10, 11, 12, 13]]
    for lens, opened in ((4, True), (6, False)):
        chains.guess(torch.tensor([1, 1]), torch.tensor([[2, 3, 4]] * 2))
        chains.extend(torch.tensor([[2, 3, 4, 5], [9, 9, 9, 9]]))
        assert chains.lens[:2].tolist()[0] == min(8, 4 * (lens // 4 + (lens > 4)))
        assert bool(chains.open(2)[0]) is opened
    assert chains.lens[:2].tolist() == [8, 2]
    assert chains.positions(2).max() == 99
    assert chains.slots(2, 16).tolist() == [-1] * 4 + [18, 19, 20, 21]
    assert chains.columns(2).tolist() == [[6, 7, 8, 9], [2, 3, 4, 5]]
    before = chains.drafts[0, :6].tolist()
    chains.extend(torch.tensor([[7, 7, 7, 7], [9, 9, 9, 9]]))
    assert chains.drafts[0, :6].tolist() == before == [2, 3, 4, 5, 2, 3]
    assert chains.lens[:2].tolist() == [8, 3]


def test_slots_of_positions() -> None:
    for _ in range(30):
        count, pages, size = random.randint(1, 4), random.randint(1, 5), random.choice([1, 4, 16])
        table = torch.randperm(count * pages).view(count, pages).int()
        positions = torch.randint(0, pages * size + 5, (count, 3))
        ends = torch.randint(0, pages * size + 1, (count,)).int()
        found = slots_of(positions, ends, table, size).tolist()
        for b in range(count):
            for j in range(3):
                position = int(positions[b, j])
                if position >= int(ends[b]):
                    assert found[b][j] == -1
                else:
                    page = int(table[b, position // size])
                    assert found[b][j] == page * size + position % size


def test_the_latest_pages() -> None:
    for _ in range(30):
        count, pages, size = random.randint(1, 4), random.randint(1, 9), random.choice([1, 4, 16])
        table = torch.randperm(count * pages).view(count, pages).int()
        lens = torch.randint(1, pages * size + 1, (count,))
        most = random.randint(1, 10)
        found, left = window_of(table, lens, size, most)
        for b in range(count):
            whole = [int(table[b, p // size]) * size + p % size for p in range(int(lens[b]))]
            kept = int(left[b])
            got = [int(found[b, p // size]) * size + p % size for p in range(kept)]
            assert got == whole[len(whole) - kept :]
            assert kept == len(whole) or kept > (most - 1) * size


def test_a_row_too_many_is_found() -> None:
    """A fault put in on purpose shows: the comparison above can fail."""
    world = Texts([[1, 2, 3, 4, 5, 6, 7]], 0.5)
    loop = make_loop(world, batch=2, rows=4, limit=12)
    chains = loop.chains
    table = torch.zeros(2, 6, dtype=torch.int32)
    one = torch.tensor([6], dtype=torch.int32)
    loop.begin(table, one * 0, one, torch.tensor([True]), torch.tensor([7]))
    loop.first(table)
    chains.lens[:1] += 1
    passed = SimpleNamespace(num_requests=1, num_rows=4, slots=chains.slots(1, world.capacity))
    passed.prefix_lens, passed.tail_lens = chains.prefix, chains.lens
    said, _ = world.run(
        passed,  # type: ignore[arg-type]
        chains.tokens[:1].flatten(),
        chains.positions(1).flatten(),
        chains.columns(1),
    )
    chains.extend(said.view(1, 4))
    drafts = chains.drafts[0, : int(chains.lens[0])].tolist()
    assert drafts != continued(world.texts[0], len(drafts))


def fake_settings(**keys: Any) -> Any:
    from nwor_specpv.config import load_config

    views = {"specpv_max_requests": 8}
    return load_config({"enable_specpv": True, "specpv_mode": "lossless"} | views | keys)


def test_lengths_that_are_possible() -> None:
    from nwor_specpv.vllm.specpv.lengths import Lengths

    lengths = Lengths(fake_settings(), 16)
    assert lengths.drafts == (0, 4, 8, 16)
    assert lengths.possible(32768)
    assert not lengths.possible(lengths.shortest)
    # 4 tokens a pass; 4 guesses follow.
    assert lengths.passes_that_fill(32768) == 3
    assert lengths.passes_that_fill(lengths.shortest) == 0
    fixed = Lengths(fake_settings(specpv_draft_passes=5), 16)
    assert fixed.fixed_arm(5000) == (16, 5)
    assert fixed.fixed_arm(1000) == (4, 0), "views cover it whole"
    assert fixed.passes_that_fill(5000) == 5
    fixed.give_up()
    assert fixed.fixed_arm(5000) == (4, 0)
    assert fixed.passes_that_fill(5000) == 0
    assert not fixed.possible(32768)
