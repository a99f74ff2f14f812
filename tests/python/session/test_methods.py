"""The registry of speculative methods."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from nwor_specpv import Method, NworError, get_method, method_names, register_method
from nwor_specpv.methods import unregister_method

PACKAGE = Path(sys.modules["nwor_specpv"].__file__).parent


def test_the_built_in_methods_say_what_they_need() -> None:
    assert method_names() == ("none", "ngram", "draft_model", "eagle", "eagle3", "medusa-tree")
    assert get_method("none").proposes == "nothing"
    assert get_method("none").needs() == ()
    assert get_method("ngram").needs() == ()
    assert get_method("draft_model").needs() == ("a draft model",)
    assert get_method("eagle").hidden_states == "last"
    assert get_method("eagle3").needs() == ("a draft head", "hidden states of several layers")
    assert get_method("medusa-tree").tree
    assert not get_method("medusa-tree").draft_probs


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("eagle-3", "eagle3"),
        ("EAGLE", "eagle"),
        ("medusa_tree", "medusa-tree"),
        ("n-gram", "ngram"),
    ],
)
def test_an_unknown_name_is_answered_with_the_nearest(name: str, nearest: str) -> None:
    with pytest.raises(NworError, match=f"got '{name}', expected one of .*nearest is '{nearest}'"):
        get_method(name)


def test_users_register_their_own() -> None:
    mine = Method("mine", "a test's", proposes="tree", factory=list)
    register_method(mine)
    try:
        assert get_method("mine") is mine
        assert method_names()[-1] == "mine"
        with pytest.raises(NworError, match="registered"):
            register_method(mine)
        register_method(Method("mine", "another"), replace=True)
        assert not get_method("mine").tree
    finally:
        unregister_method("mine")
    with pytest.raises(NworError, match="got 'mine'"):
        get_method("mine")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Method("", "x"), "name: got ''"),
        (lambda: Method("Upper", "x"), "lower case"),
        (lambda: Method("x", "x", hidden_states="first"), "hidden_states: got 'first'"),
        (lambda: Method("x", "x", proposes="forest"), "proposes: got 'forest'"),
        (lambda: register_method(Method("eagle", "x"), replace=True), "built in"),
        (lambda: register_method("eagle"), "expected a Method"),
        (lambda: unregister_method("none"), "built in"),
        (lambda: get_method(3), "got 3"),
    ],
)
def test_wrong_use_is_named(call, message: str) -> None:
    with pytest.raises(NworError, match=message):
        call()


def test_the_package_imports_no_transformers() -> None:
    code = "import nwor_specpv, sys; print('transformers' in sys.modules)"
    path = str(PACKAGE.parent)
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {path!r}); {code}"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "False"
