"""Generates text with a decoder model of transformers: the same tokens in fewer steps.

    generator = Generator(model, tokenizer, drafter="eagle3")
    generation = generator.generate(input_ids, max_new_tokens=200)
    generation.token_ids, generation.text, generation.stats

Drafts are verified in one pass and staged; what is accepted is committed to a paged cache. With a
SpecPVConfig most steps over a long context look at a part of it (see docs/specpv.md).
"""

from __future__ import annotations

import math
import secrets
import sys
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from pathlib import Path
from typing import Any

import torch

from nwor_specpv import _C, NworConfig, NworError, SpecPVConfig
from nwor_specpv.drafters import Drafter, TreeConfig

from .arguments import as_integer, as_python, at_least_one
from .decoding import Decoding
from .drafting import make_drafter
from .generation_config import warn_ignored
from .loading import load_model
from .prefixes import KeptPrefixes
from .request import Part, Request
from .round import Round
from .row_chooser import SIZES, RowChooser
from .runner import ModelRunner
from .sampling import Sampling, fold_seed
from .stats import Stats
from .view_log import ViewLog
from .view_pacer import ViewPacer
from .views import Views

# Sampling depends on the tree, so its size must not depend on a clock.
_SAMPLING_ROWS = {"cpu": 8, "cuda": 32}
_PROGRESS_FROM = 1024  # tokens of a prompt from which on a bar is shown

OnToken = Callable[..., None]


@dataclass
class Generation:
    """Of one prompt, or lists of them for a list of prompts."""

    token_ids: list[int] | list[list[int]]  # new tokens, the stop token included
    text: str | list[str] | None  # None without a tokenizer
    stats: Stats
    finish: str | list[str] = ""  # "stop" or "length"
    depths: list[int] | list[list[int]] = field(default_factory=list)  # 0: the target's own token


