"""`nwor-specpv draft` against `nwor-specpv worker`: two processes, as they are used."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

import pytest

from nwor_specpv.models import smollm2, stories
from nwor_specpv.transformers import Generator, load_model
from nwor_specpv.worker import ServerSecurity
from tests.python.cli.commands import call, run
from tests.python.cli.test_worker_command import started
from tests.python.worker.serving import PATIENCE_S, serving
from tests.python.worker.test_token_bytes import byte_level

PROMPT = "Once upon a time, there was a little girl"


@pytest.fixture(scope="module")
def story_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The story model with a tokenizer that it was not trained with."""
    destination = tmp_path_factory.mktemp("m") / "stories"
    folder = stories(progress=lambda *_: None, destination=destination)
    byte_level().save_pretrained(folder)
    return folder


def listening(line: str) -> str:
    return re.match(r"worker: listening at (\S+),", line)[1]


@pytest.mark.slow
def test_two_processes_write_what_one_writes(story_folder: Path) -> None:
    generator = Generator(*load_model(story_folder), drafter="none")
    ids = generator.tokenizer(PROMPT).input_ids
    expected = generator.generate(ids, 40)
    with started("--model", str(story_folder), "--port", "0", "--cache-tokens", "1024") as (
        process,
        line,
    ):
        worker = ("draft", "--worker", listening(line), "--model", str(story_folder), "--raw")
        plain = ("--prompt", PROMPT, "--max-new-tokens", "40")
        answer = run(*worker, *plain, "--json")
        assert (answer.returncode, answer.stderr) == (0, "")
        report = json.loads(answer.stdout)
        assert report["token_ids"] == expected.token_ids
        assert report["text"] == expected.text
        assert report["accepted"] == len(report["token_ids"]) - report["calls"]
        answer = run(*worker, *plain)
        assert answer.stdout == expected.text + "\n"
        assert re.fullmatch(
            r"40 tokens, [\d.]+ per second, [\d.]+ per call, \d+% of \d+ drafts accepted\n",
            answer.stderr,
        )
        sampled = [
            run(*worker, *plain, "--temperature", "0.9", "--seed", "4", "--json").stdout
            for _ in range(2)
        ]
        assert json.loads(sampled[0])["text"] == json.loads(sampled[1])["text"] != expected.text
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0
    answer = run(*worker, *plain)
    assert (answer.returncode, answer.stdout) == (2, "")
    assert answer.stderr.startswith(f"nwor-specpv: worker at {listening(line)} (without TLS): ")
    assert answer.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("--prompt", "a", "--worker", ""), "--worker: got '', expected the address"),
        (("--prompt", "a", "--worker", "192.0.2.1:1"), "address: got '192.0.2.1:1', which is on"),
        (("--prompt", "a", "--token-file", "/no/such"), "--token-file: got '/no/such'"),
        (("--prompt", "a", "--rows", "300"), "rows: got 300, expected 0 to 256"),
        (("--file", "/no/such"), "--file: got '/no/such', which cannot be read"),
        (("--prompt", "a", "--timeout", "0"), "timeout: got 0.0"),
        ((), "one of the arguments --prompt --file is required"),
    ],
)
def test_wrong_use_is_one_line(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], line: str
) -> None:
    code, out, err = call(capsys, "draft", *arguments)
    assert (code, out) == (2, "")
    assert line in err
    assert err.count("\n") == 1


def test_another_tokenizer_or_token_is_told(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, story_folder: Path
) -> None:
    secret = tmp_path / "token"
    secret.write_text("secret")
    options = {"security": ServerSecurity(token="secret")}
    with serving(server_options=options) as worker:
        arguments = ("draft", "--worker", worker.server.address, "--prompt", "a")
        code, _, err = call(capsys, *arguments)
        assert (code, "UNAUTHENTICATED: the bearer token is missing" in err) == (2, True)
        code, _, err = call(capsys, *arguments, "--token-file", str(secret), "--model", "/no")
        assert "--model: got '/no', expected a folder with a tokenizer.json" in err
        code, out, err = call(
            capsys, *arguments, "--token-file", str(secret), "--model", str(story_folder), "--json"
        )
        assert (code, err) == (0, "")
        assert json.loads(out)["model"] == "stories260K"


@pytest.mark.slow
def test_smollm2_drafts_remotely_what_it_generates() -> None:
    folder = smollm2("float32")
    generator = Generator(*load_model(folder), drafter="none")
    turns = [{"role": "user", "content": "Count from one to thirty in words."}]
    ids = generator.tokenizer.apply_chat_template(
        turns, add_generation_prompt=True, return_dict=False
    )
    expected = generator.generate(ids, 60)
    with started("--port", "0", "--cache-tokens", "1024") as (_, line):
        answer = run(
            *("draft", "--worker", listening(line), "--prompt", turns[0]["content"]),
            *("--max-new-tokens", "60", "--json"),
        )
    assert answer.stderr == ""
    report = json.loads(answer.stdout)
    assert report["token_ids"] == expected.token_ids
    assert report["calls"] < len(report["token_ids"])
