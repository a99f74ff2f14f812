"""The speculator of model runner V2 without a GPU: its proposals with a made-up head and target."""

from __future__ import annotations

import contextlib
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nwor_specpv.vllm.specpv.lengths import Lengths
from support.installed import ADAPTER
from support.speculator_world import (
    BATCH,
    LIMIT,
    ROWS,
    SEED,
    WORDS,
    World,
    continued,
    forward_of_nobody,
    make,
    proposals_module,
    propose,
    speculator_module,
    step,
)


def test_rounds_with_a_perfect_head_fill_the_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    print(f"seed={SEED}")
    random.seed(SEED)
    torch.manual_seed(SEED)
    for _ in range(8):
        texts = [
            [random.randrange(WORDS) for _ in range(random.randint(8, 300))]
            for _ in range(random.randint(1, 5))
        ]
        world = World(texts)
        spec = make(world, monkeypatch)
        passes = random.randint(1, 5)
        # Twice over: what the first proposal left must not disturb the second.
        for _ in range(2):
            prefix = [len(text) - 1 for text in texts]
            rejected = [random.randint(0, LIMIT) for _ in texts]
            batch = step(world, spec, prefix, rejected)
            sampled = torch.tensor([random.random() < 0.8 for _ in texts]).int()
            roots = torch.tensor([[text[-1]] for text in texts])
            spec._draft_by_passes(batch, passes, sampled, torch.tensor(rejected), roots)
            for b, text in enumerate(texts):
                if sampled[b]:
                    assert int(spec._loop.chains.lens[b]) >= min(LIMIT, passes * ROWS)
                    reached = min(LIMIT, passes * ROWS + ROWS - 1)
                    expected = continued(text, reached)
                    assert spec.draft_tokens[b, :reached].tolist() == expected
            accepted = random.randint(0, LIMIT)
            texts = world.texts = [text + continued(text, 1 + accepted) for text in texts]


