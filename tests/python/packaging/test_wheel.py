"""What is shipped: the wheel's contents, its relative run paths, and its use from another folder.

The wheel of `make test` reuses the CMake folder of `make build`; slow tests build from a copy of
the sources with nothing built.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import struct
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from email import message_from_string
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PACKAGE = ROOT / "python" / "nwor_specpv"
CURRENT = ROOT / "build" / "current"
RUN_PATH = ["$ORIGIN", "$ORIGIN/../torch/lib"]
# Where torch's own wheels bring the CUDA runtime, by its major version.
CUDA_RUNTIME_PATHS = {"12": "$ORIGIN/../nvidia/cuda_runtime/lib"}


def project_version() -> str:
    found = re.search(r'^version = "([^"]+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert found
    return found[1]


def dynamic_entries(path: Path) -> dict[str, list[str]]:
    """NEEDED, RPATH, RUNPATH and SONAME of a 64-bit little-endian ELF file."""
    data = path.read_bytes()
    assert data[:6] == b"\x7fELF\x02\x01", path
    names = {1: "NEEDED", 14: "SONAME", 15: "RPATH", 29: "RUNPATH"}
    (sections,) = struct.unpack_from("<Q", data, 40)
    size, count = struct.unpack_from("<HH", data, 58)
    found: dict[str, list[str]] = {name: [] for name in names.values()}
    for index in range(count):
        header = struct.unpack_from("<IIQQQQIIQQ", data, sections + index * size)
        kind, offset, length, link = header[1], header[4], header[5], header[6]
        if kind != 6:  # SHT_DYNAMIC
            continue
        strings = struct.unpack_from("<IIQQQQIIQQ", data, sections + link * size)[4]
        for tag, value in struct.iter_unpack("<QQ", data[offset : offset + length]):
            if tag in names:
                end = data.index(b"\0", strings + value)
                found[names[tag]].append(data[strings + value : end].decode())
    assert found["NEEDED"], path
    return found


def without_cache(program: Path) -> list[str]:
    """Runs what follows by the program's own loader, which looks into no list of the system's.

    A machine has in it whatever somebody has installed, a CUDA runtime for one.
    """
    data = program.read_bytes()
    (segments,) = struct.unpack_from("<Q", data, 32)
    size, count = struct.unpack_from("<HH", data, 54)
    for index in range(count):
        kind, _, offset, _, _, length = struct.unpack_from("<IIQQQQ", data, segments + index * size)
        if kind == 3:  # PT_INTERP
            loader = [data[offset : offset + length].rstrip(b"\0").decode(), "--inhibit-cache"]
            if subprocess.run([*loader, "/bin/true"], capture_output=True).returncode != 0:
                pytest.skip(f"{loader[0]} knows no --inhibit-cache")
            return loader
    raise AssertionError(f"{program} names no loader")


def bare_environment() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if k not in ("LD_LIBRARY_PATH", "LD_PRELOAD")}


def build_environment() -> dict[str, str]:
    """The environment of the last build in place, so that the next one has nothing to compile."""
    cache = dict(
        re.findall(
            r"^(\w+):\w+=(.*)$", (CURRENT / "CMakeCache.txt").read_text(), flags=re.MULTILINE
        )
    )
    chosen = {name: cache[name] for name in ("NWOR_CUDA", "NWOR_PROMETHEUS")}
    chosen["NWOR_WERROR"] = cache.get("NWOR_WERROR", "OFF")
    if cache.get("NWOR_CUDA_ARCH_LIST"):
        chosen["TORCH_CUDA_ARCH_LIST"] = cache["NWOR_CUDA_ARCH_LIST"]
    kept = {k: v for k, v in os.environ.items() if k not in ("NWOR_BUILD_TESTS", "CMAKE_ARGS")}
    # cmake and ninja of this environment, for builds that run in another.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    return kept | chosen | {"PATH": path}


def run(
    command: list[str], cwd: Path, env: dict[str, str] | None = None, *, with_stderr: bool = False
) -> str:
    """What the command printed; with_stderr adds what pip -v passes on from the build."""
    result = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=1800)
    assert result.returncode == 0, f"{command}\n{result.stdout[-4000:]}\n{result.stderr[-4000:]}"
    return result.stdout + (result.stderr if with_stderr else "")


def build_wheel(source: Path, folder: Path) -> Path:
    code = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
    run([sys.executable, "-c", code, str(folder)], source, build_environment())
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(ROOT, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel unpacked, as `pip install --target` leaves it."""
    target = tmp_path_factory.mktemp("installed")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(target)
    return target


