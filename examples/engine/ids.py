#!/usr/bin/env python3
"""Turns text into the token ids that the engine takes, and its result back into text.

    examples/engine/ids.py encode MODEL_FOLDER "Why is the sky blue?" "Write a poem." > prompts.json
    examples/engine/ids.py decode MODEL_FOLDER result.json

`encode` puts each text into the model's chat template where it has one. `decode` reads the engine's
--out file, or its standard output with the name -.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main(arguments: list[str]) -> None:
    if len(arguments) < 3 or arguments[0] not in ("encode", "decode"):
        sys.exit((__doc__ or "").strip())
    from transformers import AutoTokenizer

    verb, folder, *rest = arguments
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if verb == "encode":
        if tokenizer.chat_template:
            rest = [
                tokenizer.apply_chat_template(
                    [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
                )
                for text in rest
            ]
        marks = not tokenizer.chat_template  # a template has the special tokens in it
        print(json.dumps([tokenizer(text, add_special_tokens=marks).input_ids for text in rest]))
        return
    text = sys.stdin.read() if rest[0] == "-" else Path(rest[0]).read_text(encoding="utf-8")
    for index, ids in enumerate(json.loads(text)["token_ids"]):
        print(f"--- prompt {index}\n{tokenizer.decode(ids, skip_special_tokens=True)}")


if __name__ == "__main__":
    main(sys.argv[1:])
