"""How a target's chats are written: what stands before a question and after it.

It comes from the chat template in the target's folder. Without a template it is ChatML, if the
tokenizer has its markers.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nwor_specpv.errors import NworError

_QUESTION, _SYSTEM = "QUESTION-OF-THE-USER", "WORDS-OF-THE-SYSTEM"
_CHATML_END = "<|im_end|>"


@dataclass(frozen=True)
class ChatFormat:
    """Texts around a question. `system_end` is None where the template has no system turn."""

    opening: str  # before the system's words, or before the question
    system_end: str | None  # between the system's words and the question
    answer: str  # after the question, up to where the answer begins

    def question(self, words: str, system: str) -> str:
        """A chat up to the end of the question, which may not be over."""
        if self.system_end is None:
            return self.opening + words
        return f"{self.opening}{system}{self.system_end}{words}"

    def prompt(self, words: str, system: str) -> str:
        return self.question(words, system) + self.answer


CHATML = ChatFormat(
    "<|im_start|>system\n",
    f"{_CHATML_END}\n<|im_start|>user\n",
    f"{_CHATML_END}\n<|im_start|>assistant\n",
)


def read_chat_format(folder: Path) -> ChatFormat:
    """The format of the model in `folder`."""
    template, tokens = _read_template(folder)
    if template is None:
        return CHATML
    user = {"role": "user", "content": _QUESTION}
    system = {"role": "system", "content": _SYSTEM}
    try:
        text = _render(template, [system, user], tokens)
    except Exception:  # a template may refuse system turns
        text = ""
    if text.find(_SYSTEM) >= 0:
        opening, _, rest = text.partition(_SYSTEM)
        middle, found, answer = rest.partition(_QUESTION)
        if found and answer:
            return ChatFormat(opening, middle, answer)
    try:
        text = _render(template, [user], tokens)
    except Exception as error:  # of the template
        told = " ".join(str(error).split())
        raise NworError(f"{folder}: its chat template refuses a question: {told}") from None
    opening, found, answer = text.partition(_QUESTION)
    if not found or not answer:
        raise NworError(
            f"{folder}: its chat template writes nothing after a question, expected a marker that "
            "ends it"
        )
    return ChatFormat(opening, None, answer)


def _read_template(folder: Path) -> tuple[str | None, dict[str, str]]:
    """The template, and the special tokens that it may name."""
    try:
        path = folder / "tokenizer_config.json"
        config = json.loads(path.read_text("utf-8")) if path.is_file() else {}
        own = folder / "chat_template.jinja"
        template = own.read_text("utf-8") if own.is_file() else config.get("chat_template")
    except (OSError, ValueError, AttributeError) as error:
        raise NworError(f"{folder}: its chat template cannot be read: {error}") from None
    if isinstance(template, list):  # several by name
        named = {one.get("name"): one.get("template") for one in template}
        template = named.get("default")
    tokens = {}
    for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
        value = config.get(name)
        value = value.get("content") if isinstance(value, dict) else value
        tokens[name] = value or ""
    return template, tokens


def _render(template: str, messages: list[dict[str, str]], tokens: dict[str, str]) -> str:
    from jinja2.exceptions import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message: str) -> None:
        raise TemplateError(message)

    # As transformers renders them.
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.globals |= {"raise_exception": refuse, "strftime_now": lambda form: ""}
    values: dict[str, Any] = {"messages": messages, "add_generation_prompt": True, **tokens}
    return environment.from_string(template).render(**values)