def test_rounds_in_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is recorded for a batch size is replayed for smaller batches, padded."""
    random.seed(SEED)
    world = World([[random.randrange(WORDS) for _ in range(n)] for n in (100, 260)])
    spec = make(world, monkeypatch)
    replayed = []

    def record(run: Any) -> Any:
        size = run.args[0].shape[0]
        return SimpleNamespace(replay=lambda: (replayed.append(size), run()))

    monkeypatch.setattr(
        proposals_module(), "graph_capture", lambda device: contextlib.nullcontext()
    )
    monkeypatch.setattr(spec, "_record", record)
    monkeypatch.setattr(speculator_module().EagleSpeculator, "capture", lambda _: None)
    descs = [SimpleNamespace(num_reqs=n, uniform_token_count=LIMIT + 1) for n in (1, 4, 4, 6)]
    descs.append(SimpleNamespace(num_reqs=5, uniform_token_count=1))  # no drafts, no passes
    spec.prefill_cudagraph_manager = SimpleNamespace(graphs=descs)
    saved = spec.block_tables.input_block_tables[0].clone()
    world.texts += [[]] * (BATCH - 2)  # they fill the batch up
    world.forward, forward = lambda *args: forward_of_nobody(*args), world.forward
    spec.capture()
    assert sorted(spec._graphs) == [
        (kind, n) for kind in ("close", "first", "kept", "later") for n in (1, 4, 6)
    ]
    assert torch.equal(spec.block_tables.input_block_tables[0], saved)
    replayed.clear()
    world.forward, world.texts = forward, world.texts[:2]
    batch = step(world, spec, [99, 259], [0, 3])
    roots = torch.tensor([[text[-1]] for text in world.texts])
    spec._draft_by_passes(batch, 3, torch.ones(2).int(), torch.tensor([0, 3]), roots)
    assert replayed == [4, 4, 4, 4]
    for b, text in enumerate(world.texts):
        assert spec.draft_tokens[b, : 3 * ROWS].tolist() == continued(text, 3 * ROWS)


def test_who_drafts_how_much(monkeypatch: pytest.MonkeyPatch) -> None:
    """The head as many tokens as the scheduler wants, or one and then the passes the rest."""
    world = World([[1] * 300, [2] * 20])
    spec = make(world, monkeypatch)
    steps, by_passes = [], []
    monkeypatch.setattr(
        speculator_module().EagleSpeculator,
        "propose",
        lambda self, *_, **__: steps.append(self.num_speculative_steps),
    )
    monkeypatch.setattr(
        spec, "_draft_by_passes", lambda batch, passes, *_: by_passes.append(passes)
    )
    batch = step(world, spec, [299, 19], [0, 0])
    spec.num_speculative_steps = LIMIT
    for wanted, passes, dummy in (
        (LIMIT, 3, False),
        (ROWS - 1, 0, False),
        (0, 0, False),
        (LIMIT, 0, False),
        (LIMIT, 5, True),
        (LIMIT, 5, False),
    ):
        spec._engine.num_drafts, spec._engine.num_passes = wanted, passes
        assert propose(spec, batch, dummy_run=dummy).shape == (2, LIMIT)
        assert spec.latest_passes == (0 if dummy else passes)
    # A plain step: vLLM's head still fills its own K/V, for which it drafts one.
    assert steps == [1, ROWS - 1, 1, LIMIT, LIMIT, 1]
    assert by_passes == [3, 5]
    assert spec.num_speculative_steps == LIMIT


def test_a_failing_pass_drafts_nothing_and_serving_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from nwor_specpv import Metrics

    world = World([[1] * 300])
    spec = make(world, monkeypatch)
    monkeypatch.setattr(speculator_module().EagleSpeculator, "propose", lambda *_, **__: None)

    def fail(*_: Any) -> Any:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(world, "forward", fail, raising=False)
    batch = step(world, spec, [299], [0])
    spec.draft_tokens.fill_(7)
    before = Metrics().snapshot()["specpv_draft_failures_total"].get("error", 0)
    for _ in range(2):
        assert propose(spec, batch).shape == (1, LIMIT)
    assert Metrics().snapshot()["specpv_draft_failures_total"]["error"] == before + 1
    assert spec._engine.draft_failures.latest == "RuntimeError: out of memory"
    assert spec.draft_tokens[0].tolist() == [0] * LIMIT
    assert spec.latest_passes == 0
    assert spec.lengths.fixed_arm(10**6) == (ROWS - 1, 0)


def test_when_blocks_are_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """By somebody new, or when one has grown; a request within its prompt has no say yet."""
    spec = make(World([[1] * 300]), monkeypatch)
    room = spec._ready().store.budget.tail_capacity - LIMIT - 1

    def chooses(names: list[str], ends: list[int], prompts: list[int]) -> bool:
        spec._view_rows(names, ends, prompts)
        return spec._chooses(names, ends)

    assert chooses(["a", "b", "short"], [200, 150, 20], [200, 300, 20])
    assert spec._chosen_at == {"a": 200}
    assert not chooses(["a", "b"], [200 + room, 160], [200, 300])
    assert chooses(["a", "b"], [200 + room, 300], [200, 300])
    assert spec._chosen_at == {"a": 200 + room, "b": 300}
    assert not chooses(["a", "b"], [200 + room, 300 + room], [200, 300])
    assert chooses(["a", "b"], [200 + room, 301 + room], [200, 300])


def test_rows_of_views_go_to_long_requests_and_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = make(World([]), monkeypatch)
    store = spec._ready().store
    long, short = store.budget.static_tokens + 1, store.budget.static_tokens
    first = spec._view_rows(["a", "b", "c", "d"], [long, short, long, long], [0] * 4)
    assert first[1] == first[3] == -1, "short, or no row was left"
    assert sorted((first[0], first[2])) == [0, 1]
    second = spec._view_rows(["d", "c"], [long, long], [0] * 2)
    assert second[1] == first[2]
    assert second[0] == first[0]
    # Lengths are known at most: one may have been too large, and its row is not lost.
    assert spec._view_rows(["d", "c"], [short, long], [0] * 2) == second
    # Preempted and here again, in the midst of all that it had: another has the row meanwhile.
    third = spec._view_rows(["d", "c", "e"], [long, long, long], [long, long + 5, long])
    assert third == [second[0], -1, second[1]]


def test_a_prompt_has_no_view_before_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """There are two rows. They are for requests that draft, and for a prompt in its last step."""
    world = World([[1] * 300] * 4)
    spec = make(world, monkeypatch)

    def views(prompts: list[int], sampled: list[int]) -> list[int]:
        batch = step(world, spec, [299] * 4, [0] * 4)
        batch.prefill_len_np = torch.tensor(prompts).numpy()
        none, roots = torch.zeros(4).int(), torch.ones(4, 1).long()
        spec._draft_by_passes(batch, 2, torch.tensor(sampled), none, roots)
        return spec._loop.store.rows(4).tolist()

    first = views([300, 1000, 100, 1000], [0, 0, 1, 0])
    assert first[0] == first[1] == first[3] == -1
    assert first[2] >= 0
    second = views([299, 1000, 100, 1000], [1, 0, 1, 0])
    assert second == [1 - first[2], -1, first[2], -1]
    assert spec._chosen_at.keys() == {"0", "2"}


def test_rows_are_for_whom_the_lengths_call_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to `specpv_partial_threshold` everything is read; rows are missing to the longer ones."""
    spec = make(World([]), monkeypatch)
    config = spec._engine.settings.specpv()
    config.specpv_partial_threshold = 200
    spec._engine.settings.specpv = lambda: config
    spec.lengths = Lengths(spec._engine.settings, LIMIT)
    assert spec._ready().store.budget.static_tokens < 150
    assert spec.lengths.fixed_arm(200).passes == 0
    assert spec.lengths.fixed_arm(201).passes == 3
    rows = spec._view_rows(["a", "b", "c"], [150, 200, 201], [0] * 3)
    assert rows[:2] == [-1, -1]
    assert rows[2] >= 0


