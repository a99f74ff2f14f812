"""What help() and type checkers are told: docstrings of the public names, and the stub of `_C`."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, WrapperDescriptorType

import pytest

import nwor_specpv
from nwor_specpv import _C

ROOT = Path(__file__).resolve().parents[3]


def said(thing: object) -> str:
    """Its docstring without the signature that pybind11 or dataclass() writes by itself."""
    doc = inspect.cleandoc(getattr(thing, "__doc__", None) or "")
    name = getattr(thing, "__name__", "")
    return re.sub(rf"^{re.escape(name)}\(.*(\n|$)", "", doc).strip() if name else doc


def is_documented(thing: object) -> bool:
    return inspect.isclass(thing) or inspect.isroutine(thing)


def public_members(owner: type) -> Iterator[tuple[str, object]]:
    for name, member in vars(owner).items():
        # Of a class without a constructor, __init__ is the interpreter's wrapper.
        constructor = name == "__init__" and not isinstance(member, WrapperDescriptorType)
        if constructor or not name.startswith("_"):
            yield f"{owner.__name__}.{name}", member


def native_names() -> Iterator[tuple[str, object]]:
    """Functions, classes and members of `_C`; _PartialStore is what PartialStore inherits."""
    for name, thing in vars(_C).items():
        if not is_documented(thing) or (name.startswith("_") and name != "_PartialStore"):
            continue
        yield name, thing
        if inspect.isclass(thing):
            yield from public_members(thing)


def test_every_public_name_says_what_it_is() -> None:
    names = {name: getattr(nwor_specpv, name) for name in nwor_specpv.__all__}
    checked = {name: thing for name, thing in names.items() if is_documented(thing)}
    assert {"Interceptor", "Settings", "write_kv", "commit", "NworError"} <= set(checked)
    assert [name for name, thing in checked.items() if not said(thing)] == []


def test_every_method_and_property_of_the_public_classes_says_what_it_is() -> None:
    ours = (
        thing
        for name in nwor_specpv.__all__
        if inspect.isclass(thing := getattr(nwor_specpv, name))
    )
    names = {
        name: member
        for owner in ours
        for name, member in public_members(owner)
        if isinstance(member, (property, staticmethod, classmethod)) or inspect.isfunction(member)
    }
    assert {"Session.verify", "Tree.rows", "TwoLevel.of"} <= set(names)
    silent = [name for name, member in names.items() if not said(member)]
    assert [name for name in silent if not name.endswith(".__init__")] == []


def test_every_member_of_the_native_classes_says_what_it_is() -> None:
    names = dict(native_names())
    assert {"Interceptor.commit", "Receipt.ok", "NworConfig.__init__", "count"} <= set(names)
    assert {"_PartialStore.refresh_layer", "SpecPVConfig.specpv_score"} <= set(names)
    assert [name for name, thing in names.items() if not said(thing)] == []


@pytest.mark.parametrize(
    ("doc", "rest"),
    [
        (None, ""),
        ("commit(self, path: int = 0) -> Receipt\n", ""),
        ("commit(path: int)", ""),
        ("commit(path: int) -> None\n\nMoves rows.\n", "Moves rows."),
        ("Moves rows.", "Moves rows."),
    ],
)
def test_a_signature_says_nothing(doc: str | None, rest: str) -> None:
    def commit() -> None: ...

    commit.__doc__ = doc
    assert said(commit) == rest


# ---- the stub ----


@pytest.fixture(scope="module")
def stubs() -> ModuleType:
    path = ROOT / "tools" / "stubs.py"
    spec = importlib.util.spec_from_file_location("nwor_tool_stubs", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def made(stubs: ModuleType) -> str:
    return stubs.render()


def test_the_stub_is_what_the_module_says(stubs: ModuleType, made: str) -> None:
    assert stubs.STUB.read_text(encoding="utf-8") == made


def test_the_stub_has_every_name(made: str) -> None:
    told = {node.name: node for node in ast.parse(made).body if hasattr(node, "name")}
    for name, _ in native_names():
        owner, _, member = name.partition(".")
        assert owner in told, name
        assert not member or f"def {member}(" in ast.unparse(told[owner]), name


def test_a_stale_stub_is_found_and_mended(
    stubs: ModuleType,
    made: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(stubs, "ROOT", tmp_path)
    monkeypatch.setattr(stubs, "STUB", tmp_path / "_C.pyi")
    monkeypatch.setattr(stubs, "render", lambda: made)
    assert stubs.main(["--check"]) == 1
    assert "_C.pyi is not what the module says" in capsys.readouterr().out
    assert stubs.main([]) == 0
    assert stubs.main(["--check"]) == 0
    stubs.STUB.write_text(made.replace("class Receipt", "class Receipts"), encoding="utf-8")
    assert stubs.main(["--check"]) == 1


@pytest.mark.parametrize(
    ("told", "corrected"),
    [
        ('def f() -> None:\n    """\n    Says more.\n    """', "def f() -> None:\n    ..."),
        ("def f(a: X=None): ...", "def f(a: X | None=None):"),
        ("def f(*, a: X | None=None): ...", "def f(*, a: X | None=None):"),
        ("def f(a: typing.Any=None): ...", "def f(a: typing.Any=None):"),
        ("def f(a: typing.SupportsInt | typing.SupportsIndex | str): ...", "SupportsIndex | str)"),
        ("class A:\n    def list(self) -> list[int]: ...", "-> builtins.list[int]:"),
        ("class A:\n    def many(self) -> list[int]: ...", "-> list[int]:"),
        ("WORDS: dict = {'a': 'b'}", "WORDS: dict[str, str]"),
        ("PAIRS: list = [('a', 1)]", "PAIRS: list[tuple[str, int]]"),
        (
            "class A:\n    @property\n    def a(self) -> int: ...\n"
            "    @a.setter\n    def a(self, arg1: typing.Any) -> None: ...",
            "def a(self, arg1: int) -> None:",
        ),
    ],
)
def test_what_pybind11_says_is_corrected(stubs: ModuleType, told: str, corrected: str) -> None:
    tree = stubs.Corrections().visit(ast.parse(told))
    assert corrected in ast.unparse(ast.fix_missing_locations(tree))
