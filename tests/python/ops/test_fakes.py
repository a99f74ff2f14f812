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


def made_up(argument: Any, device: str) -> Any:
    """A value of the argument's type."""
    tensor = torch.zeros(2, 2, device=device)
    kind = str(argument.type).removeprefix("Optional[").removesuffix("]")
    if kind == "Tensor":
        return tensor
    if kind.startswith("List[Tensor"):
        return [tensor, tensor]
    return PLAIN[kind] if not argument.has_default_value() else argument.default_value


@pytest.mark.parametrize("name", OPS)
def test_an_argument_without_data_among_others_is_refused(name: str) -> None:
    op = getattr(torch.ops.nwor_specpv, name).default
    arguments = op._schema.arguments
    given = {argument.name: made_up(argument, "cpu") for argument in arguments}
    # By optional lists torch chooses no kernel: the real one gets and checks them.
    kinds = ("Tensor", "Optional[Tensor]", "List[Tensor]")
    places = [argument for argument in arguments if str(argument.type) in kinds]
    assert len(places) > 1
    for place in places:
        with pytest.raises(ValueError, match=r": got device (cpu|meta), expected (cpu|meta) as "):
            op(**(given | {place.name: made_up(place, "meta")}))
