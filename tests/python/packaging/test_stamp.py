"""The build stamp: each way it can disagree with what is here is one sentence naming both.

The sentence also holds the command that fixes it, in backticks.
"""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[3]
PACKAGE = ROOT / "python" / "nwor_specpv"
FIELDS = {
    "version": "0.1.0",
    "torch": "2.11.0+cu130",
    "cuda": "13.0.88",
    "architectures": "80-real 90a-real 90-virtual",
    "revision": "0123456789ab",
}


def load_stamp_module() -> ModuleType:
    """_stamp.py by its path: the package itself may not be importable, which is its point."""
    spec = importlib.util.spec_from_file_location("nwor_stamp_alone", PACKAGE / "_stamp.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


stamp = load_stamp_module()


@pytest.fixture
def built(tmp_path: Path) -> Path:
    """A package folder with all built files, outside any checkout."""
    folder = tmp_path / "site" / "nwor_specpv"
    folder.mkdir(parents=True)
    (folder / "_build_info.json").write_text(json.dumps(FIELDS))
    (folder / "libnwor_specpv.so").touch()
    (folder / f"_C{EXTENSION_SUFFIXES[0]}").touch()
    return folder


def message(call, *arguments, **keywords) -> str:
    with pytest.raises(stamp.StampMismatch) as caught:
        call(*arguments, **keywords)
    text = str(caught.value)
    assert isinstance(caught.value, ImportError)
    assert "\n" not in text
    assert text.endswith(".")
    return text


def commands(text: str) -> list[str]:
    """What the sentence says to run."""
    return re.findall(r"`([^`]+)`", text)


def test_matching_stamp_is_returned(built: Path) -> None:
    found = stamp.check(built, torch_version="2.11.0+cu130", torch_cuda="13.0")
    assert found == stamp.BuildStamp(
        version="0.1.0",
        torch="2.11.0+cu130",
        cuda="13.0.88",
        architectures=("80-real", "90a-real", "90-virtual"),
        revision="0123456789ab",
    )


@pytest.mark.parametrize(
    "here", ["2.10.0+cu130", "2.12.0+cu130", "2.1.0", "2.111.0", "3.11.0", "2.11.0a0+cu130", "2.11"]
)
def test_another_torch_is_refused_naming_both(built: Path, here: str) -> None:
    text = message(stamp.check, built, torch_version=here, torch_cuda="13.0")
    assert "built for torch 2.11.0+cu130" in text
    assert f"torch {here} is installed" in text
    assert commands(text) == [
        "pip install torch==2.11.0",
        "pip install --no-build-isolation --no-deps --force-reinstall .",
    ]


@pytest.mark.parametrize("here", ["2.11.0", "2.11.1", "2.11.0+cu131", "2.11.12+local.1"])
def test_every_release_of_that_minor_version_is_taken(built: Path, here: str) -> None:
    assert stamp.check(built, torch_version=here, torch_cuda="13.0").torch == "2.11.0+cu130"


def test_a_library_for_a_pre_release_is_for_that_one_only(built: Path) -> None:
    early = "2.15.0a0+git0123456"
    (built / "_build_info.json").write_text(json.dumps(FIELDS | {"torch": early}))
    stamp.check(built, torch_version=early, torch_cuda="13.0")
    text = message(stamp.check, built, torch_version="2.15.0", torch_cuda="13.0")
    assert f"built for torch {early}" in text


def test_another_cuda_major_is_refused_naming_both(built: Path) -> None:
    text = message(stamp.check, built, torch_version="2.11.0+cu130", torch_cuda="12.8")
    assert "CUDA 13.0.88" in text
    assert "CUDA 12.8" in text
    assert commands(text) == ["pip install --no-build-isolation --no-deps --force-reinstall ."]
    text = message(stamp.check, built, torch_version="2.11.0+cu130", torch_cuda=None)
    assert "without CUDA" in text


def test_another_cuda_minor_is_accepted(built: Path) -> None:
    stamp.check(built, torch_version="2.11.0+cu130", torch_cuda="13.1")


def test_cpu_build_runs_with_any_cuda(built: Path) -> None:
    (built / "_build_info.json").write_text(json.dumps(FIELDS | {"cuda": "", "architectures": ""}))
    assert stamp.check(built, torch_version="2.11.0+cu130", torch_cuda="13.0").cuda == ""
    stamp.check(built, torch_version="2.11.0+cu130", torch_cuda=None)


@pytest.mark.parametrize("name", ["_build_info.json", "libnwor_specpv.so"])
def test_missing_file_says_how_to_build(built: Path, name: str) -> None:
    (built / name).unlink()
    text = message(stamp.check, built, torch_version="2.11.0+cu130", torch_cuda="13.0")
    assert "not built" in text
    assert name in text
    assert "pip install --no-build-isolation" in text


def test_in_a_checkout_make_build_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "python" / "nwor_specpv"
    folder.mkdir(parents=True)
    (tmp_path / "CMakeLists.txt").touch()
    assert "`make build`" in message(stamp.check, folder)


def test_module_of_another_python_is_named(built: Path) -> None:
    module = built / f"_C{EXTENSION_SUFFIXES[0]}"
    module.rename(built / "_C.cpython-27-riscv64-linux-gnu.so")
    text = message(stamp.check, built, torch_version="2.11.0+cu130", torch_cuda="13.0")
    assert module.name in text
    assert "found only _C.cpython-27-riscv64-linux-gnu.so" in text


@pytest.mark.parametrize(
    "damage",
    ["", "{", "[]", "null", '"text"', json.dumps(FIELDS | {"torch": 2.11}), '{"torch": "2.11.0"}'],
)
def test_damaged_stamp_is_said_to_be_damaged(built: Path, damage: str) -> None:
    (built / "_build_info.json").write_text(damage)
    text = message(stamp.check, built, torch_version="2.11.0+cu130", torch_cuda="13.0")
    assert "damaged build stamp" in text


@pytest.mark.parametrize(
    ("architectures", "capability", "covered"),
    [
        ("80-real", (8, 0), True),
        ("80-real", (8, 9), True),
        ("80-real", (9, 0), False),
        ("89-real", (8, 6), False),
        ("90a-real", (9, 0), True),
        ("90a-real", (10, 0), False),
        ("90a-virtual", (10, 0), False),
        ("90-virtual", (10, 0), True),
        ("90-virtual", (12, 1), True),
        ("90-virtual", (8, 9), False),
        ("90", (12, 0), True),
        ("100f-real", (10, 3), True),
        ("100f-virtual", (12, 0), False),
        ("120-real", (12, 1), True),
        ("80-real 90a-real", (9, 0), True),
        ("", (9, 0), False),
        ("nonsense", (9, 0), False),
    ],
)
def test_which_devices_are_covered(
    architectures: str, capability: tuple[int, int], covered: bool
) -> None:
    assert stamp.covers(tuple(architectures.split()), capability) is covered


def test_uncovered_device_is_one_sentence(built: Path) -> None:
    stamp.check_device(package_dir=built, capability=(10, 0))
    text = message(stamp.check_device, package_dir=built, capability=(7, 5))
    assert "80-real 90a-real 90-virtual" in text
    assert "compute capability 7.5" in text
    assert "expected 8.0 or later" in text  # there is no build for it
    assert "TORCH_CUDA_ARCH_LIST" not in text


def test_cpu_build_covers_no_device(built: Path) -> None:
    (built / "_build_info.json").write_text(json.dumps(FIELDS | {"cuda": "", "architectures": ""}))
    text = message(stamp.check_device, package_dir=built, capability=(9, 0))
    assert "without CUDA kernels" in text
    assert "TORCH_CUDA_ARCH_LIST=9.0a in" in text  # Hopper's own kernels exist under this name only
    text = message(stamp.check_device, package_dir=built, capability=(8, 0))
    assert "TORCH_CUDA_ARCH_LIST=8.0 in" in text


def test_load_error_names_the_missing_library(built: Path) -> None:
    def raised(text: str) -> str:
        def fail() -> None:
            raise stamp.explain_load_error(OSError(text), built)

        return message(fail)

    missing = "cannot open shared object file: No such file or directory"
    text = raised(f"libprometheus-cpp-core.so.1.0: {missing}")
    assert "libprometheus-cpp-core.so.1.0" in text
    assert "NWOR_PROMETHEUS=OFF" in text
    assert commands(text) == ["apt-get install prometheus-cpp-dev"]
    for name in ("libcudart.so.13", "libc10_cuda.so", "libtorch_cpu.so"):
        text = raised(f"{name}: {missing}")
        assert name in text
        assert commands(text) == ["pip install --force-reinstall torch==2.11.0"]
    assert "libodd.so.3" in raised(f"libodd.so.3: {missing}")
    assert "undefined symbol: _Zx" in raised("libnwor_specpv.so: undefined symbol: _Zx")


def run_python(code: str, path: Path) -> subprocess.CompletedProcess[str]:
    program = f"import sys; sys.path.insert(0, {str(path)!r})\n{code}"
    command = [sys.executable, "-I", "-c", program]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=path)


