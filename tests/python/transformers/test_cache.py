"""StaticKVCache and VirtualKVCache under a real transformers model, against its DynamicCache."""

from __future__ import annotations

import itertools

import pytest
import torch
from transformers import DynamicCache, LlamaForCausalLM

from nwor_specpv import CapacityError, NworError
from nwor_specpv.transformers import StaticKVCache, VirtualKVCache
from tests.python.transformers.tiny_models import tiny

KINDS = [StaticKVCache, VirtualKVCache]
MAX_LEN = 48


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return tiny(hidden_size=32, num_hidden_layers=2)


@pytest.fixture(params=KINDS, ids=lambda kind: kind.__name__)
def kind(request: pytest.FixtureRequest):
    return request.param


def make(kind, model: LlamaForCausalLM, batch: int = 1):
    options = {"page_size": 4} if kind is VirtualKVCache else {}
    cache = kind.from_config(model.config, MAX_LEN, batch, **options)
    for side in cache._pool:  # poisoned: nobody may read what was not written
        side.fill_(float("nan"))
    return cache


def tokens(count: int, batch: int = 1, seed: int = 1) -> torch.Tensor:
    return torch.randint(1, 64, (batch, count), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def run(model: LlamaForCausalLM, ids: torch.Tensor, cache, **arguments) -> torch.Tensor:
    return model(ids, past_key_values=cache, **arguments).logits


def fresh(model: LlamaForCausalLM, ids: torch.Tensor) -> torch.Tensor:
    return run(model, ids, DynamicCache(config=model.config))


def assert_close(got: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(got, expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("batch", [1, 3])
def test_logits_equal_dynamic_caches(model, kind, batch: int) -> None:
    ours, theirs = make(kind, model, batch), DynamicCache(config=model.config)
    ids = tokens(30, batch)
    for start, end in itertools.pairwise([0, 11, 12, 13, 20, 30]):
        assert_close(run(model, ids[:, start:end], ours), run(model, ids[:, start:end], theirs))
        assert ours.get_seq_length() == ours.seq_len == end
    for layer, (key, value) in enumerate(ours.get_all_kv()):
        torch.testing.assert_close(key, theirs.layers[layer].keys, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(value, theirs.layers[layer].values, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("options", [{}, {"prompt_lookup_num_tokens": 3}, {"num_beams": 3}])
def test_generate_gives_the_same_tokens(model, kind, options: dict) -> None:
    if "num_beams" in options and kind is StaticKVCache:
        ours = make(kind, model, 3)
    else:
        ours = make(kind, model)
    prompt = tokens(5).repeat(1, 2)
    arguments = {"max_new_tokens": 16, "do_sample": False, **options}
    expected = model.generate(prompt, **arguments)
    if "num_beams" in options and kind is VirtualKVCache:
        ours.batch_repeat_interleave(3)  # generate brings its batch expanded
    assert torch.equal(model.generate(prompt, past_key_values=ours, **arguments), expected)


@pytest.mark.parametrize("batch", [1, 2])
def test_rollback_and_going_on_equal_a_fresh_run(model, kind, batch: int) -> None:
    cache = make(kind, model, batch)
    first, other = tokens(30, batch), tokens(15, batch, seed=2)
    run(model, first, cache)
    for keep in (25, 17, 16, 3, 0):
        cache.rollback(keep)
        assert cache.seq_len == keep
        both = torch.cat((first[:, :keep], other), 1)
        assert_close(run(model, other, cache), fresh(model, both)[:, keep:])
        cache.rollback(keep)


def test_crop_is_called_as_transformers_calls_it(model, kind) -> None:
    cache = make(kind, model)
    ids = tokens(20)
    run(model, ids, cache)
    cache.crop(0)
    assert cache.get_seq_length() == 20
    cache.crop(-6)
    assert cache.get_seq_length() == 14
    cache.crop(9)
    assert cache.get_seq_length() == 9
    assert_close(run(model, ids[:, 9:], cache), fresh(model, ids)[:, 9:])


@pytest.mark.parametrize("batch", [1, 2])
def test_compact_keeps_what_it_is_told(model, kind, batch: int) -> None:
    cache = make(kind, model, batch)
    run(model, tokens(21, batch), cache)
    before = [[side.clone() for side in pair] for pair in cache.get_all_kv()]
    slots = cache._slots.clone()
    keep = [0, 1, 2, 5, 6, 9, 16, 20]
    cache.compact(keep)
    assert cache.seq_len == len(keep)
    for layer, pair in enumerate(cache.get_all_kv()):
        for side, old in zip(pair, before[layer], strict=True):
            assert torch.equal(side, old[:, :, keep])
    if kind is VirtualKVCache:
        assert torch.equal(cache.get_physical_indices(), slots[0, keep])  # nothing was moved
    new = torch.randn(2, batch, 2, 7, 8)
    cache.append(new, -new)
    for layer, (key, value) in enumerate(cache.get_all_kv()):
        assert torch.equal(key, torch.cat((before[layer][0][:, :, keep], new[layer]), 2))
        assert torch.equal(value[:, :, len(keep) :], -new[layer])


def test_reset_starts_over(model, kind) -> None:
    cache = make(kind, model, 2)
    ids = tokens(20, 2)
    run(model, ids, cache)
    cache.reset()
    assert cache.get_seq_length() == 0
    assert cache.stats()["slots"]["held_slots"] == 0
    assert_close(run(model, ids, cache), fresh(model, ids))


def test_update_takes_cache_position(kind) -> None:
    cache = kind(2, 2, 16, 8)
    rows = torch.randn(6, 1, 2, 4, 8)
    for layer in range(2):
        cache.update(rows[0], -rows[0], layer, {"cache_position": torch.arange(4)})
    for layer in range(2):
        cache.update(rows[1], -rows[1], layer, cache_position=torch.arange(4, 8))
    # Rows from position 3 on replace what was there.
    for layer in range(2):
        key, value = cache.update(rows[2], rows[3], layer, {"cache_position": torch.arange(3, 7)})
        assert torch.equal(key, torch.cat((rows[0][:, :, :3], rows[2]), 2))
        assert torch.equal(value, torch.cat((-rows[0][:, :, :3], rows[3]), 2))
    assert cache.seq_len == 7
    with pytest.raises(NworError, match="cache_position: got 9, expected at most the length 7"):
        cache.update(rows[0], rows[0], 0, {"cache_position": torch.arange(9, 13)})
    with pytest.raises(NworError, match="consecutive"):
        cache.update(rows[0], rows[0], 0, {"cache_position": torch.tensor([7, 9, 8, 10])})


# ---- rounds: drafts are staged -------------------------------------------------------------------


@pytest.mark.parametrize("accepted", [0, 2, 4])
@pytest.mark.parametrize("batch", [1, 2])
def test_a_chain_is_staged_and_its_accepted_rows_are_cached(
    model, kind, accepted: int, batch: int
) -> None:
    cache = make(kind, model, batch)
    ids, after = tokens(17, batch), tokens(6, batch, seed=3)
    run(model, ids[:, :12], cache)
    before = [side.clone() for side in cache._pool]
    cache.begin_round(num_drafts=4)
    assert_close(run(model, ids[:, 12:], cache), fresh(model, ids)[:, 12:])
    # Only the root has reached the cache.
    changed = sum(
        int((now != old).any(-1).sum()) - int(old.isnan().any(-1).sum())
        for now, old in zip(cache._pool, before, strict=True)
        for now, old in [(now.nan_to_num(7e7), old.nan_to_num(7e7))]
    )
    assert changed == 2 * 2 * batch * 2  # K and V, layers, sequences, heads
    cache.commit(list(range(1, 1 + accepted)))
    kept = ids[:, : 13 + accepted]
    assert cache.seq_len == kept.shape[1]
    expected = fresh(model, torch.cat((kept, after), 1))[:, kept.shape[1] :]
    assert_close(run(model, after, cache), expected)
    assert cache.stats()["rounds"]["rejected_tokens"] == batch * (4 - accepted)


def test_a_path_through_a_tree_is_cached_without_a_move(model, kind) -> None:
    cache = make(kind, model)
    ids = tokens(10)
    run(model, ids[:, :9], cache)
    root, after = ids[:, 9:], tokens(4, seed=3)
    drafts = tokens(5, seed=4)
    parents = [0, 0, 1, 2, 2]  # rows 1 and 2 below the root, 3 below 1, 4 and 5 below 2
    depths = torch.tensor([[0, 1, 1, 2, 2, 2]])
    visible = torch.eye(6, dtype=torch.bool)
    for row, parent in enumerate(parents, 1):
        visible[row] |= visible[parent]
    mask = torch.cat((torch.ones(6, 9, dtype=torch.bool), visible), 1)
    mask = torch.zeros(6, 15).masked_fill(~mask, torch.finfo(torch.float32).min)
    cache.begin_round(num_drafts=5, parents=parents)
    logits = run(
        model,
        torch.cat((root, drafts), 1),
        cache,
        attention_mask=mask[None, None],
        position_ids=9 + depths,
    )
    sequence = torch.cat((ids, drafts[:, [1, 4]]), 1)  # rows 2 and 5
    assert_close(logits[:, [0, 2, 5]], fresh(model, sequence)[:, 9:])
    with pytest.raises(NworError, match="expected a child"):
        cache.commit([1, 5])
    cache.commit([2, 5])
    assert cache.seq_len == 12
    expected = fresh(model, torch.cat((sequence, after), 1))[:, 12:]
    assert_close(run(model, after, cache), expected)


def test_an_aborted_round_leaves_the_root(model, kind) -> None:
    cache = make(kind, model)
    ids = tokens(12)
    run(model, ids[:, :8], cache)
    cache.begin_round(3)
    run(model, ids[:, 8:], cache)
    cache.abort_round()
    assert cache.seq_len == 9
    assert_close(run(model, ids[:, 9:], cache), fresh(model, ids)[:, 9:])


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("layer", [0, 1])
def test_a_round_whose_pass_failed_half_way_leaves_nothing(
    model, kind, layer: int, batch: int
) -> None:
    cache = make(kind, model, batch)
    ids = tokens(12, batch)
    run(model, ids[:, :8], cache)
    held = cache.stats()["slots"]["held_slots"]

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    cache.begin_round(3)
    hook = model.model.layers[layer].self_attn.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        run(model, ids[:, 8:], cache)
    hook.remove()
    cache.abort_round()
    assert [part.get_seq_length() for part in cache.layers] == [8, 8]
    assert cache.stats()["slots"]["held_slots"] == held
    cache.begin_round(3)
    assert_close(run(model, ids[:, 8:], cache), fresh(model, ids)[:, 8:])
    cache.commit([1])
    assert_close(run(model, ids[:, 10:], cache), fresh(model, ids)[:, 10:])


# ---- beams ---------------------------------------------------------------------------------------


def test_reordered_sequences_go_their_own_ways(model, kind) -> None:
    cache = make(kind, model, 3)
    ids, after = tokens(14, 3), tokens(5, 3, seed=2)
    run(model, ids, cache)
    held = cache.stats()["slots"]["held_slots"]
    order = torch.tensor([2, 0, 2])
    cache.reorder_cache(order)
    if kind is VirtualKVCache:  # shared, not copied
        assert cache.stats()["slots"]["held_slots"] < held
    expected = fresh(model, torch.cat((ids[order], after), 1))[:, 14:]
    assert_close(run(model, after, cache), expected)


# ---- bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda c: c.rollback(8), "accepted_length: got 8, expected 0 to 7"),
        (lambda c: c.rollback(-1), "accepted_length: got -1"),
        (lambda c: c.compact([3, 2]), "keep_indices"),
        (lambda c: c.compact([7]), "keep_indices"),
        (lambda c: c.append(torch.zeros(2, 1, 2, 3), torch.zeros(2, 1, 2, 3)), "new_keys"),
        (lambda c: c.update(torch.zeros(2, 2, 1, 8), torch.zeros(2, 2, 1, 8), 0), "key_states"),
        (lambda c: c.update(torch.zeros(1, 2, 1, 8), torch.zeros(1, 2, 2, 8), 0), "value_states"),
        (lambda c: c.append(*[torch.zeros(2, 1, 2, 10, 8)] * 2), "max_seq_len: got 17"),
        (lambda c: c.commit([1]), "no round is open"),
        (lambda c: c.begin_round(-1), "num_drafts"),
        (lambda c: c.begin_round(2, [0]), "num_drafts"),
        (lambda c: c.get_kv_for_layer(2), "layer_idx: got 2"),
        (lambda c: c.batch_select_indices(torch.tensor([1])), "indices"),
    ],
)
def test_wrong_use_is_named_and_changes_nothing(kind, call, message: str) -> None:
    cache = kind(2, 2, 16, 8)
    rows = torch.randn(2, 1, 2, 7, 8)
    cache.append(rows, rows)
    with pytest.raises(NworError, match=message):
        call(cache)
    assert cache.seq_len == 7
    assert torch.equal(cache.get_kv_for_layer(1)[0], rows[1])


def test_a_pool_that_is_too_small_says_so() -> None:
    cache = VirtualKVCache(1, 1, 32, 8, page_size=4, num_pages=2)
    rows = torch.randn(1, 1, 1, 8, 8)
    cache.append(rows, rows)
    with pytest.raises(CapacityError, match=r"pages: request .* needs 1, but only"):
        cache.append(rows[:, :, :, :1], rows[:, :, :, :1])
    assert cache.seq_len == 8
    for size in (0, None):
        with pytest.raises(NworError, match="page_size"):
            VirtualKVCache(1, 1, 32, 8, page_size=size)
    with pytest.raises(NworError, match="num_layers: got 0"):
        StaticKVCache(0, 1, 32, 8)
