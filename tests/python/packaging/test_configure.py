"""How builds are configured: by setup.py in a folder that is kept, by CMake, by who links us."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
CMAKE = shutil.which("cmake", path=str(Path(sys.executable).parent)) or "cmake"


def run(command: list[str], cwd: Path, env: dict[str, str] | None = None) -> str:
    """What the command printed, to whichever of the two."""
    result = subprocess.run(
        command,
        cwd=cwd,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, f"{command}\n{result.stdout[-4000:]}"
    return result.stdout


# ---- find_package(nwor_specpv) ----


def found_with(tmp_path: Path, torch_files: dict[str, str], before: str = "") -> str:
    """What a project is told that asks for the package twice, with a LibTorch of these files.

    The package was built for torch 2.11.0+cu130.
    """
    package, libtorch = tmp_path / "nwor_specpv", tmp_path / "libtorch"
    for folder in (package / "cmake", package / "include", libtorch):
        folder.mkdir(parents=True)
    (package / "libnwor_specpv.so").touch()
    template = (ROOT / "cmake" / "nwor_specpvConfig.cmake.in").read_text(encoding="utf-8")
    values = {"NWOR_TORCH_VERSION": "2.11.0+cu130"}
    text = re.sub(r"@(\w+)@", lambda match: values.get(match[1], ""), template)
    (package / "cmake" / "nwor_specpvConfig.cmake").write_text(text, encoding="utf-8")
    for name, content in torch_files.items():
        (libtorch / name).parent.mkdir(parents=True, exist_ok=True)
        (libtorch / name).write_text(content)
    ask = (
        "find_package(nwor_specpv QUIET)\n"
        'message("asked ${nwor_specpv_FOUND} ${nwor_specpv_NOT_FOUND_MESSAGE}")\n'
    )
    lines = f"project(asks LANGUAGES CXX)\n{before}\n{ask}{ask}"
    lines += "if(TARGET nwor_specpv::nwor_specpv)\n message(has_target)\nendif()\n"
    (tmp_path / "CMakeLists.txt").write_text(f"cmake_minimum_required(VERSION 3.25)\n{lines}")
    command = [CMAKE, "-S", str(tmp_path), "-B", str(tmp_path / "b")]
    command += [f"-Dnwor_specpv_DIR={package / 'cmake'}", f"-DNWOR_TORCH_DIR={libtorch}"]
    return " ".join(run(command, tmp_path).split())


ATEN = {"include/ATen/ATen.h": ""}
ANOTHER_TORCH = "built for torch 2.11.0{wanted}, but {place} has torch {found}:"


def test_a_missing_libtorch_leaves_nothing_behind(tmp_path: Path) -> None:
    told = found_with(tmp_path, {})
    assert told.count("asked 0 LibTorch 2.11.0+cu130 not found") == 2
    assert "has_target" not in told


@pytest.mark.parametrize(
    ("name", "text", "version"),
    [
        ("version.py", "__version__ = '{}'\ncuda: Optional[str] = '13.0'\n", "2.12.0+cu130"),
        ("version.py", "__version__ = '{}'\n", "2.11.0+cpu"),
        ("build-version", "{}\n", "2.11.1+cu130"),
    ],
)
def test_another_libtorch_is_refused_naming_both(
    tmp_path: Path, name: str, text: str, version: str
) -> None:
    told = found_with(tmp_path, ATEN | {name: text.format(version)})
    place = f"'{tmp_path / 'libtorch'}'"
    expected = ANOTHER_TORCH.format(wanted="+cu130", place=place, found=version)
    assert told.count(f"asked 0 nwor_specpv was {expected}") == 2
    assert "has_target" not in told


@pytest.mark.parametrize(
    "files", [{"version.py": "__version__ = '2.11.0+cu130'\n"}, {"build-version": "2.11.0+cu130"}]
)
def test_its_own_libtorch_is_taken(tmp_path: Path, files: dict[str, str]) -> None:
    told = found_with(tmp_path, ATEN | files)
    assert told.count("asked 1") == 2
    assert "has_target" in told


@pytest.mark.parametrize(("version", "taken"), [("2.11.0", True), ("2.10.0", False)])
def test_the_version_of_a_project_s_own_torch_counts(
    tmp_path: Path, version: str, taken: bool
) -> None:
    before = f"add_library(torch INTERFACE IMPORTED)\nset(Torch_VERSION {version})"
    told = found_with(tmp_path, {}, before)
    assert ("has_target" in told) is taken
    refused = ANOTHER_TORCH.format(wanted="", place="find_package(Torch)", found=version)
    assert told.count(refused) == (0 if taken else 2)


# ---- architectures ----


def architectures(tmp_path: Path, wanted: str) -> subprocess.CompletedProcess[str]:
    """What cmake/NworCuda.cmake makes of a TORCH_CUDA_ARCH_LIST."""
    script = tmp_path / "architectures.cmake"
    script.write_text(
        "cmake_minimum_required(VERSION 3.25)\n"
        f'set(NWOR_CUDA OFF)\ninclude("{ROOT}/cmake/NworCuda.cmake")\n'
        f'nwor_cuda_architectures("{wanted}" found)\nmessage("found=${{found}}")\n'
    )
    return subprocess.run(
        [CMAKE, "-P", str(script)], capture_output=True, text=True, timeout=60, cwd=tmp_path
    )


@pytest.mark.parametrize(
    ("wanted", "expected", "warned"),
    [
        ("8.0;8.9;9.0a;9.0+PTX", "80-real;89-real;90a-real;90-virtual", False),
        ("9.0+PTX 9.0a", "90-virtual;90-real;90a-real", False),
        ("8.0,12.0", "80-real;120-real", False),
        ("9.0", "90-real", True),
        ("8.0 9.0+PTX", "80-real;90-virtual;90-real", True),
    ],
)
def test_architectures_are_cmake_s_and_hopper_without_its_own_is_told(
    tmp_path: Path, wanted: str, expected: str, warned: bool
) -> None:
    result = architectures(tmp_path, wanted)
    assert result.returncode == 0, result.stderr
    assert f"found={expected}\n" in result.stderr
    assert ("has 9.0 without 9.0a" in " ".join(result.stderr.split())) is warned


@pytest.mark.parametrize(
    ("wanted", "named"), [("7.5", "7.5"), ("8.0 7.0+PTX", "7.0+PTX"), ("6.1;8.0", "6.1")]
)
def test_architectures_without_kernels_are_refused(tmp_path: Path, wanted: str, named: str) -> None:
    result = architectures(tmp_path, wanted)
    assert result.returncode != 0
    told = " ".join(result.stderr.split())
    assert f"TORCH_CUDA_ARCH_LIST: got {named}, expected 8.0 or later" in told
    assert "NWOR_CUDA=OFF" in told


# ---- a folder that is kept ----


CONFIGURE = """
import json, pathlib, runpy, sys
import setuptools
setuptools.setup = lambda **_: None
command = runpy.run_path("setup.py")["cmake_build_ext"]
tools = json.loads(sys.argv[2])
inside = command._configure.__globals__
inside["ROOT"] = pathlib.Path(sys.argv[1])
inside["find_tool"] = lambda name: tools.get(name)
build = command(setuptools.Distribution())
build._call = lambda *arguments: print(json.dumps(["called", *arguments]))
print(build._configure())
"""


def configured(
    root: Path,
    cache: dict[str, str] | None = None,
    *,
    tools: dict[str, str] | None = None,
    **env: str,
) -> tuple[list[str], bool, str]:
    """CMake's arguments, whether the folder of the last build stayed, and what was said."""
    import torch

    tag = f"{sys.implementation.cache_tag}-torch-{torch.__version__.replace('+', '-')}"
    path = root / "build" / tag / "CMakeCache.txt"
    if cache is not None:
        path.parent.mkdir(parents=True)
        lines = {"CMAKE_HOME_DIRECTORY:INTERNAL": str(root), **cache}
        path.write_text("".join(f"{name}={value}\n" for name, value in lines.items()))
    given = {"cmake": "/bin/cmake", "ninja": "/bin/ninja"} if tools is None else tools
    names = ("CMAKE_ARGS", "CMAKE_GENERATOR", "CUDA_HOME", "CUDA_PATH")
    names += ("NWOR_CUDA", "NWOR_WERROR")
    bare = {k: v for k, v in os.environ.items() if k not in names and "LAUNCHER" not in k}
    command = [sys.executable, "-c", CONFIGURE, str(root), json.dumps(given)]
    told = run(command, ROOT, bare | env)
    (line,) = [line for line in told.splitlines() if line.startswith('["called"')]
    return json.loads(line)[1:], path.exists(), told


