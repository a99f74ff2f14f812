"""FlashAttention packages, imported where a route is asked for by name.

Their kernels are found as torch ops, which exist once the package has been imported. Nothing is
imported for routes that are chosen by themselves: vLLM is not a small thing to load unasked.
"""

from __future__ import annotations

import functools
import importlib

# The packages that bring a route's op, in the order in which they are tried.
PACKAGES = {
    "flash_attn_3": ("flash_attn_interface", "vllm.vllm_flash_attn"),
    "flash_attn_2": ("flash_attn", "vllm.vllm_flash_attn"),
}


@functools.cache
def load(route: str) -> str:
    """Imports the first of a route's packages that can be; "" or why none of them could."""
    failures = []
    for name in PACKAGES[route]:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            missing = name == error.name or name.startswith(f"{error.name}.")
            failures.append(f"{name} is not installed" if missing else f"{name}: {error}")
        except Exception as error:  # built for another torch, or for no GPU: the route is not there
            failures.append(f"{name}: {type(error).__name__}: {error}")
        else:
            return ""
    return "; ".join(failures)