class Generator:
    """Generates with one model. Not thread-safe; the model is untouched between calls.

    `model`: a causal language model of transformers, the folder of one, or None for
    SmolLM2-135M-Instruct, whose tokenizer is then used too. `drafter`: "none", "ngram", "eagle3",
    "draft_model" (with `draft_model`, a smaller model) or a Drafter. `cache_tokens`: size of the
    cache; default: it grows with what is asked for. `gpu_cache_bytes`: a limit for K/V, views and
    block summaries on the model's device; more is refused. K/V that `specpv_offload` keeps in host
    memory does not count. Default: no limit. `check_contract`: every step is watched by a
    ContractChecker, and `stats.violations` says what it found (slow). `cuda_graphs`: steps are
    captured by their shape and replayed; default: on CUDA. `pace`: greedy lossless verification
    uses its views only where they pay; False: always. `cache_of`: another Generator whose
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
        """Seconds of a verification step by its rows, measured on the first use."""
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
        self._kept.make_room(self._runner.cache.allocator, sys.maxsize)

    def generate(
        self,
        input_ids: Any,
        max_new_tokens: int,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int | None = None,
        eos_token_id: int | Iterable[int] | None = None,
        tree: TreeConfig | None = None,
        on_token: OnToken | None = None,
        *,
        chunk_rows: int = 0,
        view_log: ViewLog | None = None,
    ) -> Generation:
        """Continues one prompt (ids, or a tensor [n] or [1, n]) or several (lists, or [batch, n]).

        Prompts of several lengths are lists: padding would be read as text, and is refused.
        Ends after `max_new_tokens` or with `eos_token_id` (one or several; default: the model's
        own, -1 for none). `tree.rows` 0 lets the generator choose. `on_token(token)` is called for
        every new token, `on_token(token, request)` for lists of prompts. `chunk_rows`: chains
        longer than that are verified chunk by chunk. Request i of a list samples with `seed` + i.
        `view_log` records which blocks partial steps attend to.
        """
        sampling = Sampling(temperature, top_k, top_p)
        prompts, is_list = self._prompts(input_ids)
        max_new_tokens = at_least_one("max_new_tokens", max_new_tokens)
        chunk_rows = _checked_chunk(chunk_rows)
        self._check_lengths(prompts, max_new_tokens)
        tree = tree or TreeConfig()
        if not isinstance(tree, TreeConfig):
            raise NworError(f"tree: got {type(tree).__name__}, expected a TreeConfig")
        if not isinstance(seed, Integral | None):
            raise NworError(f"seed: got {seed!r}, expected a whole number or None")
        if not (on_token is None or callable(on_token)):
            raise NworError(f"on_token: got {type(on_token).__name__}, expected a function")
        stops = self._stop_ids(eos_token_id)
        first_seed = secrets.randbits(31) if seed is None else int(seed)
        stats = Stats(requests=len(prompts), prompt_tokens=sum(map(len, prompts)))
        stats.seed = None if sampling.greedy else first_seed
        largest = self._largest_tree(tree, sampling)
        requests = self._open(prompts, max_new_tokens, first_seed, largest)
        before = self._counts()
        done = False
        try:
            with self._runner.installed(self._feature_layers):
                views = self._open_views(requests, largest)
                decoding = Decoding(
                    self._runner,
                    self._drafter,
                    sampling,
                    self._fixed_tree(tree, sampling),
                    self._choose_rows(tree, sampling),
                    stops,
                    stats,
                    _teller(on_token, is_list),
                    prefill_rows=self._prefill_rows,
                    chunk_rows=chunk_rows,
                    views=views,
                    pacer=None if views is None else self._pacer(requests, sampling),
                    progress=_progress_bar(),
                    view_log=view_log,
                )
                decoding.run(requests)
            done = True
        finally:
            self._close(requests, keep=done)
        self._count(stats, before)
        return self._result(requests, stats, is_list)

    # ---- what is asked for -----------------------------------------------------------------------

    def _prompts(self, input_ids: Any) -> tuple[list[list[int]], bool]:
        if isinstance(input_ids, str):
            raise NworError("input_ids: got text, expected token ids: tokenizer(text).input_ids")
        if not isinstance(input_ids, Iterable) or isinstance(input_ids, Mapping):
            got = type(input_ids).__name__
            raise NworError(f"input_ids: got {got}, expected token ids or lists of them")
        if isinstance(input_ids, torch.Tensor):
            wrong = input_ids.is_floating_point() or input_ids.dtype == torch.bool
            if input_ids.dim() not in (1, 2) or wrong:
                got = f"{list(input_ids.shape)} of {input_ids.dtype}"
                raise NworError(f"input_ids: got {got}, expected token ids [n] or [batch, n]")
            is_list = input_ids.dim() == 2 and input_ids.shape[0] != 1
            rows = (input_ids if input_ids.dim() == 2 else input_ids[None]).tolist()
        else:
            rows = [as_python(one) for one in input_ids]
            is_list = any(isinstance(one, Sequence) for one in rows)
            rows = rows if is_list else [rows]
        vocabulary, prompts = self._runner.vocab_size, []
        for index, row in enumerate(rows):
            if not isinstance(row, Sequence):
                raise NworError(f"input_ids: got {row!r} among lists, expected prompts of ids")
            if not row:
                raise NworError(f"input_ids: prompt {index} is empty, expected at least one token")
            ids = [as_integer(token) for token in row]
            at = next((i for i, t in enumerate(ids) if t is None or not 0 <= t < vocabulary), None)
            if at is not None:
                raise NworError(
                    f"input_ids: got {row[at]!r} in prompt {index}, expected ids from 0 to "
                    f"{vocabulary - 1}"
                )
            prompts.append(ids)
        if not prompts:
            raise NworError("input_ids: got no prompts, expected at least one")
        self._refuse_padding(prompts)
        return prompts, is_list

    def _refuse_padding(self, prompts: list[list[int]]) -> None:
        """Raises for padded prompts, unless the padding id also begins or ends a text."""
        pads = self._own_ids("pad_token_id") | _ids_of(self.tokenizer, "pad_token_id")
        for name in ("eos_token_id", "bos_token_id"):
            pads -= self._own_ids(name) | _ids_of(self.tokenizer, name)
        for index, prompt in enumerate(prompts):
            for pad in pads.intersection((prompt[0], prompt[-1])):
                count = max(_leading(prompt, pad), _leading(prompt[::-1], pad))
                raise NworError(
                    f"input_ids: got {count} tokens of padding ({pad}) around prompt {index}, "
                    "expected none: give lists, whose lengths may differ"
                )

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

    def _stop_ids(self, eos_token_id: int | Iterable[int] | None) -> frozenset[int]:
        if eos_token_id is None:
            return frozenset(self._own_ids("eos_token_id"))
        given, vocabulary = as_python(eos_token_id), self._runner.vocab_size
        several = isinstance(given, Iterable) and not isinstance(given, str)
        ids = [as_integer(token) for token in given] if several else [as_integer(given)]
        if not all(token is not None and -1 <= token < vocabulary for token in ids):
            raise NworError(
                f"eos_token_id: got {eos_token_id!r}, expected ids from 0 to {vocabulary - 1}, or "
                "-1 for none"
            )
        return frozenset(token for token in ids if token >= 0)

    def _own_ids(self, name: str) -> set[int]:
        """Ids from the model's generation config or, if that has none, from its config."""
        owner = getattr(self.model, "generation_config", None)
        if getattr(owner, name, None) is None:
            owner = self.model.config.get_text_config(decoder=True)
        return _ids_of(owner, name)

    # ---- trees -----------------------------------------------------------------------------------

    def _largest_tree(self, tree: TreeConfig, sampling: Sampling) -> int:
        if self._drafter is None:
            return 1
        if tree.rows:
            return tree.rows
        return SIZES[-1] if sampling.greedy else self._sampling_rows

    @property
    def _sampling_rows(self) -> int:
        return _SAMPLING_ROWS.get(self._runner.device.type, 8)

    def _fixed_tree(self, tree: TreeConfig, sampling: Sampling) -> TreeConfig:
        if tree.rows or sampling.greedy:
            return tree
        return TreeConfig(self._sampling_rows, tree.depth, tree.top_k)

    def _choose_rows(self, tree: TreeConfig, sampling: Sampling) -> RowChooser | None:
        if tree.rows or not sampling.greedy or self._drafter is None:
            return None
        return self._rows_chooser()

    def _measure(self) -> dict[int, float]:
        """Seconds of passes of 1 to 32 rows, the best of four each.

        Sizes take turns, so that what holds the machine up for a while holds up all of them. Fewer
        rows never cost more: a size that was held up every time is as quick as the next.
        """
        costs = dict.fromkeys(SIZES, math.inf)
        size = self._runner.page_size
        self._kept.make_room(self._runner.cache.allocator, -(-SIZES[-1] // size) * size)
        with self._runner.installed():
            for rows in SIZES * 4:
                costs[rows] = min(costs[rows], self._time_pass(rows))
        least = [min(costs[more] for more in SIZES if more >= rows) for rows in SIZES]
        return dict(zip(SIZES, least, strict=True))

    def _time_pass(self, rows: int) -> float:
        request = self._new_request([0] * rows, 0, 1, 0)
        part = Part(request, [0] * (rows - 1), [0], [-1], 0, want_fed_logits=True)
        try:
            started = time.perf_counter()
            round_ = Round(self._runner, [part])
            try:
                round_.run(None, 1)
                round_.commit([[]])
            except BaseException:
                round_.abort()
                raise
            self._runner.synchronize()
            return time.perf_counter() - started
        finally:
            self._runner.cache.allocator.free(request.key)

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
            self._reuse(
                self._new_request(prompt, index, max_new_tokens, fold_seed(seed + index, 0))
            )
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

    def _pacer(self, requests: list[Request], sampling: Sampling) -> ViewPacer | None:
        """What was learnt about views over contexts of such lengths."""
        config = self._specpv
        if config is None or config.specpv_mode != "lossless":
            return None
        if not (self._pace and sampling.greedy):
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

    def _result(self, requests: list[Request], stats: Stats, is_list: bool) -> Generation:
        ids = [request.new_tokens for request in requests]
        ends = [request.finish or "" for request in requests]
        depths = [request.depths for request in requests]
        texts = None
        if self.tokenizer is not None:
            texts = [self.tokenizer.decode(one, skip_special_tokens=True) for one in ids]
        if is_list:
            return Generation(ids, texts, stats, ends, depths)
        return Generation(ids[0], texts[0] if texts else None, stats, ends[0], depths[0])


def _check_shared(**given: Any) -> None:
    """Raises for options that belong to the generator given as `cache_of`."""
    name = next((name for name, value in given.items() if value is not None), None)
    if name is not None:
        raise NworError(f"{name}: cannot be given with cache_of; it is that generator's")


def _checked_chunk(chunk_rows: Any) -> int:
    count = as_integer(chunk_rows)
    if count is None or count < 0 or count == 1:
        raise NworError(f"chunk_rows: got {chunk_rows!r}, expected 0 (off) or 2 and more")
    return count


def _ids_of(owner: Any, name: str) -> set[int]:
    """One id or several, from a configuration or a tokenizer; negative ids are left out."""
    found = getattr(owner, name, None)
    found = found if isinstance(found, Iterable) else [found]
    return {token for token in map(as_integer, found) if token is not None and token >= 0}


def _leading(tokens: list[int], pad: int) -> int:
    return next((i for i, token in enumerate(tokens) if token != pad), len(tokens))


def _teller(on_token: OnToken | None, is_list: bool) -> Callable[[Request, list[int]], None]:
    def tell(request: Request, tokens: list[int]) -> None:
        if on_token is not None:
            for token in tokens:
                on_token(token, request.index) if is_list else on_token(token)

    return tell


def _progress_bar() -> Callable[[int, int], None]:
    """A progress bar on stderr for long prompts, if stderr is a terminal."""

    def show(done: int, total: int) -> None:
        if total >= _PROGRESS_FROM and sys.stderr.isatty():
            filled = 30 * done // total
            bar = "#" * filled + "." * (30 - filled)
            end = "\r\033[K" if done == total else ""
            print(f"\rprompt [{bar}] {done} of {total}{end}", end="", file=sys.stderr, flush=True)

    return show
