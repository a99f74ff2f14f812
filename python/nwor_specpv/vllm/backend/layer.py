"""What the layers of the target model share, whichever of vLLM's backends they extend."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
import vllm.compilation.backends as model_tags
from vllm.config import get_current_vllm_config, get_current_vllm_config_or_none
from vllm.forward_context import get_forward_context

from nwor_specpv.errors import NworError, logger
from nwor_specpv.vllm.engine import HEAD_MODEL, TARGET_MODEL, Engine, engine_of
from nwor_specpv.vllm.registry import find_engine
from nwor_specpv.vllm.support import is_quantized, layer_problem


class TargetLayer:
    """Mixed into one of vLLM's attention implementations, named by `stock`.

    Construction gives an object of `stock` itself for a layer that cannot be staged; with `strict`
    or `enable_specpv` it raises. It always does where neither of the two would be right.
    """

    stock: ClassVar[type]
    engine: Engine

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        if "stock" not in vars(cls):
            raise NworError(
                f"nwor_specpv: vLLM derives {cls.__name__} from our attention and writes its K/V "
                'in another way; serve this model with "enable_nwor": false'
            )
        given = inspect.signature(cls.stock).bind(*args, **kwargs)
        given.apply_defaults()
        of = given.arguments
        config = get_current_vllm_config()
        _check_sharing(config, "a layer", of["kv_sharing_target_layer_name"])
        problem = layer_problem(
            attn_type=of["attn_type"],
            alibi=of["alibi_slopes"] is not None,
            sinks=of["sinks"] is not None,
            kv_sharing_target=of["kv_sharing_target_layer_name"],
            head_size=of["head_size"],
            quantized_cache=is_quantized(of["kv_cache_dtype"]) and not cls.takes_quantized(of),
        )
        problem = problem or cls.device_problem(of)
        if problem is None:
            return super().__new__(cls)
        _leave_to_vllm(config, problem)
        return cls.stock(*args, **kwargs)

    @classmethod
    def takes_quantized(cls, arguments: Mapping[str, Any]) -> bool:
        """Whether a layer built with these arguments works on the quantised cache they ask for."""
        return False

    @classmethod
    def device_problem(cls, arguments: Mapping[str, Any]) -> str | None:
        """Why a layer built with these arguments cannot be computed on this device, or None."""
        return None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.engine = engine_of(get_current_vllm_config())

    def write(
        self,
        layer: Any,
        key: torch.Tensor,
        value: torch.Tensor,
        slot_mapping: torch.Tensor,
        *,
        defer: bool = False,
    ) -> bool:
        """Routes the rows of the open step; False: the caller writes them itself.

        A run without metadata is no step: vLLM tries sizes, also after it has captured graphs, and
        gives slots that are nowhere.
        """
        if get_forward_context().attn_metadata is None:
            return False
        return self.engine.steps.write(layer.layer_name, key, value, slot_mapping, defer=defer)


def _leave_to_vllm(config: Any, problem: str) -> None:
    """Says that a layer is vLLM's; raises where all of them were asked for."""
    settings = engine_of(config).settings
    if settings.strict or settings.enable_specpv:  # views need every layer
        wanted = "enable_specpv" if settings.enable_specpv else "strict"
        raise NworError(f"nwor_specpv: a layer has {problem}; serve this model without {wanted}")
    logger.warning("nwor_specpv leaves a layer to vLLM: it has %s", problem)


def _check_sharing(config: Any, name: str, source: str | None) -> None:
    """Raises NworError where `source`, whose cache is read, stages: its drafts are not there."""
    layer = config.compilation_config.static_forward_context.get(source)
    if isinstance(getattr(layer, "impl", None), TargetLayer):
        raise NworError(
            f"nwor_specpv: {name} attends to the K/V of {source}, whose drafts are staged; serve "
            'this model with "enable_nwor": false'
        )


def choose_impl(
    ours: type[TargetLayer], backend: type, builder: type, heads: Mapping[str, type]
) -> type:
    """Our class for layers of the target model where staging is on, vLLM's own elsewhere.

    `backend` may be one that vLLM has made of ours, with another builder than `builder`: it changes
    requests, lengths or the mask before ours sees them. `heads`: for layers of an EAGLE head, where
    the target attends to views (`refresh`), and where the head grows trees (`trees`).
    """
    config = get_current_vllm_config_or_none()
    if config is None:
        return ours.stock
    if model_tags.model_tag == HEAD_MODEL:
        engine = find_engine(config)
        asked = (name for name in heads if getattr(engine, name, None) is not None)
        return heads.get(next(asked, ""), ours.stock)
    if model_tags.model_tag != TARGET_MODEL:
        return ours.stock
    if engine_of(config).off is not None:
        return ours.stock
    if backend.get_builder_cls() is not builder:
        _leave_to_vllm(config, f"metadata of {backend.get_builder_cls().__name__}")
        return ours.stock
    return ours


def own_layers(vllm_config: Any, layer_names: Sequence[str]) -> list[str]:
    """Those of a cache group's layers that stage. Nobody else reads their caches: layers of a
    drafter, too, may say only now what they read.
    """
    layers = vllm_config.compilation_config.static_forward_context
    for name, layer in layers.items():
        _check_sharing(vllm_config, name, getattr(layer, "kv_sharing_target_layer_name", None))
    return [name for name in layer_names if isinstance(layers[name].impl, TargetLayer)]


def engine_of_layer(vllm_config: Any, name: str) -> Engine:
    """The engine that a layer of ours was built for."""
    return vllm_config.compilation_config.static_forward_context[name].impl.engine
