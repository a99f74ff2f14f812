"""Fake kernels, which say shapes where tensors have no data: for tracing, and for nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import nwor_specpv  # noqa: F401

REGISTERED = [name for name in torch._C._dispatch_get_all_op_names() if "nwor_specpv::" in name]
# These two check their arguments by the same code on every device.
OPS = sorted({name.split("::")[1] for name in REGISTERED} - {"commit", "write_kv"})
PLAIN = {"int": 1, "SymInt": 1, "float": 1.0, "bool": False, "str": ""}


def tensors(name: str) -> list[Any]:
    """By which torch chooses a kernel; by optional lists it does not: the real one checks them."""
    arguments = getattr(torch.ops.nwor_specpv, name).default._schema.arguments
    kinds = ("Tensor", "Optional[Tensor]", "List[Tensor]")
    return [argument for argument in arguments if str(argument.type) in kinds]


def made_up(argument: Any, device: str) -> Any:
    """A value of the argument's type."""
    tensor = torch.zeros(2, 2, device=device)
    kind = str(argument.type).removeprefix("Optional[").removesuffix("]")
    if kind == "Tensor":
        return tensor
    if kind.startswith("List[Tensor"):
        return [tensor, tensor]
    return PLAIN[kind] if not argument.has_default_value() else argument.default_value


@pytest.mark.parametrize("name", [name for name in OPS if len(tensors(name)) > 1])
def test_an_argument_without_data_among_others_is_refused(name: str) -> None:
    op = getattr(torch.ops.nwor_specpv, name).default
    given = {argument.name: made_up(argument, "cpu") for argument in op._schema.arguments}
    for place in tensors(name):
        with pytest.raises(ValueError, match=r": got device (cpu|meta), expected (cpu|meta) as "):
            op(**(given | {place.name: made_up(place, "meta")}))
