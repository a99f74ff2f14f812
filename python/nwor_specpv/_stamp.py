"""Compares the build stamp with the installed torch before the native library is loaded.

A library built for another torch fails without an explanation: undefined symbols, or a crash in the
first op. `_build_info.json` says what the library was built for; `check()` compares it with the
installed torch and raises one sentence that names both and the command that fixes it. torch is not
imported for that. This module needs only Python itself.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
import sys
from dataclasses import dataclass
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from types import ModuleType

LIBRARY = "libnwor_specpv.so"
STAMP = "_build_info.json"
MODULE = "_C"
MODULE_NAME = f"{__package__}.{MODULE}"
NOT_INSTALLED = "not installed"
OLDEST_PYTHON = (3, 10)
# The release of vLLM that needs a torch of this minor version, of those that have an adapter. The
# newest is last.
VLLM_OF_TORCH = {"2.11": "0.26.0", "2.13": "0.32.0", "2.14": "0.33.0"}

_PACKAGE_DIR = Path(__file__).absolute().parent


class StampMismatch(ImportError):  # noqa: N818 (the name says what is wrong)
    """The built library does not fit this torch, interpreter or device, or was never built."""


@dataclass(frozen=True)
class BuildStamp:
    """What the library was built from and for; an empty `cuda` means a CPU-only build."""

    version: str
    torch: str
    cuda: str
    architectures: tuple[str, ...]
    revision: str


def is_source_checkout(package_dir: Path = _PACKAGE_DIR) -> bool:
    """Whether the package is used in place, from a checkout of its repository."""
    return (package_dir.parent.parent / "CMakeLists.txt").is_file()


def read_stamp(package_dir: Path = _PACKAGE_DIR) -> BuildStamp:
    """The stamp beside the library. Raises StampMismatch if it is missing or unreadable."""
    path = package_dir / STAMP
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        return BuildStamp(
            version=_text(fields, "version"),
            torch=_text(fields, "torch"),
            cuda=_text(fields, "cuda"),
            architectures=tuple(_text(fields, "architectures").split()),
            revision=_text(fields, "revision"),
        )
    except FileNotFoundError:
        raise StampMismatch(
            f"nwor_specpv is not built: {path} is missing; {_rebuild(package_dir)}."
        ) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StampMismatch(
            f"nwor_specpv has a damaged build stamp {path} ({error!r}); {_rebuild(package_dir)}."
        ) from None


def check(
    package_dir: Path = _PACKAGE_DIR,
    *,
    torch_version: str | None = None,
    torch_cuda: str | None = None,
) -> BuildStamp:
    """Raises StampMismatch unless the built files are complete and fit this Python and torch.

    `torch_version` and `torch_cuda` are `torch.__version__` and `torch.version.cuda`; without a
    version, the installed torch is looked at.
    """
    check_python()
    stamp = read_stamp(package_dir)
    _check_files(package_dir, stamp)
    if torch_version is None:
        torch_version, torch_cuda = _installed_torch(stamp)
    if not fits_torch(stamp.torch, torch_version):
        # vLLM needs the torch it came with.
        other = "" if _has_vllm() else f"run `{install_torch(stamp.torch)}`, or "
        raise StampMismatch(
            f"nwor_specpv {stamp.version} was built for torch {stamp.torch}, but torch "
            f"{torch_version} is installed; {other}{_rebuild(package_dir)}."
        )
    if stamp.cuda and _major(stamp.cuda) != _major(torch_cuda or ""):
        here = f"for CUDA {torch_cuda}" if torch_cuda else "without CUDA"
        raise StampMismatch(
            f"nwor_specpv {stamp.version} was built with CUDA {stamp.cuda}, but the installed "
            f"torch {torch_version} is built {here}; install torch {stamp.torch}, or "
            f"{_rebuild(package_dir)} with a toolkit of torch's CUDA version."
        )
    return stamp


def check_python(version: tuple[int, ...] | None = None) -> None:
    """Raises StampMismatch if this Python is too old for the package's sources."""
    major, minor = (version or sys.version_info)[:2]
    if (major, minor) < OLDEST_PYTHON:
        oldest = ".".join(map(str, OLDEST_PYTHON))
        raise StampMismatch(
            f"nwor_specpv needs Python {oldest} or later, but this is Python {major}.{minor}; run "
            "`python3.12 -m venv NEW` and install it there."
        )


