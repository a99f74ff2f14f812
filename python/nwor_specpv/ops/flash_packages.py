"""FlashAttention packages, imported where a route is asked for by name.

Their kernels are found as torch ops, which exist once the package has been imported. Nothing is
imported for routes that are chosen by themselves: vLLM is not a small thing to load unasked.
"""

from __future__ import annotations

import functools
import importlib

from nwor_specpv import _C

# The packages that may bring a route's op, those that take small pages first.
PACKAGES = {
    "flash_attn_3": ("flash_attn_interface", "vllm.vllm_flash_attn"),
    "flash_attn_2": ("vllm.vllm_flash_attn", "flash_attn"),
}


@functools.cache
def load(route: str) -> str:
    """Imports a route's packages until its op is there; "" or why it is not."""
    failures = []
    for name in PACKAGES[route]:
        if is_present(route):
            break
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            missing = name == error.name or name.startswith(f"{error.name}.")
            failures.append(f"{name} is not installed" if missing else f"{name}: {error}")
        except Exception as error:  # built for another torch, or for no GPU: the route is not there
            failures.append(f"{name}: {type(error).__name__}: {error}")
        else:
            failures.append(f"{name} brings no kernels for it")
    return "" if is_present(route) else "; ".join(failures)


def is_present(route: str) -> bool:
    return f"\n{route}: present" in f"\n{_C.attention_routes()}"
