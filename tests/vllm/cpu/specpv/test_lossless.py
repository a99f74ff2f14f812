"""The target drafts for itself over a partial view; the real vLLM verifies. The story model.

Output is plain vLLM's, token for token, whatever happens to the drafts.
"""

from __future__ import annotations

import functools
import inspect
import json
import logging
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nwor_specpv import Metrics
from nwor_specpv.errors import NworError
from nwor_specpv.models import stories
from nwor_specpv.models.tiny_model import TinyTokenizer
from nwor_specpv.vllm.specpv.failures import RankError
from nwor_specpv.vllm.specpv.rules import DRAFTER
from support import chi_square, disturbances
from support.engines import (
    STOCK,
    caches,
    check_drafting,
    counted,
    draft_failures,
    drive,
    greedy,
    own_engine,
    start,
)
from support.engines import stats as own_stats
from support.installed import PAGE
from support.small_views import LENGTHS, SMALL_VIEW, prompts, varied_prompt

pytestmark = pytest.mark.serves("lossless without a head", "V1")

SPECULATION = {"method": "custom_class", "model": DRAFTER, "num_speculative_tokens": 8}
VIEW = SMALL_VIEW | {"specpv_draft_passes": 3, "check_contract": True}
MAX_TOKENS = 48


def begin(nwor: dict[str, Any] | None = None, **options: Any) -> Any:
    return start(VIEW | (nwor or {}), speculation=SPECULATION, **options)


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    story = drive(start(STOCK, speculation=None), prompts(), greedy(MAX_TOKENS))
    return [story.tokens[str(i)] for i in range(len(LENGTHS))]


@pytest.fixture(autouse=True)
def before() -> dict[str, Any]:
    return Metrics().snapshot()


def drafter() -> Any:
    return own_engine().runner.drafter


def grown(before: dict[str, Any], name: str) -> int:
    return Metrics().snapshot()[f"specpv_{name}_total"] - before[f"specpv_{name}_total"]


def check(story: Any, expected: list[list[int]], before: dict[str, Any]) -> None:
    """The same tokens, nothing rejected in the cache, and the drafts did come from views."""
    assert [story.tokens[str(i)] for i in range(len(expected))] == expected
    assert own_engine().violations == []
    assert own_stats()["fallbacks"] == {}
    assert grown(before, "draft_passes") > 0
    assert 0 < grown(before, "confirmed_tokens") <= grown(before, "drafted_tokens")
    check_drafting(before)