def fits_torch(built: str, here: str) -> bool:
    """Whether a library built for torch `built` runs with torch `here`.

    Every minor version has an ABI of its own. Patch releases keep it, and so do the builds of one
    release ("+cpu", "+cu130"). Pre-releases promise nothing.
    """
    minors = [re.fullmatch(r"(\d+\.\d+)\.\d+(\+.*)?", version) for version in (built, here)]
    return built == here or (None not in minors and minors[0][1] == minors[1][1])


def check_device(
    device: int | None = None,
    *,
    package_dir: Path = _PACKAGE_DIR,
    capability: tuple[int, int] | None = None,
) -> None:
    """Raises StampMismatch if the kernels were not built for this CUDA device.

    Asking torch for the capability initialises CUDA in this process: call it where the device is
    about to be used, never at import and never before a fork.
    """
    stamp = read_stamp(package_dir)
    name = "this CUDA device"
    if capability is None:
        import torch

        index = torch.cuda.current_device() if device is None else device
        capability = torch.cuda.get_device_capability(index)
        name = f"cuda:{index} ({torch.cuda.get_device_name(index)})"
    if covers(stamp.architectures, capability):
        return
    major, minor = capability
    built = (
        f"for {' '.join(stamp.architectures)}" if stamp.architectures else "without CUDA kernels"
    )
    wanted = architecture_for(capability)
    if wanted is None:
        fix = "expected 8.0 or later"
    else:
        fix = f"{_rebuild(package_dir)} with TORCH_CUDA_ARCH_LIST={wanted} in the environment"
    raise StampMismatch(
        f"nwor_specpv {stamp.version} was built {built}, but {name} has compute capability "
        f"{major}.{minor}; {fix}."
    )


def architecture_for(capability: tuple[int, int]) -> str | None:
    """The TORCH_CUDA_ARCH_LIST to build with for this device; None where there are no kernels."""
    major, minor = capability
    if major < 8:
        return None
    # Hopper's own instructions exist only under the name 9.0a.
    return "9.0a" if capability == (9, 0) else f"{major}.{minor}"


def covers(architectures: tuple[str, ...], capability: tuple[int, int]) -> bool:
    """Whether code for CMake-spelt `architectures` runs on a device of `capability`.

    Machine code ("80-real") runs on later minors of its major, PTX ("90-virtual") on everything
    later; "90a" is for exactly 9.0, "100f" for its major's later minors.
    """
    major, minor = capability
    for entry in architectures:
        match = re.fullmatch(r"(\d+)(\d)([af]?)(?:-(real|virtual))?", entry)
        if match is None:
            continue
        built = (int(match[1]), int(match[2]))
        family, kind = match[3], match[4]
        if family == "a":
            fits = built == capability
        elif family == "f" or kind == "real":
            fits = built[0] == major and built[1] <= minor
        else:
            fits = built <= capability
        if fits:
            return True
    return False


def load_torch() -> tuple[ModuleType | None, str | None]:
    """The module torch, or None and why it is not there."""
    try:
        return importlib.import_module("torch"), None
    except ModuleNotFoundError as error:
        if error.name == "torch":
            return None, NOT_INSTALLED
        return None, _broken_torch(error)
    except Exception as error:  # torch's libraries can fail to load in many ways
        return None, _broken_torch(error)


def install_torch(version: str, *, again: bool = False) -> str:
    """The command for a torch of this version; pip's index has no local parts ("+cu130")."""
    force = "--force-reinstall " if again else ""
    return f"pip install {force}torch=={version.partition('+')[0]}"


def install_vllm(torch_version: str) -> str:
    """The command for the vLLM that runs with a library for this torch; the newest if none does."""
    minor = ".".join(torch_version.split(".")[:2])
    return f"pip install vllm=={VLLM_OF_TORCH.get(minor, [*VLLM_OF_TORCH.values()][-1])}"


def load_native() -> ModuleType:
    """The module `_C`. Raises StampMismatch with one sentence where it does not fit or load."""
    stamp = check()
    if MODULE_NAME not in sys.modules:
        from . import _copies

        problem = _copies.find_problem(_PACKAGE_DIR)
        if problem:
            raise StampMismatch(problem)
    torch, problem = load_torch()  # its libraries first: ours look for them in memory, then on disk
    if torch is None:
        raise _without_torch(stamp, problem)
    try:
        return importlib.import_module(MODULE_NAME)
    except (ImportError, OSError) as error:
        raise explain_load_error(error) from None


