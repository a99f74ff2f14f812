"""Float8 copies of the target's linear weights, for partial passes alone.

A pass over few rows is the time that it takes to read weights, and float8 has half the bytes. What
a pass says are drafts, which vLLM's full step judges with the weights of the model.

For the time of a pass each layer multiplies by its copy: vLLM's layers ask their `quant_method` for
the product whenever they are called. A compiled model asks nobody, so passes run the model's own
code (`skip_compiled` of vLLM's forward context). Graphs are captured of it, and nothing is compiled
twice. What the compiler would have fused runs as vLLM's kernels of single operations, as in its
eager mode.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from vllm import ir
from vllm.ir.op import IrOp
from vllm.model_executor.custom_op import CustomOp
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
)

from nwor_specpv.errors import NworError, logger
from nwor_specpv.vllm.versions.adapter import replaced

from .float8 import multiply, quantise

# vLLM's providers of an operation: for the compiler, and its own kernels.
_FOR_COMPILER, _KERNELS = "native", "vllm_c"


class _Float8:
    """Multiplies by a copy of a layer's weights."""

    def __init__(self, layer: Any) -> None:
        self._layer = layer
        self.weights, self.scales = quantise(weights_of(layer))

    def renew(self) -> None:
        """In place: graphs have the addresses."""
        weights, scales = quantise(weights_of(self._layer))
        self.weights.copy_(weights)
        self.scales.copy_(scales)

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """What vLLM's layers call."""
        return multiply(x, self.weights, self.scales, bias)


class _Linear(_Float8, UnquantizedLinearMethod):
    """vLLM asks what kind of method a layer has."""


class _Output(_Float8, UnquantizedEmbeddingMethod):
    """The same of the output matrix."""


class DraftWeights:
    """Copies of all linear weights of a model, and of its output matrix. Thread-safety: none."""

    @torch.inference_mode()
    def __init__(self, model: torch.nn.Module) -> None:
        """Raises NworError where the model has no weights to copy."""
        self._copies: list[tuple[Any, _Float8]] = []
        for module in model.modules():
            kind = _kind(module)
            if kind is not None:
                self._copies.append((module, kind(module)))
        if not self._copies:
            raise NworError(
                "nwor_specpv, specpv_draft_weights 'float8': the model has no linear layer with "
                "weights that are not quantised; drop specpv_draft_weights"
            )
        self._on_gpu = self._copies[0][1].weights.is_cuda
        self._operations = _left_to_compiler(model) if self._on_gpu else []
        logger.info("nwor_specpv: float8 weights of partial passes take %.2f GB", self.bytes / 1e9)

    @property
    def bytes(self) -> int:
        """Memory held on the device."""
        return sum(copy.weights.nbytes + copy.scales.nbytes for _, copy in self._copies)

    @torch.inference_mode()
    def renew(self) -> None:
        """The model's weights are others."""
        for _, copy in self._copies:
            copy.renew()

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """While it lasts, the model multiplies by the copies. Its own weights are untouched."""
        with contextlib.ExitStack() as stack:
            for layer, copy in self._copies:
                stack.enter_context(replaced(layer, "quant_method", copy))
            for operation in self._operations:
                method = operation.forward_cuda
                stack.enter_context(replaced(operation, "_forward_method", method))
            if self._on_gpu:
                _use_kernels(stack)
            yield


def weights_of(layer: Any) -> torch.Tensor:
    """[outputs, columns]: what a layer that is not quantised multiplies by."""
    if layer.weight.numel():
        return layer.weight.data
    # vLLM's CPU platform has packed them and keeps nothing else.
    columns = getattr(layer, "input_size_per_partition", layer.input_size)
    ones = torch.eye(columns, dtype=layer.params_dtype)
    return layer.quant_method.apply(layer, ones, None).t().contiguous()


def _kind(module: Any) -> type[_Float8] | None:
    """What multiplies in the place of a layer's own weights, None: it keeps them."""
    method = type(getattr(module, "quant_method", None))
    if isinstance(module, LinearBase) and method is UnquantizedLinearMethod:
        return _Linear
    if isinstance(module, ParallelLMHead) and method is UnquantizedEmbeddingMethod:
        return _Output
    return None


def _left_to_compiler(model: torch.nn.Module) -> list[Any]:
    """Operations that have a kernel of vLLM's and do not use it, because a compiler was to fuse
    them with others, or compiles each of them where it is called."""
    return [
        module
        for module in model.modules()
        if isinstance(module, CustomOp)
        and module._forward_method != module.forward_cuda
        and type(module).forward_cuda is not CustomOp.forward_cuda
    ]


def _use_kernels(stack: contextlib.ExitStack) -> None:
    """The same of vLLM's operations that are no modules."""
    stack.enter_context(ir.enable_torch_wrap(False))
    for operation in IrOp.registry.values():
        if operation.get_priority() == [_FOR_COMPILER] and _KERNELS in operation.impls:
            stack.enter_context(operation.set_priority([_KERNELS, _FOR_COMPILER]))