@pytest.mark.parametrize("case", ["own vocabulary", "the target's matrix", "two ranks", "no ids"])
def test_the_heads_best_guess_is_vllms(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By vLLM's own way, scores spread over the target's vocabulary, or by a shorter one."""
    from nwor_specpv.vllm.specpv.draft_models import EagleHead

    random = torch.Generator().manual_seed(3)
    own, all_tokens, size = 12, 40, 8
    ids = torch.randperm(all_tokens, generator=random)[:own].sort().values - torch.arange(own)
    matrix = torch.randn(
        all_tokens if case == "the target's matrix" else own, size, generator=random
    )
    asked = []

    def greedy(hidden: torch.Tensor) -> torch.Tensor:
        asked.append(len(hidden))
        scores = torch.full((len(hidden), all_tokens), float("-inf"))
        scores[:, torch.arange(own) + ids] = hidden @ matrix[:own].T
        return scores.argmax(-1)

    model = SimpleNamespace(
        draft_id_to_target_id=None if case == "no ids" else ids,
        logits_processor=lambda weight, hidden: hidden @ weight.T,
        lm_head=matrix,
    )
    ranks = SimpleNamespace(tensor_parallel_size=2 if case == "two ranks" else 1)
    head = EagleHead.__new__(EagleHead)
    head._speculator = SimpleNamespace(
        model=model, vllm_config=SimpleNamespace(parallel_config=ranks)
    )
    monkeypatch.setattr(type(ADAPTER), "likeliest", lambda _, speculator, hidden: greedy(hidden))
    hidden = torch.randn(50, size, generator=random)
    assert head._likeliest(hidden).tolist() == greedy(hidden).tolist()
    assert len(asked) == (1 if case == "own vocabulary" else 2)
