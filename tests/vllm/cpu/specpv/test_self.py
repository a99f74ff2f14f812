"""The speculator without a head (model runner V2), its lookups, and how vLLM comes to take it."""

from __future__ import annotations

import contextlib
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nwor_specpv.vllm.hooks import runner_choice
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
    repeating,
    self_module,
    step,
)


def proposal(world: World, spec: Any, passes: int, rejected: list[int] | None = None) -> None:
    """A proposal after a full step; all requests draft."""
    count = len(world.texts)
    rejected = rejected or [0] * count
    batch = step(world, spec, [len(text) - 1 for text in world.texts], rejected)
    told = torch.tensor(rejected, dtype=torch.int32)
    spec.idx_mapping[:count] = batch.idx_mapping
    spec.idx_mapping[count:] = -1
    prefix = spec._update_texts(batch, told)
    if not passes:
        spec._look_up(batch, prefix)
        return
    roots = torch.tensor([[text[-1]] for text in world.texts])
    spec._draft_by_passes(batch, passes, torch.ones(count).int(), told, roots)


@pytest.mark.parametrize("passes", [0, 1, 2, 3])
def test_guesses_from_the_text_fill_the_chain(passes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The chain and all that follows it are what the target says, and passes confirm whole rows."""
    print(f"seed={SEED}")
    rng = random.Random(SEED)
    for _ in range(4):
        texts = [repeating(rng.randint(100, 250), 10, rng) for _ in range(rng.randint(1, 5))]
        world = World(texts)
        spec = make(world, monkeypatch, head=False)
        for _ in range(3):  # what a proposal left beyond the texts must not disturb the next one
            proposal(world, spec, passes, [rng.randint(0, LIMIT) for _ in texts])
            for b, text in enumerate(world.texts):
                if passes:
                    assert int(spec._loop.chains.lens[b]) == min(LIMIT + ROWS - 1, passes * ROWS)
                assert spec.draft_tokens[b].tolist() == continued(text, LIMIT)
            world.texts = [text + continued(text, 1 + rng.randint(0, 5)) for text in world.texts]


def test_a_pass_adds_a_token_where_nothing_matches(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World([list(range(WORDS)) * 3 + [WORDS + 1 + i for i in range(30)]])
    spec = make(world, monkeypatch, head=False)
    proposal(world, spec, 3)
    assert int(spec._loop.chains.lens[0]) >= 3
    assert spec.draft_tokens[0, :3].tolist() == continued(world.texts[0], 3)
    proposal(world, spec, 0)
    assert spec.draft_tokens[0].tolist() == [WORDS + 30] * LIMIT  # the latest token again


def test_lookups_in_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is recorded for a batch size is replayed for smaller batches, padded."""
    from vllm.config.compilation import CUDAGraphMode

    world = World([])
    spec = make(world, monkeypatch, head=False)
    replayed = []

    def record(run: Any) -> Any:
        size = run.args[0].shape[0]
        return SimpleNamespace(replay=lambda: (replayed.append(size), run()))

    monkeypatch.setattr(
        proposals_module(), "graph_capture", lambda device: contextlib.nullcontext()
    )
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)
    monkeypatch.setattr(spec, "_record", record)
    descs = [SimpleNamespace(num_reqs=n, uniform_token_count=LIMIT + 1) for n in (6, 4, 4, 1)]
    descs.append(SimpleNamespace(num_reqs=5, uniform_token_count=1))  # no drafts, no passes
    spec._manager = SimpleNamespace(_capture_descs={CUDAGraphMode.FULL: descs}, pool=None)
    spec.lengths._fixed = 0
    world.texts = [[]] * BATCH
    world.forward, forward = lambda *args: forward_of_nobody(*args), world.forward
    spec.capture()
    assert spec._engine.draft_failures.latest == ""
    kinds = ("close", "first", "kept", "later")
    assert sorted(spec._graphs) == [(kind, n) for kind in kinds for n in (1, 4, 6)]
    replayed.clear()
    world.forward = forward
    rng = random.Random(SEED)
    world.texts = [repeating(150, 10, rng), repeating(220, 12, rng)]
    proposal(world, spec, 3)
    assert replayed == [4, 4, 4, 4]
    for b, text in enumerate(world.texts):
        assert spec.draft_tokens[b].tolist() == continued(text, LIMIT)


