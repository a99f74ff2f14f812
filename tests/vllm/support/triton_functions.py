"""Functions of a device's library that Triton's interpreter lacks. Import it when interpreting."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def log1p(x):
    """By way of float64, in which 1 + x keeps what is small of x."""
    return tl.log(1.0 + x.to(tl.float64)).to(tl.float32)
