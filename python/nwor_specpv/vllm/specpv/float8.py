"""Products of float8 rows, each of which has a scale of its own.

On a GPU they are vLLM's kernels. Elsewhere plain torch gives the same, so that tests without a GPU
see what float8 does to drafts.
"""

from __future__ import annotations

import torch

_LARGEST = torch.finfo(torch.float8_e4m3fn).max
_LEAST_SCALE = 1 / (512 * _LARGEST)  # as in vLLM's kernel: a row of zeros has one, too


def quantise(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[rows, columns] in float8 and their scales [rows, 1] float32, which `rows` all but are the
    product of. What is not finite spoils its own row alone."""
    if rows.is_cuda:
        from vllm import _custom_ops

        return _custom_ops.scaled_fp8_quant(rows, use_per_token_if_dynamic=True)
    exact = rows.float()
    scales = (exact.abs().amax(-1, keepdim=True) / _LARGEST).clamp(min=_LEAST_SCALE)
    return (exact / scales).clamp(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn), scales


def multiply(
    inputs: torch.Tensor,
    weights: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """[..., outputs] in the dtype of `inputs` [..., columns], which are quantised on the way, times
    `weights` [outputs, columns] and their `scales`, as `quantise` gives them."""
    rows, row_scales = quantise(inputs.reshape(-1, inputs.shape[-1]))
    if inputs.is_cuda:
        from vllm import _custom_ops

        found = _custom_ops.cutlass_scaled_mm(
            rows, weights.t(), row_scales, scales, inputs.dtype, bias
        )
    else:
        exact = (rows.float() * row_scales) @ (weights.float() * scales).t()
        found = (exact if bias is None else exact + bias.float()).to(inputs.dtype)
    return found.view(*inputs.shape[:-1], weights.shape[0])
