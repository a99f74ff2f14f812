"""A model's modules once more, with the same weights, for a Generator to run and to change.

The model itself is never changed: other threads may run it, or generate with it, at the same time.
"""

from __future__ import annotations

import copy
import operator
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any

from torch import nn
from transformers import PreTrainedModel

# What a module keeps in dictionaries that change in place: parts and hooks.
_HELD = ("_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks")
_CHANGED_IN_PLACE = {name for name, one in vars(nn.Module()).items() if isinstance(one, dict)}
_MISSING = object()


class StandIn:
    """Copies of a model's modules that share its parameters, buffers, hooks and other attributes.

    `attention`: the attention implementation of the copies. Their configuration is another object.
    """

    def __init__(self, model: PreTrainedModel, attention: str) -> None:
        self._seen = [(one, _state(one)) for one in model.modules()]
        config = copy.deepcopy(model.config)
        text = model.config.get_text_config(decoder=True)
        config.get_text_config(decoder=True)._attn_implementation = attention
        self._made: dict[int, Any] = {
            id(model.config): config,
            id(text): config.get_text_config(decoder=True),
        }
        self._kept = (model.config, text)  # alive, so that no other object has their ids
        for one, _ in self._seen:
            self._made[id(one)] = object.__new__(type(one))
        for one, _ in self._seen:
            self._fill(one, self._made[id(one)])
        self.model: PreTrainedModel = self._made[id(model)]

    @property
    def is_current(self) -> bool:
        """Whether the model still has the same modules, weights, hooks and attributes."""
        return all(_is_same(vars(one), state) for one, state in self._seen)

    def _fill(self, module: nn.Module, made: nn.Module) -> None:
        own = vars(made)
        for name, value in vars(module).items():
            if name in _CHANGED_IN_PLACE:
                own[name] = type(value)(value)
            else:
                own[name] = self._own(value)
        own["_modules"] = {name: self._own(child) for name, child in own["_modules"].items()}
        own["training"] = False

    def _own(self, value: Any) -> Any:
        """What stands for a value of the model's; anything else is shared."""
        if id(value) in self._made:
            return self._made[id(value)]
        compiled = getattr(value, "_torchdynamo_orig_callable", None)
        if compiled is not None:
            return self._own(compiled)
        if isinstance(value, MethodType):
            owner = self._own(value.__self__)
            return value if owner is value.__self__ else MethodType(value.__func__, owner)
        if isinstance(value, partial):
            own = [self._own(one) for one in value.args]
            same = all(map(operator.is_, own, value.args))
            return value if same else partial(self._own(value.func), *own, **value.keywords)
        if isinstance(value, FunctionType) and value.__closure__:
            return self._own_function(value)
        return value

    def _own_function(self, function: FunctionType) -> FunctionType:
        """A function that encloses a method of the model's, as one that wraps a `forward` does."""
        cells = []
        for cell in function.__closure__ or ():
            held = _content(cell)
            wraps = isinstance(held, MethodType | partial)
            own = self._own(held) if wraps else held
            cells.append(cell if own is held else CellType(own))
        if all(map(operator.is_, cells, function.__closure__ or ())):
            return function
        made = FunctionType(
            function.__code__,
            function.__globals__,
            function.__name__,
            function.__defaults__,
            tuple(cells),
        )
        made.__kwdefaults__ = function.__kwdefaults__
        return made


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None


def _state(module: nn.Module) -> tuple[dict[str, Any], list[list[Any]]]:
    own = vars(module)
    return dict(own), [list(own.get(name, {}).values()) for name in _HELD]


def _is_same(now: dict[str, Any], state: tuple[dict[str, Any], list[list[Any]]]) -> bool:
    before, held = state
    if len(now) != len(before):
        return False
    for name, value in now.items():
        if value is not before.get(name, _MISSING) and name != "training":
            return False
    for name, values in zip(_HELD, held, strict=True):
        mine = now.get(name, {})
        if len(mine) != len(values) or not all(map(operator.is_, mine.values(), values)):
            return False
    return True


def is_hooked(module: nn.Module) -> bool:
    """Whether a library has added hooks to the module, or a `forward` of its own."""
    hooks = module._forward_hooks or module._forward_pre_hooks
    return bool(hooks) or "forward" in vars(module)
