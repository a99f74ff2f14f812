"""The example of docs/worker.md runs as it stands, against a worker at another port."""

from __future__ import annotations

import re
from pathlib import Path

from nwor_specpv.cli.worker import build_parser
from nwor_specpv.worker import rpc
from tests.python.models.tiny_decoding import decode_plain
from tests.python.worker.serving import MODEL, serving

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "worker.md").read_text(encoding="utf-8")


def test_the_example_decodes_like_plain_decoding() -> None:
    (example,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.M | re.S)
    assert example.count("127.0.0.1:50051") == 1
    names: dict[str, list[int]] = {}
    with serving() as worker:
        example = example.replace("127.0.0.1:50051", worker.server.address)
        exec(compile(example, "docs/worker.md", "exec"), names)
        assert worker.store.stats()["forwards"] < 100  # some drafts were right
        assert worker.client.ping().sessions == 0
    prompt, tokens = names["prompt"], names["tokens"]
    assert tokens == (prompt + decode_plain(MODEL, prompt, 120).tokens)[: len(tokens)]


def test_every_call_option_and_package_is_there() -> None:
    for call in rpc.CALLS:
        assert f"| `{call}` |" in PAGE
    assert rpc.INSTALL in PAGE
    options = {text for action in build_parser()._actions for text in action.option_strings}
    told = set(re.findall(r"--[a-z][a-z-]+", PAGE))
    assert told | {"--help"} == options - {"-h"}
