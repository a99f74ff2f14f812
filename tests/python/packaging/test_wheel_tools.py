"""The tools of `make wheel` and `make test-torch`, without a compiler."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from tests.python.packaging.test_checks import load

ROOT = Path(__file__).resolve().parents[3]
TOOLS = ROOT / "tools"
BASH = shutil.which("bash") or "/bin/bash"


@pytest.fixture(scope="module")
def wheel_tool() -> ModuleType:
    return load(TOOLS / "wheel.py")


@pytest.mark.parametrize(
    ("torch", "cuda", "kernels", "tag"),
    [
        ("2.13.0+cu130", "13.0", True, "torch2.13.cu130"),
        ("2.11.0", "12.8", True, "torch2.11.cu128"),
        ("2.14.1+cu130", "13.0", False, "torch2.14.cpu"),
        ("2.14.0+cpu", None, False, "torch2.14.cpu"),
    ],
)
def test_the_version_says_what_a_wheel_is_for(
    wheel_tool: ModuleType, torch: str, cuda: str | None, kernels: bool, tag: str
) -> None:
    assert wheel_tool.local_version(torch, cuda, kernels=kernels) == tag


def test_a_torch_without_cuda_is_one_sentence(wheel_tool: ModuleType) -> None:
    with pytest.raises(SystemExit) as caught:
        wheel_tool.local_version("2.13.0+cpu", None, kernels=True)
    assert "torch 2.13.0+cpu is built without CUDA" in str(caught.value)
    assert "`make wheel NWOR_CUDA=OFF`" in str(caught.value)


def test_the_size_is_said(wheel_tool: ModuleType, tmp_path: Path) -> None:
    wheel = tmp_path / "some-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("some/large.so", os.urandom(2_000_000))
        archive.writestr("some/small.py", "")
    assert wheel_tool.describe(wheel) == (
        "some-1.0-py3-none-any.whl: 2.0 MB (large.so 2.0, small.py 0.0)"
    )


def test_a_build_with_all_architectures_is_the_default(
    wheel_tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, str]] = []

    def run(command: list[str], **keywords: dict[str, str]) -> subprocess.CompletedProcess[str]:
        if "env" not in keywords:
            return subprocess.CompletedProcess(command, 0, "2.13.0+cu130 13.0\n", "")
        asked.append(keywords["env"])
        (tmp_path / "new" / "a.whl").touch()
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(wheel_tool.subprocess, "run", run)
    for name in ("NWOR_CUDA", "TORCH_CUDA_ARCH_LIST"):
        monkeypatch.delenv(name, raising=False)
    assert wheel_tool.build(tmp_path / "new").name == "a.whl"
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0a")
    monkeypatch.setenv("NWOR_CUDA", "OFF")
    wheel_tool.build(tmp_path / "new")
    names = ("NWOR_CUDA", "NWOR_PROMETHEUS", "NWOR_LOCAL_VERSION", "TORCH_CUDA_ARCH_LIST")
    assert [[environment[name] for name in names] for environment in asked] == [
        ["ON", "ON", "torch2.13.cu130", "8.0;8.9;9.0a;9.0+PTX"],
        ["OFF", "ON", "torch2.13.cpu", "9.0a"],
    ]


@pytest.mark.parametrize("status", [0, 1])
def test_another_torch_builds_in_its_environment(
    wheel_tool: ModuleType, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    calls: list[list[str]] = []
    monkeypatch.setattr(
        wheel_tool.subprocess, "call", lambda command, **_: calls.append(command) or status
    )
    monkeypatch.setattr(wheel_tool, "installed_torch", lambda: ("2.11.0+cu130", "13.0"))
    monkeypatch.setattr(sys, "argv", ["wheel.py", "--no-smoke", "2.13.0"])
    assert wheel_tool.main() == status
    assert calls[0] == [str(TOOLS / "setup_environment.sh"), "2.13.0"]
    python = str(ROOT / ".venv-torch-2.13.0" / "bin" / "python")
    assert calls[1:] == [[python, str(TOOLS / "wheel.py"), "--no-smoke"]][status:]


def test_a_wheel_that_is_not_there_is_one_sentence(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(TOOLS / "smoke_wheel.py"), str(tmp_path / "no.whl")],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert done.stderr.strip() == f"smoke: there is no {tmp_path / 'no.whl'}: run `make wheel`"


def constant(path: Path, name: str) -> list[str]:
    (text,) = re.findall(rf"^{name} = (.+)$", path.read_text(), re.MULTILINE)
    return list(ast.literal_eval(text))


def test_the_workflow_builds_what_is_supported() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "wheels.yml").read_text())
    build = workflow["jobs"]["build"]
    matrix = build["strategy"]["matrix"]
    assert matrix["machine"] == ["x86_64", "aarch64"]
    assert matrix["torch"] == constant(ROOT / "setup.py", "TORCH_TESTED")
    assert matrix["torch"][1:] == constant(TOOLS / "test_torch.py", "TORCH")
    classifiers = (ROOT / "pyproject.toml").read_text()
    assert matrix["python"] == re.findall(
        r'"Programming Language :: Python :: (3\.\d+)"', classifiers
    )
    assert build["env"]["TORCH_CUDA_ARCH_LIST"] == load(TOOLS / "wheel.py").ARCHITECTURES


# ---- environments of other releases of torch ----


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The script that makes environments, where everything is installed already."""
    root = tmp_path / "checkout"
    for name in ("tools", "requirements"):
        (root / name).mkdir(parents=True)
    (root / "requirements" / "dev.txt").write_text("# all\ntorch==2.11.0\nnumpy==2.4.6\n")
    shutil.copy(TOOLS / "setup_environment.sh", root / "tools")
    write(root / "tools" / "install_system_packages.sh", "")
    for venv in (".venv", ".venv-torch-2.13.0"):
        write(root / venv / "bin" / "python", f'exec "{sys.executable}" "$@"')
        write(root / venv / "bin" / "uv", f'for f do :; done; cp "$f" "{tmp_path}/asked"')
    return root


def write(path: Path, body: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)


def setup(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    script = str(root / "tools" / "setup_environment.sh")
    return subprocess.run([BASH, script, *arguments], capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    ("arguments", "venv", "torch"),
    [
        ([], ".venv", "2.11.0"),
        (["2.11.0"], ".venv", "2.11.0"),
        (["2.13.0"], ".venv-torch-2.13.0", "2.13.0"),
    ],
)
def test_another_torch_has_an_environment_of_its_own(
    checkout: Path, tmp_path: Path, arguments: list[str], venv: str, torch: str
) -> None:
    result = setup(checkout, *arguments)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip().endswith(f" in {venv}")
    assert (tmp_path / "asked").read_text() == f"# all\ntorch=={torch}\nnumpy==2.4.6\n"


@pytest.mark.parametrize("wrong", ["2.13", "latest", "2.13.0+cpu", "../2.13.0"])
def test_a_wrong_torch_is_refused(checkout: Path, wrong: str) -> None:
    result = setup(checkout, wrong)
    assert result.returncode == 1
    assert f"torch: got '{wrong}', expected a version like 2.13.0" in result.stderr
    done = subprocess.run(
        [sys.executable, str(TOOLS / "test_torch.py"), wrong], capture_output=True, text=True
    )
    assert done.returncode == 2
    assert f"torch: got {wrong!r}, expected a version like 2.13.0" in done.stderr
