"""Linear layers and the decoder layers they are in, for the few rows of a step."""

from __future__ import annotations

import torch

from ._call import call


def linear_rows(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """A linear layer for few rows: `input` [.., K], `weight` [N, K], `bias` [N].

    On the CPU a row has the same bits whatever the number of rows, sums are float32, and weights
    are read once, as they lie. With a `weight` that is not contiguous, and on CUDA, it is torch's
    linear, which promises none of that. float32 rows may meet weights of float16 or bfloat16.
    """
    return call(torch.ops.nwor_specpv.linear_rows.default, input, weight, bias)


def attention_inputs(
    hidden: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    norm: torch.Tensor,
    epsilon: float,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    query_bias: torch.Tensor | None = None,
    key_bias: torch.Tensor | None = None,
    value_bias: torch.Tensor | None = None,
    query_norm: torch.Tensor | None = None,
    key_norm: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What a Llama-like layer attends with: normalized, projected, rotated.

    `hidden` [T, hidden], `cos` and `sin` [T, D], `norm` [hidden] or, for parts that are normalized
    alone, [parts, hidden / parts], weights [outputs, hidden], also of float16 or bfloat16 where
    `hidden` is float32; `query_norm` and `key_norm` [D] normalize every head. Returns query
    [T, Hq, D], key and value [T, Hkv, D]. On the CPU in float32, with contiguous weight matrices, a
    row has the same bits whatever the number of rows.
    """
    return call(
        torch.ops.nwor_specpv.attention_inputs.default,
        hidden,
        cos,
        sin,
        norm,
        epsilon,
        query,
        key,
        value,
        query_bias,
        key_bias,
        value_bias,
        query_norm,
        key_norm,
    )


def layer_output(
    hidden: torch.Tensor,
    attended: torch.Tensor,
    attention: torch.Tensor,
    attention_bias: torch.Tensor | None,
    norm: torch.Tensor,
    epsilon: float,
    gate: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
) -> torch.Tensor:
    """The output [T, hidden] of a Llama-like layer from its input and what was attended to.

    `attended` [T, Hq * D]; `attention` [hidden, Hq * D] with its bias, `gate` and `up`
    [intermediate, hidden], `down` [hidden, intermediate]; both residual connections are added. On
    the CPU in float32, with contiguous matrices, a row has the same bits whatever the number of
    rows.
    """
    return call(
        torch.ops.nwor_specpv.layer_output.default,
        hidden,
        attended,
        attention,
        attention_bias,
        norm,
        epsilon,
        gate,
        up,
        down,
    )
