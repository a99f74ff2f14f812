"""Builds libnwor_specpv.so and _C with CMake and places them in the package.

    pip install --no-build-isolation .        # or -e . : rebuilds only what changed
    python setup.py build_ext --inplace       # what `make build` runs

The wheel's metadata asks for the minor version of torch that it was built for.

The CMake folder build/<interpreter>-torch-<version> is kept between builds. NWOR_CUDA=OFF has a
folder of its own, with -cpu at the end, so that builds with and without kernels do not undo each
other; the wheel of `make wheel` has one with -wheel. build/current points to the folder that was
last built in place, build/torch-<version> to the last one for that torch. Environment:

    MAX_JOBS              compiler processes at once (default: by cores and free memory)
    NWOR_CUDA             AUTO | ON | OFF
    NWOR_PROMETHEUS       AUTO | ON | OFF
    TORCH_CUDA_ARCH_LIST  such as "8.0;9.0a;9.0+PTX"
    NWOR_BUILD_TESTS      ON builds the GoogleTest suite too
    NWOR_WERROR           ON makes errors of the compilers' warnings
    CMAKE_ARGS            further arguments for CMake
    NWOR_LOCAL_VERSION    is added to the version of the wheel, such as torch2.11.cu130
"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import setuptools
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
PACKAGE = "nwor_specpv"
TORCH_TESTED = ("2.11.0", "2.13.0", "2.14.0")
# One compiler process over torch's headers, or one nvcc over a kernel, stays below this.
GIB_PER_JOB = 3.0


def stop(sentence: str) -> SystemExit:
    return SystemExit(f"nwor_specpv: {sentence}")


def find_torch() -> str | None:
    """torch's full version, such as 2.11.0+cu130, read without importing it; None without torch."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        return None
    text = (Path(spec.submodule_search_locations[0]) / "version.py").read_text(encoding="utf-8")
    match = re.search(r"^__version__\s*=\s*['\"]([^'\"]+)['\"]", text, re.MULTILINE)
    if match is None:
        raise stop(
            "no version found in torch's version.py: "
            f"run `pip install --force-reinstall torch=={TORCH_TESTED[0]}`"
        )
    return match[1]


def minor_version(version: str) -> str:
    """2.11 for 2.11.0+cu130."""
    return ".".join(version.split(".")[:2])


def torch_version() -> str:
    """The version of the torch that the library is built against."""
    version = find_torch()
    if version is None:
        raise stop(
            "torch was not found in the environment that builds this package: run "
            f"`pip install torch=={TORCH_TESTED[0]}`, then `pip install --no-build-isolation .`"
        )
    tested = [minor_version(known) for known in TORCH_TESTED]
    numbers = [tuple(map(int, text.split("."))) for text in (minor_version(version), tested[0])]
    if numbers[0] < numbers[1]:
        raise stop(
            f"torch {version} is too old, expected {tested[0]} or newer: run "
            f"`pip install torch=={TORCH_TESTED[0]}` and build again"
        )
    if minor_version(version) not in tested:
        print(
            f"nwor_specpv: torch {version} has not been tried, only {', '.join(tested)}", flush=True
        )
    return version


def requirements() -> list[str]:
    """What the import needs; without torch, as in an archive of sources, any that can be built."""
    version = find_torch()
    pin = f"torch=={minor_version(version)}.*" if version else "torch>=2.11"
    return [pin, "numpy", "safetensors>=0.8"]


def version_tag() -> str:
    local = os.environ.get("NWOR_LOCAL_VERSION", "")
    if local and not re.fullmatch(r"[a-z0-9]+(\.[a-z0-9]+)*", local):
        raise stop(f"NWOR_LOCAL_VERSION: got '{local}', expected a tag like torch2.11.cu130")
    return f"+{local}" if local else ""


def find_tool(name: str) -> str | None:
    """A program of this environment, else of the system: pip may run us with a bare PATH."""
    scripts = os.pathsep.join([sysconfig.get_path("scripts"), str(Path(sys.executable).parent)])
    return shutil.which(name, path=scripts) or shutil.which(name)


