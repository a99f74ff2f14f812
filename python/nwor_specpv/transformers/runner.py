"""A decoder model of transformers over a paged cache: steps in, logits and features out."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

from nwor_specpv import CapacityError, NworConfig, NworError, SpecPVConfig

from .graphs import MOST_ROWS
from .layers.attention import NAME, Step
from .layers.decoder import replace_layers
from .layers.linear import replace_linears
from .layers.stand_in import StandIn
from .paged import PagedCache
from .sizes import any_window, kv_sizes, masks_windows, text_config
from .views.views import Views

_KEYS = itertools.count(1)


class ModelRunner:
    """Owns a model's cache and runs it, from one thread at a time. The model is never changed."""

    def __init__(
        self,
        model: PreTrainedModel,
        nwor: NworConfig,
        *,
        page_size: int = 16,
        cache_tokens: int | None = None,
        check_contract: bool = False,
        graphs: bool = False,
        offload: bool = False,
        gpu_cache_bytes: int | None = None,
    ) -> None:
        check_model(model)
        self.model = model
        self._nwor, self.page_size = nwor, page_size
        self._fixed_tokens, self._check_contract = cache_tokens, check_contract
        self.offload, self._gpu_cache_bytes = offload, gpu_cache_bytes
        self._graphs = graphs and not check_contract  # the checker looks at every layer's write
        text = model.config.get_text_config(decoder=True)
        self.num_layers, self.num_kv_heads, self.head_dim = kv_sizes(text)
        self.vocab_size = text.vocab_size
        self.context = getattr(text, "max_position_embeddings", None) or 1 << 30
        self.context_told = f"{self.context}, the context of the model"
        original = _longrope_original(text)
        if original < self.context:
            self.context_told = (
                f"{original}, where longrope changes its angles (the context of the model is "
                f"{self.context})"
            )
            self.context = original
        self.window = any_window(text)
        if 0 < self.window < self.context and not masks_windows(model.get_decoder()):
            self.context_told = (
                f"{self.window}, the sliding window of the model's cache, which its mask does not "
                f"have (the context of the model is {self.context})"
            )
            self.context = self.window
        self.head = model.get_output_embeddings()
        self.device = self.head.weight.device
        self.dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
        row_bytes = self.num_kv_heads * self.head_dim * self.dtype.itemsize
        self.token_bytes = 2 * self.num_layers * row_bytes  # K and V
        self._stand_in: StandIn | None = None
        self._features: dict[int, torch.Tensor] = {}
        self._cache: PagedCache | None = None
        if cache_tokens is not None:
            self.reserve(cache_tokens)

    @property
    def has_cache(self) -> bool:
        return self._cache is not None

    @property
    def cache(self) -> PagedCache:
        if self._cache is None:
            self.reserve(1)
        return self._cache

    def reserve(self, tokens: int, drafts: int = 0) -> bool:
        """Makes room for so many tokens, and for steps of so many drafts.

        True: the cache is a new one, and empty.
        """
        if (
            self._cache is not None
            and self._cache.capacity >= tokens
            and (not self._graphs or self._cache.staging_rows >= drafts)
        ):
            return False
        if self._fixed_tokens is not None:
            if tokens > self._fixed_tokens:
                raise CapacityError(
                    f"cache_tokens: got {self._fixed_tokens}, expected {tokens} or more for these "
                    "prompts and max_new_tokens"
                )
            tokens = self._fixed_tokens
        if self._cache is not None:
            tokens = max(tokens, self._cache.capacity)
        pages = max(64, -(-tokens // self.page_size))
        self._check_memory(pages)
        self._cache = None  # its memory first
        self._cache = PagedCache(
            self.num_layers,
            self.num_kv_heads,
            self.head_dim,
            pages,
            self.page_size,
            self.dtype,
            self.device,
            self._config(drafts),
            check_contract=self._check_contract,
            graphs=self._graphs,
            offload=self.offload,
        )
        return True

    def _check_memory(self, pages: int, views: int = 0) -> None:
        """Refuses a cache, or views of so many bytes beside it, beyond `gpu_cache_bytes`."""
        most, tokens = self._gpu_cache_bytes, pages * self.page_size
        cache = 0 if self.offload else tokens * self.token_bytes
        if most is None or cache + views <= most:
            return
        got = f"gpu_cache_bytes: got {most}, expected {cache + views} or more"
        if cache > most:
            raise CapacityError(
                f"{got} for K/V of {tokens} tokens; set specpv_offload with specpv_storage "
                "'compact' to keep it in host memory"
            )
        raise CapacityError(
            f"{got}: {cache} for the cache, {views} for views and block summaries; lower "
            "specpv_n_retrieval_blocks or run fewer requests at once"
        )

    def open_views(
        self, config: SpecPVConfig, max_requests: int, max_tokens: int, max_rows: int
    ) -> Views:
        """Views of the cache as it is now."""
        views = Views(
            config,
            self.cache.caches,
            max_requests=max_requests,
            max_tokens=max_tokens,
            max_rows=max_rows,
        )
        others = sum(known.bytes for known, _ in self.cache.beside.values())
        self._check_memory(self.cache.num_pages, views.bytes + others)
        return views

    def _config(self, drafts: int) -> NworConfig:
        """As asked for; staging that graphs know cannot grow, so it is as large as it will be."""
        if not self._graphs:
            return self._nwor
        own = self._nwor
        return NworConfig(
            enable_nwor=own.enable_nwor,
            strict=own.strict,
            staging_rows=max(own.staging_rows, drafts),
            max_staging_bytes=own.max_staging_bytes,
            graph_rows=MOST_ROWS,
            agreement_group=own.agreement_group,
        )

    def new_key(self) -> int:
        """A name for a request that no other has, of whichever model."""
        return next(_KEYS)

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    @contextmanager
    def installed(self, feature_layers: Sequence[int] = ()) -> Iterator[PreTrainedModel]:
        """Inside, steps can be run. Gives what stands in for the model, as the model is now."""
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode())
            if self._stand_in is None or not self._stand_in.is_current:
                self._stand_in = self._make_stand_in()
            layers = _decoder_layers(self._stand_in.model)
            for index in feature_layers:
                handle = layers[index].register_forward_hook(self._keep(index))
                stack.callback(handle.remove)
            yield self._stand_in.model

    def _make_stand_in(self) -> StandIn:
        made = StandIn(self.model, NAME)
        layers = _decoder_layers(made.model)
        replace_layers(layers, made.model.config.get_text_config(decoder=True))
        replace_linears(made.model)
        made.model.eval()
        return made

    def _keep(self, index: int) -> Any:
        def hook(module: torch.nn.Module, arguments: Any, output: Any) -> None:
            self._features[index] = output[0] if isinstance(output, tuple) else output

        return hook

    def prepare(self, step: Step, feature_layers: Sequence[int] = ()) -> Any:
        """What `run` takes as `fixed`. REQUIRES: no open round."""
        graphs = self.cache.graphs
        if graphs is None:
            return None
        layers = tuple(feature_layers)
        return graphs.prepare(step, layers, lambda one: self._forward(one, layers))

    def run(
        self, step: Step, feature_layers: Sequence[int] = (), fixed: Any = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Logits of the rows asked for, and features of all rows. REQUIRES: an open round."""
        if fixed is not None:
            return self.cache.graphs.run(
                fixed, step, lambda one: self._forward(one, feature_layers)
            )
        return self._forward(step.to(self.device), feature_layers)

    def _forward(
        self, step: Step, feature_layers: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        cache = self.cache
        step.caches = cache.caches
        cache.step, cache.written = step, 0
        try:
            output = self._stand_in.model(
                input_ids=step.tokens[None],
                position_ids=step.positions[None],
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=0 if step.logit_rows is None else step.logit_rows,
                nwor_step=step,
            )
            cache.expect_attention()
        finally:
            cache.step = step.cached_kv = None
        if cache.written != self.num_layers:
            raise NworError(
                f"model: {cache.written} of {self.num_layers} layers wrote K/V through the cache, "
                "expected all: its attention does not go through transformers' interface"
            )
        features = None
        if feature_layers:
            features = torch.cat([self._features[i][0] for i in feature_layers], -1)
            self._features.clear()
        return output.logits[0], features


def check_model(model: Any) -> None:
    """Raises unless the model can be run; the error says what to use instead."""
    if not isinstance(model, PreTrainedModel):
        raise NworError(
            f"model: got {type(model).__name__}, expected a causal language model of transformers"
        )
    name = type(model).__name__
    if getattr(model.config, "is_encoder_decoder", False):
        raise NworError(
            f"model: got {name}, an encoder-decoder; use a decoder-only model (..ForCausalLM)"
        )
    if not model.can_generate() or model.get_output_embeddings() is None:
        raise NworError(
            f"model: got {name}, which generates no text; load it with AutoModelForCausalLM"
        )
    if not getattr(model, "_supports_attention_backend", False) or _decoder_layers(model) is None:
        raise NworError(
            f"model: got {name}, whose attention cannot be replaced; use a model "
            "that follows transformers' attention interface (Llama, Qwen2, Qwen3, Mistral, ..)"
        )
    text = text_config(model.config)
    kinds = set(getattr(text, "layer_types", None) or ()) - {
        "full_attention",
        "sliding_attention",
    }
    if kinds:
        raise NworError(f"model: got {name} with layers of {sorted(kinds)}, expected attention")
    _refuse_quantised(model)
    missing = [n for n, p in model.named_parameters() if p.device.type == "meta"]
    if missing:
        raise NworError(
            f"model: got no weights for {missing[0]} and {len(missing) - 1} more; load the "
            "checkpoint they are in"
        )


def _refuse_quantised(model: PreTrainedModel) -> None:
    """Raises for torch.ao layers: all rows of a pass share a scale, so drafts would change it."""
    for name, module in model.named_modules():
        if type(module).__module__.startswith("torch.ao.nn.quantized"):
            raise NworError(
                f"model: {name} is quantised by torch.ao, and its results depend on the other rows "
                "of a pass; use the model with floating-point weights"
            )


def _longrope_original(text: Any) -> int:
    """The length up to which longrope uses one set of angles.

    Beyond it transformers chooses the angles of a pass by its last position. A pass here holds rows
    of several requests, pieces of prompts and drafts, beside K of earlier passes.
    """
    rope = getattr(text, "rope_parameters", None) or {}
    kinds = [rope, *(one for one in rope.values() if isinstance(one, dict))]
    lengths = [
        kind.get("original_max_position_embeddings") or 1 << 30
        for kind in kinds
        if kind.get("rope_type") == "longrope"
    ]
    return min(lengths, default=1 << 30)


def _decoder_layers(model: PreTrainedModel) -> torch.nn.ModuleList | None:
    layers = getattr(model.get_decoder(), "layers", None)
    return layers if isinstance(layers, torch.nn.ModuleList) else None
