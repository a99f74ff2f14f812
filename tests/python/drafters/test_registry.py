"""Drafters by name."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Hashable, Sequence
from typing import Any

import pytest

from nwor_specpv import NworError
from nwor_specpv.drafters import Drafter, TreeConfig, make_drafter, register_drafter, registry
from nwor_specpv.drafters.ngram import NgramDrafter
from nwor_specpv.drafters.registry import drafter_names


class Silent(Drafter):
    def __init__(self, target: Any, word: str = "") -> None:
        self.target, self.word = target, word

    def begin(self, request: Hashable, prompt_ids: Sequence[int]) -> None: ...

    def observe(self, request: Hashable, tokens: Sequence[int], features: Any) -> None: ...

    def draft(self, requests: Sequence[Hashable], tree: TreeConfig) -> list[Any]:
        return []

    def end(self, request: Hashable) -> None: ...


@pytest.fixture(autouse=True)
def nothing_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registered", {})


def test_a_registered_drafter_is_made_with_target_and_options() -> None:
    register_drafter("silent", Silent)
    assert drafter_names() == ("ngram", "eagle3", "silent")
    made = make_drafter("silent", target="model", word="hush")
    assert isinstance(made, Silent)
    assert (made.target, made.word) == ("model", "hush")


def test_a_name_that_is_taken_needs_replace() -> None:
    register_drafter("silent", Silent)
    with pytest.raises(NworError, match="is registered"):
        register_drafter("silent", Silent)
    register_drafter("silent", lambda target: Silent(target, "another"), replace=True)
    assert make_drafter("silent").word == "another"


def test_built_in_drafters_have_names() -> None:
    assert isinstance(make_drafter("ngram", min_tokens=1), NgramDrafter)
    for name in ("ngram", "eagle3", "none", "draft_model"):
        with pytest.raises(NworError, match=f"name: got '{name}', which is built in"):
            register_drafter(name, Silent, replace=True)


@pytest.mark.parametrize("name", ["", "Upper", " spaced ", 3])
def test_a_name_is_a_word_in_lower_case(name: object) -> None:
    with pytest.raises(NworError, match=r"name: got .*, expected a word in lower case"):
        register_drafter(name, Silent)


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("engram", {}, "the nearest is 'ngram'"),
        ("eagel3", {}, "the nearest is 'eagle3'"),
        ("eagle-3", {}, "the nearest is 'eagle3'"),
        ("N-GRAM", {}, "the nearest is 'ngram'"),
        (3, {}, "drafter: got 3, expected one of ngram, eagle3"),
        ("draft_model", {}, "which the host handles itself; expected one of ngram, eagle3"),
        ("eagle3", {}, "target: got None"),
        ("ngram", {"width": 3}, "unexpected keyword argument 'width'"),
    ],
)
def test_wrong_names_and_options(name: str, options: dict, words: str) -> None:
    with pytest.raises(NworError, match=words):
        make_drafter(name, **options)


def test_a_factory_makes_a_drafter_or_is_refused() -> None:
    with pytest.raises(NworError, match="factory: got int, expected a callable"):
        register_drafter("three", 3)
    register_drafter("list", lambda target: [])
    with pytest.raises(NworError, match="'list': got list, expected a Drafter"):
        make_drafter("list")


def test_the_package_imports_no_transformers() -> None:
    code = "import nwor_specpv, sys; print('transformers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