NINJA = {"CMAKE_GENERATOR:INTERNAL": "Ninja"}


def test_launchers_are_named_even_if_there_are_none(tmp_path: Path) -> None:
    tools = {"cmake": "/bin/cmake", "ninja": "/bin/ninja"}
    arguments, kept, _ = configured(tmp_path, NINJA, tools=tools)
    assert kept
    for lang in ("CXX", "CUDA"):
        assert f"-DCMAKE_{lang}_COMPILER_LAUNCHER=" in arguments
    with_ccache, _, _ = configured(tmp_path, tools=tools | {"ccache": "/bin/ccache"})
    assert "-DCMAKE_CUDA_COMPILER_LAUNCHER=/bin/ccache" in with_ccache
    own, _, _ = configured(tmp_path, tools=tools, CMAKE_CXX_COMPILER_LAUNCHER="sccache")
    assert "-DCMAKE_CXX_COMPILER_LAUNCHER=sccache" in own


@pytest.mark.parametrize(
    ("cached", "ninja", "kept"),
    [
        ("Ninja", True, True),
        ("Unix Makefiles", False, True),
        ("Unix Makefiles", True, False),
        ("Ninja", False, False),
    ],
)
def test_another_generator_begins_anew(
    tmp_path: Path, cached: str, ninja: bool, kept: bool
) -> None:
    tools = {"cmake": "/bin/cmake"} | ({"ninja": "/bin/ninja"} if ninja else {})
    cache = {"CMAKE_GENERATOR:INTERNAL": cached}
    arguments, stayed, told = configured(tmp_path, cache, tools=tools)
    assert stayed is kept
    assert (f"was built with {cached}" in told) is not kept
    assert ("Ninja" in arguments) is ninja
    assert ("-DNWOR_BUILD_TESTS=OFF" in arguments) is not kept


