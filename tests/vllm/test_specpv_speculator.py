"""The speculator of model runner V2 without a GPU: rounds of it with a made-up head and target.

The head keeps its own "K/V", a token for each slot it was given, and says what follows from what
it finds there under the block table. It is right exactly as long as slots, positions and lengths
are, so chains that grow by whole passes show that they are.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import logging
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

if TYPE_CHECKING:
    from nwor_specpv.vllm.specpv.speculator import PartialViewSpeculator

module: Any = None  # vLLM is not imported while tests are collected: pytest would log twice

SEED = int(os.environ.get("NWOR_TEST_SEED", random.randrange(2**31)))
WORDS, PAGE, ROWS, LIMIT, BATCH, MAX_LEN = 50, 16, 4, 15, 6, 400


@pytest.fixture(scope="module", autouse=True)
def _imported() -> None:
    global module
    module = importlib.import_module("nwor_specpv.vllm.specpv.speculator")


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


def make(world: Any, monkeypatch: pytest.MonkeyPatch, batch: int = BATCH) -> PartialViewSpeculator:
    from nwor_specpv.vllm.specpv import round_models

    monkeypatch.setattr(round_models, "set_forward_context", world.forward_context)
    settings = SimpleNamespace(
        specpv=lambda: SpecPVConfig(
            enable_specpv=True,
            specpv_rectify="lossless",
            specpv_n_sink_blocks=1,
            specpv_n_retrieval_blocks=2,
            specpv_n_window_blocks=1,
        ),
        specpv_max_requests=2,
        specpv_draft_passes=3,
        specpv_draft_lookup=ROWS - 1,
        specpv_partial_threshold=0,
    )
    ours = module.PartialViewSpeculator
    spec = ours.__new__(ours)
    spec._engine = SimpleNamespace(
        settings=settings, layers={"target.0": None}, draft_failures=DraftFailures(alone=True)
    )
    spec.limit, spec._guesses = LIMIT, ROWS - 1
    spec.lengths = Lengths(settings, LIMIT, alone=True)
    spec._target, spec._rounds, spec._graphs, spec._rows = world, None, {}, {}
    spec._chosen_at = {}
    spec.max_num_reqs, spec.max_model_len = batch, MAX_LEN
    spec.device = torch.device("cpu")
    spec.vllm_config = SimpleNamespace(model_config=SimpleNamespace(max_model_len=MAX_LEN))
    spec.model, spec.draft_logits, spec._offered = world, None, True
    spec.use_local_argmax_reduction = False
    spec.draft_attn_layer_names = {"head.0"}
    groups = [SimpleNamespace(layer_names=[*world.layers, "head.0"])]
    spec.kv_cache_config = SimpleNamespace(kv_cache_groups=groups)
    pages = MAX_LEN // PAGE
    table = (torch.randperm(batch * pages) + 1).int().view(batch, pages)
    spec.block_tables = SimpleNamespace(input_block_tables=[table], kernel_block_sizes=[PAGE])
    builder = SimpleNamespace(build=lambda _, common, fast_build: common)
    spec.attn_groups = [[SimpleNamespace(get_metadata_builder=lambda _: builder)]]
    spec.draft_tokens = torch.zeros(batch, LIMIT, dtype=torch.int64)
    spec.hidden_states = torch.zeros(batch, 1)
    spec.idx_mapping = torch.arange(batch, dtype=torch.int32)
    spec.temperature = torch.ones(batch)
    spec.seeds = torch.arange(batch)
    spec.draft_seeds = torch.zeros_like(spec.seeds)
    spec.use_fp64_gumbel = False
    return spec


def step(world: World, spec: PartialViewSpeculator, prefix: list[int], rejected: list[int]) -> Any:
    """What the runner and vLLM's own part of drafting leave after a full step."""
    table = spec.block_tables.input_block_tables[0]
    for b, (text, length) in enumerate(zip(world.texts, prefix, strict=True)):
        for p in range(length):  # the head has seen every confirmed token, shifted by one
            world.head_slots[int(table[b, p // PAGE]) * PAGE + p % PAGE] = text[p + 1]
        spec.draft_tokens[b, 0] = next_token(text)
    ends = torch.tensor([n + r for n, r in zip(prefix, rejected, strict=True)], dtype=torch.int32)
    count = len(prefix)
    return SimpleNamespace(
        num_reqs=count,
        req_ids=[str(b) for b in range(count)],
        seq_lens=ends,
        seq_lens_cpu_upper_bound=ends,
        prefill_len_np=torch.zeros(count, dtype=torch.int32).numpy(),
        idx_mapping=torch.arange(count),
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
        # Twice over: what the first round left must not disturb the second.
        for _ in range(2):
            prefix = [len(text) - 1 for text in texts]
            rejected = [random.randint(0, LIMIT) for _ in texts]
            batch = step(world, spec, prefix, rejected)
            sampled = torch.tensor([random.random() < 0.8 for _ in texts]).int()
            roots = torch.tensor([[text[-1]] for text in texts])
            spec._round(batch, passes, sampled, torch.tensor(rejected), roots)
            for b, text in enumerate(texts):
                if sampled[b]:
                    assert int(spec._rounds.chains.lens[b]) >= min(LIMIT, passes * ROWS)
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

    monkeypatch.setattr(module, "graph_capture", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)
    monkeypatch.setattr(spec, "_record", record)
    monkeypatch.setattr(module.EagleSpeculator, "capture", lambda _: None)
    manager = SimpleNamespace(graphs=[SimpleNamespace(num_reqs=n) for n in (1, 4, 4, 6)])
    spec.prefill_cudagraph_manager = manager
    saved = spec.block_tables.input_block_tables[0].clone()
    spec.lengths._fixed = 0
    world.texts += [[]] * (BATCH - 2)  # they fill the batch up
    world.forward, forward = lambda *args: forward_of_nobody(*args), world.forward
    spec.capture()
    assert sorted(spec._graphs) == [
        (kind, n) for kind in ("close", "first", "kept", "later") for n in (1, 4, 6)
    ]
    assert spec.lengths.costs is not None
    assert torch.equal(spec.block_tables.input_block_tables[0], saved)
    replayed.clear()
    world.forward, world.texts = forward, world.texts[:2]
    batch = step(world, spec, [99, 259], [0, 3])
    roots = torch.tensor([[text[-1]] for text in world.texts])
    spec._round(batch, 3, torch.ones(2).int(), torch.tensor([0, 3]), roots)
    assert replayed == [4, 4, 4, 4]
    for b, text in enumerate(world.texts):
        assert spec.draft_tokens[b, : 3 * ROWS].tolist() == continued(text, 3 * ROWS)


@pytest.mark.parametrize("case", ["alone", "several ranks", "fixed", "short", "lowered"])
def test_a_start_without_graphs_takes_memory_and_measures(
    case: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Costs are those of passes as they run; nobody's tail and no slot of the head is written."""
    world = Unchecked([])
    spec = make(world, monkeypatch)
    kinds: list[tuple[str, int]] = []
    run = spec._run
    monkeypatch.setattr(
        spec, "_run", lambda kind, table: (kinds.append((kind, len(table))), run(kind, table))
    )
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)
    spec.lengths._fixed = 3 if case == "fixed" else 0
    spec.lengths._alone = case != "several ranks"
    if case == "short":
        spec.vllm_config.model_config.max_model_len = spec.lengths.shortest
    if case == "lowered":  # by vLLM, which tells its runner and not us
        spec.vllm_config.model_config.max_model_len -= 40
    table = spec.block_tables.input_block_tables[0]
    saved = table.clone()
    with caplog.at_level(logging.INFO, "nwor_specpv"):
        spec.start()
        costs = spec.lengths.costs
        spec.start()  # what is there stays
    assert spec._engine.draft_failures.latest == ""
    assert spec.lengths.costs is costs
    assert (costs is not None) == (case in ("alone", "lowered"))
    assert (spec._rounds is not None) == (case != "short")
    said = [record.getMessage().split()[1] for record in caplog.records]
    wanted = [] if case == "short" else ["views"]
    assert said == wanted + ["measured"] * (costs is not None)
    if case == "lowered":
        assert spec._rounds.store.max_tokens == spec.max_model_len == MAX_LEN - 40
    if costs is not None:
        assert costs.run(1, 0) > 0
        assert set(kinds) == {(kind, size) for kind in ("first", "later") for size in (1, 2)}
    assert torch.equal(table, saved)
    assert world.tails == {}
    assert set(world.head_slots) == {-1}


class Unchecked(World):
    """A head and a target that say 0 to everything; what they write is seen as ever."""

    def __call__(self, **told: Any) -> tuple[torch.Tensor, torch.Tensor]:
        slots = self.context[1]["slot_mapping"]["head.0"].tolist()
        for token, slot in zip(told["input_ids"].tolist(), slots, strict=True):
            if slot >= 0:
                self.head_slots[slot] = token
        states = torch.zeros(told["input_ids"].shape[0], 1)
        return states, states

    def forward(self, passed: Any, tokens: Any, positions: Any) -> tuple[torch.Tensor, list[Any]]:
        self.tails |= {slot: 0 for slot in passed.slots.tolist() if slot >= 0}
        return forward_of_nobody(passed, tokens, positions)


def test_a_start_that_fails_leaves_the_head_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from nwor_specpv import Metrics

    world = World([])
    spec = make(world, monkeypatch)
    spec.lengths._fixed = 0

    def fail(*_: Any) -> Any:
        raise RuntimeError("injected")

    monkeypatch.setattr(world, "forward", fail, raising=False)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)
    table = spec.block_tables.input_block_tables[0]
    saved = table.clone()
    before = Metrics().snapshot()["specpv_draft_failures_total"].get("start", 0)
    for _ in range(2):  # it is not tried again
        spec.start()
    assert Metrics().snapshot()["specpv_draft_failures_total"]["start"] == before + 1
    assert spec._engine.draft_failures.latest == "RuntimeError: injected"
    assert spec.lengths.number([10**6]) == ROWS - 1
    assert spec._rounds is None  # nor is memory held for nobody
    assert torch.equal(table, saved)


def forward_of_nobody(passed: Any, tokens: Any, positions: Any) -> tuple[torch.Tensor, list[Any]]:
    """A target that says 0 to everything, for rounds whose result nobody uses."""
    states = torch.zeros(tokens.shape[0], 1)
    return states, [states]


def test_graphs_of_both_lengths_are_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own managers: full graphs for few drafts and for whole chains, single rows for the
    head."""
    from vllm.config.compilation import CUDAGraphMode
    from vllm.v1.worker.gpu import cudagraph_utils

    group = SimpleNamespace(is_first_rank=True, is_last_rank=True)
    monkeypatch.setattr(cudagraph_utils, "get_pp_group", lambda: group)
    monkeypatch.setattr(cudagraph_utils, "is_breakable_cudagraph_enabled", lambda: False)
    platform = SimpleNamespace(get_global_graph_pool=lambda: None)
    monkeypatch.setattr(cudagraph_utils, "current_platform", platform)
    spec = make(World([]), monkeypatch)
    speculative = SimpleNamespace(num_speculative_tokens_per_batch_size=None)
    speculative.uses_dynamic_speculative_decoding = lambda: (
        speculative.num_speculative_tokens_per_batch_size is not None
    )
    spec.speculative_config, spec.num_speculative_steps = speculative, LIMIT
    spec.vllm_config = SimpleNamespace(
        speculative_config=speculative,
        num_speculative_tokens=LIMIT,
        scheduler_config=SimpleNamespace(max_num_seqs=BATCH),
        parallel_config=SimpleNamespace(data_parallel_size=1, tensor_parallel_size=1),
        compilation_config=SimpleNamespace(
            cudagraph_capture_sizes=[1, 2, 4, 8, 16, 32, 64, 96], max_cudagraph_capture_size=96
        ),
    )
    spec._offer_lengths()
    assert speculative.uses_dynamic_speculative_decoding()
    spec.init_cudagraph_manager(CUDAGraphMode.FULL_DECODE_ONLY)
    assert not speculative.uses_dynamic_speculative_decoding(), "vLLM's scheduler would take it"
    full = spec.prefill_cudagraph_manager._capture_descs[CUDAGraphMode.FULL]
    by_rows = {rows: set() for rows in (ROWS, 1 + LIMIT)}
    for desc in full:
        by_rows[desc.uniform_token_count].add(desc.num_reqs)
    assert by_rows[1 + LIMIT] >= {1, 2, 4, 6}
    assert by_rows[ROWS] >= {1, 2, 4}
    single = spec.decode_cudagraph_manager._capture_descs[CUDAGraphMode.FULL]
    assert {desc.uniform_token_count for desc in single} == {1}
    # Every batch of either kind finds a graph, the smallest that holds it.
    manager = spec.prefill_cudagraph_manager
    manager._graphs_captured = True
    for rows, batches in by_rows.items():
        for count in range(1, max(batches) + 1):
            desc = manager.dispatch(count, count * rows, rows, 0)
            assert desc.cg_mode == CUDAGraphMode.FULL, (rows, count)
            assert desc.uniform_token_count == rows
            assert desc.num_reqs == min(n for n in batches if n >= count)
    assert manager.dispatch(3, 3 * ROWS + 1, None, 0).cg_mode == CUDAGraphMode.NONE


@pytest.mark.parametrize("ranges", [None, [(1, 4, LIMIT), (5, BATCH, 2)]])
def test_ranges_of_the_users_are_refused_and_ours_are_not(
    ranges: list | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The set-up is judged before ours stand in their place."""
    from nwor_specpv.config import load_config
    from nwor_specpv.errors import NworError
    from nwor_specpv.vllm.specpv import rules

    settings = load_config({"enable_specpv": True, "specpv_rectify": "lossless"})
    speculative = SimpleNamespace(
        method="eagle3",
        model="h",
        num_speculative_tokens=LIMIT,
        num_speculative_tokens_per_batch_size=ranges,
    )
    config = SimpleNamespace(
        speculative_config=speculative,
        model_config=SimpleNamespace(
            is_multimodal_model=False, uses_mrope=False, max_model_len=32768
        ),
        scheduler_config=SimpleNamespace(scheduler_cls=None, async_scheduling=True),
        cache_config=SimpleNamespace(
            enable_prefix_caching=False, cache_dtype="auto", block_size=PAGE
        ),
        parallel_config=SimpleNamespace(data_parallel_size=1),
        lora_config=None,
        use_v2_model_runner=True,
    )

    def begin(self: Any, vllm_config: Any, _: Any) -> None:
        self.num_speculative_steps, self.max_num_reqs = LIMIT, BATCH
        self.speculative_config, self.seeds = vllm_config.speculative_config, torch.zeros(BATCH)

    def engine_of(vllm_config: Any) -> Any:
        rules.judge(settings, rules.describe(vllm_config), None)
        return SimpleNamespace(settings=settings, lengths=Lengths(settings, LIMIT, alone=True))

    monkeypatch.setattr(module.EagleSpeculator, "__init__", begin)
    monkeypatch.setattr(module, "engine_of", engine_of)
    cpu = torch.device("cpu")
    if ranges is None:
        module.PartialViewSpeculator(config, cpu)
        assert speculative.num_speculative_tokens_per_batch_size is not None
        return
    with pytest.raises(NworError, match="num_speculative_tokens_per_batch_size"):
        module.PartialViewSpeculator(config, cpu)
    assert speculative.num_speculative_tokens_per_batch_size is ranges


def propose(spec: PartialViewSpeculator, batch: Any, **more: Any) -> torch.Tensor:
    count = batch.num_reqs
    told = dict.fromkeys(
        list(inspect.signature(module.PartialViewSpeculator.propose).parameters)[2:12]
    )
    told |= {"num_sampled": torch.ones(count).int(), "num_rejected": torch.zeros(count).int()}
    told["last_sampled"] = torch.zeros(BATCH, 1).long()
    return spec.propose(batch, **(told | more))


def test_who_drafts_how_much(monkeypatch: pytest.MonkeyPatch) -> None:
    """The head as many tokens as the scheduler wants, or one and then the round."""
    world = World([[1] * 300, [2] * 20])
    spec = make(world, monkeypatch)
    steps, rounds = [], []
    monkeypatch.setattr(
        module.EagleSpeculator,
        "propose",
        lambda self, *_: steps.append(self.num_speculative_steps),
    )
    monkeypatch.setattr(spec, "_round", lambda batch, passes, *_: rounds.append(passes))
    batch = step(world, spec, [299, 19], [0, 0])
    batch.prefill_len_np = torch.tensor([300, 20]).numpy()
    batch.num_draft_tokens_per_req = None
    judged: list[list[int]] = []
    spec._counts = SimpleNamespace(
        judged=lambda _, drafts, __: judged.append(drafts), drafted=lambda *_: None
    )
    spec.num_speculative_steps = LIMIT
    batch.prefill_len_np[:] = 0
    for wanted, dummy in ((LIMIT, False), (ROWS - 1, False), (0, False), (LIMIT, True)):
        spec._engine.num_drafts = wanted
        assert propose(spec, batch, dummy_run=dummy).shape == (2, LIMIT)
    assert steps == [1, ROWS - 1, 1, LIMIT]  # 0: a scheduler that says nothing
    assert rounds == [3, 3]
    batch.prefill_len_np[:] = 1000  # all are in the midst of their prompts
    spec._engine.num_drafts = LIMIT
    propose(spec, batch)
    assert rounds == [3, 3]
    assert spec.num_speculative_steps == LIMIT
    # Rows of prompts are nobody's drafts: they must not look like a head that is always right.
    assert judged == []
    batch.num_draft_tokens_per_req = torch.tensor([2, 0, 7]).numpy()
    propose(spec, batch)
    assert judged == [[2, 0]]


def test_a_failing_pass_drafts_nothing_and_serving_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from nwor_specpv import Metrics

    world = World([[1] * 300])
    spec = make(world, monkeypatch)
    monkeypatch.setattr(module.EagleSpeculator, "propose", lambda *_: None)

    def fail(*_: Any) -> Any:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(world, "forward", fail, raising=False)
    batch = step(world, spec, [299], [0])
    batch.prefill_len_np = torch.tensor([0]).numpy()
    batch.num_draft_tokens_per_req = None
    spec._counts = SimpleNamespace(judged=lambda *_: None, drafted=lambda *_: None)
    spec._engine.num_drafts = LIMIT
    spec.draft_tokens.fill_(7)
    before = Metrics().snapshot()["specpv_draft_failures_total"].get("error", 0)
    for _ in range(2):
        assert propose(spec, batch).shape == (1, LIMIT)
    assert Metrics().snapshot()["specpv_draft_failures_total"]["error"] == before + 1
    assert spec._engine.draft_failures.latest == "RuntimeError: out of memory"
    assert spec.draft_tokens[0].tolist() == [0] * LIMIT
    assert spec.latest_passes == 0
    assert spec.lengths.number([10**6]) == ROWS - 1


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
        spec._round(batch, 2, torch.tensor(sampled), none, roots)
        return spec._rounds.store.rows(4).tolist()

    first = views([300, 1000, 100, 1000], [0, 0, 1, 0])
    assert first[0] == first[1] == first[3] == -1
    assert first[2] >= 0
    second = views([299, 1000, 100, 1000], [1, 0, 1, 0])
    assert second == [1 - first[2], -1, first[2], -1]
    assert spec._chosen_at.keys() == {"0", "2"}


def test_rows_are_for_whom_the_lengths_call_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to `specpv_partial_threshold` everything is read; rows are missing to the longer ones."""
    spec = make(World([]), monkeypatch)
    spec._engine.settings.specpv_partial_threshold = 200
    spec.lengths = Lengths(spec._engine.settings, LIMIT, alone=True)
    assert spec._ready().store.budget.static_tokens < 150
    assert spec.lengths.passes([150, 200]) == 0
    assert spec.lengths.passes([150, 200, 201]) > 0
    rows = spec._view_rows(["a", "b", "c"], [150, 200, 201], [0] * 3)
    assert rows[:2] == [-1, -1]
    assert rows[2] >= 0


@pytest.mark.parametrize("case", ["own vocabulary", "the target's matrix", "two ranks", "no ids"])
def test_the_heads_best_guess_is_vllms(case: str) -> None:
    """By vLLM's own way, scores spread over the target's vocabulary, or by a shorter one."""
    from nwor_specpv.vllm.specpv.round_models import EagleHead

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
        model=model,
        _greedy_sample_draft=greedy,
        vllm_config=SimpleNamespace(parallel_config=ranks),
    )
    hidden = torch.randn(50, size, generator=random)
    assert head._likeliest(hidden).tolist() == greedy(hidden).tolist()
    assert len(asked) == (1 if case == "own vocabulary" else 2)
