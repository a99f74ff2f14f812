"""Generates text with a decoder model of transformers: the same tokens in fewer steps.

    generator = Generator(model, tokenizer, drafter="eagle3")
    generation = generator.generate(input_ids, max_new_tokens=200)
    generation.token_ids, generation.text, generation.stats

Drafts are verified in one pass and staged; what is accepted is committed to a paged cache. With a
SpecPVConfig most steps over a long context look at a part of it (see docs/specpv.md).
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections import Counter
from collections.abc import Hashable, Iterable
from pathlib import Path
from typing import Any

from nwor_specpv import _C, NworConfig, NworError, SpecPVConfig
from nwor_specpv.drafters import Drafter, TreeConfig

from .call_lock import CallLock, lock_of
from .calls.arguments import at_least_one
from .calls.generation_config import warn_ignored
from .calls.options import OnToken, Options, make_streamer
from .calls.other_options import refuse_options
from .calls.processors import Processor, Processors
from .calls.prompts import read_prompts
from .calls.results import Generation, collect, show_progress, teller
from .calls.sampling import Sampling, fold_seed
from .calls.special_ids import end_ids
from .calls.stopping import StopStrings, read_stop
from .calls.streaming import TextPieces, TextStream
from .decoding import Decoding
from .drafting import make_drafter
from .loading import load_model
from .prefixes import KeptPrefixes
from .request import Request
from .rows.chooser import SIZES, RowChooser
from .rows.costs import row_costs
from .runner import ModelRunner
from .stats import Stats
from .thread_hint import hint_at_spinning
from .views.log import ViewLog
from .views.pacer import ViewPacer
from .views.views import Views

# Views of the lossy modes depend on the tree, so with a seed its size must not depend on a clock.
_LOSSY_ROWS = {"cpu": 8, "cuda": 32}


class Generator:
    """Generates with one model, which is never changed.

    Calls of several threads run one after the other, also those of generators that share a cache or
    a drafter. Other generators of the model and the model itself run at the same time.

    `model`: a causal language model of transformers, the folder of one, or None for
    SmolLM2-135M-Instruct, whose tokenizer is then used too. `drafter`: "none", "ngram", "eagle3",
    "draft_model" (with `draft_model`, a smaller model) or a Drafter. `cache_tokens`: size of the
    cache; default: it grows with what is asked for. `gpu_cache_bytes`: a limit for K/V, views and
    block summaries on the model's device; more is refused. K/V that `specpv_offload` keeps in host
    memory does not count. Default: no limit. `check_contract`: every step is watched by a
    ContractChecker, and `stats.violations` says what it found (slow). `cuda_graphs`: steps are
    captured by their shape and replayed; default: on CUDA. `pace`: lossless verification uses
    its views only where they pay; False: always. `cache_of`: another Generator whose
    model, cache and kept prefixes this one shares, so that a long prompt runs once for both; with
    the same drafter also what was learnt about rows.
    """

    def __init__(
        self,
        model: Any = None,
        tokenizer: Any = None,
        drafter: str | Drafter = "ngram",
        nwor: NworConfig | None = None,
        specpv: SpecPVConfig | None = None,
        *,
        draft_model: Any = None,
        page_size: int = 16,
        cache_tokens: int | None = None,
        gpu_cache_bytes: int | None = None,
        prefill_rows: int = 256,
        check_contract: bool = False,
        cuda_graphs: bool | None = None,
        pace: bool = True,
        cache_of: Generator | None = None,
    ) -> None:
        if nwor is not None and not nwor.enable_nwor:
            raise NworError(
                "enable_nwor: got False, expected True: this host has no other way into its cache; "
                "drafter='none' decodes plainly"
            )
        if cache_of is not None:
            _check_shared(
                model=model if model is not cache_of.model else None,
                nwor=nwor,
                cache_tokens=cache_tokens,
                gpu_cache_bytes=gpu_cache_bytes,
                check_contract=check_contract or None,
                cuda_graphs=cuda_graphs,
            )
            model, page_size = cache_of.model, cache_of._runner.page_size
            tokenizer = tokenizer if tokenizer is not None else cache_of.tokenizer
        if model is None or isinstance(model, (str, Path)):
            model, found = load_model(model)
            tokenizer = tokenizer if tokenizer is not None else found
        page_size = at_least_one("page_size", page_size)
        prefill_rows = at_least_one("prefill_rows", prefill_rows)
        if cache_tokens is not None:
            cache_tokens = at_least_one("cache_tokens", cache_tokens)
        if gpu_cache_bytes is not None:
            gpu_cache_bytes = at_least_one("gpu_cache_bytes", gpu_cache_bytes)
        self._specpv = specpv if specpv is not None and specpv.enable_specpv else None
        self._runner = (
            cache_of._runner
            if cache_of is not None
            else ModelRunner(
                model,
                nwor or NworConfig(),
                page_size=page_size,
                cache_tokens=cache_tokens,
                check_contract=check_contract,
                graphs=getattr(model, "device", None) is not None and model.device.type == "cuda"
                if cuda_graphs is None
                else cuda_graphs,
                offload=self._specpv is not None and self._specpv.specpv_offload,
                gpu_cache_bytes=gpu_cache_bytes,
            )
        )
        self._lock = CallLock() if cache_of is None else cache_of._lock
        if cache_of is None:
            warn_ignored(model)
        self.tokenizer = tokenizer
        self._check_specpv(page_size)
        lossy = self._specpv is not None and self._specpv.specpv_mode != "lossless"
        self._lossy = _C.LossyEngine() if lossy else None  # counted by `specpv_lossy_engines`
        self._drafter = make_drafter(drafter, self._runner, draft_model)
        self._prefill_rows, self._pace = prefill_rows, pace
        self._pacers: dict[tuple[int, int], ViewPacer] = {}
        self._kept = cache_of._kept if cache_of is not None else KeptPrefixes()
        # What was measured and learnt about rows, by the drafter it was learnt with.
        self._choosers: dict[Hashable, RowChooser] = {} if cache_of is None else cache_of._choosers
        named = isinstance(drafter, str)
        self._learnt_with: Hashable = (drafter, draft_model) if named else self._drafter

    @property
    def model(self) -> Any:
        return self._runner.model

    @property
    def drafter(self) -> Drafter | None:
        return self._drafter

    @property
    def row_costs(self) -> dict[int, float]:
        """Seconds of a verification step by its rows, measured on the first use on a machine."""
        with self._lock:
            return dict(self._rows_chooser().costs)

    def _rows_chooser(self) -> RowChooser:
        """Generators that share a cache share it too, if their drafters are alike."""
        if self._learnt_with not in self._choosers:
            known = next(iter(self._choosers.values()), None)
            costs = self._measure() if known is None else known.costs
            self._choosers[self._learnt_with] = RowChooser(costs)
        return self._choosers[self._learnt_with]

    def forget(self) -> None:
        """Drops the prefixes that earlier calls have left in the cache.

        To be called when the model's weights have changed: what is cached is of the old ones.
        """
        with self._lock:
            self._kept.make_room(self._runner.cache.allocator, sys.maxsize)

    def generate(
        self,
        input_ids: Any = None,
        max_new_tokens: int | None = None,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int | None = None,
        eos_token_id: int | Iterable[int] | None = None,
        tree: TreeConfig | None = None,
        on_token: OnToken | None = None,
        *,
        attention_mask: Any = None,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        presence_penalty: float = 0.0,
        logits_processor: Iterable[Processor] | Processor | None = None,
        stop: str | int | Iterable[str | int] | None = None,
        num_return_sequences: int = 1,
        return_logprobs: bool = False,
        streamer: Any = None,
        chunk_rows: int = 0,
        view_log: ViewLog | None = None,
        **other: Any,
    ) -> Generation:
        """Continues one prompt or several; docs/generate_options.md lists the options.

        `input_ids`: ids (a list, or a tensor [n] or [1, n]), several prompts (lists, or
        [batch, n]), a tokenizer's whole output, or messages of a chat. Padding is left out if an
        attention mask hides it, and refused otherwise.
        Ends after `max_new_tokens`, with `eos_token_id` (one or several; default: the model's own,
        -1 for none) or with `stop`. Prompts and `max_new_tokens` must be given.
        `tree.rows` 0 lets the generator choose.
        `on_token(token)` is called for every new token, `on_token(token, request)` for lists of
        prompts. `chunk_rows`: chains longer than that are verified chunk by chunk. Request i of a
        list samples with `seed` + i. `view_log` records which blocks partial steps attend to.
        """
        refuse_options(other, _own_options())
        vocabulary = self._runner.vocab_size
        sampling = Sampling(temperature, top_k, top_p, min_p)
        prompts, is_list = read_prompts(input_ids, attention_mask, self.model, self.tokenizer)
        stop_ids, strings = read_stop(stop, self.tokenizer, vocabulary)
        options = Options(
            max_new_tokens,
            sampling,
            tree,
            end_ids(self.model, eos_token_id, vocabulary) | stop_ids,
            seed,
            on_token,
            num_return_sequences,
            Processors(repetition_penalty, presence_penalty, logits_processor),
            StopStrings(strings, self.tokenizer),
            return_logprobs,
            make_streamer(streamer),
            chunk_rows,
        )
        self._check_lengths(prompts, options.max_new_tokens)
        options.warn_unused()
        prompts = [prompt for prompt in prompts for _ in range(options.sequences)]
        is_list = is_list or options.sequences > 1
        if options.streamer is not None:
            options.streamer.begin(prompts)
        with self._lock, lock_of(self if self._drafter is None else self._drafter):
            requests, stats = self._run(prompts, options, is_list, view_log)
        if options.streamer is not None:
            options.streamer.end()
        return collect(requests, stats, self.tokenizer, strings, options, is_list=is_list)

    def stream(
        self, input_ids: Any = None, max_new_tokens: int | None = None, **options: Any
    ) -> TextStream:
        """Pieces of one text while it is generated; `options` are those of `generate`.

        for piece in generator.stream(messages, 200):
            print(piece, end="", flush=True)
        """
        if self.tokenizer is None:
            raise NworError("stream: got no tokenizer, expected one in Generator(model, tokenizer)")
        if "on_token" in options:
            raise NworError("on_token: cannot be given to stream, which calls it; use generate")
        mask, copies = options.get("attention_mask"), options.get("num_return_sequences", 1)
        prompts, _ = read_prompts(input_ids, mask, self.model, self.tokenizer)
        count = len(prompts) * at_least_one("num_return_sequences", copies)
        if count != 1:
            raise NworError(
                f"stream: got {count} sequences, expected one; on_token(token, request) of "
                "generate tells the tokens of several"
            )
        _, strings = read_stop(options.get("stop"), self.tokenizer, self._runner.vocab_size)
        ids = prompts[0]
        options["attention_mask"] = [1] * len(ids)  # what was hidden is left out by now
        generate = functools.partial(self.generate, ids, max_new_tokens, **options)
        return TextStream(generate, TextPieces(self.tokenizer, strings))

    def _run(
        self, prompts: list[list[int]], options: Options, is_list: bool, view_log: ViewLog | None
    ) -> tuple[list[Request], Stats]:
        sampling = options.sampling
        tree = self._fixed_tree(options.tree, sampling)
        hint_at_spinning(self._runner.device)
        stats = Stats(requests=len(prompts), prompt_tokens=sum(map(len, prompts)))
        stats.seed = None if sampling.greedy else options.seed
        largest = self._largest_tree(tree, sampling)
        requests = self._open(prompts, options.max_new_tokens, options.seed, largest)
        before = self._counts()
        done = False
        try:
            with self._runner.installed(self._feature_layers):
                views = self._open_views(requests, largest)
                decoding = Decoding(
                    self._runner,
                    self._drafter,
                    options,
                    tree,
                    self._choose_rows(tree),
                    stats,
                    teller(options, is_list=is_list),
                    prefill_rows=self._prefill_rows,
                    views=views,
                    pacer=None if views is None else self._pacer(requests),
                    progress=show_progress,
                    view_log=view_log,
                )
                decoding.run(requests)
            done = True
        finally:
            self._close(requests, keep=done)
        self._count(stats, before)
        return requests, stats

    # ---- what is asked for -----------------------------------------------------------------------

    def _check_lengths(self, prompts: list[list[int]], max_new_tokens: int) -> None:
        context, told = self._runner.context, self._runner.context_told
        for index, prompt in enumerate(prompts):
            if len(prompt) >= context:
                raise NworError(
                    f"input_ids: got {len(prompt)} tokens in prompt {index}, expected fewer than "
                    f"{told}; shorten the prompt"
                )
            if len(prompt) + max_new_tokens > context:
                raise NworError(
                    f"max_new_tokens: got {max_new_tokens} after prompt {index} of {len(prompt)} "
                    f"tokens, expected at most {context - len(prompt)}: {len(prompt)} + "
                    f"{max_new_tokens} is beyond {told}"
                )

    # ---- trees -----------------------------------------------------------------------------------

    def _largest_tree(self, tree: TreeConfig, sampling: Sampling) -> int:
        if self._drafter is None:
            return 1
        return self._fixed_tree(tree, sampling).rows or SIZES[-1]

    def _fixed_tree(self, tree: TreeConfig, sampling: Sampling) -> TreeConfig:
        """Rows 0: their number is chosen by the time of steps."""
        if tree.rows or sampling.greedy or self._lossy is None:
            return tree
        rows = _LOSSY_ROWS.get(self._runner.device.type, 8)
        return TreeConfig(rows, tree.depth, tree.top_k)

    def _choose_rows(self, tree: TreeConfig) -> RowChooser | None:
        return None if tree.rows or self._drafter is None else self._rows_chooser()

    def _measure(self) -> dict[int, float]:
        size = self._runner.page_size
        self._kept.make_room(self._runner.cache.allocator, -(-SIZES[-1] // size) * size)
        return row_costs(self._runner)

    # ---- requests --------------------------------------------------------------------------------

    def _open(
        self, prompts: list[list[int]], max_new_tokens: int, seed: int, largest: int
    ) -> list[Request]:
        tokens = sum(map(len, prompts)) + len(prompts) * (max_new_tokens + 1)
        size = self._runner.page_size
        # A page of its own for every end, and room for lossless tails to overshoot.
        needed = tokens + len(prompts) * (2 * size + largest)
        try:
            if self._runner.reserve(needed, len(prompts) * largest):
                self._kept.clear()
        except BaseException:  # no memory for a larger cache, and the old one is gone
            if not self._runner.has_cache:
                self._kept.clear()
            raise
        requests = [
            self._reuse(self._new_request(prompt, index, max_new_tokens, fold_seed(seed + index)))
            for index, prompt in enumerate(prompts)
        ]
        # What was found is held by now: room is for the rest, and makes nothing run again.
        found = sum(request.cached // size * size for request in requests)
        self._kept.make_room(self._runner.cache.allocator, needed - found)
        return requests

    def _new_request(self, prompt: list[int], index: int, new_tokens: int, seed: int) -> Request:
        request = Request(
            self._runner.new_key(), index, list(prompt), len(prompt), new_tokens, seed, len(prompt)
        )
        self._runner.cache.allocator.extend(request.key, 0)
        return request

    def _reuse(self, request: Request) -> Request:
        """Starts with what an earlier sequence has cached of this prompt."""
        allocator = self._runner.cache.allocator
        found = self._kept.find(request.tokens, self._feature_layers)
        if found is not None:
            kept, length = found
            allocator.free(request.key)
            allocator.fork(kept.key, request.key, length)
            request.cached = length
            if self._feature_layers:
                request.features = [kept.features[:length]]
        return request

    @property
    def _feature_layers(self) -> tuple[int, ...]:
        return () if self._drafter is None else tuple(self._drafter.feature_layers)

    def _close(self, requests: list[Request], *, keep: bool) -> None:
        cache = self._runner.cache
        if cache.interceptor.stats()["round_open"]:
            cache.interceptor.abort()
        for request in requests:
            if self._drafter is not None:
                self._drafter.end(request.key)
            if keep:
                self._kept.add(cache.allocator, request, self._feature_layers)
            else:
                cache.allocator.free(request.key)
            request.partial = None

    # ---- partial verification --------------------------------------------------------------------

    def _check_specpv(self, page_size: int) -> None:
        if self._specpv is None:
            return
        if self._runner.window:
            raise NworError(
                "specpv: got a model with sliding-window layers, expected full attention in every "
                "layer: such layers see a window already"
            )
        offload = self._runner.offload  # with cache_of it is another generator's choice
        if self._specpv.specpv_offload != offload:
            where = "host memory" if offload else "the model's device"
            raise NworError(
                f"specpv_offload: got {not offload} beside cache_of, expected {offload}: that "
                f"cache is in {where}"
            )
        self._specpv.validate_for(
            page_size=page_size, max_rows=SIZES[-1], max_context=self._runner.context
        )

    def _open_views(self, requests: list[Request], largest: int) -> Views | None:
        if self._specpv is None:
            return None
        cache = self._runner.cache
        longest = max(len(r.tokens) + r.max_new_tokens for r in requests)
        if self._specpv.budget(largest, longest).static_tokens >= longest:
            return None  # the view covers everything
        tokens = longest + 2 * largest + self._specpv.specpv_n_spec_tokens_buf
        if self in cache.beside:  # graphs that were captured over its views go on
            views, (places, most, rows) = cache.beside[self]
            if (places, rows) == (len(requests), largest) and tokens <= most:
                return views
            if cache.graphs is not None:
                cache.graphs.drop(views)
            del views, cache.beside[self]  # their memory first
        views = self._runner.open_views(self._specpv, len(requests), tokens, largest)
        cache.beside[self] = (views, (len(requests), tokens, largest))
        return views

    def _pacer(self, requests: list[Request]) -> ViewPacer | None:
        """What was learnt about views over contexts of such lengths."""
        config = self._specpv
        if config is None or config.specpv_mode != "lossless" or not self._pace:
            return None
        longest = max(len(request.tokens) for request in requests)
        chooser = self._choosers.get(self._learnt_with)
        pacer = self._pacers.setdefault(
            (len(requests), longest.bit_length()),
            ViewPacer(
                None if chooser is None else chooser.cost,
                rows_cost=self._runner.device.type == "cpu",
            ),
        )
        pacer.begin()
        return pacer

    # ---- results ---------------------------------------------------------------------------------

    def _counts(self) -> tuple[dict[str, Any], int, Counter[str]]:
        cache = self._runner.cache
        graphs = cache.graphs
        replays, eager = (0, Counter()) if graphs is None else (graphs.replays, graphs.eager)
        return cache.interceptor.stats(), replays, Counter(eager)

    def _count(self, stats: Stats, before: tuple[dict[str, Any], int, Counter[str]]) -> None:
        after = self._counts()
        for name in ("cache_bytes_written", "cache_bytes_avoided", "rejected_tokens"):
            setattr(stats, name, after[0][name] - before[0][name])
        committed = after[0]["committed_tokens"] - before[0]["committed_tokens"]
        stats.draft_bytes_written = committed * self._runner.token_bytes
        stats.graph_replays = after[1] - before[1]
        stats.eager_passes = after[2] - before[2]


@functools.cache
def _own_options() -> tuple[str, ...]:
    """Names of the options of `generate`."""
    return tuple(inspect.signature(Generator.generate).parameters)[1:-1]


def _check_shared(**given: Any) -> None:
    """Raises for options that belong to the generator given as `cache_of`."""
    name = next((name for name, value in given.items() if value is not None), None)
    if name is not None:
        raise NworError(f"{name}: cannot be given with cache_of; it is that generator's")