def test_the_module_alone_loads_nothing(built: Path) -> None:
    shutil.copy(PACKAGE / "_stamp.py", built.parent / "nwor_stamp_copy.py")
    result = run_python(
        "import nwor_stamp_copy, sys; print('torch' in sys.modules, 'numpy' in sys.modules)",
        built.parent,
    )
    assert result.stdout.split() == ["False", "False"], result.stderr


def copy_package(destination: Path) -> Path:
    folder = destination / "nwor_specpv"
    shutil.copytree(PACKAGE, folder, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def test_an_old_python_is_refused() -> None:
    stamp.check_python()
    stamp.check_python((3, 10, 0))
    text = message(stamp.check_python, (3, 9, 18))
    assert "needs Python 3.10 or later, but this is Python 3.9" in text
    assert commands(text) == ["python3.12 -m venv NEW"]


def test_an_old_python_is_refused_before_anything_else_is_read(tmp_path: Path) -> None:
    folder = tmp_path / "nwor_specpv"
    folder.mkdir()
    for name in ("__init__.py", "_stamp.py"):
        shutil.copy(PACKAGE / name, folder)
    old = "import itertools, sys; sys.version_info = (3, 9, 18); del itertools.pairwise\n"
    result = run_python(old + IMPORT, tmp_path)
    assert result.stdout.startswith("StampMismatch | nwor_specpv needs Python 3.10"), result.stderr


IMPORT = """
try:
    import nwor_specpv
except ImportError as error:
    print(type(error).__name__, "|", error)
    # By the last folder and the name: a checkout may be called as the package is.
    files = [line.split()[-1] for line in open("/proc/self/maps") if ".so" in line]
    ours = [name for name in files if "nwor_specpv" in "/".join(name.split("/")[-2:])]
    print("loaded", len(ours), "torch" in sys.modules)
else:
    print("imported", nwor_specpv.__file__)
"""


def test_import_checks_the_stamp_before_loading(tmp_path: Path) -> None:
    folder = copy_package(tmp_path)
    result = run_python(IMPORT, tmp_path)
    assert result.stdout.startswith(f"imported {folder}"), result.stdout + result.stderr

    path = folder / "_build_info.json"
    fields = json.loads(path.read_text())
    path.write_text(json.dumps(fields | {"torch": "1.2.3+cu999"}))
    result = run_python(IMPORT, tmp_path)
    first, second = result.stdout.splitlines()
    assert first.startswith("StampMismatch | "), result.stdout + result.stderr
    assert "torch 1.2.3+cu999" in first
    assert f"torch {fields['torch']} is installed" in first
    assert second == "loaded 0 False"


def test_import_of_an_unbuilt_package_says_how_to_build(tmp_path: Path) -> None:
    folder = copy_package(tmp_path)
    for name in ("libnwor_specpv.so", "_build_info.json"):
        (folder / name).unlink()
    result = run_python(IMPORT, tmp_path)
    assert "StampMismatch | nwor_specpv is not built" in result.stdout, result.stdout
    assert "loaded 0 False" in result.stdout


VERSION_FILES = {
    "2.11.0+cu130": "__version__ = '2.11.0+cu130'\ncuda: Optional[str] = '13.0'\n",
    "2.11.0+cpu": "__version__ = '2.11.0+cpu'\ncuda: Optional[str] = None\n",
    "2.10.0+cu130": "from typing import Optional\n__version__ = \"2.10.0+cu130\"\ncuda = '13.0'\n",
}


@pytest.mark.parametrize(
    ("version", "says"),
    [
        ("2.11.0+cu130", "checked"),
        ("2.11.0+cpu", "torch 2.11.0+cpu is built without CUDA"),
        ("2.10.0+cu130", "torch 2.10.0+cu130 is installed"),
    ],
)
def test_torch_is_not_imported_to_learn_its_version(built: Path, version: str, says: str) -> None:
    site = built.parent
    (site / "torch").mkdir()
    (site / "torch" / "__init__.py").write_text("raise RuntimeError('imported')\n")
    (site / "torch" / "version.py").write_text(VERSION_FILES[version])
    shutil.copy(PACKAGE / "_stamp.py", site / "nwor_stamp_copy.py")
    code = (
        "import pathlib, nwor_stamp_copy as stamp\n"
        f"try: stamp.check(pathlib.Path({str(built)!r})); print('checked')\n"
        "except ImportError as error: print(error)"
    )
    result = run_python(code, site)
    assert says in result.stdout, result.stdout + result.stderr


def test_a_torch_that_cannot_be_imported_is_named(tmp_path: Path) -> None:
    """Its version fits: only loading it shows what is wrong."""
    folder = copy_package(tmp_path)
    version = json.loads((folder / "_build_info.json").read_text())["torch"]
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise OSError('libodd.so: gone')\n")
    cuda = (
        f"cuda: Optional[str] = '{json.loads((folder / '_build_info.json').read_text())['cuda']}'"
    )
    (tmp_path / "torch" / "version.py").write_text(f"__version__ = '{version}'\n{cuda}\n")
    result = run_python(IMPORT, tmp_path)
    first = result.stdout.splitlines()[0]
    assert "cannot be imported (OSError: libodd.so: gone)" in first, result.stdout + result.stderr
    assert commands(first) == [f"pip install --force-reinstall torch=={version.partition('+')[0]}"]