@pytest.mark.parametrize("passes", [0, 2])
def test_the_sampler_is_told_what_was_not_drawn(
    passes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chains are drawn, with their logits. All that follows them is certain."""
    from nwor_specpv.vllm.specpv import draft_sampling
    from support import reference_sampling

    monkeypatch.setattr(draft_sampling, "gumbel_sample", reference_sampling.gumbel_sample)
    rng = random.Random(SEED)
    world = World([repeating(200, 10, rng), repeating(150, 9, rng)])
    spec = make(world, monkeypatch, head=False)
    spec.draws = True
    spec.temperature.fill_(0.01)  # the made-up target is sure
    spec.draft_logits = torch.full((BATCH, LIMIT, WORDS), float("nan"))
    proposal(world, spec, passes)
    for b, text in enumerate(world.texts):
        assert spec.draft_tokens[b].tolist() == continued(text, LIMIT)
        drawn = passes * ROWS
        told = spec.draft_logits[b, :drawn]
        assert told.argmax(1).tolist() == continued(text, LIMIT)[:drawn]
        assert (told > -200).all()  # the target's own, who gives every word a chance
        certain = spec.draft_logits[b, drawn:]
        assert certain.argmax(1).tolist() == continued(text, LIMIT)[drawn:]
        assert (certain == -1e30).sum(1).eq(WORDS - 1).all()
    assert spec.draft_logits[2:].isnan().all()


def test_a_failing_pass_drafts_nothing_and_lookups_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    from nwor_specpv import Metrics

    world = World([repeating(300, 10, random.Random(SEED))])
    spec = make(world, monkeypatch, head=False)

    def fail(*_: Any) -> Any:
        raise RuntimeError("injected")

    monkeypatch.setattr(world, "forward", fail, raising=False)
    batch = step(world, spec, [299], [0])
    batch.num_draft_tokens_per_req = None
    spec._counts = SimpleNamespace(judged=lambda *_: None, drafted=lambda *_: None)
    spec._engine.num_drafts = LIMIT
    spec.draft_tokens.fill_(7)
    more = {"temperature": spec.temperature.clone(), "seeds": spec.seeds.clone()}
    more["last_sampled"] = torch.tensor([[world.texts[0][-1]]] * BATCH)
    before = Metrics().snapshot()["specpv_draft_failures_total"].get("error", 0)
    found = [propose(spec, batch, **more)[0].tolist() for _ in range(2)]
    assert Metrics().snapshot()["specpv_draft_failures_total"]["error"] == before + 1
    assert found[0] == [0] * LIMIT
    assert found[1] == continued(world.texts[0], LIMIT)
    assert spec.latest_passes == 0


def test_warm_up_steps_draft_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World([[1] * 300])
    spec = make(world, monkeypatch, head=False)
    batch = step(world, spec, [299], [0])
    monkeypatch.setattr(world, "forward", None, raising=False)
    assert propose(spec, batch, dummy_run=True).shape == (1, LIMIT)
    assert propose(spec, batch, is_profile=True).shape == (1, LIMIT)
    assert spec._loop is None


@pytest.mark.parametrize(
    ("said", "used"),
    [((5, 5), (2, 5)), ((None, None), (2, 5)), ((3, 7), (3, 7)), ((1, 40), (1, 16))],
)
def test_lengths_of_a_match(said: tuple[int, int], used: tuple[int, int]) -> None:
    config = SimpleNamespace(prompt_lookup_min=said[0], prompt_lookup_max=said[1])
    assert self_module().match_lengths(config) == used


def test_vllm_takes_runner_v2_for_us_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import EngineArgs

    from nwor_specpv.models import stories
    from nwor_specpv.vllm import versions

    assert runner_choice.install() is None
    assert runner_choice.install() is None
    if versions.adapter.unsupported_by_v2 is None:
        pytest.skip("this vLLM has n-grams on model runner V2")
    name = "_get_v2_model_runner_unsupported_features"
    assert not hasattr(getattr(VllmConfig, name).__wrapped__, "__wrapped__")
    speculation = {"method": "ngram_gpu", "num_speculative_tokens": 8}
    config = EngineArgs(
        model=str(stories()),
        skip_tokenizer_init=True,
        max_model_len=512,
        speculative_config=speculation,
        additional_config={"nwor_specpv": {"enable_specpv": True}},
    ).create_engine_config()
    refused = versions.adapter.ngram_on_v2

    def listed(**nwor: Any) -> bool:
        config.additional_config = {"nwor_specpv": nwor}
        return refused in config._get_v2_model_runner_unsupported_features()

    assert not listed(enable_specpv=True)
    assert listed()
    assert listed(enable_specpv=True, specpv_mode="refresh")
    assert listed(enable_specpv=True, enable_nwor=False)
    config.additional_config = {}
    assert refused in config._get_v2_model_runner_unsupported_features()
    config.additional_config = {"nwor_specpv": {"enable_specpv": True}}
    config.speculative_config.method = "ngram"
    assert refused in config._get_v2_model_runner_unsupported_features()
    config.speculative_config.method = "ngram_gpu"
    # As on a GPU, where there is Triton.
    from vllm.config import vllm as module

    monkeypatch.setattr(module, "HAS_TRITON", True)
    assert config.use_v2_model_runner
    config.additional_config = {}
    assert not config.use_v2_model_runner