def explain_load_error(
    error: ImportError | OSError, package_dir: Path = _PACKAGE_DIR
) -> StampMismatch:
    """One sentence for a library that passed `check()` and still could not be loaded."""
    missing = re.match(r"(\S+\.so\S*): cannot open shared object file", str(error))
    if missing is None:
        return StampMismatch(
            f"nwor_specpv cannot load {LIBRARY} ({error}); {_rebuild(package_dir)}."
        )
    name = missing[1]
    if name.startswith("libprometheus-cpp"):
        fix = (
            "run `apt-get install prometheus-cpp-dev` (Debian), or build again with "
            "NWOR_PROMETHEUS=OFF in the environment"
        )
    elif name.startswith(("libtorch", "libc10", "libcudart")):
        command = install_torch(read_stamp(package_dir).torch, again=True)
        fix = f"it comes with torch: run `{command}`"
    else:
        fix = f"install the package that holds it, or {_rebuild(package_dir)}"
    return StampMismatch(f"nwor_specpv needs the shared library {name}, which is not here; {fix}.")


def _check_files(package_dir: Path, stamp: BuildStamp) -> None:
    if not (package_dir / LIBRARY).is_file():
        missing = package_dir / LIBRARY
        raise StampMismatch(
            f"nwor_specpv is not built: {missing} is missing; {_rebuild(package_dir)}."
        )
    if any((package_dir / f"{MODULE}{suffix}").is_file() for suffix in EXTENSION_SUFFIXES):
        return
    others = sorted(path.name for path in package_dir.glob(f"{MODULE}.*.so"))
    found = f"only {', '.join(others)}" if others else "none"
    raise StampMismatch(
        f"nwor_specpv {stamp.version} has no {MODULE}{EXTENSION_SUFFIXES[0]} for this Python "
        f"(found {found}); {_rebuild(package_dir)} with this interpreter."
    )


def _installed_torch(stamp: BuildStamp) -> tuple[str, str | None]:
    """torch's version and its CUDA version, from its version file where it is not imported yet."""
    found = None if "torch" in sys.modules else _read_torch_version()
    if found is not None:
        return found
    torch, problem = load_torch()
    if torch is None:
        raise _without_torch(stamp, problem)
    return str(torch.__version__), torch.version.cuda


def _read_torch_version() -> tuple[str, str | None] | None:
    """None where torch is missing or its version file is not what it has been for years."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        return None
    try:
        text = (Path(spec.submodule_search_locations[0]) / "version.py").read_text("utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    version = re.search(r"^__version__\s*=\s*['\"]([^'\"]+)['\"]", text, re.MULTILINE)
    cuda = re.search(r"^cuda\b[^=\n]*=\s*(?:None|['\"]([\d.]+)['\"])\s*$", text, re.MULTILINE)
    return (version[1], cuda[1]) if version and cuda else None


def _without_torch(stamp: BuildStamp, problem: str | None) -> StampMismatch:
    command = install_torch(stamp.torch, again=problem != NOT_INSTALLED)
    return StampMismatch(
        f"nwor_specpv {stamp.version} was built for torch {stamp.torch}, but torch is {problem}; "
        f"run `{command}`."
    )


def _broken_torch(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"installed but cannot be imported ({type(error).__name__}: {text})"


def _has_vllm() -> bool:
    return importlib.util.find_spec("vllm") is not None


def _rebuild(package_dir: Path) -> str:
    if (package_dir / Path(__file__).name).is_symlink():  # as tools/setup_vllm.sh links a checkout
        return "run `make setup-vllm` in the checkout (VLLM=VERSION for an older one)"
    if is_source_checkout(package_dir):
        return "run `make build` (or `pip install --no-build-isolation -e .`) in the checkout"
    return (
        "run `pip install --no-build-isolation --no-deps --force-reinstall .` in its source folder"
    )


def _major(version: str) -> str:
    return version.partition(".")[0]


def _text(fields: dict[str, object], key: str) -> str:
    value = fields[key]
    if not isinstance(value, str):
        raise TypeError(f"{key}: got {value!r}, expected a string")
    return value