# ---- one version, everywhere ----


def test_version_is_the_same_everywhere() -> None:
    import nwor_specpv

    version = project_version()
    assert json.loads((PACKAGE / "_build_info.json").read_text())["version"] == version
    assert nwor_specpv.__version__ == version
    assert metadata.version("nwor-specpv") == version
    assert (
        f'PACKAGE_VERSION "{version}"'
        in (PACKAGE / "cmake" / "nwor_specpvConfigVersion.cmake").read_text()
    )
    # CMake takes it from pyproject.toml and has none of its own.
    assert version not in (ROOT / "CMakeLists.txt").read_text()


def test_stamp_names_the_torch_that_is_installed() -> None:
    import torch

    assert json.loads((PACKAGE / "_build_info.json").read_text())["torch"] == torch.__version__


# ---- libraries ----


def shipped_libraries(package: Path) -> list[Path]:
    found = sorted(package.glob("*.so"))
    assert any(path.name == "libnwor_specpv.so" for path in found)
    assert any(path.name.startswith("_C.") for path in found)
    return found


def run_path(package: Path, library: Path) -> list[str]:
    cuda = json.loads((package / "_build_info.json").read_text())["cuda"]
    if not cuda or library.name != "libnwor_specpv.so":
        return RUN_PATH
    major = cuda.partition(".")[0]
    return [*RUN_PATH, CUDA_RUNTIME_PATHS.get(major, f"$ORIGIN/../nvidia/cu{major}/lib")]


def assert_relocatable(package: Path) -> None:
    for path in shipped_libraries(package):
        entries = dynamic_entries(path)
        assert entries["RPATH"] == [], path
        assert len(entries["RUNPATH"]) == 1, path
        assert entries["RUNPATH"][0].split(":") == run_path(package, path), path
        assert not [name for name in entries["NEEDED"] if "/" in name], path


def test_the_reader_sees_an_absolute_run_path() -> None:
    """The build tree's own library has one: the check below can fail."""
    entries = dynamic_entries(CURRENT / "libnwor_specpv.so")
    assert any(part.startswith("/") for part in entries["RUNPATH"][0].split(":"))
    assert entries["SONAME"] == ["libnwor_specpv.so"]


def test_libraries_in_place_are_relocatable() -> None:
    assert_relocatable(PACKAGE)


def test_the_library_needs_no_python() -> None:
    needed = dynamic_entries(PACKAGE / "libnwor_specpv.so")["NEEDED"]
    assert not [name for name in needed if "python" in name], needed


def test_messages_name_no_folder_of_the_build_machine(installed: Path) -> None:
    data = (installed / "nwor_specpv" / "libnwor_specpv.so").read_bytes()
    assert str(ROOT / "csrc").encode() + b"/kv_interceptor/interceptor.cpp" not in data


# ---- the wheel ----


def test_wheel_holds_what_it_should_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        info = f"nwor_specpv-{project_version()}.dist-info"
        scripts = archive.read(f"{info}/entry_points.txt").decode()
        described = archive.read(f"{info}/METADATA").decode()
    assert "nwor-specpv = nwor_specpv.cli.main:main" in scripts
    assert "License-Expression: Apache-2.0" in described
    assert "nwor_specpv = nwor_specpv_vllm:register" in scripts
    assert_complete(described)
    assert f"{info}/licenses/LICENSE" in names

    inside = {name.removeprefix("nwor_specpv/") for name in names if not name.startswith(info)}
    sources = {
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*")
        if path.is_file() and path.suffix not in (".so", ".pyc") and path.parent.name != "cmake"
    }
    headers = {f"include/{p.relative_to(ROOT / 'csrc')}" for p in (ROOT / "csrc").rglob("*.h")}
    built = {"libnwor_specpv.so", "_build_info.json", "nwor_specpv_vllm.py"}
    built |= {"cmake/nwor_specpvConfig.cmake", "cmake/nwor_specpvConfigVersion.cmake"}
    (extension,) = {name for name in inside if re.fullmatch(r"_C\..*\.so", name)}
    assert {"__init__.py", "py.typed", "_C.pyi"} <= sources
    assert inside == sources | headers | built | {extension}


