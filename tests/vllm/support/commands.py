"""Commands that our pages and files tell users to run vLLM with."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[3]
SERVER = "vllm.entrypoints.openai.api_server"


def blocks(page: str) -> list[str]:
    """The shell blocks of a page."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return re.findall(r"^```bash\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def server_arguments(page: str) -> list[list[str]]:
    """Arguments of every `vllm serve MODEL ...` and `python -m ...api_server ...` of a page."""
    found = []
    for block in blocks(page):
        for line in shell_lines(block):
            words = shlex.split(line, comments=True)
            if words[:2] == ["vllm", "serve"]:
                found.append(["--model", words[2], *words[3:]])
            elif SERVER in words:
                found.append(words[words.index(SERVER) + 1 :])
    return found


def shell_lines(block: str) -> list[str]:
    """Whole commands: lines that go on, and quotes that are open, are joined."""
    lines, open_line = [], ""
    for line in block.replace("\\\n", " ").splitlines():
        open_line += line
        if open_line.count("'") % 2:
            open_line += "\n"
            continue
        if open_line.strip():
            lines.append(open_line)
        open_line = ""
    return lines


def compose_arguments() -> list[str]:
    """What the image and the compose file start vLLM with, variables at their defaults."""
    image = (ROOT / "deploy" / "Dockerfile").read_text(encoding="utf-8")
    (entry,) = re.findall(r"^ENTRYPOINT (\[.*\])$", image, re.MULTILINE)
    program, *own = json.loads(entry)[2:]
    assert program == SERVER
    compose = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text(encoding="utf-8"))
    command = compose["services"]["vllm"]["command"]
    return own + [re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", word) for word in command]
