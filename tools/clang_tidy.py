#!/usr/bin/env python3
"""clang-tidy over our C++, remembering what was found clean.

    tools/clang_tidy.py [--build build/current] [--jobs N] [file ...]

Without files: every .cpp of compile_commands.json in this repository. A file is checked again only
if it, a header of ours it reaches, its compile command, .clang-tidy or clang-tidy itself changed;
what was clean is remembered in build/clang-tidy/. Exit status 1 if anything was found.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from shutil import which

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / "build" / "clang-tidy"
INCLUDE = re.compile(rb'^[ \t]*#[ \t]*include[ \t]*["<]([^">\n]+)[">]', re.MULTILINE)
# Where a quoted include of ours is looked for, after the including file's own folder.
INCLUDE_ROOTS = (ROOT / "csrc", ROOT / "tests" / "cpp")


def find_clang_tidy() -> str:
    found = which("clang-tidy", path=sysconfig.get_path("scripts")) or which("clang-tidy")
    if found is None:
        sys.exit("clang_tidy: clang-tidy was not found; run `make setup`")
    return found


def compile_commands(build: Path) -> dict[Path, str]:
    path = build / "compile_commands.json"
    if not path.is_file():
        sys.exit(f"clang_tidy: {path} is missing; run `make build` first")
    commands = {}
    for entry in json.loads(path.read_text(encoding="utf-8")):
        file = Path(entry["directory"], entry["file"]).resolve()
        generated = file.is_relative_to(ROOT / "build")
        if file.suffix == ".cpp" and file.is_relative_to(ROOT) and not generated and file.is_file():
            commands[file] = entry["command"]
    return commands


def reached_files(file: Path, contents: dict[Path, bytes]) -> list[Path]:
    """The file and every header of ours it reaches, in a fixed order."""
    reached: dict[Path, None] = {}
    pending = [file]
    while pending:
        current = pending.pop()
        if current in reached:
            continue
        reached[current] = None
        if current not in contents:
            contents[current] = current.read_bytes()
        for match in INCLUDE.finditer(contents[current]):
            name = os.fsdecode(match[1])
            for folder in (current.parent, *INCLUDE_ROOTS):
                target = (folder / name).resolve()
                if target.is_file() and target.is_relative_to(ROOT):
                    pending.append(target)
                    break
    return sorted(reached)


def fingerprint(file: Path, command: str, version: bytes, contents: dict[Path, bytes]) -> str:
    digest = hashlib.sha256(version + command.encode())
    for folder in file.parents:
        if folder.is_relative_to(ROOT) and (folder / ".clang-tidy").is_file():
            digest.update((folder / ".clang-tidy").read_bytes())
    for reached in reached_files(file, contents):
        digest.update(reached.relative_to(ROOT).as_posix().encode() + b"\0")
        digest.update(hashlib.sha256(contents[reached]).digest())
    return digest.hexdigest()


def check(tool: str, build: Path, file: Path) -> tuple[bool, str]:
    # GCC's precompiled headers are of no use to clang, which reads the headers themselves.
    command = [tool, "-p", str(build), "--quiet", "--extra-arg=-Wno-ignored-gch", str(file)]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    clean = result.returncode == 0
    # A clean run still counts the suppressed warnings on stderr; nobody needs them.
    return clean, "" if clean else result.stdout + result.stderr


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--build", type=Path, default=ROOT / "build" / "current")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("files", nargs="*", type=Path)
    options = parser.parse_args()

    tool = find_clang_tidy()
    version = subprocess.run([tool, "--version"], capture_output=True, check=True).stdout
    build = options.build.resolve()
    commands = compile_commands(build)
    wanted = [file.resolve() for file in options.files] or sorted(commands)
    unknown = [str(file) for file in wanted if file not in commands]
    if unknown:
        sys.exit(f"clang_tidy: no compile command for {', '.join(unknown)}")

    contents: dict[Path, bytes] = {}
    CACHE.mkdir(parents=True, exist_ok=True)
    marks = {f: CACHE / fingerprint(f, commands[f], version, contents) for f in wanted}
    pending = [file for file in wanted if not marks[file].exists()]
    print(f"clang-tidy: {len(pending)} of {len(wanted)} files to check", flush=True)

    failed = 0
    with ThreadPoolExecutor(max_workers=max(1, options.jobs)) as pool:
        for file, (clean, text) in zip(
            pending, pool.map(lambda file: check(tool, build, file), pending), strict=True
        ):
            if clean:
                marks[file].touch()
            else:
                failed += 1
                print(f"{file.relative_to(ROOT)}:\n{text}", flush=True)
    for old in set(CACHE.iterdir()) - set(marks.values()) if not options.files else ():
        old.unlink()
    if failed:
        print(f"clang-tidy: {failed} of {len(wanted)} files have findings")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