def assert_complete(described: str) -> None:
    """What a page of the package shows, and what pip installs beside it."""
    headers = message_from_string(described)
    assert headers["Summary"]
    assert headers["Keywords"]
    assert headers["Description-Content-Type"] == "text/markdown"
    assert headers.get_payload().lstrip().startswith("# nwor_specpv")
    assert "Environment :: GPU :: NVIDIA CUDA" in headers.get_all("Classifier")
    assert set(headers.get_all("Provides-Extra")) == {"transformers", "vllm", "worker", "train"}
    # The same minor version as in the stamp that the import checks.
    torch = json.loads((PACKAGE / "_build_info.json").read_text())["torch"]
    needed = [line for line in headers.get_all("Requires-Dist") if line.startswith("torch")]
    assert needed == [f"torch=={'.'.join(torch.split('.')[:2])}.*"]


def test_wheel_is_relocatable(installed: Path) -> None:
    assert_relocatable(installed / "nwor_specpv")
    assert (
        str(ROOT)
        not in (installed / "nwor_specpv" / "cmake" / "nwor_specpvConfig.cmake").read_text()
    )


PROBE = """
import json, os, sys
sys.path.insert(0, sys.argv[1])
import nwor_specpv, torch
# By the last folder and the name: a checkout may be called as the package is.
maps = {line.split()[-1] for line in open("/proc/self/maps") if "/" in line}
maps = {name for name in maps if "nwor_specpv" in "/".join(name.split("/")[-2:])}
print(json.dumps({
    "file": nwor_specpv.__file__,
    "version": nwor_specpv.__version__,
    "include": nwor_specpv.get_include(),
    "cmake": nwor_specpv.get_cmake_dir(),
    "loaded": sorted(maps),
    "op": str(torch.ops.nwor_specpv.commit.default._schema.name),
}))
"""


def probe(python: str, path: Path, cwd: Path) -> dict[str, object]:
    return json.loads(run([python, "-I", "-c", PROBE, str(path)], cwd).splitlines()[-1])


def assert_used_from(report: dict[str, object], package: Path) -> None:
    assert Path(str(report["file"])).parent == package
    assert report["version"] == project_version()
    assert report["op"] == "nwor_specpv::commit"
    loaded = report["loaded"]
    assert isinstance(loaded, list)
    assert len([name for name in loaded if name.endswith(".so")]) == 2, loaded
    assert {Path(name).parent for name in loaded if name.endswith(".so")} == {package}


def test_wheel_runs_from_any_folder(installed: Path, tmp_path: Path) -> None:
    report = probe(sys.executable, installed, tmp_path)
    package = installed / "nwor_specpv"
    assert_used_from(report, package)
    assert report["include"] == str(package / "include")
    assert report["cmake"] == str(package / "cmake")
    assert (package / "include" / "kv_interceptor" / "interceptor.h").is_file()


@pytest.fixture
def site_packages(installed: Path, tmp_path: Path) -> Path:
    """The package with torch and what torch needs beside it."""
    import torch

    site = tmp_path / "site-packages"
    shutil.copytree(installed, site)
    for path in Path(torch.__file__).parents[1].iterdir():
        if path.is_dir() and not (site / path.name).exists():
            (site / path.name).symlink_to(path)
    return site


def test_the_library_finds_torch_beside_itself(site_packages: Path, tmp_path: Path) -> None:
    """Without Python's torch being loaded first."""
    code = "import ctypes, sys; ctypes.CDLL(sys.argv[1]); print('torch' in sys.modules)"
    library = site_packages / "nwor_specpv" / "libnwor_specpv.so"
    said = run([sys.executable, "-I", "-c", code, str(library)], tmp_path)
    assert said.strip() == "False"


def test_the_library_finds_all_it_needs_beside_itself(site_packages: Path, tmp_path: Path) -> None:
    library = site_packages / "nwor_specpv" / "libnwor_specpv.so"
    loader = without_cache(Path(sys.executable).resolve())
    said = run([*loader, "--list", str(library)], tmp_path, bare_environment())
    assert "libtorch_cpu.so => " in said
    assert "not found" not in said


def test_checkout_names_its_own_headers() -> None:
    import nwor_specpv

    assert Path(nwor_specpv.get_include()) == ROOT / "csrc"
    assert (Path(nwor_specpv.get_cmake_dir()) / "nwor_specpvConfig.cmake").is_file()


