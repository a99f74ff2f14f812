"""`nwor-specpv draft`: continues a prompt with drafts from here and a worker's model."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from nwor_specpv.errors import NworError

from .generate import (
    TextPrinter,
    add_prompt_arguments,
    add_sampling_arguments,
    encode,
    prompt_text,
)
from .parser import PROGRAM, Parser, address, count

_DEFAULT_WORKER = "127.0.0.1:50051"
_EXIT_FAILURE = 1


def build_parser() -> Parser:
    parser = Parser(prog="nwor-specpv draft", description=__doc__)
    add_prompt_arguments(parser)
    parser.add_argument(
        "--worker", type=address, default=_DEFAULT_WORKER, help=f"default: {_DEFAULT_WORKER}"
    )
    parser.add_argument(
        "--model",
        type=Path,
        help="folder of the tokenizer of the worker's model, default: SmolLM2-135M-Instruct",
    )
    parser.add_argument(
        "--drafter", choices=("ngram", "none"), default="ngram", help="default: ngram"
    )
    parser.add_argument("--rows", type=count, default=8, help="of a draft tree, default: 8")
    parser.add_argument("--depth", type=count, default=6, help="of a draft tree, default: 6")
    add_sampling_arguments(parser)
    parser.add_argument(
        "--timeout", type=float, default=120.0, help="seconds of one call, default: 120"
    )
    parser.add_argument(
        "--retry-seconds",
        type=float,
        default=0.0,
        help="how long a worker that cannot be reached is tried again, default: 0",
    )
    parser.add_argument(
        "--root-certificate", type=Path, help="PEM file to check the worker's certificate against"
    )
    parser.add_argument(
        "--tls", action="store_true", help="TLS with the root certificates that gRPC comes with"
    )
    parser.add_argument("--token-file", type=Path, help="file of the bearer token")
    parser.add_argument(
        "--insecure", action="store_true", help="call another machine without TLS or token"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    return parser


def run(arguments: argparse.Namespace) -> int:
    try:
        from nwor_specpv.worker.client import Client
        from nwor_specpv.worker.drafting import decode
    except ModuleNotFoundError as error:  # grpcio or protobuf
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return _EXIT_FAILURE
    from nwor_specpv.drafters import TreeConfig, make_drafter
    from nwor_specpv.worker.security import read_token

    text = prompt_text(arguments)
    tree = TreeConfig(rows=arguments.rows, depth=arguments.depth, top_k=2)
    client = Client(
        arguments.worker,
        timeout=arguments.timeout,
        root_certificate=arguments.root_certificate,
        tls=arguments.tls,
        token=read_token(arguments.token_file),
        insecure=arguments.insecure,
    )
    with client:
        info = client.ping(wait=arguments.retry_seconds > 0)
        tokenizer = _tokenizer(arguments.model)
        prompt = encode(tokenizer, text, raw=arguments.raw)
        if len(tokenizer) > info.vocab_size:
            raise NworError(
                f"--model: got a tokenizer of {len(tokenizer)} tokens, expected at most "
                f"{info.vocab_size}: the worker's model is {info.model}"
            )
        stream = None if arguments.json else TextPrinter(tokenizer)
        drafted = decode(
            client,
            make_drafter("ngram") if arguments.drafter == "ngram" else None,
            prompt,
            arguments.max_new_tokens,
            tree=tree,
            stop_ids=[] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id],
            on_token=stream,
            retry_seconds=arguments.retry_seconds,
            temperature=arguments.temperature,
            top_k=arguments.top_k,
            top_p=arguments.top_p,
            seed=arguments.seed,
        )
    if stream is None:
        answer = tokenizer.decode(drafted.token_ids, skip_special_tokens=True)
        print(json.dumps({"text": answer, "model": info.model, **drafted.as_dict()}))
        return 0
    stream.end()
    print(
        f"{len(drafted.token_ids)} tokens, {drafted.tokens_per_second:.1f} per second, "
        f"{drafted.tokens_per_call:.2f} per call, {drafted.acceptance_rate:.0%} of "
        f"{drafted.drafts} drafts accepted",
        file=sys.stderr,
    )
    return 0


def _tokenizer(folder: Path | None) -> Any:
    from transformers import AutoTokenizer

    from nwor_specpv.models import smollm2

    found = smollm2() if folder is None else folder
    if not (found / "tokenizer.json").is_file():
        raise NworError(f"--model: got {str(found)!r}, expected a folder with a tokenizer.json")
    return AutoTokenizer.from_pretrained(found, local_files_only=True)
