"""Kinds of wrong arguments, by kind of argument, and what must happen to a call that has one."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from nwor_specpv import NworError

PAGES, TOKENS, HEADS, DIM, LAYERS, ROWS = 4, 4, 2, 8, 2, 5
INT32, INT64 = torch.int32, torch.int64

Arguments = dict[str, Any]
Change = Callable[[Arguments], Arguments]


def filled(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Distinct values, with a NaN among them: no check may be fooled by one."""
    values = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape) / 8
    values.view(-1)[3] = float("nan")
    return values.to(dtype)


def ints(*values: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


def as_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def memory_of(arguments: Arguments) -> list[torch.Tensor]:
    """Everything a call might write to, as it was before the arguments were made wrong."""
    found = []
    for value in arguments.values():
        for tensor in value if isinstance(value, list) else [value]:
            if isinstance(tensor, torch.Tensor):
                found.append(tensor)
    return found


def expect_refusal(name: str, call: Callable[[], Any], watched: list[torch.Tensor]) -> None:
    _expect(rf"\b{name}\b[\s\S]*got [\s\S]*expected ", call, watched)


def expect_message(message: str, call: Callable[[], Any], watched: list[torch.Tensor]) -> None:
    """The error says exactly this."""
    _expect(f"^{re.escape(message)}$", call, watched)


def _expect(pattern: str, call: Callable[[], Any], watched: list[torch.Tensor]) -> None:
    before = [as_bytes(tensor) for tensor in watched]
    with pytest.raises(NworError, match=pattern):
        call()
    assert [as_bytes(tensor) for tensor in watched] == before


# ---- kinds of wrong, per kind of argument ----


def rows_kinds(name: str) -> dict[str, Change]:
    """K or V rows that are read."""
    return {
        f"{name}: float64": lambda a: {name: a[name].double()},
        f"{name}: int32": lambda a: {name: torch.zeros(a[name].shape, dtype=INT32)},
        f"{name}: rank": lambda a: {name: a[name][0]},
        f"{name}: one row less": lambda a: {name: a[name][:-1]},
        f"{name}: heads": lambda a: {name: a[name][..., :1, :]},
        f"{name}: channels": lambda a: {name: a[name][..., :-1]},
        f"{name}: device": lambda a: {name: a[name].to("meta")},
    }


def cache_kinds(name: str) -> dict[str, Change]:
    """A paged cache that is written."""
    return {
        f"{name}: float64": lambda a: {name: a[name].double()},
        f"{name}: float8_e5m2": lambda a: {name: a[name].to(torch.float8_e5m2)},
        f"{name}: rank": lambda a: {name: a[name][0]},
        f"{name}: heads": lambda a: {name: a[name][:, :, :1]},
        f"{name}: channels": lambda a: {name: a[name][..., :-1]},
        f"{name}: pages": lambda a: {name: a[name][:-1]},
        f"{name}: channel stride": lambda a: {
            name: torch.zeros(PAGES, TOKENS, HEADS, 2 * DIM)[..., ::2]
        },
        f"{name}: overlap": lambda a: {name: a[name][:1].expand(PAGES, -1, -1, -1)},
        f"{name}: device": lambda a: {name: a[name].to("meta")},
    }


def index_kinds(name: str, wrong_dtype: torch.dtype) -> dict[str, Change]:
    """An integer tensor: dtype, rank, size, stride, device."""
    return {
        f"{name}: dtype": lambda a: {name: a[name].to(wrong_dtype)},
        f"{name}: float": lambda a: {name: a[name].float()},
        f"{name}: rank": lambda a: {name: a[name][None]},
        f"{name}: size": lambda a: {name: torch.cat([a[name], a[name]])},
        f"{name}: stride": lambda a: {name: torch.stack([a[name]] * 2, -1)[..., 0]},
        f"{name}: device": lambda a: {name: a[name].to("meta")},
    }


def scale_kinds(name: str) -> dict[str, Change]:
    return {
        f"{name}: dtype": lambda a: {name: a[name].double()},
        f"{name}: size": lambda a: {name: torch.ones(HEADS + 1)},
        f"{name}: rank": lambda a: {name: torch.ones(1, HEADS)},
        f"{name}: stride": lambda a: {name: torch.ones(2 * HEADS)[::2]},
        f"{name}: device": lambda a: {name: a[name].to("meta")},
    }


def poke(name: str, index: Any, value: int) -> Change:
    def change(arguments: Arguments) -> Arguments:
        tensor = arguments[name].clone()
        tensor[index] = value
        return {name: tensor}

    return change


def parametrize(kinds: dict[str, Change]):
    return pytest.mark.parametrize(
        ("name", "change"),
        [pytest.param(what.split(":")[0], change, id=what) for what, change in kinds.items()],
    )


def names_an_argument_of(name: str, arguments: Arguments) -> str:
    """K and V of a pair are compared with each other: either may be called the wrong one."""
    pair = name.replace("key", "value") if "key" in name else name.replace("value", "key")
    return f"({name}|{pair})" if pair in arguments else name
