"""A made-up head and target around the speculator of model runner V2.

The head keeps its own "K/V", a token for each slot it was given, and says what follows from what
it finds there under the block table. It is right exactly as long as slots, positions and lengths
are, so chains that grow by whole passes show that they are.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import os
import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from nwor_specpv import SpecPVConfig
from nwor_specpv.vllm.specpv.failures import DraftFailures
from nwor_specpv.vllm.specpv.lengths import Lengths
from support.installed import ADAPTER  # noqa: F401  (chooses it)

if TYPE_CHECKING:
    from nwor_specpv.vllm.specpv.speculator import PartialViewSpeculator

SEED = int(os.environ.get("NWOR_TEST_SEED", random.randrange(2**31)))
WORDS, PAGE, ROWS, LIMIT, BATCH, MAX_LEN = 50, 16, 4, 15, 6, 400


def speculator_module() -> Any:
    """vLLM is not imported while tests are collected: pytest would log twice."""
    return importlib.import_module("nwor_specpv.vllm.specpv.speculator")


def proposals_module() -> Any:
    return importlib.import_module("nwor_specpv.vllm.specpv.proposals")


def self_module() -> Any:
    return importlib.import_module("nwor_specpv.vllm.specpv.self_speculator")


def repeating(length: int, again: int, rng: Any = random) -> list[int]:
    """A text that says some of its tokens again at its end: what follows them follows again, as the
    next token depends on the last ones alone."""
    text = [rng.randrange(WORDS) for _ in range(6)]
    text += continued(text, length - 6 - again)
    return text + text[20 : 20 + again]


def next_token(text: list[int]) -> int:
    state = 17
    for token in text[-6:]:
        state = (state * 31 + token + 7) % 1_000_003
    return state % WORDS


def continued(text: list[int], count: int) -> list[int]:
    text = list(text)
    for _ in range(count):
        text.append(next_token(text))
    return text[-count:]


class World:
    """Requests, the head's slots, the target's tail, and what a forward pass was told."""

    def __init__(self, texts: list[list[int]]) -> None:
        self.texts = texts
        self.head_slots = [-1] * (BATCH * 32 * PAGE)
        self.tails: dict[int, int] = {}
        self.context: Any = None
        self.layers = ["target.0", "target.1"]

    @contextlib.contextmanager
    def forward_context(self, metadata: Any, _: Any, **told: Any) -> Iterator[None]:
        self.context = (metadata, told)
        yield

    # ---- the head, called as vLLM's model ----

    def __call__(
        self, *, input_ids: Any, positions: Any, hidden_states: Any, inputs_embeds: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        metadata, told = self.context
        common, slots = metadata["head.0"], told["slot_mapping"]["head.0"].tolist()
        assert hidden_states.shape[0] == input_ids.shape[0] == told["num_tokens"]
        for token, slot in zip(input_ids.tolist(), slots, strict=True):
            if slot >= 0:
                self.head_slots[slot] = token
        said = []
        starts = common.query_start_loc.tolist()
        assert starts == common.query_start_loc_cpu.tolist()
        for b in range(common.num_reqs):
            table = common.block_table_tensor[b].tolist()
            for row in range(starts[b], starts[b + 1]):
                position = int(positions[row])
                length = int(common.seq_lens[b]) - (starts[b + 1] - 1 - row)
                # A window of whole pages that ends with the row.
                assert (position + 1 - length) % PAGE == 0
                assert length >= min(position + 1, 64)
                found = [
                    self.head_slots[table[p // PAGE] * PAGE + p % PAGE]
                    for p in range(max(0, length - 6), length)
                ]
                said.append(next_token(found))
        states = torch.tensor(said)[:, None].float()
        return states, states

    def compute_logits(self, states: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.one_hot(states[:, 0].long(), WORDS).float()

    def combine_hidden_states(self, states: torch.Tensor) -> torch.Tensor:
        return states

    # ---- the target ----

    @property
    def layer_index(self) -> dict[str, int]:
        return {name: index for index, name in enumerate(self.layers)}

    dtype = torch.float32

    def key_scales(self) -> list[torch.Tensor]:
        return []

    def key_caches(self) -> list[torch.Tensor]:
        return [torch.zeros(4, PAGE, 1, 16) for _ in self.layers]

    def forward(self, passed: Any, tokens: Any, positions: Any) -> tuple[torch.Tensor, list[Any]]:
        capacity = passed.tail.capacity
        for token, slot in zip(tokens.tolist(), passed.slots.tolist(), strict=True):
            if slot >= 0:
                self.tails[slot] = token
        said = []
        for b in range(passed.num_requests):
            prefix, length = int(passed.prefix_lens[b]), int(passed.tail_lens[b])
            seen = self.texts[b][:prefix] if prefix else []
            seen += [self.tails[b * capacity + i] for i in range(length)]
            for j in range(ROWS):
                seen = [*seen, int(tokens[b * ROWS + j])]
                said.append(next_token(seen))
        states = torch.tensor(said)[:, None].float()
        return states, [states]

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        return self.compute_logits(states)


def make(
    world: Any, monkeypatch: pytest.MonkeyPatch, batch: int = BATCH, *, head: bool = True
) -> Any:
    """A speculator with the made-up head, or one that looks texts up."""
    from nwor_specpv.vllm.specpv import draft_models

    monkeypatch.setattr(draft_models, "set_forward_context", world.forward_context)
    settings = SimpleNamespace(
        specpv=lambda: SpecPVConfig(
            enable_specpv=True,
            specpv_mode="lossless",
            specpv_n_sink_blocks=1,
            specpv_n_retrieval_blocks=2,
            specpv_n_window_blocks=1,
        ),
        specpv_max_requests=2,
        specpv_draft_passes=3,
        specpv_draft_lookup=ROWS - 1,
    )
    ours = speculator_module().PartialViewSpeculator if head else self_module().SelfSpeculator
    spec = ours.__new__(ours)
    spec._engine = SimpleNamespace(
        settings=settings,
        layers={"target.0": None},
        draft_failures=DraftFailures(single_rank=True),
        num_drafts=LIMIT,
        num_passes=3,
        sizes_caches=False,
    )
    spec.limit, spec._guesses = LIMIT, ROWS - 1
    spec.lengths = Lengths(settings, LIMIT)
    spec._target, spec._loop, spec._graphs, spec._rows = world, None, {}, {}
    spec._chosen_at = {}
    spec.max_num_reqs = batch
    spec.device = torch.device("cpu")
    spec.vllm_config = SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=MAX_LEN),
        scheduler_config=SimpleNamespace(max_num_seqs=batch),
        speculative_config=SimpleNamespace(num_speculative_tokens_per_batch_size=None),
    )
    spec.model, spec.draft_logits, spec._offered = world, None, True
    spec.use_local_argmax_reduction = False
    spec.draft_attn_layer_names = {"head.0"}
    groups = [SimpleNamespace(layer_names=[*world.layers, "head.0"])]
    spec.kv_cache_config = SimpleNamespace(kv_cache_groups=groups)
    pages = MAX_LEN // PAGE
    table = (torch.randperm(batch * pages) + 1).int().view(batch, pages)
    spec.block_tables = SimpleNamespace(
        input_block_tables=[table], kernel_block_sizes=[PAGE], block_sizes=[PAGE]
    )
    builder = SimpleNamespace(build=lambda _, common, fast_build: common)
    spec.attn_groups = [[SimpleNamespace(get_metadata_builder=lambda _: builder)]]
    spec.draft_tokens = torch.zeros(batch, LIMIT, dtype=torch.int64)
    spec.hidden_states = torch.zeros(batch, 1)
    spec.idx_mapping = torch.arange(batch, dtype=torch.int32)
    spec.temperature = torch.ones(batch)
    spec.seeds = torch.arange(batch)
    spec.draft_seeds = torch.zeros_like(spec.seeds)
    spec.use_fp64_gumbel = False
    spec.draws = False  # nobody is sampled
    spec.top_k = torch.zeros(batch, dtype=torch.int32)
    spec.top_p, spec.min_p = torch.ones(batch), torch.zeros(batch)
    if not head:
        add_texts(world, spec)
    return spec


def add_texts(world: World, spec: Any) -> None:
    """The runner's texts, and our copy of them on the device."""
    from nwor_specpv.vllm.specpv.texts import Texts

    batch = spec.max_num_reqs
    spec._texts = Texts(batch, MAX_LEN, LIMIT, (2, 5), spec.device)
    gpu = torch.zeros(batch, MAX_LEN, dtype=torch.int32)
    states = SimpleNamespace(all_token_ids=SimpleNamespace(gpu=gpu))
    spec._engine.runner = world.runner = SimpleNamespace(req_states=states)