def free_memory_gib() -> float:
    """What is available, or less where the control group allows less."""
    limits = []
    meminfo = Path("/proc/meminfo")
    if meminfo.is_file():
        match = re.search(r"^MemAvailable:\s+(\d+) kB", meminfo.read_text(), re.MULTILINE)
        if match:
            limits.append(int(match[1]) / 2**20)
    group = Path("/sys/fs/cgroup/memory.max")
    if group.is_file() and group.read_text().strip().isdigit():
        limits.append(int(group.read_text()) / 2**30)
    return min(limits, default=GIB_PER_JOB)


def num_jobs() -> int:
    wanted = os.environ.get("MAX_JOBS", "")
    if wanted:
        if not wanted.isdigit() or int(wanted) < 1:
            raise stop(f"MAX_JOBS: got '{wanted}', expected a number of at least 1")
        return int(wanted)
    return max(1, min(len(os.sched_getaffinity(0)), int(free_memory_gib() / GIB_PER_JOB)))


def read_cache(build_dir: Path) -> dict[str, str]:
    """What CMake has kept in the folder; nothing if it is new."""
    cache = build_dir / "CMakeCache.txt"
    text = cache.read_text() if cache.is_file() else ""
    return dict(re.findall(r"^([\w-]+):\w+=(.*)$", text, re.MULTILINE))


def begin_anew(build_dir: Path, was: str) -> None:
    print(f"nwor_specpv: {build_dir} was built {was}; building it again", flush=True)
    shutil.rmtree(build_dir)


def forget_another_place(build_dir: Path) -> None:
    """Removes what was built before the sources were moved: CMake would refuse to go on with it."""
    home = read_cache(build_dir).get("CMAKE_HOME_DIRECTORY")
    if home and Path(home) != ROOT:
        begin_anew(build_dir, f"in {home}")


def forget_another_generator(build_dir: Path, wanted: str) -> None:
    """The same where ninja has come or gone since."""
    generator = read_cache(build_dir).get("CMAKE_GENERATOR")
    if generator and generator != wanted:
        begin_anew(build_dir, f"with {generator}, not {wanted}")


