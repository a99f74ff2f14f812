"""The commands of docs/vllm*.md, the README and deploy/, on the real vLLM."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from nwor_specpv.vllm.settings import read_settings
from support.commands import ROOT, SERVER, blocks, compose_arguments, server_arguments
from support.installed import server_arguments_module
from support.server import free_port, stop, wait_until_ready

# Pages, and how many servers each of them starts.
PAGES = {"docs/vllm.md": 3, "docs/vllm_long_context.md": 3, "README.md": 2}


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


@pytest.mark.slow
def test_a_newcomer_comes_to_a_scraped_metric(tmp_path: Path) -> None:
    """The page's own commands for a CPU, from after `make setup-vllm` on, at free ports."""
    (begin,) = [block for block in blocks("docs/vllm.md") if "make setup-vllm" in block]
    (ask,) = [block for block in blocks("docs/vllm.md") if "curl" in block]
    assert SERVER in begin
    port, metrics = str(free_port()), str(free_port())
    begin = begin.replace("make setup-vllm\n", "").replace("9400", metrics)
    begin = begin.replace(f"-m {SERVER}", f"-m {SERVER} --port {port}")
    begin = begin.replace("\n.venv-vllm", "\nexec .venv-vllm")
    ask = ask.replace("9400", metrics).replace("8000", port)
    log = tmp_path / "server.log"
    env = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_LOGGING_LEVEL": "INFO"}
    with log.open("w") as out:
        shell = ["bash", "-ec", begin]
        server = subprocess.Popen(shell, cwd=ROOT, env=env, stdout=out, stderr=out)
    try:
        wait_until_ready(server, f"http://localhost:{port}/health", log)
        shell = ["bash", "-eo", "pipefail", "-c", ask]
        done = subprocess.run(shell, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    finally:
        stop(server)
    assert "Application startup complete" in log.read_text()
    assert '"choices"' in done.stdout
    counted = dict(re.findall(r"^nwor_(\w+)_tokens_total\S* (\S+)$", done.stdout, re.MULTILINE))
    staged, committed, rejected = (float(counted[n]) for n in ("staged", "committed", "rejected"))
    assert staged == committed + rejected > 0