def step(world: World, spec: PartialViewSpeculator, prefix: list[int], rejected: list[int]) -> Any:
    """What the runner and vLLM's own part of drafting leave after a full step."""
    table = spec.block_tables.input_block_tables[0]
    for b, (text, length) in enumerate(zip(world.texts, prefix, strict=True)):
        for p in range(length):  # the head has seen every confirmed token, shifted by one
            world.head_slots[int(table[b, p // PAGE]) * PAGE + p % PAGE] = text[p + 1]
        spec.draft_tokens[b, 0] = next_token(text)
    if hasattr(world, "runner"):
        for b, text in enumerate(world.texts):
            told = world.runner.req_states.all_token_ids.gpu[b]
            told[: len(text)] = torch.tensor(text, dtype=torch.int32)
    ends = torch.tensor([n + r for n, r in zip(prefix, rejected, strict=True)], dtype=torch.int32)
    count = len(prefix)
    return SimpleNamespace(
        num_reqs=count,
        req_ids=[str(b) for b in range(count)],
        seq_lens=ends,
        seq_lens_cpu_upper_bound=ends,
        prefill_len_np=torch.zeros(count, dtype=torch.int32).numpy(),
        idx_mapping=torch.arange(count, dtype=torch.int32),
        idx_mapping_np=torch.arange(count).numpy(),
    )


def propose(spec: PartialViewSpeculator, batch: Any, **more: Any) -> torch.Tensor:
    count = batch.num_reqs
    told = dict.fromkeys(
        list(inspect.signature(speculator_module().PartialViewSpeculator.propose).parameters)[2:12]
    )
    told |= {"num_sampled": torch.ones(count).int(), "num_rejected": torch.zeros(count).int()}
    told["last_sampled"] = torch.zeros(BATCH, 1).long()
    return spec.propose(batch, **(told | more))


def forward_of_nobody(passed: Any, tokens: Any, positions: Any) -> tuple[torch.Tensor, list[Any]]:
    """A target that says 0 to everything, for drafts that nobody uses."""
    states = torch.zeros(tokens.shape[0], 1)
    return states, [states]
