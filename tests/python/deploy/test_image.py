"""The Dockerfile, as far as it can be looked at without a registry and a container engine.

Its context, its packages and its build requirements are those of this checkout; its arguments are
parsed by vLLM's own parser in tests/vllm/cpu/test_docs.py.
"""

from __future__ import annotations

import importlib.metadata
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement

from nwor_specpv.vllm import versions

ROOT = Path(__file__).resolve().parents[3]
DEPLOY = ROOT / "deploy"


def instructions() -> list[tuple[str, str]]:
    """(keyword, arguments), continued lines joined."""
    lines = (DEPLOY / "Dockerfile").read_text().replace("\\\n", " ").splitlines()
    words = (line.split(None, 1) for line in lines if line.strip() and line[0] != "#")
    return [(keyword, rest) for keyword, rest in words]


def arguments(keyword: str) -> list[str]:
    return [rest for found, rest in instructions() if found == keyword]


def words_behind(command: str) -> list[str]:
    """What the image's commands of this name are given, without options."""
    found = []
    for run in arguments("RUN"):
        for part in re.split(r"&&|;", run):
            if command in part:
                words = shlex.split(part.partition(command)[2])
                found += [word for word in words if not word.startswith("-")]
    return found


# ---- its files ----


def pattern(line: str) -> re.Pattern[str]:
    """A line of .dockerignore: a path from the context's root, and all below it."""
    special = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    parts = re.split(r"(\*\*/|\*\*|\*|\?)", line.strip("/"))
    return re.compile("".join(special.get(part) or re.escape(part) for part in parts) + "(?:/.*)?")


def left_out() -> list[re.Pattern[str]]:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    lines = [line for line in lines if line.strip() and line[0] != "#"]
    assert not any(line.startswith("!") for line in lines)
    return [pattern(line) for line in lines]


@pytest.mark.parametrize(
    ("line", "path", "matches"),
    [
        ("build", "build/a/b", True),
        ("build", "docs/build", False),
        ("build", "builder", False),
        (".venv-vllm*", ".venv-vllm-0.26.0/bin/python", True),
        ("**/__pycache__", "a/b/__pycache__/c.pyc", True),
        ("**/*.egg-info", "python/nwor.egg-info/PKG-INFO", True),
        ("python/nwor_specpv/*.so", "python/nwor_specpv/lib.so", True),
        ("python/nwor_specpv/*.so", "python/nwor_specpv/cmake/lib.so", False),
    ],
)
def test_patterns_mean_what_docker_makes_of_them(line: str, path: str, matches: bool) -> None:
    assert (pattern(line).fullmatch(path) is not None) == matches


def test_the_image_gets_no_leftovers_of_this_machine() -> None:
    """What git ignores was built here, for this machine; a build in the image must not find it."""
    ignored = [line.strip("/") for line in (ROOT / ".gitignore").read_text().splitlines()]
    kept_out = (ROOT / ".dockerignore").read_text().splitlines()
    for line in ignored:
        if line and not line.startswith("#"):
            assert {line, f"**/{line}"} & set(kept_out), line


def tracked() -> list[str]:
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("no git checkout: its files are what the image gets")
    listed = ("git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard")
    done = subprocess.run(listed, capture_output=True, text=True, check=True)
    return [name for name in done.stdout.splitlines() if (ROOT / name).is_file()]


