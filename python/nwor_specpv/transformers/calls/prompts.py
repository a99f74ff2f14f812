"""Turns what a caller gives as prompts into lists of token ids."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from nwor_specpv import NworError

from .arguments import as_integer, as_python
from .special_ids import refuse_padding

_EXPECTED = "expected token ids, lists of them, a tokenizer's output or messages of a chat"


def read_prompts(given: Any, mask: Any, model: Any, tokenizer: Any) -> tuple[list[list[int]], bool]:
    """Prompts, and whether the caller gave a list of them.

    `given`: ids (a list, or a tensor [n] or [1, n]), several prompts (lists, or [batch, n]), a
    tokenizer's whole output, or messages of a chat. `mask`: an attention mask of the same shape;
    what it hides is left out. Padding that no mask hides is refused.
    """
    if isinstance(given, Mapping) and "role" not in given:
        given, mask = _from_tokenizer(given, mask)
    if isinstance(given, str):
        raise NworError(
            "input_ids: got text, expected token ids: tokenizer(text), or messages of a chat: "
            '[{"role": "user", "content": text}]'
        )
    if _is_chat(given):
        _refuse_mask(mask)
        rows, is_list = [_chat_ids(given, tokenizer)], False
    elif isinstance(given, Sequence) and given and all(map(_is_chat, given)):
        _refuse_mask(mask)
        rows, is_list = [_chat_ids(one, tokenizer) for one in given], True
    else:
        rows, is_list = _rows(given)
        if mask is not None:
            rows = _without_hidden(rows, mask)
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    prompts = [_checked(index, row, vocabulary) for index, row in enumerate(rows)]
    if not prompts:
        raise NworError("input_ids: got no prompts, expected at least one")
    if mask is None:
        refuse_padding(prompts, model, tokenizer)
    return prompts, is_list


def _from_tokenizer(given: Mapping, mask: Any) -> tuple[Any, Any]:
    if "input_ids" not in given:
        names = ", ".join(map(str, given)) or "nothing"
        raise NworError(f"input_ids: got a mapping with {names}, expected input_ids in it")
    return given["input_ids"], given.get("attention_mask") if mask is None else mask


def _rows(given: Any) -> tuple[list[Any], bool]:
    if not isinstance(given, Iterable) or isinstance(given, Mapping):
        raise NworError(f"input_ids: got {type(given).__name__}, {_EXPECTED}")
    if isinstance(given, torch.Tensor):
        wrong = given.is_floating_point() or given.dtype == torch.bool
        if given.dim() not in (1, 2) or wrong:
            got = f"{list(given.shape)} of {given.dtype}"
            raise NworError(f"input_ids: got {got}, expected token ids [n] or [batch, n]")
        is_list = given.dim() == 2 and given.shape[0] != 1
        return (given if given.dim() == 2 else given[None]).tolist(), is_list
    rows = [as_python(one) for one in given]
    is_list = any(isinstance(one, Sequence) for one in rows)
    return (rows if is_list else [rows]), is_list


def _checked(index: int, row: Any, vocabulary: int) -> list[int]:
    if not isinstance(row, Sequence):
        raise NworError(f"input_ids: got {row!r} among lists, expected prompts of ids")
    if not row:
        raise NworError(f"input_ids: prompt {index} is empty, expected at least one token")
    ids = [as_integer(token) for token in row]
    at = next((i for i, t in enumerate(ids) if t is None or not 0 <= t < vocabulary), None)
    if at is not None:
        raise NworError(
            f"input_ids: got {row[at]!r} in prompt {index}, expected ids from 0 to {vocabulary - 1}"
        )
    return ids


# ---- attention masks -----------------------------------------------------------------------------


def _without_hidden(rows: list[Any], mask: Any) -> list[list[Any]]:
    """Drops padding on either side, which the mask hides. A text has no holes."""
    hidden, _ = _rows(mask) if not _is_bool(mask) else _rows(mask.long())
    if [len(one) for one in hidden] != [len(one) for one in rows]:
        raise NworError(
            f"attention_mask: got rows of {[len(one) for one in hidden]}, expected the lengths of "
            f"input_ids, {[len(one) for one in rows]}"
        )
    kept = []
    for index, (row, seen) in enumerate(zip(rows, hidden, strict=True)):
        ones = [at for at, one in enumerate(seen) if one]
        if ones and ones[-1] - ones[0] + 1 != len(ones):
            raise NworError(
                f"attention_mask: got tokens hidden inside prompt {index}, expected ones in one "
                "piece, with padding before or after"
            )
        kept.append(row[ones[0] : ones[-1] + 1] if ones else [])
    return kept


def _is_bool(mask: Any) -> bool:
    return isinstance(mask, torch.Tensor) and mask.dtype == torch.bool


def _refuse_mask(mask: Any) -> None:
    if mask is not None:
        raise NworError("attention_mask: got one beside messages of a chat, expected none")


# ---- chats ---------------------------------------------------------------------------------------


def _is_chat(given: Any) -> bool:
    return (
        isinstance(given, Sequence)
        and not isinstance(given, str)
        and len(given) > 0
        and all(isinstance(one, Mapping) and "role" in one for one in given)
    )


def _chat_ids(messages: Any, tokenizer: Any) -> list[int]:
    """Ids of a chat by the tokenizer's template, up to where the model's answer begins."""
    if not getattr(tokenizer, "chat_template", None):
        missing = "no tokenizer" if tokenizer is None else "a tokenizer without a chat template"
        raise NworError(
            f"input_ids: got messages of a chat and {missing}, expected token ids, or a tokenizer "
            "with a chat template in Generator(model, tokenizer)"
        )
    try:
        ids = tokenizer.apply_chat_template(
            list(messages), add_generation_prompt=True, return_dict=False
        )
    except Exception as error:  # of the template's own, which may refuse a role or an order
        told = " ".join(str(error).split())
        raise NworError(f"input_ids: the chat template refused the messages: {told}") from None
    return list(as_python(ids))
