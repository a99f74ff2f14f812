"""Mode `lossless` on model runner V1: the target drafts for itself over a partial view.

    --speculative-config '{"method": "custom_class", "num_speculative_tokens": 16,
                           "model": "nwor_specpv.vllm.specpv.drafter.PartialViewDrafter"}'

After every step vLLM asks `propose` for drafts. Requests longer than their view draft by partial
passes of the target, each of which also confirms tokens looked up in the request's own text; what
is looked up behind the last one follows. The others draft by lookups alone. vLLM's next step
verifies the drafts with full attention, samples and writes as ever, so what goes wrong here costs
speed and never changes output. Memory is taken and passes are timed by `start`, before the first
request.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from nwor_specpv import _C, VerifyPolicy
from nwor_specpv.errors import NworError, logger
from nwor_specpv.vllm.engine import StepSeen, engine_of

from . import rules
from .costs import measure_passes
from .policy import DraftOutlook, StepCosts, choose_passes, running_mean
from .tail import Tail
from .target import TargetModel, own_layers
from .turns import Turns
from .views import ViewBatch, ViewStore

# Tokens that a lookup must have in common with the text, at least and at most.
_MATCHED_TOKENS = (2, 4)
_MAX_LOOKUP = 16  # tokens a lookup alone may draft


@dataclass
class DraftedRequest:
    """What is kept of a request while it stays in the batch."""

    state: Any  # vLLM's own: another one under the same name is another request
    lookup_length: int
    index: _C.NgramIndex = field(default_factory=lambda: _C.NgramIndex(*_MATCHED_TOKENS))
    row: int | None = None  # in the store of views
    drafts: list[int] = field(default_factory=list)  # of the last proposal
    by_view: int = 0  # so many of them, the first, came from partial passes


class PartialViewDrafter:
    """Built by vLLM from its class path. Thread-safety: none; a worker has one step at a time."""

    def __init__(self, vllm_config: Any) -> None:
        self._vllm_config = vllm_config
        self._engine = engine_of(vllm_config)
        self._failures = self._engine.draft_failures
        settings = self._settings = self._engine.settings
        if not settings.enable_specpv:
            raise NworError(
                f"nwor_specpv: the drafter {rules.DRAFTER} needs enable_specpv; add "
                '--additional-config \'{"nwor_specpv": {"enable_specpv": true}}\''
            )
        self._limit = vllm_config.speculative_config.num_speculative_tokens
        self._config = settings.specpv()
        # Shorter requests are seen whole by any view.
        budget = self._config.budget(1 + self._limit)
        self._shortest = VerifyPolicy(self._config).always_full_tokens(budget)
        self._inner = settings.specpv_draft_lookup
        self._max_len = vllm_config.model_config.max_model_len
        self._requests: dict[str, DraftedRequest] = {}
        self._target: TargetModel | None = None
        self._store: ViewStore | None = None
        self._tail: Tail | None = None
        self._costs: StepCosts | None = None
        self._proposed_at = 0.0
        self._expect()
        self.full_extra = running_mean(0.0, weight=1.0)

    # ---- what vLLM calls ------------------------------------------------------------------------

    def load_model(self, target: Any) -> None:
        """vLLM has built the target. Its layers must be ours: nobody else reads views."""
        names = own_layers(self._engine.layers)
        self._target = TargetModel(self._vllm_config, target, names)

    @torch.inference_mode()
    def start(self) -> None:
        """Memory of views and costs of passes, before the first request; see `hooks.runner`.

        Nothing is taken where no request can be longer than its view. What fails leaves requests
        to lookups.
        """
        # vLLM may have lowered it to what its caches hold.
        self._max_len = self._vllm_config.model_config.max_model_len
        # vLLM asks for drafts as long as all of them fit behind a step's rows.
        if self._max_len - self._limit <= self._shortest:
            return
        reason = ""  # of the error: memory is what may be missing
        try:
            with self._failures.agreed():
                self._allocate()
            reason = "start"
            if not self._settings.specpv_draft_passes:
                assert self._target is not None
                assert self._store is not None
                assert self._tail is not None
                self._costs = measure_passes(self._target, self._store, self._tail, self._failures)
                logger.info("nwor_specpv: measured the costs of partial passes: %s", self._costs)
        except Exception as error:
            self._store = self._tail = None
            self._fail(error, "views could not be made, so requests draft by lookups alone", reason)

    @torch.inference_mode()
    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: Any,
        token_ids_cpu: Any,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Drafts of every request of the step; none for those still in their prompt."""
        started = time.perf_counter()
        try:
            drafts = self._propose(sampled_token_ids, num_tokens_no_spec, token_ids_cpu, started)
        except Exception as error:
            self._fail(error)
            self._renew()  # whatever was half done
            if not self._failures.single_rank:
                self._expect()  # one may have counted less than the others, and they choose alike
            drafts = [[] for _ in sampled_token_ids]
        self._proposed_at = time.perf_counter()
        return drafts

    def _propose(
        self, sampled: list[list[int]], num_tokens: Any, token_ids: Any, started: float
    ) -> list[list[int]]:
        """Ranks agree before the passes, between them and on the drafts, which are equal."""
        count = len(sampled)
        lens = [int(length) for length in num_tokens[:count]]
        active = [i for i in range(count) if sampled[i] and lens[i] < self._max_len]
        with self._failures.agreed():
            seen = self._engine.seen
            if seen is None or len(seen.lens) < count:
                raise NworError("the attention metadata of this step was not built by nwor_specpv")
            names = self._engine.runner.input_batch.req_ids[:count]
            self._learn(names, sampled, lens, token_ids, seen)
            requests = [self._requests[name] for name in names]
            members = [i for i in active if self._has_view(requests[i], lens[i])]
            passes = self._passes(members, [i for i in active if i not in members], lens)
            self._observe(started, seen, lens)
            if not passes:
                return self._drafts(active, requests, {})
        try:
            chains = self._draft_by_passes(members, requests, lens, seen, passes)
        except Exception as error:
            self._fail(error)
            chains = {i: [] for i in members}
        with self._failures.agreed():
            return self._drafts(active, requests, chains)

    def _drafts(
        self, active: list[int], requests: list[DraftedRequest], chains: dict[int, list[int]]
    ) -> list[list[int]]:
        """Chains and the lookups behind them; lookups alone for who has no chain."""
        drafts: list[list[int]] = [[] for _ in requests]
        for i in active:
            request, chain = requests[i], chains.get(i)
            request.by_view = len(chain or [])
            if chain is not None:
                behind = min(self._inner, self._limit - len(chain)) if chain else 0
                request.drafts = chain + request.index.lookup(chain, behind)
            else:
                request.drafts = request.index.lookup([], min(request.lookup_length, self._limit))
                self.lookup_tokens.add(len(request.drafts))
            drafts[i] = request.drafts
        return drafts

    # ---- requests -------------------------------------------------------------------------------

    def _learn(
        self,
        names: Sequence[str],
        sampled: list[list[int]],
        lens: list[int],
        token_ids: Any,
        seen: StepSeen,
    ) -> None:
        """Brings requests up to date: who is here, what was accepted, which tokens are new."""
        states = self._engine.runner.requests
        for name in set(self._requests) - set(names):
            self._drop(name)
        for i, name in enumerate(names):
            known = self._requests.get(name)
            if known is not None and (
                known.state is not states[name] or len(known.index) > lens[i]
            ):
                self._drop(name)
                known = None
            if known is None:
                known = self._requests[name] = self._new(states[name])
            # Near the longest context vLLM takes drafts of its own making and asks nobody.
            asked = lens[i] - len(known.index) == len(sampled[i])
            if sampled[i] and known.drafts and asked:
                self._judge(known, seen.drafts[i], len(sampled[i]) - 1)
            known.drafts = []
            if sampled[i]:
                known.index.append(token_ids[i, len(known.index) : lens[i]].tolist())

    def _judge(self, request: DraftedRequest, scheduled: int, accepted: int) -> None:
        """A full step has judged the last proposal; vLLM may have scheduled less of it."""
        chain = min(request.by_view, scheduled)
        if chain:
            confirmed = min(accepted, chain)
            _C.count("specpv_confirmed_tokens_total", confirmed)
            self.agreement.add(confirmed, confirmed + (accepted < chain))
        if chain <= accepted and chain < scheduled:  # lookups were judged, too
            found = accepted - chain
            self.lookup_agreement.add(found, found + (accepted < scheduled))
        if chain:
            return
        whole = 0 < scheduled == accepted
        grown = 2 * request.lookup_length if whole else self._inner
        request.lookup_length = min(_MAX_LOOKUP, max(1, grown))

    def _expect(self) -> None:
        """What is taken for likely until something was seen."""
        self.agreement = running_mean(0.9)
        self.lookup_agreement = running_mean(0.5)
        self.lookup_tokens = running_mean(1.0)
        self.tokens_per_pass = running_mean(1.5)

    def _renew(self) -> None:
        """Nothing stays of requests but their texts, which the next step brings up to date."""
        for name in list(self._requests):
            known = self._drop(name)
            self._requests[name] = self._new(known.state)
            self._requests[name].index = known.index

    def _new(self, state: Any) -> DraftedRequest:
        return DraftedRequest(state, max(1, self._inner))

    def _drop(self, name: str) -> DraftedRequest:
        request = self._requests.pop(name)
        if request.row is not None and self._store is not None:
            self._store.close(request.row)
        return request

    def _has_view(self, request: DraftedRequest, length: int) -> bool:
        """Whether a request is longer than its view and has, or gets, a row."""
        if self._store is None or length - 1 <= self._shortest:
            return False
        if request.row is None:
            request.row = self._store.open()
        return request.row is not None

    def _allocate(self) -> None:
        assert self._target is not None
        caches = self._target.key_caches()
        batch = self._settings.specpv_max_requests
        store = ViewStore(
            self._config,
            caches,
            max_requests=batch,
            max_batch=batch,
            max_tokens=self._max_len,
            max_rows=1 + self._limit,
            key_scales=self._target.key_scales(),
            dtype=self._target.dtype,
        )
        tail = Tail(caches, batch, self._limit + 1 + self._inner, self._target.dtype)
        self._store, self._tail = store, tail
        taken = (store.bytes + tail.bytes) / 1e6
        logger.info("nwor_specpv: views of %d requests take %.1f MB", batch, taken)

    # ---- how many passes ------------------------------------------------------------------------

    def _passes(self, members: list[int], others: list[int], lens: list[int]) -> int:
        if not members:
            return 0
        fixed = self._settings.specpv_draft_passes
        if fixed:
            return fixed
        assert self._store is not None
        assert self._costs is not None
        costs = StepCosts(
            self._costs.base, self._costs.per_row, self._costs.per_token, self.full_extra.value
        )
        known = DraftOutlook(
            contexts=[lens[i] for i in members],
            view_tokens=self._store.budget.static_tokens,
            others=sum(lens[i] for i in others),
            num_others=len(others),
            rows_per_pass=1 + self._inner,
            tokens_per_pass=self.tokens_per_pass.value,
            agreement=min(self.agreement.value, 0.999),
            lookup_agreement=min(self.lookup_agreement.value, 0.999),
            lookup_tokens=self.lookup_tokens.value,
            tokens_behind=min(self._inner, self.lookup_tokens.value),
            max_drafts=self._limit,
        )
        return choose_passes(costs, known)

    def _observe(self, now: float, seen: StepSeen, lens: list[int]) -> None:
        """What a full step took beyond the model's passes: it is over when drafts are asked for."""
        single_rank = self._vllm_config.parallel_config.tensor_parallel_size == 1
        verifies = all(n == 1 + d for n, d in zip(seen.lens, seen.drafts, strict=True))
        if self._costs is None or not self._proposed_at or not single_rank or not verifies:
            return
        run = self._costs.run(sum(seen.lens), sum(lens))
        extra = now - self._proposed_at - run
        self.full_extra.add(max(-self._costs.base, min(run, extra)))

    # ---- partial passes -------------------------------------------------------------------------

    def _draft_by_passes(
        self,
        members: list[int],
        requests: list[DraftedRequest],
        lens: list[int],
        seen: StepSeen,
        passes: int,
    ) -> dict[int, list[int]]:
        """The chains that `passes` partial passes give the members of the batch.

        Ranks agree before each pass that all are ready for it, and behind it that none has failed.
        """
        store, tail, target = self._store, self._tail, self._target
        assert store is not None
        assert tail is not None
        assert target is not None
        agreed = self._failures.agreed
        with agreed():
            size, device = len(members), tail.keys.device
            rows = torch.tensor(
                [requests[i].row for i in members], dtype=torch.int32, device=device
            )
            turns = Turns(
                store,
                tail,
                target.layer_index,
                seen.block_table[torch.tensor(members, device=device)],
                [requests[i].index for i in members],
                [lens[i] - 1 for i in members],  # the last token is not in the cache yet
                limit=self._limit,
                inner=self._inner,
                max_len=self._max_len,
                select_interval=self._settings.specpv_draft_select_interval,
                keeps_failure=not self._failures.single_rank,
            )
            store.begin(
                ViewBatch(turns.block_table, rows, turns.prefix_lens, torch.ones_like(rows))
            )
            turn = turns.next()
        while turn is not None:
            said = target.greedy(turn.passed, turn.tokens, turn.positions)
            with agreed():
                turn.passed.check()
                turns.judge(turn, said.tolist())
                if turns.number == 1:
                    store.end(size)
                turn = turns.next() if turns.number < passes else None
            _C.count("specpv_draft_passes_total", 1)
        for tokens in turns.grown:
            self.tokens_per_pass.add(tokens)
        drafts = dict(zip(members, turns.drafts(), strict=True))
        _C.count("specpv_drafted_tokens_total", sum(map(len, drafts.values())))
        return drafts

    def _fail(
        self,
        error: Exception,
        consequence: str = "a partial pass failed, so this step has no drafts",
        reason: str = "",
    ) -> None:
        """Nothing is drafted over views this time; serving goes on."""
        self._failures.add(error, consequence, reason)
