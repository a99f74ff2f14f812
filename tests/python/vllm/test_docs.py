"""docs/vllm*.md: settings with their defaults, every reason; and the entry point, without vLLM."""

from __future__ import annotations

import ast
import dataclasses
import importlib.metadata
import re
import sys
from pathlib import Path

from nwor_specpv import BYPASS_REASONS
from nwor_specpv.config import Settings
from nwor_specpv.vllm import plugin
from nwor_specpv.vllm.settings import read_settings

DOCS = Path(__file__).resolve().parents[3] / "docs"
PAGE, LONG_CONTEXT = (
    (DOCS / name).read_text(encoding="utf-8") for name in ("vllm.md", "vllm_long_context.md")
)
# Words of the page for values that are no literals.
WORDS = {"off": None, "true": True, "false": False, "1 GiB": 1 << 30, '""': ""}
# Reasons that vLLM's way of calling us leaves no room for, or that are a choice and no news.
SILENT = {"none", "disabled", "fake_tensor", "unbound_layer", "stale_round"}


def documented_defaults() -> dict[str, str]:
    """Key -> default of both pages' tables; several keys of a row share its columns."""
    found = {}
    settings = "".join(
        page.split("## Settings")[1].split("\n## ")[0] for page in (PAGE, LONG_CONTEXT)
    )
    for keys, values in re.findall(
        r"^\| ((?:`[a-z_]+`(?:, )?)+) \| (.*?) \|", settings, re.MULTILINE
    ):
        names = re.findall(r"`([a-z_]+)`", keys)
        columns = values.split(", ") if len(names) > 1 else [values]
        found |= dict(zip(names, columns, strict=True))
    return found


def test_settings_have_the_defaults_that_the_page_says() -> None:
    known = {field.name for field in dataclasses.fields(Settings)}
    defaults = read_settings({}, {})
    documented = documented_defaults()
    assert len(documented) > 10
    assert documented.keys() <= known
    for name, text in documented.items():
        told = WORDS[text] if text in WORDS else int(text) if text.isdecimal() else text
        assert getattr(defaults, name) in (told, text), name


def test_every_reason_that_users_can_meet_is_in_troubleshooting() -> None:
    table = PAGE[PAGE.index("## Troubleshooting") :]
    named = set(re.findall(r"^\| reason `([a-z_]+)`", table, re.MULTILINE))
    assert named == BYPASS_REASONS.keys() - SILENT


def messages() -> list[str]:
    """Every string of the plugin's sources; what is filled in is `...`."""
    found = []
    for path in Path(plugin.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = [getattr(part, "value", "...") for part in node.values]
                found.append("".join(p if isinstance(p, str) else "..." for p in parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value.replace("%s", "..."))
    return found


def test_what_the_log_is_quoted_to_say_is_said() -> None:
    table = PAGE[PAGE.index("## Troubleshooting") :]
    rows = re.findall(r"^\|.*\|$", table, re.MULTILINE)
    quoted = {text for row in rows for text in re.findall(r"`([^`]*)`", row) if " " in text}
    others = ("Selected", "Backend", "Failed", "--", "nwor-specpv")  # vLLM's lines, and commands
    quoted = {text for text in quoted if not text.startswith(others)}
    said = messages()
    assert len(quoted) > 5
    for text in quoted:
        # What a layer has is a string of its own.
        parts = [part.strip(" ,") for part in re.split(r"\.\.\.|(?<=it has) ", text)]
        assert all(any(part in line for line in said) for part in parts), text


def test_the_way_in_is_registered_and_needs_no_vllm() -> None:
    """vLLM calls it in every process it starts, so naming it must import little."""
    (point,) = (
        point
        for point in importlib.metadata.entry_points(group="vllm.general_plugins")
        if point.name == "nwor_specpv"
    )
    assert point.value == "nwor_specpv_vllm:register"
    assert callable(point.load())
    assert "vllm" not in sys.modules