def published_blocks(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Of every call that publishes blocks to the prefix cache: tokens in them, tokens confirmed."""
    from vllm.v1.core.block_pool import BlockPool

    publish, found = BlockPool.cache_full_blocks, []

    def watched(self: Any, *args: Any, **kwargs: Any) -> None:
        given = inspect.signature(publish).bind(self, *args, **kwargs).arguments
        request = given["request"]
        # Drafts are no tokens of a request until a full step has accepted them.
        assert len(request.all_token_ids) == request.num_prompt_tokens + request.num_output_tokens
        found.append((given["num_full_blocks"] * given["block_size"], request.num_tokens))
        publish(self, *args, **kwargs)

    monkeypatch.setattr(BlockPool, "cache_full_blocks", watched)
    return found


@pytest.mark.quick
def test_requests_of_many_lengths_in_one_batch(
    expected: list, before: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    published = published_blocks(monkeypatch)
    llm = begin(max_num_batched_tokens=96)
    check(drive(llm, prompts(), greedy(MAX_TOKENS), arrivals=[0, 0, 3, 9, 9, 20]), expected, before)
    # Prompts again: their blocks are in the prefix cache, and hold nothing of the drafts.
    hits = counted(llm, "vllm:prefix_cache_hits")
    check(drive(llm, prompts(), greedy(MAX_TOKENS)), expected, before)
    assert counted(llm, "vllm:prefix_cache_hits") > hits
    # Nor was any of them published before full steps had confirmed all of its tokens.
    assert len(published) > 20
    assert all(tokens <= confirmed for tokens, confirmed in published)
    # What is confirmed with these views is most of what was drafted.
    assert grown(before, "confirmed_tokens") > 0.5 * grown(before, "drafted_tokens")


def test_a_book_a_question_about_its_beginning_and_code(before: dict) -> None:
    """Other text than the model's own: little of it is confirmed, and all of it is plain vLLM's."""
    encode, length = TinyTokenizer().encode, 260
    book = encode(disturbances.BOOK.read_text()[:4000])
    first, last = map(encode, disturbances.ASKED.split("{}"))
    asked = first + book[length : 2 * length - len(first) - len(last)] + last
    code = encode(disturbances.CODE.read_text()[:4000])[: length - 30]
    texts = [book[:length], asked, code]
    plain = drive(start(STOCK, speculation=None), texts, greedy(MAX_TOKENS)).tokens
    check(drive(begin(), texts, greedy(MAX_TOKENS)), [plain[str(i)] for i in range(3)], before)


def test_passes_by_measured_cost_without_lookups(expected: list, before: dict) -> None:
    llm = begin({"specpv_draft_passes": 0, "specpv_draft_lookup": 0})
    story = drive(llm, prompts(), greedy(MAX_TOKENS))
    assert [story.tokens[str(i)] for i in range(6)] == expected
    costs = drafter()._costs
    assert costs is not None
    assert costs.run(1, 0) > 0
    # On a story model drafting cannot pay; told that K/V is dear, it does.
    drafter()._costs = type(costs)(1e-4, 1e-6, 1e-4)
    drafter()._observe = lambda *_: None
    check(drive(llm, prompts(), greedy(MAX_TOKENS)), expected, before)


def test_lookups_follow_the_chain_and_are_judged_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    from nwor_specpv.vllm.specpv.drafter import DraftedRequest, PartialViewDrafter

    ours = PartialViewDrafter.__new__(PartialViewDrafter)
    ours._limit, ours._inner = 8, 3
    told: list[tuple[str, int, int]] = []
    for name in ("agreement", "lookup_agreement"):
        add = functools.partial(lambda name, *counts: told.append((name, *counts)), name)
        setattr(ours, name, SimpleNamespace(add=add))
    # Of a chain of 4 with 3 lookups behind it vLLM has scheduled so many, and accepted so many.
    for scheduled, accepted, expected in (
        (7, 2, [("agreement", 2, 3)]),
        (7, 4, [("agreement", 4, 4), ("lookup_agreement", 0, 1)]),
        (7, 6, [("agreement", 4, 4), ("lookup_agreement", 2, 3)]),
        (7, 7, [("agreement", 4, 4), ("lookup_agreement", 3, 3)]),
        (4, 4, [("agreement", 4, 4)]),
        (3, 3, [("agreement", 3, 3)]),
        (0, 0, []),
    ):
        told.clear()
        ours._judge(DraftedRequest(None, 3, by_view=4), scheduled, accepted)
        assert told == expected, (scheduled, accepted)
    told.clear()
    ours._judge(DraftedRequest(None, 3), 5, 2)
    assert told == [("lookup_agreement", 2, 3)]

    # The last tokens of a chain were seen before: what came after them follows.
    llm = begin()
    drive(llm, prompts()[:1], greedy(2))
    ours, found = drafter(), []
    monkeypatch.setattr(
        ours, "_draft_by_passes", lambda members, *_: {i: [71, 72] for i in members}
    )
    learn = ours._learn

    class Answering(list):
        """A text that finds the chain itself, and three tokens behind it."""

        append = list.extend

        def lookup(self, chain: list[int], count: int) -> list[int]:
            return [*chain, 73, 74, 75][:count]

    def learning(names: Any, *args: Any) -> None:
        learn(names, *args)
        for name in names:
            known = ours._requests[name]
            known.index = Answering([0] * len(known.index))

    monkeypatch.setattr(ours, "_learn", learning)
    propose = ours._propose
    monkeypatch.setattr(ours, "_propose", lambda *args: found.append(propose(*args)) or found[-1])
    drive(llm, prompts()[:1], greedy(4))
    assert [[71, 72, 71, 72, 73, 74][: 2 + ours._inner]] in found


def test_preempted_requests(expected: list, before: dict) -> None:
    llm = begin(num_gpu_blocks_override=800 // PAGE, max_model_len=320)
    check(drive(llm, prompts(), greedy(MAX_TOKENS)), expected, before)
    assert counted(llm, "vllm:num_preemptions") > 0


def test_drafts_that_vllm_makes_up_are_not_taken_for_ours(expected: list, before: dict) -> None:
    """One request near the longest context keeps vLLM from asking; it verifies zeros meanwhile."""
    longest = 280
    llm = begin(max_model_len=longest)
    drive(llm, prompts()[:1], greedy(2))
    ours, judged, zeros = drafter(), [], []
    judge, propose = ours._judge, ours._propose

    def scheduled(name: str) -> list[int]:
        batch = own_engine().runner.input_batch
        index = batch.req_id_to_index.get(name)
        return [] if index is None else list(batch.spec_token_ids[index])

    def proposing(*args: Any) -> Any:
        zeros.extend(name for name in ours._requests if scheduled(name) == [0] * 8)
        return propose(*args)

    def watched(request: Any, count: int, accepted: int) -> None:
        name = next(name for name, known in ours._requests.items() if known is request)
        assert scheduled(name) == request.drafts[:count]
        judged.append(count)
        judge(request, count, accepted)

    ours._judge, ours._propose = watched, proposing
    # The third has room for 20 tokens, and ends long before the first.
    story = drive(llm, prompts()[:3], greedy(MAX_TOKENS))
    wanted = [*expected[:2], expected[2][: longest - LENGTHS[2]]]
    assert zeros
    check(story, wanted, before)
    assert len(judged) > 5


def test_aborts_stops_and_fewer_rows_than_requests(expected: list, before: dict) -> None:
    """Two requests at a time have views; a row goes to the next when its request is gone."""
    stop = expected[3][20]
    params = [greedy(MAX_TOKENS) for _ in LENGTHS]
    params[3] = greedy(MAX_TOKENS, stop_token_ids=[stop])
    llm = begin({"specpv_max_requests": 2})
    story = drive(llm, prompts(), params, aborts={4: "0"})
    ended = expected[3].index(stop) + 1
    wanted = [*expected[:3], expected[3][:ended], *expected[4:]]
    wanted[0] = wanted[0][: len(story.tokens["0"])]
    assert len(wanted[0]) < MAX_TOKENS
    check(story, wanted, before)
    assert story.finished["3"] == "stop"
    drive(llm, [[1, 5]], greedy(2))
    assert len(drafter()._store._free) == 2


def test_what_happens_to_requests_leaves_nothing_behind(expected: list, before: dict) -> None:
    """Alone and all at once, preempted, found in the prefix cache, aborted, stopped; one engine."""
    script = disturbances.stories()
    found = script.run(begin({"specpv_max_requests": script.num_views}, **script.options))
    assert len(found.outputs) > 3 * len(LENGTHS)
    for i, output in found.outputs:
        assert list(output.token_ids) == expected[i][: len(output.token_ids)]
    assert found.stops >= 2
    assert own_engine().violations == []
    assert own_stats()["fallbacks"] == {}
    check_drafting(before)


def test_drafting_changes_no_byte_of_the_cache(expected: list, before: dict) -> None:
    llm = begin()
    drive(llm, prompts()[:1], greedy(2))
    ours, untouched = drafter(), []
    draft = ours._draft_by_passes

    def watched(*args: Any) -> Any:
        held = caches()
        found = draft(*args)
        now = caches()
        untouched.append(all(torch.equal(held[name], now[name]) for name in held))
        return found

    ours._draft_by_passes = watched
    check(drive(llm, prompts(), greedy(MAX_TOKENS)), expected, before)
    assert len(untouched) > 10
    assert all(untouched)


def test_summaries_are_of_confirmed_keys_alone(expected: list) -> None:
    """At every proposal, and in every layer: from scratch, out of the cache, block by block."""
    llm = begin()
    drive(llm, prompts()[:1], greedy(2))
    ours, looked_at = drafter(), []
    draft = ours._draft_by_passes

    def watched(members: Any, requests: Any, lens: Any, seen: Any, passes: int) -> Any:
        found = draft(members, requests, lens, seen, passes)
        store = ours._store
        for i in members[:2]:
            blocks = (lens[i] - 1) // 16 - 2 - 1  # whole, between sink and window
            for layer in (0, 4):
                pages = seen.block_table[i].long()
                tokens = store.key_caches[layer][pages].flatten(0, 1)
                keys = tokens.unflatten(0, (-1, 16))[1 : 1 + blocks]
                for kept, wanted in ((store.kmax, keys.amax(1)), (store.kmin, keys.amin(1))):
                    own = kept[layer][pages].flatten(0, 1)
                    assert torch.equal(own[1 : 1 + blocks], wanted)
            looked_at.append(blocks)
        return found

    ours._draft_by_passes = watched
    story = drive(llm, prompts(), greedy(MAX_TOKENS))
    assert [story.tokens[str(i)] for i in range(6)] == expected
    assert len(looked_at) > 10


def test_a_failing_pass_drafts_nothing_and_serving_goes_on(
    expected: list, before: dict, caplog: pytest.LogCaptureFixture
) -> None:
    llm = begin()
    drive(llm, prompts()[:1], greedy(2))
    target, calls = drafter()._target, []
    run = target.greedy

    def failing(*args: Any) -> Any:
        calls.append(len(calls))
        if len(calls) % 3 == 0:
            raise RuntimeError("injected")
        return run(*args)

    target.greedy = failing
    check_drafting(before)
    with caplog.at_level(logging.WARNING, "nwor_specpv"):
        story = drive(llm, prompts(), greedy(MAX_TOKENS))
    assert [story.tokens[str(i)] for i in range(6)] == expected
    assert own_engine().violations == []
    assert len(calls) // 3 > 3
    assert draft_failures(before) == {"error": len(calls) // 3}
    said = "a partial pass failed, so this step has no drafts: RuntimeError: injected"
    assert [record.getMessage() for record in caplog.records].count(f"nwor_specpv: {said}") == 1
    assert 'raise RuntimeError("injected")' in caplog.text  # where it was
    with pytest.raises(AssertionError, match=r"\{'error': \d+\}, at last by RuntimeError: inj"):
        check_drafting(before)


def test_a_pass_that_fails_on_one_of_several_ranks_ends_the_worker(
    expected: list, before: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other ranks may wait in the midst of it. What we refuse they refuse, too."""
    llm = begin()
    drive(llm, prompts()[:1], greedy(2))
    monkeypatch.setattr(own_engine().draft_failures, "single_rank", False)
    errors = iter([NworError("refused"), RuntimeError("injected")])

    def failing(*_: Any) -> Any:
        raise next(errors)

    monkeypatch.setattr(drafter()._target, "greedy", failing)
    with pytest.raises(RankError, match=r"one of several ranks.*RuntimeError: injected"):
        drive(llm, prompts(), greedy(MAX_TOKENS))
    assert draft_failures(before) == {"refused": 1, "error": 1}


def test_ranks_that_have_failed_forget_alike_what_they_have_learnt(
    expected: list, before: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One may have counted less than the others, and what they know decides what they draft."""
    learnt = ("agreement", "lookup_agreement", "lookup_tokens", "tokens_per_pass")
    llm = begin()
    drive(llm, prompts(), greedy(MAX_TOKENS))
    ours, found = drafter(), []
    fresh = SimpleNamespace()
    type(ours)._expect(fresh)
    expectations = [getattr(fresh, name).value for name in learnt]
    known = [getattr(ours, name).value for name in learnt]
    assert all(one != other for one, other in zip(known, expectations, strict=True))
    monkeypatch.setattr(own_engine().draft_failures, "single_rank", False)
    passes, propose = ours._passes, ours.propose

    def failing(*args: Any) -> int:
        if not found:
            raise RuntimeError("injected")
        return passes(*args)

    def watched(*args: Any, **kwargs: Any) -> Any:
        drafts = propose(*args, **kwargs)
        found.append([getattr(ours, name).value for name in learnt])
        return drafts

    monkeypatch.setattr(ours, "_passes", failing)
    monkeypatch.setattr(ours, "propose", watched)
    story = drive(llm, prompts(), greedy(MAX_TOKENS))
    assert [story.tokens[str(i)] for i in range(6)] == expected
    assert found[0] == expectations
    assert found[-1] != expectations  # and learn anew
    assert draft_failures(before) == {"error": 1}


@pytest.mark.parametrize("place", ["_passes", pytest.param("_drafts", marks=pytest.mark.slow)])
def test_a_failure_between_passes_keeps_what_is_known_of_the_text(
    place: str, expected: list, before: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of views are given back, indices stay: no token is taken up twice."""
    from nwor_specpv._C import NgramIndex

    llm = begin({"specpv_max_requests": 3})
    drive(llm, prompts()[:1], greedy(2))
    ours, calls, added = drafter(), [], Counter()
    run, propose, append = getattr(ours, place), ours.propose, NgramIndex.append

    def failing(*args: Any) -> Any:
        calls.append(len(calls))
        done = run(*args)
        if len(calls) % 2 == 0:
            raise RuntimeError("injected")
        return done

    def watched(*args: Any, **kwargs: Any) -> Any:
        drafts = propose(*args, **kwargs)
        if calls and len(calls) % 2 == 0:
            assert not any(drafts)
            assert len(ours._store._free) == 3
            assert all(
                (known.row, known.drafts, known.by_view) == (None, [], 0)
                for known in ours._requests.values()
            )
        return drafts

    def counted_append(index: Any, tokens: Any) -> None:
        added[index] += len(tokens)
        append(index, tokens)

    monkeypatch.setattr(ours, place, failing)
    monkeypatch.setattr(ours, "propose", watched)
    monkeypatch.setattr(NgramIndex, "append", counted_append)
    check_drafting(before)
    story = drive(llm, prompts(), greedy(MAX_TOKENS))
    assert [story.tokens[str(i)] for i in range(6)] == expected
    assert len(calls) // 2 > 3
    assert draft_failures(before) == {"error": len(calls) // 2}
    assert len(added) == len(LENGTHS), "one index a request"
    assert all(count == len(index) for index, count in added.items())
    # The last step of a request may accept drafts beyond its end.
    most = sorted(length + MAX_TOKENS + 8 for length in LENGTHS)
    assert all(n <= end for n, end in zip(sorted(added.values()), most, strict=True))
    assert 0 < grown(before, "confirmed_tokens") <= grown(before, "drafted_tokens")


@pytest.mark.parametrize("part", ["ViewStore", "Tail"])
def test_without_memory_for_views_lookups_draft(
    part: str,
    expected: list,
    before: dict,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    from nwor_specpv.vllm.specpv import drafter as module

    def refuse(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("injected")

    monkeypatch.setattr(module, part, refuse)
    with caplog.at_level(logging.WARNING, "nwor_specpv"):
        llm = begin()
    said = "views could not be made, so requests draft by lookups alone: OutOfMemoryError: injected"
    assert said in caplog.text
    assert draft_failures(before) == {"out_of_memory": 1}  # at start
    story = drive(llm, prompts(), greedy(MAX_TOKENS))
    assert [story.tokens[str(i)] for i in range(6)] == expected
    assert grown(before, "draft_passes") == 0
    assert draft_failures(before) == {"out_of_memory": 1}
    assert drafter()._store is None  # nor does the half of it keep its memory
    assert own_stats()["committed_tokens"] > 0
    # Nor does anything else that goes wrong in the drafter end a request.
    monkeypatch.setattr(drafter(), "_learn", refuse)
    story = drive(llm, prompts(), greedy(MAX_TOKENS))
    assert [story.tokens[str(i)] for i in range(6)] == expected
    assert draft_failures(before)["out_of_memory"] > MAX_TOKENS


def expand_to_tokens(
    values: torch.Tensor,
    ends: torch.Tensor,
    num_tokens: int,
    replace_from: int = 0,
    replace_to: int = 0,
) -> torch.Tensor:
    """A request's value for each of its drafts.

    vLLM 0.26.0 leaves its result unwritten on the CPU when values are not int64, so temperatures
    of verifying requests are whatever memory held, with any drafter.
    """
    values = torch.where(values == replace_from, replace_to, values)
    counts = torch.diff(ends, prepend=ends.new_zeros(1))
    assert int(counts.sum()) == num_tokens
    return values.repeat_interleave(counts)


def test_sampling_keeps_the_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    """The third token of many requests, with drafts and without: the same distribution.

    Two-sample chi-square over the likelier tokens; the seed is fixed, so the verdict is.
    """
    from vllm import SamplingParams
    from vllm.v1.sample import rejection_sampler

    monkeypatch.setattr(rejection_sampler, "expand_batch_to_tokens", expand_to_tokens)
    prompt = varied_prompt()
    found = []
    for nwor, speculation in ((STOCK, None), (VIEW, SPECULATION)):
        free = {"check_contract": False, "specpv_max_requests": 128} if speculation else {}
        llm = start(nwor | free, speculation=speculation, max_num_seqs=128, seed=7)
        params = SamplingParams(temperature=1.0, max_tokens=4, ignore_eos=True)
        story = drive(llm, [prompt] * 768, params)
        found.append([tokens[2] for tokens in story.tokens.values()])
    statistic, degrees = chi_square.two_samples(*found)
    limit = chi_square.quantile(degrees)
    print(f"chi-square {statistic:.1f} of {degrees} degrees, limit {limit:.1f}")
    assert degrees >= 5
    assert statistic < limit


@pytest.mark.slow
def test_layers_it_cannot_serve_stop_the_start(tmp_path: Path) -> None:
    config = json.loads((stories() / "config.json").read_text())
    config |= {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
    (tmp_path / "config.json").write_text(json.dumps(config | {"sliding_window": 32}))
    model = {"model": str(tmp_path), "load_format": "dummy", "skip_tokenizer_init": True}
    with pytest.raises(NworError, match=r"sliding window of 32.*without enable_specpv"):
        begin(**model)


def test_layers_of_two_cache_groups_stop_the_start() -> None:
    begin()
    with pytest.raises(NworError, match="are in different KV cache groups"):
        own_engine().add_group(["another"])


def test_a_target_with_another_attention_stops_the_start() -> None:
    """As on a GPU without --attention-backend CUSTOM; a head's own layers are vLLM's."""
    from nwor_specpv.vllm.specpv.target import own_layers

    begin()
    layers = dict(own_engine().layers)
    assert own_layers(layers) == list(layers)
    layers["theirs"] = SimpleNamespace(impl=object())
    assert own_layers(layers, besides={"theirs"}) == [name for name in layers if name != "theirs"]
    with pytest.raises(NworError, match=r"theirs uses vLLM's own.*--attention-backend CUSTOM"):
        own_layers(layers)
    with pytest.raises(NworError, match="the target uses vLLM's own"):
        own_layers({})


@pytest.mark.parametrize(
    ("nwor", "speculation", "message"),
    [
        ({"enable_specpv": False}, SPECULATION, "needs enable_specpv"),
        ({}, {"method": "ngram", "num_speculative_tokens": 4}, "custom_class.*PartialViewDrafter"),
        ({"specpv_n_retrieval_blocks": 512}, SPECULATION, "view of 8240 tokens.*smaller view"),
        ({"specpv_mode": "rectify"}, SPECULATION, "feeds no token twice; use 'lossless'"),
        ({"specpv_bloc_size": 8}, SPECULATION, "nearest is 'specpv_block_size'"),
    ],
    ids=["not enabled", "another drafter", "budget", "rectify", "unknown key"],
)
def test_what_cannot_work_stops_the_start(nwor: dict, speculation: dict, message: str) -> None:
    with pytest.raises((NworError, RuntimeError), match=message):
        start(VIEW | nwor, speculation=speculation)
