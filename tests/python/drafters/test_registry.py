"""Drafters by name."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import pytest

from nwor_specpv import NworError
from nwor_specpv.drafters import Drafter, TreeConfig, make_drafter, register_drafter
from nwor_specpv.drafters.ngram import NgramDrafter
from nwor_specpv.methods import get_method, unregister_method


class Silent(Drafter):
    def __init__(self, target: Any, word: str = "") -> None:
        self.target, self.word = target, word

    def begin(self, request: Hashable, prompt_ids: Sequence[int]) -> None: ...

    def observe(self, request: Hashable, tokens: Sequence[int], features: Any) -> None: ...

    def draft(self, requests: Sequence[Hashable], tree: TreeConfig) -> list[Any]:
        return []

    def end(self, request: Hashable) -> None: ...


@pytest.fixture
def silent() -> Iterator[str]:
    register_drafter("silent", Silent, summary="says nothing", proposes="chain")
    yield "silent"
    unregister_method("silent")


def test_a_registered_drafter_is_made_with_target_and_options(silent: str) -> None:
    made = make_drafter(silent, target="model", word="hush")
    assert isinstance(made, Silent)
    assert (made.target, made.word) == ("model", "hush")
    assert get_method(silent).proposes == "chain"
    with pytest.raises(NworError, match="is registered"):
        register_drafter(silent, Silent)
    register_drafter(silent, Silent, replace=True)


def test_built_in_drafters_have_names() -> None:
    assert isinstance(make_drafter("ngram", min_tokens=1), NgramDrafter)
    with pytest.raises(NworError, match="built in"):
        register_drafter("ngram", Silent)


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("engram", {}, "the nearest is 'ngram'"),
        ("eagel3", {}, "the nearest is 'eagle3'"),
        ("draft_model", {}, "needs a draft model and is made by its host"),
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
    try:
        with pytest.raises(NworError, match="'list': got list, expected a Drafter"):
            make_drafter("list")
    finally:
        unregister_method("list")