def test_a_cpp_engine_links_the_wheel(installed: Path, tmp_path: Path) -> None:
    import torch

    source = Path(__file__).parent / "consumer"
    cmake = shutil.which("cmake", path=str(Path(sys.executable).parent)) or "cmake"
    torch_dir = Path(torch.__file__).parent
    configure = [cmake, "-S", str(source), "-B", str(tmp_path / "b"), "-DCMAKE_BUILD_TYPE=Release"]
    configure += [f"-Dnwor_specpv_DIR={installed / 'nwor_specpv' / 'cmake'}"]
    without = [*configure, "-DNWOR_PYTHON=/bin/false"]
    missing = subprocess.run(without, capture_output=True, text=True, timeout=300)
    assert missing.returncode != 0
    assert "pass -DNWOR_TORCH_DIR" in " ".join(missing.stderr.split())

    run([*configure, f"-DNWOR_TORCH_DIR={torch_dir}"], tmp_path)
    run([cmake, "--build", str(tmp_path / "b")], tmp_path)
    consumer = tmp_path / "b" / "consumer"
    loader = without_cache(consumer)
    said = run([*loader, str(consumer)], tmp_path, bare_environment())
    assert said == run([str(consumer)], tmp_path)
    built, round_ = said.splitlines()
    assert built == f"{project_version()} {torch.__version__}"
    assert round_ == "2 committed, rejected never written"


def test_a_package_in_place_finds_the_torch_of_the_python_on_the_path(tmp_path: Path) -> None:
    """An editable install has no torch beside it."""
    import torch

    assert not (PACKAGE.parent / "torch").exists()
    source, bin_folder = tmp_path / "source", str(Path(sys.executable).parent)
    source.mkdir()
    (source / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.25)\nproject(finder LANGUAGES CXX)\n"
        'find_package(nwor_specpv REQUIRED)\nmessage("torch is in ${NWOR_TORCH_DIR}.")\n'
    )
    cmake = shutil.which("cmake", path=bin_folder) or "cmake"
    configure = [cmake, "-S", str(source), "-B", str(tmp_path / "b")]
    configure += [f"-Dnwor_specpv_DIR={PACKAGE / 'cmake'}"]
    path = os.pathsep.join([bin_folder, os.environ["PATH"]])
    said = run(configure, tmp_path, os.environ | {"PATH": path}, with_stderr=True)
    assert f"torch is in {Path(torch.__file__).parent}." in said


def test_the_page_about_cpp_shows_that_engine() -> None:
    page = (ROOT / "docs" / "cpp.md").read_text(encoding="utf-8")
    source = Path(__file__).parent / "consumer"
    assert (source / "main.cpp").read_text(encoding="utf-8") in page
    lines = (source / "CMakeLists.txt").read_text(encoding="utf-8").splitlines(keepends=True)
    assert "".join(line for line in lines if not line.startswith("#")) in page
    for header in re.findall(r"`([a-z_/]+\.h)`", page):
        places = (ROOT / "csrc", ROOT / "examples" / "engine")
        assert any((place / header).is_file() for place in places), header


# ---- what goes wrong ----


