"""Ids that begin, end and pad texts, from a model, its tokenizer or the caller."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from nwor_specpv import NworError

from .arguments import as_integer, as_python


def ids_of_model(model: Any, name: str) -> set[int]:
    """Ids from the model's generation config or, if that has none, from its config."""
    owner = getattr(model, "generation_config", None)
    if getattr(owner, name, None) is None:
        owner = model.config.get_text_config(decoder=True)
    return _ids_of(owner, name)


def end_ids(model: Any, eos_token_id: Any, vocabulary: int) -> frozenset[int]:
    """Ids that end a text: those given (-1 for none), or the model's own."""
    if eos_token_id is None:
        return frozenset(ids_of_model(model, "eos_token_id"))
    given = as_python(eos_token_id)
    several = isinstance(given, Iterable) and not isinstance(given, str)
    ids = [as_integer(token) for token in given] if several else [as_integer(given)]
    if not all(token is not None and -1 <= token < vocabulary for token in ids):
        raise NworError(
            f"eos_token_id: got {eos_token_id!r}, expected ids from 0 to {vocabulary - 1}, or "
            "-1 for none"
        )
    return frozenset(token for token in ids if token >= 0)


def refuse_padding(prompts: list[list[int]], model: Any, tokenizer: Any) -> None:
    """Raises for padded prompts, unless the padding id also begins or ends a text."""
    pads = ids_of_model(model, "pad_token_id") | _ids_of(tokenizer, "pad_token_id")
    for name in ("eos_token_id", "bos_token_id"):
        pads -= ids_of_model(model, name) | _ids_of(tokenizer, name)
    for index, prompt in enumerate(prompts):
        for pad in pads.intersection((prompt[0], prompt[-1])):
            count = max(_leading(prompt, pad), _leading(prompt[::-1], pad))
            raise NworError(
                f"input_ids: got {count} tokens of padding ({pad}) around prompt {index}, "
                "expected none: give lists, whose lengths may differ, or an attention_mask"
            )


def _ids_of(owner: Any, name: str) -> set[int]:
    """One id or several, from a configuration or a tokenizer; negative ids are left out."""
    found = getattr(owner, name, None)
    found = found if isinstance(found, Iterable) else [found]
    return {token for token in map(as_integer, found) if token is not None and token >= 0}


def _leading(tokens: list[int], pad: int) -> int:
    return next((i for i, token in enumerate(tokens) if token != pad), len(tokens))
