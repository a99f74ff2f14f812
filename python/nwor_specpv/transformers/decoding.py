"""One call of generate: prompts in, tokens out, step by step."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from nwor_specpv import _C, NworError, VerifyPolicy
from nwor_specpv.arms import Choice
from nwor_specpv.drafters import Drafter, TreeConfig

from .calls.logprobs import LogProbabilities
from .calls.options import Options
from .calls.sampling import Verdict, confirm, judge
from .prefixes import take_shared
from .request import Part, Request
from .round import Round
from .rows.chooser import RowChooser
from .runner import ModelRunner
from .stats import Stats
from .views.log import ViewLog
from .views.pacer import CallSizes, ViewPacer
from .views.views import Views

OnToken = Callable[[Request, list[int]], None]
_FIRST_LOOK = TreeConfig(rows=2, depth=1, top_k=1)


class Decoding:
    """Requests that share forward passes. The runner's model is installed while this runs."""

    def __init__(
        self,
        runner: ModelRunner,
        drafter: Drafter | None,
        options: Options,
        tree: TreeConfig,
        chooser: RowChooser | None,
        stats: Stats,
        on_tokens: OnToken,
        *,
        prefill_rows: int,
        views: Views | None = None,
        pacer: ViewPacer | None = None,
        progress: Callable[[int, int], None] = lambda done, total: None,
        view_log: ViewLog | None = None,
    ) -> None:
        self._view_log = view_log
        self._runner, self._drafter, self._sampling = runner, drafter, options.sampling
        self._tree, self._chooser, self._stop_ids = tree, chooser, options.stop_ids
        self._stop_strings, self._processors = options.stop_strings, options.processors
        self._logprobs = LogProbabilities() if options.logprobs else None
        self._stats, self._on_tokens, self._progress = stats, on_tokens, progress
        self._prefill_rows, self._chunk_rows = prefill_rows, options.chunk_rows
        self._layers = tuple(drafter.feature_layers) if drafter is not None else ()
        self._views = views
        self._policy = VerifyPolicy(views.config) if views else None
        self._lossless = bool(views) and views.config.specpv_mode == "lossless"
        self._pacer = pacer
        self._switching = False
        self._places = 0

    def run(self, requests: list[Request]) -> None:
        self._places = len(requests)
        began = time.perf_counter()
        for index, request in enumerate(requests):
            allocator = self._runner.cache.allocator
            take_shared(allocator, request, requests[:index], self._layers)
            self._prefill(request)
        prefilled = time.perf_counter()
        self._stats.prefill_seconds = prefilled - began
        while active := [request for request in requests if request.finish is None]:
            self._step(active)
        self._stats.decode_seconds = time.perf_counter() - prefilled

    # ---- the prompt ------------------------------------------------------------------------------

    def _prefill(self, request: Request) -> None:
        """Runs the part of the prompt that is not cached; its last row gives the first token."""
        tokens, reused = request.tokens, request.cached
        if self._drafter is not None:
            self._drafter.begin(request.key, tokens)
        last = len(tokens) - 1
        features = list(request.features)
        while request.cached < len(tokens):
            start = request.cached
            root = min(start + self._prefill_rows, len(tokens)) - 1
            part = Part(request, tokens[start:root], [tokens[root]], [-1], start)
            round_ = self._run_round([part], None, graphs=False)
            if round_.features is not None:
                features.append(round_.features)
            if root == last:
                self._process(round_)
                verdicts = judge(
                    self._sampling, round_.trees(), round_.tree_logits(), [request.seed]
                )
            self._commit(round_, [[]])
            request.cached = root + 1
            self._progress(request.cached - reused, len(tokens) - reused)
        if self._views is not None:
            request.partial = self._views.store.open(len(tokens), request.max_new_tokens)
            if request.partial is not None:
                request.partial.prefill(len(tokens))
        request.features = features
        first = verdicts[0].next_token
        if self._logprobs is not None:
            self._logprobs.add(request, round_, 0, [0], [first])
        request.tokens.append(first)
        request.depths.append(0)
        self._stats.reused_tokens += reused
        self._show(request)
        if request.finish is None and self._drafter is not None:
            joined = torch.cat(features) if features else None
            if joined is not None:
                request.features = [joined]
            self._drafter.observe(request.key, request.tokens[1:], joined)
            if request.room > 1:
                # The drafter's first look at the prompt belongs to the prompt, not to a step.
                self._drafter.draft([request.key], _FIRST_LOOK)

    # ---- a step ----------------------------------------------------------------------------------

    def _step(self, active: list[Request]) -> None:
        began = time.perf_counter()
        self._switch(active)
        shown, cut = self._stats.new_tokens, self._stats.cut_tokens
        shape, choice = self._shape(active)
        parts = self._draft(active, shape)
        drafted = time.perf_counter()
        partial = self._make_views(parts) if self._viewing else None
        round_ = self._run_round(parts, partial)
        verdicts = self._judge(round_)
        self._finish(round_, verdicts)
        seconds = time.perf_counter() - began
        if self._view_log is not None and partial is not None:
            self._view_log.note(partial.store, self._runner.cache.allocator, parts)
        self._stats.draft_seconds += drafted - began
        self._stats.passes += 1
        confirming = any(part.fed for part in parts)
        # A call's first step may wait for what later ones find.
        usual = not confirming and self._stats.passes > 1
        if choice is not None and usual:
            self._chooser.note(choice, seconds, [len(verdict.path) + 1 for verdict in verdicts])
        if self._pacer is not None:
            lost = self._stats.cut_tokens - cut
            told = self._stats.new_tokens - shown
            self._note_pace(parts, verdicts, told, lost, seconds, drafted - began)

    def _note_pace(
        self,
        parts: list[Part],
        verdicts: list[Verdict],
        shown: int,
        lost: int,
        seconds: float,
        drafting: float,
    ) -> None:
        pacer, batch = self._pacer, len(parts)
        budget = self._views.store.budget
        size = CallSizes(batch, budget.static_tokens, budget.tail_capacity)
        fed = sum(len(part.fed) for part in parts) / batch
        kinds = {part.decision.kind for part in parts if part.decision is not None}
        if not pacer.viewing:
            rows = sum(len(part.tokens) for part in parts) / batch
            tokens = sum(len(verdict.path) + 1 for verdict in verdicts) / batch
            context = max(len(part.request.tokens) for part in parts)
            self._switching |= pacer.full_step(size, context, rows, tokens, seconds, drafting)
        elif fed:
            self._switching |= pacer.confirmation(size, shown / batch, lost, fed, seconds)
        elif kinds == {"partial"}:
            pacer.partial_step(seconds)

    @property
    def _viewing(self) -> bool:
        return self._views is not None and (self._pacer is None or self._pacer.viewing)

    def _switch(self, active: list[Request]) -> None:
        """Switches between views and full steps, once no tail waits for its confirmation."""
        if not self._switching:
            return
        caches = [r.partial for r in active if r.partial is not None]
        for cache in caches:
            cache.require_full()
        if all(cache.tail_len == 0 for cache in caches):
            self._pacer.switch()
            self._switching = False

    def _shape(self, active: list[Request]) -> tuple[TreeConfig, Choice | None]:
        if self._chooser is None:
            return self._tree, None
        context = sum(len(request.tokens) for request in active) / len(active)
        return self._chooser.choose(self._tree, len(active), context, viewing=self._viewing)

    def _draft(self, active: list[Request], shape: TreeConfig) -> list[Part]:
        asked = [r for r in active if r.room > 1 and not r.pending]
        trees = {}
        if self._drafter is not None and asked and shape.rows > 1:
            drafted = self._drafter.draft([r.key for r in asked], shape)
            if len(drafted) != len(asked):
                raise NworError(f"drafter: got {len(drafted)} trees, expected {len(asked)}")
            trees = {r.key: tree for r, tree in zip(asked, drafted, strict=True)}
        parts = []
        for request in active:
            tokens, parents = [request.tokens[-1]], [-1]
            if request.pending:
                tokens += request.pending[: request.room - 1]
                parents = [*range(-1, len(tokens) - 1)]
            elif request.key in trees:
                tree = trees[request.key]
                if tree.tokens[0] != request.tokens[-1]:
                    raise NworError(
                        f"drafter: got a root of {tree.tokens[0]}, expected {request.tokens[-1]}"
                    )
                tree = tree.pruned(request.room - 1)
                tokens, parents = tree.tokens, tree.parents
                size = self._runner.vocab_size
                wrong = next((token for token in tokens if not 0 <= token < size), None)
                if wrong is not None:
                    raise NworError(
                        f"drafter: got token {wrong}, expected ids from 0 to {size - 1}; use a "
                        "drafter made for this model"
                    )
            part = Part(request, [], tokens, parents, request.cached)
            self._chunk(part)
            parts.append(part)
        return parts

    def _chunk(self, part: Part) -> None:
        """Runs only the first chunk of a long chain; the rest waits for its outcome."""
        request = part.request
        request.pending = []
        if self._chunk_rows and len(part.tokens) > self._chunk_rows and part.is_chain:
            request.pending = part.tokens[self._chunk_rows :]
            part.tokens = part.tokens[: self._chunk_rows]
            part.parents = part.parents[: self._chunk_rows]

    def _make_views(self, parts: list[Part]) -> Views:
        """Full, full + refresh or partial, for each request of its own."""
        batch: list = [None] * self._places
        for part in parts:
            cache = part.request.partial
            if cache is None:
                continue
            if self._ending(part.request) or (self._pacer is not None and self._pacer.hurry):
                cache.require_full()
            decision = self._policy.decide(cache, len(part.tokens))
            part.decision = decision
            part.prefix_len = decision.prefix_len
            part.fed = part.request.tokens[decision.prefix_len : decision.committed_len]
            part.want_fed_logits = bool(part.fed)
            batch[part.request.index] = (cache, decision)
            self._stats.step_kinds[decision.kind] += 1
            if decision.kind == "partial":
                there = decision.committed_len
                self._stats.coverage.append((there, min(there, decision.view_tokens)))
        places = [None] * self._places
        for part in parts:
            places[part.request.index] = part.request.key
        self._views.begin(batch, self._runner.cache.block_table(places))
        return self._views

    def _ending(self, request: Request) -> bool:
        """Lossless: the provisional tokens would end the sequence, so they have to be confirmed."""
        if not self._lossless or request.shown == len(request.tokens):
            return False
        waiting = request.tokens[request.shown :]
        return request.room <= 0 or not self._stop_ids.isdisjoint(waiting)

    def _run_round(self, parts: list[Part], partial: Views | None, *, graphs: bool = True) -> Round:
        round_ = Round(self._runner, parts, self._layers, graphs=graphs)
        round_.run(partial, self._places)
        return round_

    # ---- verdicts --------------------------------------------------------------------------------

    def _process(self, round_: Round) -> None:
        """Applies penalties and processors; keeps what log-probabilities are taken from."""
        if self._logprobs is not None:
            self._logprobs.keep(round_)
        if self._processors:
            round_.logits = self._processors.run(round_)

    def _judge(self, round_: Round) -> list[Verdict]:
        self._process(round_)
        trees, logits = round_.trees(), round_.tree_logits()
        seeds = [part.request.seed for part in round_.parts]
        verdicts = judge(self._sampling, trees, logits, seeds)
        for index, part in enumerate(round_.parts):
            if part.fed and self._lossless:
                verdicts[index] = self._confirm(round_, index)
            elif part.fed:
                self._count_drift(round_, index)
        return verdicts

    def _confirm(self, round_: Round, index: int) -> Verdict:
        part = round_.parts[index]
        start = round_.logit_spans()[index][1]
        return confirm(
            self._sampling,
            part.fed + part.tokens[:1],
            round_.fed_logits(index),
            Round(self._runner, [part]).trees(),
            round_.logits[start : start + len(part.tokens)][None],
            part.request.seed,
        )

    def _count_drift(self, round_: Round, index: int) -> None:
        """The logits of rows fed again tell what full attention would have chosen."""
        if not self._sampling.greedy:
            return
        part = round_.parts[index]
        told = round_.fed_logits(index).argmax(-1).tolist()
        said = (part.fed + part.tokens[:1])[1:]
        disagreed = sum(a != b for a, b in zip(told, said, strict=True))
        part.request.partial.count_drift(len(said), disagreed)
        self._stats.rechecked_tokens += len(said)
        self._stats.disagreed_tokens += disagreed

    # ---- what stands -----------------------------------------------------------------------------

    def _finish(self, round_: Round, verdicts: list[Verdict]) -> None:
        paths, runs = [], []
        for part, verdict in zip(round_.parts, verdicts, strict=True):
            run = [part.tokens[row] for row in verdict.path] + [verdict.next_token]
            kept, path = run, verdict.path
            if verdict.whole:
                count, _ = _C.find_run_end(run, self._stop_ids, max(1, part.request.room))
                kept, path = run[:count], verdict.path[: count - 1]
            else:
                path = []
            paths.append(path)
            runs.append(kept)
        self._commit(round_, paths)
        for index, (part, verdict) in enumerate(zip(round_.parts, verdicts, strict=True)):
            self._settle(round_, index, part, verdict, paths[index], runs[index])

    def _settle(
        self,
        round_: Round,
        index: int,
        part: Part,
        verdict: Verdict,
        path: list[int],
        run: list[int],
    ) -> None:
        request, stats = part.request, self._stats
        start = round_.starts[index]
        root = start + len(part.fed)
        stats.steps += 1
        stats.drafts += len(part.tokens) - 1
        stats.accepted += len(path)
        stats.accepted_lengths[len(path)] += 1
        stats.rows[len(part.tokens)] += 1
        self._go_on_with_chain(request, part, verdict, run)
        if self._logprobs is not None:
            if self._lossless:
                self._logprobs.confirm(part, round_, index, verdict.confirmed)
            at = [0, *path] if verdict.whole else [verdict.confirmed - len(part.fed)]
            self._logprobs.add(request, round_, index, at, run)
        if verdict.whole:
            rows = [root, *(root + row for row in path)]
            request.tokens += run
            request.depths += [*range(1, len(path) + 1), 0][: len(run)]
            request.cached = len(request.tokens) - 1
        else:
            kept = part.prefix_len + 1 + verdict.confirmed
            lost = len(request.tokens) - kept
            rows = [start + verdict.confirmed]
            request.tokens[kept:] = run
            request.depths[kept - request.prompt_len :] = [0]
            request.cached = kept
            stats.cut_tokens += lost
            self._runner.cache.truncate(request.key, kept)
            self._retract(request, lost)
        if part.decision is not None:
            accepted = len(path)
            if part.fed and self._lossless:
                accepted += verdict.confirmed
            request.partial.finish(part.decision, accepted)
        elif request.partial is not None:  # a full step outside of its books
            request.partial.prefill(1 + len(path))
        if not self._lossless or part.decision is None or part.decision.kind != "partial":
            self._show(request)
        if request.finish is None and self._drafter is not None:
            self._observe(request, rows, run, round_.features)

    def _go_on_with_chain(
        self, request: Request, part: Part, verdict: Verdict, run: list[int]
    ) -> None:
        """Chunked verification: the next chunk counts only if all of this one was accepted."""
        if not request.pending:
            return
        accepted = verdict.whole and len(verdict.path) == len(part.tokens) - 1
        if accepted and request.pending[0] == run[-1] and len(run) == len(verdict.path) + 1:
            del request.pending[0]
        else:
            self._stats.rows_saved += len(request.pending)
            request.pending = []

    def _observe(
        self, request: Request, rows: list[int], run: list[int], features: torch.Tensor | None
    ) -> None:
        seen = None
        if features is not None:
            seen = features[torch.tensor(rows, device=features.device)]
            request.features.append(seen)
        self._drafter.observe(request.key, run, seen)

    def _retract(self, request: Request, count: int) -> None:
        """Takes provisional tokens back from the drafter too."""
        if self._drafter is None:
            return
        if request.features:
            joined = torch.cat(request.features)
            request.features = [joined[: len(joined) - count]]
        if not self._drafter.retract(request.key, count):
            self._drafter.end(request.key)
            self._drafter.begin(request.key, request.tokens[: request.prompt_len])
            known = request.tokens[1 : request.cached]
            self._drafter.observe(
                request.key, known, request.features[0] if request.features else None
            )

    def _show(self, request: Request) -> None:
        """Emits what is final, up to where the sequence ends."""
        waiting = request.tokens[request.shown :]
        room = request.max_new_tokens - (request.shown - request.prompt_len)
        count, finish = _C.find_run_end(waiting, self._stop_ids, room)
        if self._stop_strings:
            found = self._stop_strings.find(request.new_tokens, waiting[:count])
            count, finish = (count, finish) if found is None else (found, "stop")
        if finish is not None:
            del request.tokens[request.shown + count :]
            del request.depths[request.shown + count - request.prompt_len :]
            del request.logprobs[request.shown + count - request.prompt_len :]
        request.shown += count
        request.finish = finish
        self._stats.new_tokens += count
        self._on_tokens(request, waiting[:count])

    def _commit(self, round_: Round, paths: list[list[int]]) -> None:
        try:
            round_.commit(paths)
        except BaseException:
            round_.abort()
            raise
        self._stats.violations += round_.violations