def setup_py(code: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    program = (
        f"import runpy, sys\n{code}\nsys.argv = ['setup.py', '-q', 'build_ext', '--inplace']\n"
        "runpy.run_path('setup.py', run_name='__main__')\n"
    )
    return subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env=os.environ | env,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_missing_torch_is_one_sentence_with_the_mend() -> None:
    result = setup_py("sys.modules['torch'] = None", {})
    assert result.returncode == 1
    (line,) = result.stderr.strip().splitlines()
    assert "pip install torch==2.11.0" in line
    assert "--no-build-isolation" in line


@pytest.mark.parametrize(
    ("version", "refused"), [("2.10.0+cu130", True), ("1.13.1", True), ("2.12.0", False)]
)
def test_which_torch_is_built_with(tmp_path: Path, version: str, refused: bool) -> None:
    """One that is too old is refused; one that was not tried is named and used."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").touch()
    (tmp_path / "torch" / "version.py").write_text(f"__version__ = '{version}'\n")
    program = (
        f"import runpy, setuptools, sys\nsys.path.insert(0, {str(tmp_path)!r})\n"
        "setuptools.setup = lambda **keywords: print(keywords['install_requires'])\n"
        "print('uses', runpy.run_path('setup.py')['torch_version']())\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    minor = ".".join(version.split(".")[:2])
    assert f"['torch=={minor}.*', " in done.stdout
    if refused:
        (line,) = done.stderr.strip().splitlines()
        assert f"torch {version} is too old, expected 2.11 or newer" in line
        assert "`pip install torch==2.11.0`" in line
    else:
        assert f"torch {version} has not been tried, only 2.11, 2.13, 2.14" in done.stdout
        assert f"uses {version}" in done.stdout


@pytest.mark.parametrize("value", ["torch 2.11", "Torch2.11", "+cu130", "a..b"])
def test_a_wrong_local_version_is_one_sentence(value: str) -> None:
    result = setup_py("", {"NWOR_LOCAL_VERSION": value})
    assert result.returncode == 1
    (line,) = result.stderr.strip().splitlines()
    assert f"NWOR_LOCAL_VERSION: got '{value}'" in line


@pytest.mark.parametrize("value", ["0", "many", "-2", "1.5"])
def test_wrong_max_jobs_is_one_sentence(value: str) -> None:
    result = setup_py("", {"MAX_JOBS": value})
    assert result.returncode == 1
    (line,) = result.stderr.strip().splitlines()
    assert f"MAX_JOBS: got '{value}'" in line


def test_old_setuptools_is_one_sentence() -> None:
    result = setup_py("import setuptools; setuptools.__version__ = '65.5.0'", {})
    assert result.returncode == 1
    (line,) = result.stderr.strip().splitlines()
    assert "setuptools 65.5.0 is too old, expected 77 or newer" in line


@pytest.mark.parametrize("moved", [False, True])
def test_a_build_made_before_a_move_is_forgotten(tmp_path: Path, moved: bool) -> None:
    cache = tmp_path / "build" / "CMakeCache.txt"
    cache.parent.mkdir()
    home = "/somewhere/else" if moved else ROOT
    cache.write_text(f"A:STRING=1\nCMAKE_HOME_DIRECTORY:INTERNAL={home}\n")
    program = (
        "import pathlib, runpy, setuptools, sys\nsetuptools.setup = lambda **_: None\n"
        "runpy.run_path('setup.py')['forget_another_place'](pathlib.Path(sys.argv[1]))\n"
    )
    told = run([sys.executable, "-c", program, str(cache.parent)], ROOT)
    assert cache.exists() is not moved
    assert ("was built in /somewhere/else" in told) is moved


# ---- from nothing ----


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The sources alone, as a clone would have them."""
    target = tmp_path_factory.mktemp("copy") / "source"
    names = run(["git", "ls-files", "--cached", "--others", "--exclude-standard"], ROOT)
    for name in names.splitlines():
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)
    yield target
    shutil.rmtree(target)


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with pip of its own that sees the packages of this one, but not us."""
    folder = tmp_path_factory.mktemp("environment") / "venv"
    import torch

    run([sys.executable, "-m", "venv", str(folder)], ROOT)
    # Older Pythons put an old setuptools into it, which would hide ours.
    run([str(folder / "bin" / "python"), "-m", "pip", "uninstall", "-y", "setuptools"], ROOT)

    (site,) = (folder / "lib").glob("python*/site-packages")
    (site / "packages.pth").write_text(f"{Path(torch.__file__).parents[1]}\n")
    return folder


def test_source_archive_has_what_a_build_needs(copy: Path, tmp_path: Path) -> None:
    code = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
    run([sys.executable, "-c", code, str(tmp_path)], copy)
    (path,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    folders = ("csrc", "cmake", "tests/cpp", "python/nwor_specpv")
    needed = {
        file.relative_to(copy).as_posix()
        for folder in folders
        for file in (copy / folder).rglob("*")
        if file.is_file() and not file.name.startswith(".")
    }
    assert needed - inside == set()
    assert {"CMakeLists.txt", "setup.py", "pyproject.toml", "LICENSE", "README.md"} <= inside


@pytest.mark.slow
def test_pip_install_from_nothing(copy: Path, environment: Path, tmp_path: Path) -> None:
    python = str(environment / "bin" / "python")
    target = tmp_path / "target"
    command = [python, "-m", "pip", "install", "--no-build-isolation", "--no-deps"]
    run([*command, "--target", str(target), "."], copy, build_environment())
    assert_relocatable(target / "nwor_specpv")
    shutil.rmtree(copy / "build")
    assert_used_from(probe(python, target, tmp_path), target / "nwor_specpv")


@pytest.mark.slow
def test_editable_install_rebuilds_only_what_changed(
    copy: Path, environment: Path, tmp_path: Path
) -> None:
    python = str(environment / "bin" / "python")
    command = [python, "-m", "pip", "install", "-v", "--no-build-isolation", "--no-deps", "-e", "."]
    first = run(command, copy, build_environment(), with_stderr=True)
    assert first.count("Building CXX object") > 5
    assert_used_from(probe(python, tmp_path / "nothing", tmp_path), copy / "python" / "nwor_specpv")
    changed = copy / "csrc" / "metrics" / "counters.cpp"
    changed.write_text(changed.read_text() + "\n// changed\n")
    second = run(command, copy, build_environment(), with_stderr=True)
    built = re.findall(r"Building \w+ object (\S+)", second)
    assert [name.endswith("metrics/counters.cpp.o") for name in built] == [True], built
