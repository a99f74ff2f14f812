"""Decisions of mode `refresh` against its rules written down in Python, and what is counted."""

from __future__ import annotations

import itertools
import os
import random
from collections import Counter
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from nwor_specpv import Metrics, SpecPVConfig
from nwor_specpv.vllm.specpv.refresh_requests import RefreshDecision, RefreshRequests

SEED = int(os.environ.get("NWOR_TEST_SEED", random.randrange(2**31)))
STEPS = int(os.environ.get("NWOR_POLICY_STEPS", "3000"))
BYTES = 10


class Rows:
    """As the store of views gives rows; the lowest one, in whatever order rows came back."""

    def __init__(self, config: SpecPVConfig, count: int) -> None:
        self.config, self.free = config, set(range(count))

    @property
    def has_room(self) -> bool:
        return bool(self.free)

    def open(self) -> int | None:
        row = min(self.free, default=None)
        self.free.discard(row)
        return row

    def close(self, row: int) -> None:
        self.free.add(row)


@dataclass
class Known:
    row: int
    anchor: int = 0  # context when blocks were chosen last
    steps: int = 0  # partial ones since then
    selected: bool = False
    failed: bool = False


@dataclass
class Model:
    """The rules, one request at a time, with the context taken as vLLM tells it."""

    config: SpecPVConfig
    rows: Rows
    max_rows: int
    known: dict[str, Known] = field(default_factory=dict)
    selecting: list[Known] = field(default_factory=list)

    def decide(
        self, name: str, context: int, rows: int, drafts: int, prefilling: bool, in_front: bool
    ) -> RefreshDecision:
        budget = self.config.budget(self.max_rows)
        request = self.known.get(name)
        prompt = prefilling or rows != 1 + drafts
        if prompt or context <= max(budget.static_tokens, self.config.specpv_partial_threshold):
            if request is not None and prompt:
                request.selected = False
            elif request is not None:
                request.failed = False  # a short context needs no view
            return RefreshDecision(trigger="short_context")
        if not in_front:
            return RefreshDecision(trigger="policy")
        if request is None:
            row = self.rows.open()
            if row is None:
                return RefreshDecision(trigger="policy")
            request = self.known[name] = Known(row)
        trigger = "none"
        since = context - request.anchor
        if not request.selected:
            trigger = "refresh_failure" if request.failed else "first"
        elif since + rows > budget.tail_capacity:
            trigger = "tail_full"
        elif (
            self.config.specpv_full_refresh_interval
            and request.steps >= self.config.specpv_full_refresh_interval
        ):
            trigger = "interval"
        if trigger == "none":
            request.steps += 1
            return RefreshDecision(request.row, partial=True)
        probe = request.selected and since <= budget.tail_capacity
        request.anchor, request.steps = context, 0
        request.selected, request.failed = True, False
        self.selecting.append(request)
        return RefreshDecision(request.row, select=True, probe=probe, trigger=trigger)

    def give_up(self, *, failed: bool) -> None:
        for request in self.selecting:
            request.selected, request.failed = False, failed

    def forget(self, names: set[str]) -> None:
        for name in [name for name in self.known if name not in names]:
            self.rows.close(self.known.pop(name).row)


@dataclass
class Text:
    """A request: tokens in the cache, and whether they are its prompt's, or computed again."""

    context: int = 0
    to_compute: int = 0  # tokens before it decodes


def counted() -> Counter[str]:
    now = Metrics().snapshot()
    found = Counter({"partial": now["specpv_partial_steps_total"]})
    found += Counter(now["specpv_full_steps_total"])
    for name in ("read", "full"):
        found[f"bytes {name}"] = now[f"specpv_kv_bytes_{name}_total"]
    return found


