"""The examples of docs/worker.md run as they stand, against workers at other ports."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from nwor_specpv.cli import draft
from nwor_specpv.cli import worker as worker_command
from nwor_specpv.worker import ServerSecurity, rpc, security
from tests.python.models.tiny_decoding import decode_plain
from tests.python.worker.serving import MODEL, serving

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "worker.md").read_text(encoding="utf-8")
LOOP, SAMPLING, TLS = re.findall(r"^```python\n(.*?)^```", PAGE, re.M | re.S)
(MAKE_CERTIFICATE,) = re.findall(r"^```bash\n(.*?)^```", PAGE, re.M | re.S)


def run(example: str, address: str, documented: str = "127.0.0.1:50051") -> dict[str, Any]:
    """The names that an example leaves."""
    assert example.count(documented) == 1
    names: dict[str, Any] = {}
    exec(compile(example.replace(documented, address), "docs/worker.md", "exec"), names)
    return names


def test_the_example_decodes_like_plain_decoding() -> None:
    with serving() as worker:
        names = run(LOOP, worker.server.address)
        assert worker.store.stats()["forwards"] < 100  # some drafts were right
        assert worker.client.ping().sessions == 0
    prompt, tokens = names["prompt"], names["tokens"]
    assert tokens == (prompt + decode_plain(MODEL, prompt, 120).tokens)[: len(tokens)]


def test_the_example_of_sampling_repeats() -> None:
    with serving() as worker:
        first, second = (run(SAMPLING, worker.server.address)["result"] for _ in range(2))
    assert (first.tokens, first.next_token) == (second.tokens, second.next_token)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")
def test_the_example_with_tls_and_a_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    subprocess.run(["bash", "-ec", MAKE_CERTIFICATE], check=True, capture_output=True, timeout=300)
    own = ServerSecurity.load("worker.crt", "worker.key", "worker.token")
    assert len(own.token) == 64
    with serving(server_options={"security": own}) as worker:
        run(TLS, f"localhost:{worker.server.port}", "localhost:50051")


def test_every_command_is_one() -> None:
    parsers = {"worker": worker_command.build_parser(), "draft": draft.build_parser()}
    lines = re.findall(r"^nwor-specpv (.*)$", PAGE, re.M)
    assert len(lines) == 4
    for line in lines:
        name, *arguments = shlex.split(line, comments=True)
        parsers[name].parse_args(arguments)


def test_every_call_option_variable_and_package_is_there() -> None:
    for call in rpc.CALLS:
        assert f"| `{call}` |" in PAGE
    assert rpc.INSTALL in PAGE
    for name, value in vars(security).items():
        assert not name.endswith("_VARIABLE") or f"`{value}`" in PAGE, name

    def options(parser: Any) -> set[str]:
        return {text for action in parser._actions for text in action.option_strings}

    told = set(re.findall(r"--[a-z][a-z-]+", PAGE))
    own = options(worker_command.build_parser()) - {"-h", "--help"}
    assert own <= told
    assert told <= own | options(draft.build_parser()) | {"--url"}
