#!/usr/bin/env python3
"""Holds the source tree to its shape: `file:line: what is wrong`, exit status 1 if anything is.

    tools/check_structure.py [repository root]

* Includes in csrc/ go one way: base, metrics, kv_interceptor, attention, linear, decoder, tree,
  specpv, session, drafters, bindings; no file includes itself by any detour.
* Only bindings/ops.cpp registers torch ops, only bindings/module*.cpp include pybind11 or Python,
  only metrics/exporter.cpp includes prometheus.
* No .cu or .cuh reaches a torch header, neither itself nor through a header of ours.
* No module of python/nwor_specpv imports itself by any detour, deferred imports included.
* vLLM is imported only under python/nwor_specpv/vllm, as a peer by bench/peers.py, and for its
  FlashAttention by ops/flash_packages.py.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# Lower may not include higher.
LAYERS = (
    "base",
    "metrics",
    "kv_interceptor",
    "attention",
    "linear",
    "decoder",
    "tree",
    "specpv",
    "session",
    "drafters",
    "bindings",
)
MODULE = re.compile(r"bindings/module(_[a-z]+)?\.(cpp|h)")
# Of python/nwor_specpv: the integration, the peer of the benchmarks, and FlashAttention.
VLLM_IMPORTERS = ("vllm", "bench/peers.py", "ops/flash_packages.py")
EXPORTER = re.compile("metrics/exporter.cpp")
PACKAGE = "nwor_specpv"
NATIVE = f"{PACKAGE}._C"
CPP_SUFFIXES = (".h", ".cuh", ".cpp", ".cu")

REGISTRATION = re.compile(r"\b(TORCH_LIBRARY(?:_IMPL|_FRAGMENT)?|RegisterOperators)\b")
PYTHON_HEADER = re.compile(
    r"pybind11/|Python\.h$|torch/(extension|python)\.h$|torch/csrc/utils/pybind"
)
PROMETHEUS_HEADER = re.compile(r"prometheus/")
TORCH_HEADER = re.compile(r"(torch|ATen|c10)/")
INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*(["<])([^">\n]+)[">]', re.MULTILINE)
# Comments go; literals are matched so that a "//" or a quote inside them is not taken for one.
COMMENT_OR_LITERAL = re.compile(
    r"//[^\n]*|/\*.*?\*/"
    r'|R"([^()\\ ]{0,16})\(.*?\)\1"'
    r'|"(?:\\.|[^"\\\n])*"'
    r"|(?<![0-9A-Za-z_])'(?:\\.|[^'\\\n])*'",
    re.DOTALL,
)


@dataclass(frozen=True, order=True)
class Violation:
    path: str
    line: int
    what: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.what}"


@dataclass(frozen=True)
class Include:
    line: int
    name: str
    target: str | None  # path inside csrc/, or None for a header of somebody else
    quoted: bool


@dataclass(frozen=True)
class Source:
    path: str  # inside csrc/
    code: str  # comments blanked out, line numbers kept
    includes: tuple[Include, ...]


def without_comments(text: str) -> str:
    def blank(match: re.Match[str]) -> str:
        token = match[0]
        return re.sub(r"[^\n]", " ", token) if token.startswith(("//", "/*")) else token

    return COMMENT_OR_LITERAL.sub(blank, text)


def read_sources(csrc: Path) -> dict[str, Source]:
    sources = {}
    for file in sorted(csrc.rglob("*")):
        if file.suffix not in CPP_SUFFIXES or not file.is_file():
            continue
        path = file.relative_to(csrc).as_posix()
        code = without_comments(file.read_text(encoding="utf-8"))
        includes = []
        for match in INCLUDE.finditer(code):
            name = match[2].strip()
            line = code.count("\n", 0, match.start(2)) + 1
            target = resolve(csrc, file, name, quoted=match[1] == '"')
            includes.append(Include(line, name, target, match[1] == '"'))
        sources[path] = Source(path, code, tuple(includes))
    return sources


def resolve(csrc: Path, file: Path, name: str, *, quoted: bool) -> str | None:
    for folder in [file.parent, csrc] if quoted else [csrc]:
        target = (folder / name).resolve()
        if target.is_file() and target.is_relative_to(csrc.resolve()):
            return target.relative_to(csrc.resolve()).as_posix()
    return None


def layer(path: str) -> int | None:
    folder = path.partition("/")[0]
    return LAYERS.index(folder) if folder in LAYERS else None


def check_layers(sources: dict[str, Source]) -> Iterator[Violation]:
    for source in sources.values():
        own = layer(source.path)
        if own is None:
            what = f"not in a folder of csrc/; expected one of {', '.join(LAYERS)}"
            yield Violation(source.path, 1, what)
            continue
        for include in source.includes:
            if include.target is None:
                if include.quoted:
                    what = f'"{include.name}" is no file of csrc/; headers of others go in <>'
                    yield Violation(source.path, include.line, what)
                continue
            other = layer(include.target)
            if other is not None and other > own:
                what = (
                    f"{LAYERS[own]} may not include {include.target} ({LAYERS[other]}): "
                    "includes go one way"
                )
                yield Violation(source.path, include.line, what)


def check_cycles(sources: dict[str, Source]) -> Iterator[Violation]:
    """Each cycle once, reported at the include that closes it."""
    done: set[str] = set()
    trail: list[str] = []

    def visit(path: str) -> Iterator[Violation]:
        trail.append(path)
        for include in sources[path].includes:
            target = include.target
            if target is None or target not in sources or target in done:
                continue
            if target in trail:
                ring = [*trail[trail.index(target) :], target]
                yield Violation(path, include.line, f"include cycle: {' -> '.join(ring)}")
            else:
                yield from visit(target)
        trail.pop()
        done.add(path)

    for path in sources:
        if path not in done:
            yield from visit(path)


def check_owners(sources: dict[str, Source]) -> Iterator[Violation]:
    rules = (
        (PYTHON_HEADER, MODULE, "bindings/module.cpp", "Python and pybind11"),
        (PROMETHEUS_HEADER, EXPORTER, EXPORTER.pattern, "prometheus"),
    )
    for source in sources.values():
        for pattern, owners, owner, subject in rules:
            for include in source.includes:
                if not owners.fullmatch(source.path) and pattern.match(include.name):
                    what = f"<{include.name}>: only csrc/{owner} includes {subject}"
                    yield Violation(source.path, include.line, what)
        for match in REGISTRATION.finditer(source.code):
            if source.path != "bindings/ops.cpp":
                line = source.code.count("\n", 0, match.start()) + 1
                what = f"{match[1]}: only csrc/bindings/ops.cpp registers torch ops"
                yield Violation(source.path, line, what)


def check_kernels(sources: dict[str, Source]) -> Iterator[Violation]:
    for source in sources.values():
        if not source.path.endswith((".cu", ".cuh")):
            continue
        for include in source.includes:
            chain = torch_chain(sources, include, {source.path})
            if chain:
                what = f"kernels include no torch header: {' -> '.join(chain)}"
                yield Violation(source.path, include.line, what)


def torch_chain(sources: dict[str, Source], include: Include, seen: set[str]) -> list[str]:
    """The names that lead from this include to a torch header, or nothing."""
    if include.target is None:
        return [f"<{include.name}>"] if TORCH_HEADER.match(include.name) else []
    if include.target in seen or include.target not in sources:
        return []
    seen.add(include.target)
    for deeper in sources[include.target].includes:
        chain = torch_chain(sources, deeper, seen)
        if chain:
            return [include.target, *chain]
    return []


def check_python_cycles(root: Path) -> Iterator[Violation]:
    """Each cycle once, reported at the import that closes it."""
    package = root / "python" / PACKAGE
    files = {module_name(file, package.parent): file for file in sorted(package.rglob("*.py"))}
    edges = {name: imports_of(name, file, files) for name, file in files.items()}
    done: set[str] = set()
    trail: list[str] = []

    def visit(name: str) -> Iterator[Violation]:
        trail.append(name)
        for line, target in edges[name]:
            if target in trail:
                ring = [*trail[trail.index(target) :], target]
                path = files[name].relative_to(root).as_posix()
                yield Violation(path, line, f"import cycle: {' -> '.join(ring)}")
            elif target not in done:
                yield from visit(target)
        trail.pop()
        done.add(name)

    for name in files:
        if name not in done:
            yield from visit(name)


def module_name(file: Path, top: Path) -> str:
    parts = file.relative_to(top).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(name: str, file: Path, files: dict[str, Path]) -> list[tuple[int, str]]:
    """The modules of the package that a file imports anywhere in it, with the lines."""
    package = name if file.name == "__init__.py" else name.rpartition(".")[0]
    found = []
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"), str(file))):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names if alias.name in files]
        elif isinstance(node, ast.ImportFrom):
            source = node.module or ""
            if node.level:
                base = ".".join(package.split(".")[: len(package.split(".")) - node.level + 1])
                source = f"{base}.{source}".rstrip(".")
            for alias in node.names:
                target = f"{source}.{alias.name}"
                if target != NATIVE:
                    found.append((node.lineno, target if target in files else source))
    return sorted({(line, target) for line, target in found if target in files and target != name})


def check_vllm(root: Path) -> Iterator[Violation]:
    package = root / "python" / "nwor_specpv"
    for file in sorted(package.rglob("*.py")):
        if any(file.is_relative_to(package / allowed) for allowed in VLLM_IMPORTERS):
            continue
        path = file.relative_to(root).as_posix()
        for line, name in imported_modules(ast.parse(file.read_text(encoding="utf-8"), path)):
            if name.partition(".")[0] == "vllm":
                what = f"imports {name}: vLLM is imported only under python/nwor_specpv/vllm"
                yield Violation(path, line, what)


def imported_modules(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.lineno, node.module
        elif isinstance(node, ast.Call) and node.args:
            called = node.func.attr if isinstance(node.func, ast.Attribute) else ""
            called = node.func.id if isinstance(node.func, ast.Name) else called
            first = node.args[0]
            if called in ("import_module", "__import__") and isinstance(first, ast.Constant):
                yield node.lineno, str(first.value)


def check(root: Path) -> tuple[int, list[Violation]]:
    """How many C++ and CUDA files were read, and what is wrong, paths relative to `root`."""
    sources = read_sources(root / "csrc")
    found: set[Violation] = set()
    for rule in (check_layers, check_cycles, check_owners, check_kernels):
        found |= {Violation(f"csrc/{v.path}", v.line, v.what) for v in rule(sources)}
    found |= {*check_vllm(root), *check_python_cycles(root)}
    return len(sources), sorted(found)


def main(arguments: list[str]) -> int:
    root = Path(arguments[0]) if arguments else Path(__file__).resolve().parent.parent
    if not (root / "csrc").is_dir():
        print(f"check_structure: {root} has no csrc/", file=sys.stderr)
        return 2
    count, violations = check(root)
    for violation in violations:
        print(violation)
    if not violations:
        print(f"structure: {count} C++ and CUDA files, as they should be")
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