def forget_another_toolkit(build_dir: Path) -> None:
    """The same where CUDA_HOME names another nvcc: CMake stays with what it knows of the first."""
    cached = read_cache(build_dir).get("NWOR_NVCC", "")
    given = "NWOR_NVCC" in os.environ.get("CMAKE_ARGS", "")
    if not os.path.isabs(cached) or given:
        return
    homes = [os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH")]
    compilers = [Path(home) / "bin" / "nvcc" for home in homes if home]
    named = next((path for path in compilers if os.access(path, os.X_OK)), None)
    if named and named.resolve() != Path(cached).resolve():
        begin_anew(build_dir, f"with {cached}, not {named}")


def remove_other_modules(package: Path, build_dir: Path) -> None:
    """Of other interpreters: they were built with another library than the one now beside them."""
    ours = {path.name for path in build_dir.glob("_C.*.so")}
    for path in package.glob("_C.*.so"):
        if path.name not in ours:
            path.unlink()
            print(f"nwor_specpv: removed {path.name}, the library was built again", flush=True)


def link(name: str, build_dir: Path) -> None:
    path = build_dir.parent / name
    path.unlink(missing_ok=True)
    path.symlink_to(build_dir.name)


class cmake_build_ext(build_ext):
    """Configures, builds and installs with CMake, into the wheel's tree or into python/."""

    def run(self) -> None:
        jobs = num_jobs()
        build_dir = self._configure()
        self._build(build_dir, jobs)
        self._place(build_dir)
        link(f"torch-{self._torch.partition('+')[0]}", build_dir)

    def get_outputs(self) -> list[str]:
        return [str(path) for path in self._placed_files(self._destination())]

    def get_output_mapping(self) -> dict[str, str]:
        if not self.inplace:
            return {}
        here = self._destination()
        there = Path(self.build_lib)
        return {str(there / p.relative_to(here)): str(p) for p in self._placed_files(here)}

    def _destination(self) -> Path:
        return ROOT / "python" if self.inplace else (ROOT / self.build_lib).resolve()

    def _placed_files(self, destination: Path) -> list[Path]:
        folder = destination / PACKAGE
        found = [*folder.glob("*.so"), *folder.glob("_build_info.json")]
        for name in ("cmake", "include"):
            found += [path for path in (folder / name).rglob("*") if path.is_file()]
        return found

    def _configure(self) -> Path:
        self._torch = torch_version()
        self._cmake = find_tool("cmake")
        if self._cmake is None:
            raise stop("cmake was not found: run `pip install cmake ninja` and build again")
        if importlib.util.find_spec("pybind11") is None:
            raise stop("pybind11 was not found: run `pip install pybind11` and build again")
        tag = f"{sys.implementation.cache_tag}-torch-{self._torch.replace('+', '-')}"
        cpu = "-cpu" if os.environ.get("NWOR_CUDA") == "OFF" else ""
        wheel = "-wheel" if version_tag() else ""  # of more architectures than a checkout has
        build_dir = ROOT / "build" / f"{tag}{cpu}{wheel}"
        ninja = find_tool("ninja")
        forget_another_place(build_dir)
        default = os.environ.get("CMAKE_GENERATOR", "Unix Makefiles")
        forget_another_generator(build_dir, "Ninja" if ninja else default)
        forget_another_toolkit(build_dir)
        arguments = [f"-DNWOR_PYTHON={sys.executable}", "-DCMAKE_BUILD_TYPE=Release"]
        if ninja:
            # Named each time: the one of the last build may have lived in an environment now gone.
            arguments += ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}"]
        # So are these, if only to say that there is none any more.
        ccache = find_tool("ccache")
        for name in ("CMAKE_CXX_COMPILER_LAUNCHER", "CMAKE_CUDA_COMPILER_LAUNCHER"):
            arguments.append(f"-D{name}={ccache or os.environ.get(name, '')}")
        for name in ("NWOR_CUDA", "NWOR_PROMETHEUS"):
            arguments.append(f"-D{name}={os.environ.get(name, 'AUTO')}")
        # Named each time as well: without it the one of the last build would stand.
        arguments.append(f"-DNWOR_CUDA_ARCH_LIST={os.environ.get('TORCH_CUDA_ARCH_LIST', '')}")
        arguments.append("-DNWOR_SANITIZE=")
        self._with_tests = os.environ.get("NWOR_BUILD_TESTS", "OFF").upper() in ("ON", "1", "TRUE")
        if self._with_tests or not (build_dir / "CMakeCache.txt").is_file():
            # A plain install leaves a developer's configured tests as they are, unbuilt.
            arguments.append(f"-DNWOR_BUILD_TESTS={'ON' if self._with_tests else 'OFF'}")
        if "NWOR_WERROR" in os.environ:
            # As with the tests: whoever builds with it need not compile all again after an install.
            arguments.append(f"-DNWOR_WERROR={os.environ['NWOR_WERROR']}")
        arguments += shlex.split(os.environ.get("CMAKE_ARGS", ""))
        self._call("-S", str(ROOT), "-B", str(build_dir), *arguments)
        return build_dir

    def _build(self, build_dir: Path, jobs: int) -> None:
        targets = [] if self._with_tests else ["--target", PACKAGE, "_C"]
        self._call("--build", str(build_dir), "--parallel", str(jobs), *targets)

    def _place(self, build_dir: Path) -> None:
        destination = self._destination()
        # In place, the headers are those of csrc/: no copy that could go stale.
        for component in ["package"] if self.inplace else ["package", "headers"]:
            self._call(
                *("--install", str(build_dir), "--prefix", str(destination)),
                *("--component", component),
            )
        if self.inplace:
            remove_other_modules(destination / PACKAGE, build_dir)
            link("current", build_dir)

    def _call(self, *arguments: str) -> None:
        command = [str(self._cmake), *arguments]
        print("+", shlex.join(command), flush=True)
        code = subprocess.call(command, cwd=ROOT)
        if code != 0:
            raise stop(f"CMake failed with exit code {code}; its own message is above")


class fresh_build_py(build_py):
    """Empties the package in build/lib first: setuptools would ship modules deleted since."""

    def run(self) -> None:
        if not getattr(self, "editable_mode", False):
            shutil.rmtree(Path(self.build_lib) / PACKAGE, ignore_errors=True)
        super().run()


if int(setuptools.__version__.partition(".")[0]) < 77:
    raise stop(
        f"setuptools {setuptools.__version__} is too old, expected 77 or newer: "
        'run `pip install "setuptools>=77,<82"` and build again'
    )

setup(
    install_requires=requirements(),
    options={"egg_info": {"tag_build": version_tag()}},
    ext_modules=[Extension(f"{PACKAGE}._C", sources=[])],
    cmdclass={"build_ext": cmake_build_ext, "build_py": fresh_build_py},
)
