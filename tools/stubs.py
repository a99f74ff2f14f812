#!/usr/bin/env python3
"""Makes python/nwor_specpv/_C.pyi, what type checkers see of the built module.

tools/stubs.py            writes it
tools/stubs.py --check    exits 1 if it is not what the module says
"""

from __future__ import annotations

import ast
import builtins
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
STUB = ROOT / "python" / "nwor_specpv" / "_C.pyi"
HEADER = """\
# Made from the built module by tools/stubs.py; docstrings are in the module itself.
# ruff: noqa: N999
"""


def run(arguments: list[str], text: str | None = None) -> str:
    """What a Python module of this environment prints, given `text`."""
    paths = [str(ROOT / "python"), os.environ.get("PYTHONPATH", "")]
    result = subprocess.run(
        [sys.executable, "-m", *arguments],
        input=text,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
        capture_output=True,
        text=True,
    )
    if result.returncode != 0:
        raise SystemExit(f"stubs: {arguments[0]} failed\n{result.stdout}{result.stderr}")
    return result.stdout


def expression(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body


def type_of(value: object) -> str:
    """The type of a constant, by its first element: all of them are alike."""
    if isinstance(value, dict):
        key, item = next(iter(value.items()))
        return f"dict[{type_of(key)}, {type_of(item)}]"
    if isinstance(value, list):
        return f"list[{type_of(value[0])}]"
    if isinstance(value, tuple):
        return f"tuple[{', '.join(map(type_of, value))}]"
    return type(value).__name__


class Corrections(ast.NodeTransformer):
    """What pybind11 cannot say, or says too widely."""

    def __init__(self) -> None:
        self._names: set[str] = set()  # of the class's members

    def visit_Module(self, node: ast.Module) -> ast.Module:
        self.generic_visit(node)
        node.body = [*ast.parse("import builtins").body, *node.body]
        return node

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.ImportFrom | None:
        return None if node.module == "__future__" else node

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.ClassDef:
        self._names = {item.name for item in node.body if isinstance(item, ast.FunctionDef)}
        node.body = without_docstring(node.body)
        self.generic_visit(node)
        self._names = set()
        self._type_setters(node)
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        node.body = without_docstring(node.body)
        node.args = self.visit(node.args)
        node.returns = self.visit(node.returns) if node.returns else None
        positional = node.args.args[len(node.args.args) - len(node.args.defaults) :]
        self._allow_none(positional, node.args.defaults)
        self._allow_none(node.args.kwonlyargs, node.args.kw_defaults)
        return node

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        self.generic_visit(node)
        # A float supports int(), and is refused.
        text = ast.unparse(node).replace("typing.SupportsInt | ", "")
        return expression(text)

    def visit_Name(self, node: ast.Name) -> ast.expr:
        # Where a class has a method `list`, that is what the name means.
        shadowed = node.id in self._names and hasattr(builtins, node.id)
        return expression(f"builtins.{node.id}") if shadowed else node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AnnAssign:
        self.generic_visit(node)
        if node.value is not None and ast.unparse(node.target) != "__all__":
            node.annotation = expression(type_of(ast.literal_eval(node.value)))
            node.value = None
        return node

    @staticmethod
    def _allow_none(arguments: list[ast.arg], defaults: list[ast.expr | None]) -> None:
        for argument, default in zip(arguments, defaults, strict=True):
            if not isinstance(default, ast.Constant) or default.value is not None:
                continue
            known = ast.unparse(argument.annotation) if argument.annotation else "typing.Any"
            if known != "typing.Any" and not known.endswith("| None"):
                argument.annotation = expression(f"{known} | None")

    @staticmethod
    def _type_setters(node: ast.ClassDef) -> None:
        """A setter that takes any object and checks it itself wants what the getter returns."""
        returned: dict[str, ast.expr | None] = {}
        for item in node.body:
            if not isinstance(item, ast.FunctionDef) or not item.decorator_list:
                continue
            decorator = ast.unparse(item.decorator_list[0])
            if decorator == "property":
                returned[item.name] = item.returns
            elif decorator.endswith(".setter"):
                value = item.args.args[1]
                if value.annotation and ast.unparse(value.annotation) == "typing.Any":
                    value.annotation = returned[item.name]


def without_docstring(body: list[ast.stmt]) -> list[ast.stmt]:
    first = body[0]
    told = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    return (body[1:] if told else body) or [ast.Expr(ast.Constant(...))]


def render() -> str:
    with tempfile.TemporaryDirectory() as folder:
        run(["pybind11_stubgen", "nwor_specpv._C", "--exit-code", "-o", folder])
        text = (Path(folder) / "nwor_specpv" / "_C.pyi").read_text(encoding="utf-8")
    tree = ast.fix_missing_locations(Corrections().visit(ast.parse(text)))
    named = ["--stdin-filename", str(STUB), "-"]
    text = run(["ruff", "check", "-q", "--fix-only", *named], HEADER + ast.unparse(tree) + "\n")
    return run(["ruff", "format", "-q", *named], text)


def main(arguments: list[str]) -> int:
    made = render()
    if "--check" not in arguments:
        STUB.write_text(made, encoding="utf-8")
    elif not STUB.is_file() or STUB.read_text(encoding="utf-8") != made:
        print(f"{STUB.relative_to(ROOT)} is not what the module says: run tools/stubs.py")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