def test_a_sanitizer_of_the_last_build_does_not_stay(tmp_path: Path) -> None:
    arguments, _, _ = configured(tmp_path, CMAKE_ARGS="-DNWOR_SANITIZE=address")
    given = [value for value in arguments if value.startswith("-DNWOR_SANITIZE")]
    assert given == ["-DNWOR_SANITIZE=", "-DNWOR_SANITIZE=address"]  # CMake takes the last


@pytest.mark.parametrize(
    ("home", "env", "kept"),
    [
        ("other", {}, False),
        ("first", {}, True),
        ("first-by-link", {}, True),
        ("none", {}, True),
        ("other", {"CMAKE_ARGS": "-DNWOR_NVCC=/x/nvcc"}, True),
    ],
)
def test_another_toolkit_begins_anew(
    tmp_path: Path, home: str, env: dict[str, str], kept: bool
) -> None:
    for name in ("first", "other"):
        (tmp_path / name / "bin").mkdir(parents=True)
        (tmp_path / name / "bin" / "nvcc").touch(0o755)
    (tmp_path / "first-by-link").symlink_to("first")
    cache = NINJA | {"NWOR_NVCC:FILEPATH": str(tmp_path / "first" / "bin" / "nvcc")}
    _, stayed, told = configured(tmp_path, cache, CUDA_HOME=str(tmp_path / home), **env)
    assert stayed is kept
    assert ("was built with" in told) is not kept


def test_a_build_without_kernels_has_a_folder_of_its_own(tmp_path: Path) -> None:
    arguments, kept, said = configured(tmp_path, NINJA, NWOR_CUDA="OFF")
    assert kept
    folder = Path(arguments[arguments.index("-B") + 1])
    assert folder.name.endswith("-cpu")
    assert str(folder) == said.splitlines()[-1]
    arguments, _, _ = configured(tmp_path, NWOR_CUDA="AUTO")
    assert arguments[arguments.index("-B") + 1] == str(folder).removesuffix("-cpu")


def test_warnings_are_errors_only_where_asked_for(tmp_path: Path) -> None:
    """A plain install leaves a developer's folder as it is: every file would be compiled again."""
    arguments, _, _ = configured(tmp_path, NINJA)
    assert not [value for value in arguments if "WERROR" in value]
    arguments, _, _ = configured(tmp_path, NWOR_WERROR="ON")
    assert "-DNWOR_WERROR=ON" in arguments


@pytest.mark.parametrize(
    ("home", "found", "refused"),
    [("other", True, True), ("other", False, False), ("first", True, False)],
)
def test_cmake_keeps_to_one_toolkit_in_a_folder(
    tmp_path: Path, home: str, found: bool, refused: bool
) -> None:
    for name in ("first", "other"):
        (tmp_path / name / "bin").mkdir(parents=True)
        (tmp_path / name / "bin" / "nvcc").write_text("#!/bin/sh\n")
        (tmp_path / name / "bin" / "nvcc").chmod(0o755)
    first = tmp_path / "first" / "bin" / "nvcc"
    script = tmp_path / "again.cmake"
    script.write_text(
        "cmake_minimum_required(VERSION 3.25)\nset(NWOR_TORCH_HAS_CUDA FALSE)\n"
        f'set(NWOR_NVCC "{first}" CACHE FILEPATH "")\n'
        + (f'set(NWOR_NVCC_FOUND "{first}" CACHE INTERNAL "")\n' if found else "")
        + f'include("{ROOT}/cmake/NworCuda.cmake")\n'
    )
    env = os.environ | {"CUDA_HOME": str(tmp_path / home)}
    result = subprocess.run([CMAKE, "-P", str(script)], capture_output=True, text=True, env=env)
    told = " ".join(result.stderr.split())
    expected = f"CUDA_HOME has {tmp_path / 'other' / 'bin' / 'nvcc'}, but"
    assert (expected in told) is refused
    assert (f"was begun with {first}" in told) is refused
    assert ("enable_language command is not scriptable" in told) is not refused  # went on


