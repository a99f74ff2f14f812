#!/usr/bin/env python3
"""What `make wheel` does: a wheel for one release of torch, in dist/.

    tools/wheel.py [--no-smoke]            for the torch of this interpreter's environment
    tools/wheel.py [--no-smoke] 2.13.0     for that one, in .venv-torch-2.13.0

Its version says what it is for: 0.1.0+torch2.13.cu130 needs torch 2.13 and has kernels for CUDA 13.
auditwheel puts prometheus-cpp into it and names the oldest glibc it runs with. The libraries of
torch and CUDA stay outside, because torch brings them. tools/smoke_wheel.py then installs it where
there is neither a compiler nor prometheus-cpp. Environment:

    TORCH_CUDA_ARCH_LIST  architectures (default: 8.0;8.9;9.0a;9.0+PTX)
    NWOR_CUDA             OFF: a wheel for the CPU only, its version ends in .cpu
    MAX_JOBS              compiler processes at once
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ARCHITECTURES = "8.0;8.9;9.0a;9.0+PTX"
# What torch brings: in the wheel they would be loaded a second time.
OUTSIDE = ("libtorch*", "libc10*", "libcudart.so.*")
BUILD = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"


def stop(sentence: str) -> SystemExit:
    return SystemExit(f"wheel: {sentence}")


def local_version(torch: str, cuda: str | None, *, kernels: bool) -> str:
    """torch2.13.cu130 for torch 2.13.0+cu130 with CUDA 13.0; without kernels torch2.13.cpu."""
    minor = re.match(r"\d+\.\d+", torch)
    if minor is None:
        raise stop(f"torch has the version {torch!r}, expected one like 2.13.0")
    if not kernels:
        return f"torch{minor[0]}.cpu"
    if not cuda:
        raise stop(
            f"torch {torch} is built without CUDA: install a CUDA build of torch, or run "
            "`make wheel NWOR_CUDA=OFF`"
        )
    return f"torch{minor[0]}.cu{cuda.replace('.', '')}"


def installed_torch() -> tuple[str, str | None]:
    code = "import torch; print(torch.__version__, torch.version.cuda or '')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    if done.returncode != 0:
        raise stop(f"{sys.executable} has no usable torch: run `make setup`")
    version, cuda = [*done.stdout.split(), ""][:2]
    return version, cuda or None


def run_with(torch: str, arguments: list[str]) -> int:
    """The same in the environment of another torch, which is made if it is not there."""
    setup = [str(ROOT / "tools" / "setup_environment.sh"), torch]
    if subprocess.call(setup, cwd=ROOT) != 0:
        return 1
    python = ROOT / f".venv-torch-{torch}" / "bin" / "python"
    return subprocess.call([str(python), str(Path(__file__).resolve()), *arguments])


def build(folder: Path) -> Path:
    """The wheel as setuptools makes it, which needs the prometheus-cpp of this machine."""
    kernels = os.environ.get("NWOR_CUDA", "ON") != "OFF"
    environment = os.environ | {
        "NWOR_CUDA": "ON" if kernels else "OFF",
        "NWOR_PROMETHEUS": "ON",
        "NWOR_BUILD_TESTS": "OFF",
        "NWOR_LOCAL_VERSION": local_version(*installed_torch(), kernels=kernels),
        "TORCH_CUDA_ARCH_LIST": os.environ.get("TORCH_CUDA_ARCH_LIST") or ARCHITECTURES,
    }
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    done = subprocess.run([sys.executable, "-c", BUILD, str(folder)], cwd=ROOT, env=environment)
    if done.returncode != 0:
        raise stop("the build failed; its own message is above")
    (wheel,) = folder.glob("*.whl")
    return wheel


def repair(wheel: Path, folder: Path) -> Path:
    """The same with the libraries that a bare machine does not have."""
    command = [sys.executable, "-m", "auditwheel", "repair", "--wheel-dir", str(folder)]
    for name in OUTSIDE:
        command += ["--exclude", name]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    prefix, suffix = wheel.name.rsplit("-", 1)[0], wheel.suffix
    for old in folder.glob(f"{prefix}-*{suffix}"):
        old.unlink()
    done = subprocess.run([*command, str(wheel)], env=os.environ | {"PATH": path})
    if done.returncode != 0:
        raise stop("auditwheel failed; its own message is above")
    (repaired,) = folder.glob(f"{prefix}-*{suffix}")
    return repaired


def describe(wheel: Path) -> str:
    """Its name and size, and what the largest files in it take."""
    with zipfile.ZipFile(wheel) as archive:
        largest = sorted(archive.infolist(), key=lambda file: -file.compress_size)[:4]
    parts = ", ".join(f"{Path(f.filename).name} {f.compress_size / 1e6:.1f}" for f in largest)
    return f"{wheel.name}: {wheel.stat().st_size / 1e6:.1f} MB ({parts})"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("torch", nargs="?", help="release of torch, such as 2.13.0")
    parser.add_argument("--no-smoke", action="store_true", help="do not install and run it")
    options = parser.parse_args()
    if options.torch and options.torch != installed_torch()[0].partition("+")[0]:
        return run_with(options.torch, ["--no-smoke"] if options.no_smoke else [])
    wheel = repair(build(ROOT / "build" / "wheel"), ROOT / "dist")
    print(f"wheel: {describe(wheel)}", flush=True)
    if options.no_smoke:
        return 0
    smoke = ROOT / "tools" / "smoke_wheel.py"
    return subprocess.call([sys.executable, str(smoke), str(wheel)])


if __name__ == "__main__":
    sys.exit(main())