def test_the_context_has_all_files_and_builds_a_description(tmp_path: Path) -> None:
    """The checkout, as `COPY` leaves it in the image, is a package that pip can begin to build."""
    (copied,) = arguments("COPY")
    source, target = copied.split()
    assert source == ".", "the whole context"
    assert target in words_behind("pip install")
    rules, files = left_out(), tracked()
    lost = [name for name in files if any(rule.fullmatch(name) for rule in rules)]
    assert lost == [], "files of the checkout that the image would not get"
    context = tmp_path / "context"
    for name in files:
        place = context / name
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, place)
    describe = ("setup.py", "-q", "dist_info", "--output-dir", str(tmp_path))
    done = subprocess.run(
        [sys.executable, *describe], cwd=context, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    (made,) = tmp_path.glob("*.dist-info")
    assert "Name: nwor-specpv" in (made / "METADATA").read_text()
    assert "vllm.general_plugins" in (made / "entry_points.txt").read_text()


# ---- its instructions ----


def test_instructions_are_known_and_its_shell_parses() -> None:
    found = instructions()
    assert {keyword for keyword, _ in found} <= {"FROM", "ARG", "RUN", "COPY", "ENTRYPOINT"}
    (base,) = arguments("FROM")
    assert found[0] == ("FROM", base)
    assert base.rpartition(":v")[2] in {known.version for known in versions.ADAPTERS}
    runs = arguments("RUN")
    for run in runs:
        assert subprocess.run(["bash", "-n", "-c", run], check=False).returncode == 0, run
    for name in arguments("ARG"):
        assert any(f"${{{name.partition('=')[0]}}}" in run for run in runs)


def base_version() -> str:
    return arguments("FROM")[0].rpartition(":v")[2]


def pinned(file: str, name: str) -> str:
    text = (ROOT / "requirements" / file).read_text()
    return re.search(rf"^{name}==([^\s;]+)", text, re.M)[1]


def of_this_torch() -> None:
    """What torch says of itself is only of use if it is the image's."""
    wanted = pinned(f"vllm-{base_version()}.txt", "torch")
    if torch.__version__.partition("+")[0] != wanted or torch.version.cuda is None:
        pytest.skip(f"the image's torch is {wanted} for CUDA, here is {torch.__version__}")


def test_apt_knows_its_packages() -> None:
    """NVIDIA's are in the base image's own list, and apt's lists may be of another release."""
    packages = [word for word in words_behind("apt-get install") if not word.startswith("cuda-")]
    assert len(packages) > 3
    if shutil.which("apt-cache") is None:
        pytest.skip("no apt here")
    told = subprocess.run(["apt-cache", "policy"], capture_output=True, text=True, check=True)
    if " Packages" not in told.stdout:
        pytest.skip("apt has no lists here: apt-get update")
    for package in packages:
        command = ["apt-cache", "policy", package]
        told = subprocess.run(command, capture_output=True, text=True, check=True)
        assert re.search(r"Candidate: [^(\s]", told.stdout), package


def test_its_cuda_packages_are_of_the_release_that_torch_was_built_for() -> None:
    of_this_torch()
    packages = [word for word in words_behind("apt-get install") if word.startswith("cuda-")]
    release = torch.version.cuda.replace(".", "-")
    assert set(packages) == {f"cuda-nvcc-{release}", f"cuda-cudart-dev-{release}"}


def build_requirements() -> dict[str, Requirement]:
    words = [word for word in words_behind("pip install") if not word.startswith("/")]
    return {one.name: one for one in map(Requirement, words)}


def test_the_image_brings_what_a_build_asks_for() -> None:
    """--no-build-isolation: beside vLLM's torch. What we build with has to be among it."""
    project = (ROOT / "pyproject.toml").read_text()
    wanted = json.loads(re.search(r"^requires = (\[.*\])$", project, re.M)[1])
    installed = build_requirements()
    assert {Requirement(text).name for text in wanted} == installed.keys()
    for text in wanted:
        ours = Requirement(text)
        version = pinned("dev.txt", ours.name)
        assert ours.specifier.contains(version), text
        assert installed[ours.name].specifier.contains(version), text


def test_its_setuptools_are_those_that_torch_can_live_with() -> None:
    of_this_torch()
    asked = [Requirement(text) for text in importlib.metadata.requires("torch") or ()]
    theirs = next((one.specifier for one in asked if one.name == "setuptools"), None)
    assert theirs is not None
    taken = build_requirements()["setuptools"].specifier
    versions_around = [f"{number}.0.0" for number in range(60, 120)]
    assert all(theirs.contains(one) for one in versions_around if taken.contains(one))
