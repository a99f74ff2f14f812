"""How our torch ops are called from Python: wrong use becomes NworError."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from nwor_specpv.errors import NworError


def call(op: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls a torch op of ours; its ValueError becomes a NworError."""
    if torch.compiler.is_compiling():
        return op(*args, **kwargs)
    try:
        return op(*args, **kwargs)
    except ValueError as error:
        raise NworError(str(error)) from None
    except RuntimeError as error:
        # A wrong argument type or a mix of devices stops in torch before it reaches the op.
        if "nwor_specpv::" in str(error):
            raise NworError(str(error).split("\n")[0]) from None
        raise
