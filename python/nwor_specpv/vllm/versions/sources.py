"""Reads what adapters rely on from the sources of a vLLM release, without importing it.

A release is a folder that holds the package `vllm`, a wheel or an sdist.
"""

from __future__ import annotations

import ast
import tarfile
import zipfile
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path

from .adapter import Adapter
from .functions import VllmFields, VllmFunction, VllmNames


@dataclass(frozen=True)
class Difference:
    """Something of vLLM that is not as an adapter has it."""

    part: VllmFunction | VllmFields | VllmNames
    file: str  # in the release
    line: int  # 0: the file or the name is not there
    found: tuple[str, ...] | None  # None: it is not there; of `VllmNames`, the wanted ones alone

    def __str__(self) -> str:
        name = f"{self.file}:{self.line}: {self.part.path}"
        wanted = expected(self.part)
        if self.found is None:
            return f"{name} is not there, expected {self.part.path}({', '.join(wanted)})"
        gone = [one for one in wanted if one not in self.found]
        new = [one for one in self.found if one not in wanted]
        changes = [f"without {', '.join(gone)}"] if gone else []
        changes += [f"new {', '.join(new)}"] if new else []
        return f"{name} has changed: {'; '.join(changes) or 'another order'}"


def expected(part: VllmFunction | VllmFields | VllmNames) -> tuple[str, ...]:
    if isinstance(part, VllmNames):
        return part.names
    return part.parameters if isinstance(part, VllmFunction) else part.fields


class Release(ABC):
    """Sources of one release."""

    def __init__(self) -> None:
        self._trees: dict[str, ast.Module | None] = {}

    @abstractmethod
    def read(self, path: str) -> str | None:
        """The text of a file such as `vllm/version.py`; None: it is not there."""

    def differences(self, adapter: Adapter) -> list[Difference]:
        """Everything that is not as the adapter has it."""
        found = (self._compare(part) for part in adapter.parts())
        return [difference for difference in found if difference is not None]

    def _compare(self, part: VllmFunction | VllmFields | VllmNames) -> Difference | None:
        file, node = self._find(part.module, part.path.split("."))
        if node is None:
            return Difference(part, file, 0, None)
        if isinstance(part, VllmNames):
            there = {*_parameters(node), *_fields(node), *_attributes(node)}
            names = tuple(name for name in part.names if name in there)
        else:
            names = _parameters(node) if isinstance(part, VllmFunction) else _fields(node)
        if names == expected(part):
            return None
        return Difference(part, file, getattr(node, "lineno", 0), names)

    def _find(self, module: str, path: list[str]) -> tuple[str, ast.AST | None]:
        """The definition of a name, in this module or in the one it is imported from."""
        file, tree = self._tree(module)
        if tree is None:
            return file, None
        node: ast.AST | None = tree
        for depth, name in enumerate(path):
            inner = _definition(node, name)
            if inner is None and depth == 0:
                source = _origin(file, tree, name)
                if source is not None:
                    return self._find(source, path)
            if inner is None:
                return file, None
            node = inner
        return file, node

    def _tree(self, module: str) -> tuple[str, ast.Module | None]:
        base = module.replace(".", "/")
        for path in (f"{base}.py", f"{base}/__init__.py"):
            if path not in self._trees:
                text = self.read(path)
                self._trees[path] = None if text is None else ast.parse(text)
            if self._trees[path] is not None:
                return path, self._trees[path]
        return f"{base}.py", None


class FolderRelease(Release):
    """The folder that holds the package, such as an environment's site-packages."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    def read(self, path: str) -> str | None:
        file = self._folder / path
        return file.read_text(encoding="utf-8") if file.is_file() else None


class WheelRelease(Release):
    def __init__(self, file: Path) -> None:
        super().__init__()
        self._archive = zipfile.ZipFile(file)
        self._names = set(self._archive.namelist())

    def read(self, path: str) -> str | None:
        return self._archive.read(path).decode() if path in self._names else None


class SdistRelease(Release):
    """Its files are below one folder of the release's name."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self._archive = tarfile.open(file)  # noqa: SIM115 (read until the end)
        self._members = {
            member.name.partition("/")[2]: member
            for member in self._archive.getmembers()
            if member.isfile()
        }

    def read(self, path: str) -> str | None:
        member = self._members.get(path)
        stream = self._archive.extractfile(member) if member is not None else None
        return stream.read().decode() if stream is not None else None


def open_release(path: Path) -> Release:
    """Raises ValueError for what is no release."""
    if path.is_dir():
        found: Release = FolderRelease(path)
    elif zipfile.is_zipfile(path):
        found = WheelRelease(path)
    elif path.is_file() and tarfile.is_tarfile(path):
        found = SdistRelease(path)
    else:
        raise ValueError(f"{path} is no folder, wheel or sdist")
    if found.read("vllm/__init__.py") is None:
        raise ValueError(f"{path} holds no package vllm")
    return found


def _definition(node: ast.AST | None, name: str) -> ast.AST | None:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    body = getattr(node, "body", ())
    return next((one for one in body if isinstance(one, kinds) and one.name == name), None)


def _origin(file: str, tree: ast.Module, name: str) -> str | None:
    """The module that a name of this file is imported from."""
    for node in tree.body:
        if not isinstance(node, ast.ImportFrom) or not node.module:
            continue
        if any(alias.name == name and alias.asname is None for alias in node.names):
            folders = file.split("/")[: -node.level] if node.level else []
            return ".".join([*folders, node.module])
    return None


def _parameters(node: ast.AST) -> tuple[str, ...]:
    """As `inspect.signature` names them."""
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return ()
    given = node.args
    found = [*given.posonlyargs, *given.args, given.vararg, *given.kwonlyargs, given.kwarg]
    return tuple(argument.arg for argument in found if argument is not None)


def _fields(node: ast.AST) -> tuple[str, ...]:
    body = getattr(node, "body", ())
    annotated = (one for one in body if isinstance(one, ast.AnnAssign))
    return tuple(one.target.id for one in annotated if isinstance(one.target, ast.Name))


def _attributes(node: ast.AST) -> tuple[str, ...]:
    """What methods of the class set on `self`."""
    stored = (
        one for one in ast.walk(node) if isinstance(one, ast.Attribute) and _is_stored_on_self(one)
    )
    return tuple(one.attr for one in stored)


def _is_stored_on_self(node: ast.Attribute) -> bool:
    owner = node.value
    return isinstance(node.ctx, ast.Store) and isinstance(owner, ast.Name) and owner.id == "self"