PLACE = """
import pathlib, runpy, sys
import setuptools
setuptools.setup = lambda **_: None
command = runpy.run_path("setup.py")["cmake_build_ext"]
root = pathlib.Path(sys.argv[1])
command._place.__globals__["ROOT"] = root
build = command(setuptools.Distribution({"packages": []}))
build.inplace = True
build._call = lambda *_: (root / "python/nwor_specpv/_C.here.so").touch()
build._place(root / "build/one")
"""


def test_no_module_of_another_python_stays_beside_a_new_library(tmp_path: Path) -> None:
    package, build = tmp_path / "python" / "nwor_specpv", tmp_path / "build" / "one"
    for folder in (package, build):
        folder.mkdir(parents=True)
    (build / "_C.here.so").touch()
    for name in ("_C.there.so", "libnwor_specpv.so", "_C.pyi"):
        (package / name).touch()
    told = run([sys.executable, "-c", PLACE, str(tmp_path)], ROOT)
    assert sorted(path.name for path in package.iterdir()) == [
        "_C.here.so",
        "_C.pyi",
        "libnwor_specpv.so",
    ]
    assert "removed _C.there.so" in told


@pytest.mark.parametrize(("given", "errors"), [([], False), (["-DNWOR_WERROR=ON"], True)])
def test_a_new_folder_makes_no_errors_of_warnings(
    tmp_path: Path, given: list[str], errors: bool
) -> None:
    command = [CMAKE, "-S", str(ROOT), "-B", str(tmp_path), f"-DNWOR_PYTHON={sys.executable}"]
    command += [f"-DNWOR_{name}=OFF" for name in ("CUDA", "PROMETHEUS", "BUILD_TESTS")]
    run([*command, "-DNWOR_BUILD_PYTHON=OFF", *given], tmp_path)
    commands = json.loads((tmp_path / "compile_commands.json").read_text())
    assert commands
    for entry in commands:
        options = entry["command"].split()
        assert "-Wextra" in options
        assert ("-Werror" in options) is errors


def compile_commands(build: Path, *options: str) -> list[dict[str, str]]:
    command = [CMAKE, "-S", str(ROOT), "-B", str(build), f"-DNWOR_PYTHON={sys.executable}"]
    command += [f"-DNWOR_{name}=OFF" for name in ("CUDA", "PROMETHEUS", "BUILD_PYTHON")]
    command.append("-DCMAKE_CXX_COMPILER_LAUNCHER=/bin/ccache")
    run([*command, "-G", "Unix Makefiles", *options], build)
    return json.loads((build / "compile_commands.json").read_text())


def test_precompiled_headers_are_for_tests_with_torch(tmp_path: Path) -> None:
    tests = 0
    for entry in compile_commands(tmp_path):
        file = Path(entry["file"])
        has_headers = "cmake_pch.hxx" in entry["command"]
        if file.is_relative_to(ROOT / "csrc"):
            assert not has_headers, file
        elif file.is_relative_to(ROOT / "tests"):
            text = file.read_text(encoding="utf-8")
            pattern = "^#include (<ATen/|.*(toy_target|checker_fixture))"
            assert not has_headers or re.search(pattern, text, re.MULTILINE), file
            tests += has_headers
    assert tests > 0
    rules = "".join(path.read_text() for path in tmp_path.glob("tests/cpp/**/build.make"))
    assert rules.count("CCACHE_SLOPPINESS=pch_defines,time_macros /bin/ccache") > tests


def test_a_unity_build_leaves_instruction_sets_alone(tmp_path: Path) -> None:
    commands = compile_commands(tmp_path, "-DCMAKE_UNITY_BUILD=ON", "-DNWOR_BUILD_TESTS=OFF")
    files = {Path(entry["file"]) for entry in commands}
    own = {file for file in files if file.is_relative_to(ROOT / "csrc")}
    assert own == set((ROOT / "csrc").glob("*/cpu/kernel_*.cpp")) != set()
    assert 0 < len(files - own) < 40