def make(rng: random.Random, buffer: int = 20, interval: int = 0) -> SpecPVConfig:
    return SpecPVConfig(
        enable_specpv=True,
        specpv_mode="refresh",
        specpv_block_size=4,
        specpv_n_sink_blocks=1,
        specpv_n_retrieval_blocks=2,
        specpv_n_window_blocks=2,
        specpv_n_spec_tokens_buf=buffer,
        specpv_partial_threshold=rng.choice([0, 40]),
        specpv_full_refresh_interval=interval,
    )


@pytest.mark.parametrize("most", [1, 3, 5])
def test_decisions_are_those_of_the_rules(most: int) -> None:
    """Random traffic: requests that come and go, are preempted, and stand behind."""
    print(f"seed={SEED}")
    rng, triggers, before = random.Random(SEED + most), Counter(), counted()
    bytes_full, drafts_most = 0, 4
    for buffer, interval in itertools.product((0, 6, 20), (0, 3)):
        config = make(rng, buffer, interval)
        requests = RefreshRequests(Rows(config, most), 1 + drafts_most, BYTES)
        model = Model(config, Rows(config, most), 1 + drafts_most)
        texts: dict[str, Text] = {}
        for step in range(STEPS // 6):
            while len(texts) < 5 and rng.random() < 0.5:
                texts[f"{step}.{len(texts)}"] = Text(to_compute=rng.randrange(1, 90))
            for name in [name for name in texts if rng.random() < 0.02]:
                del texts[name]
            for text in texts.values():
                if rng.random() < 0.01:  # preempted
                    text.to_compute, text.context = text.context + 1, 0
            batch = rng.sample(sorted(texts), len(texts))
            front = rng.choice([len(batch), len(batch), rng.randrange(1 + len(batch))])
            told: list[Any] = []
            for name in batch:
                text = texts[name]
                if text.to_compute:
                    rows = min(text.to_compute, rng.choice([1, 30]))
                    told.append((name, text.context, rows, 0, True))
                else:
                    drafts = rng.randrange(1 + drafts_most)
                    told.append((name, text.context, 1 + drafts, drafts, False))
            columns = [list(column) for column in zip(*told, strict=True)] or [[]] * 5
            model.selecting = []
            model.forget(set(batch))
            expected = [
                model.decide(*one, in_front=place < front) for place, one in enumerate(told)
            ]
            assert requests.decide(*columns, front) == expected
            assert requests.selects is bool(model.selecting)
            triggers.update(one.trigger for one in expected)
            bytes_full += BYTES * sum(text.context for text in map(texts.get, batch))
            ending = rng.random()
            if ending < 0.05:
                requests.give_up("refresh_failure")
                model.give_up(failed=True)
            elif ending < 0.1:  # the step died
                requests.give_up()
                model.give_up(failed=False)
            requests.end()
            for _, (name, _, rows, drafts, busy) in zip(batch, told, strict=True):
                text = texts[name]
                if busy:
                    text.to_compute -= rows
                text.context += rows if busy else 1 + rng.randint(0, drafts)
    since = counted() - before
    print(dict(triggers))
    assert since.pop("bytes full") == bytes_full
    assert 0 < since.pop("bytes read") < bytes_full
    assert since.pop("partial") == triggers.pop("none")
    assert since == triggers
    assert triggers.keys() == {
        "short_context", "first", "tail_full", "interval", "refresh_failure", "policy"
    }  # fmt: skip


def test_rows_are_given_back() -> None:
    rows = Rows(make(random.Random(1)), 2)
    requests = RefreshRequests(rows, 5, BYTES)
    batch = SimpleNamespace(lens=[5, 5, 5], drafts=[4, 4, 4], busy=[False] * 3)
    found = requests.decide(["a", "b", "c"], [90] * 3, batch.lens, batch.drafts, batch.busy)
    assert [one.trigger for one in found] == ["first", "first", "policy"]
    assert not rows.has_room
    assert requests.decide(["c"], [92], [5], [4], [False])[0].trigger == "first"
    assert requests.decide([], [], [], [], []) == []
    assert len(rows.free) == 2
