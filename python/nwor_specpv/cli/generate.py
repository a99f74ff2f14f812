"""`nwor-specpv generate`: continues a prompt, with any drafter and any mode."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nwor_specpv.errors import NworError

from .parser import Parser, count, require_device

if TYPE_CHECKING:
    from nwor_specpv import SpecPVConfig

MODES = ("off", "rectify", "refresh", "lossless")
VIEW_TOKENS = 1024
_BLOCK, _SINK, _WINDOW = 16, 2, 8


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", type=Path, help="folder of a model, default: SmolLM2-135M-Instruct"
    )
    parser.add_argument("--dtype", default="float32", help="float32 (default), bfloat16, float16")
    parser.add_argument("--device", default="cpu", help="cpu (default) or cuda")
    parser.add_argument("--threads", type=count, help="CPU threads, default: torch's")


def add_prompt_arguments(parser: argparse.ArgumentParser) -> None:
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt", help="the text to answer or to continue")
    source.add_argument("--file", type=Path, help="a file with that text; - reads standard input")
    parser.add_argument("--max-new-tokens", type=count, default=200, help="default: 200")
    parser.add_argument(
        "--raw", action="store_true", help="continue the text itself, without a chat template"
    )


def prompt_text(arguments: argparse.Namespace) -> str:
    """The text of --prompt or --file."""
    if arguments.file is None:
        return arguments.prompt
    try:
        if str(arguments.file) == "-":
            return sys.stdin.buffer.read().decode("utf-8")
        return arguments.file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        got = repr(str(arguments.file))
        raise NworError(f"--file: got {got}, which cannot be read: {error}") from None


def add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--temperature", type=float, default=0.0, help="0 (default): greedy")
    parser.add_argument(
        "--top-k", type=int, default=0, help="sample from the k likeliest tokens; 0 (default): all"
    )
    parser.add_argument(
        "--top-p",
        type=float,
        default=1.0,
        help="sample from the likeliest tokens of this mass; 1 (default): all",
    )
    parser.add_argument("--seed", type=int, help="seed of sampling, default: a new one each time")


def model_name(arguments: argparse.Namespace) -> str:
    """The name that reports show."""
    return "SmolLM2-135M-Instruct" if arguments.model is None else str(arguments.model)


def view_config(
    mode: str, view_tokens: int, tail_tokens: int | None = None, partial_steps: int = 0
) -> SpecPVConfig | None:
    """Partial verification with views of `view_tokens` tokens; None when it is off.

    `partial_steps`: between full steps at most; 0: as many as the tail has room for.
    """
    if mode == "off":
        return None
    from nwor_specpv import SpecPVConfig

    if tail_tokens is None:
        # A lossless tail is discarded from its first wrong token on: short tails lose less.
        tail_tokens = 16 if mode == "lossless" else 48
    blocks = view_tokens // _BLOCK - _SINK - _WINDOW
    if blocks < 1:
        least = _BLOCK * (_SINK + _WINDOW + 1)
        raise NworError(f"--view-tokens: got {view_tokens}, expected {least} or more")
    return SpecPVConfig(
        enable_specpv=True,
        specpv_mode=mode,
        specpv_block_size=_BLOCK,
        specpv_n_sink_blocks=_SINK,
        specpv_n_window_blocks=_WINDOW,
        specpv_n_retrieval_blocks=blocks,
        specpv_n_spec_tokens_buf=tail_tokens,
        specpv_full_refresh_interval=partial_steps,
    )


def load(arguments: argparse.Namespace) -> tuple[Any, Any]:
    """Model and tokenizer; sets the number of threads."""
    import torch

    from nwor_specpv.models.folder import torch_dtype
    from nwor_specpv.transformers.loading import load_model

    torch_dtype(arguments.dtype)
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    require_device(arguments.device)
    model, tokenizer = load_model(arguments.model, arguments.dtype, arguments.device)
    if tokenizer is None:
        raise NworError(f"model: {arguments.model} has no tokenizer, expected tokenizer.json in it")
    return model, tokenizer


def encode(tokenizer: Any, text: str, *, raw: bool) -> list[int]:
    """Token ids of a prompt: a chat's user turn if the model has a chat template, or `raw`."""
    if raw or not getattr(tokenizer, "chat_template", None):
        return list(tokenizer(text).input_ids)
    turns = [{"role": "user", "content": text}]
    return list(tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False))


def build_parser() -> Parser:
    parser = Parser(prog="nwor-specpv generate", description=__doc__)
    add_prompt_arguments(parser)
    parser.add_argument(
        "--drafter",
        help="none, ngram (default with --model), draft_model or eagle3 (default without)",
    )
    parser.add_argument("--draft-model", type=Path, help="folder of the smaller model")
    parser.add_argument(
        "--specpv", choices=MODES, default="off", help="partial verification, default: off"
    )
    parser.add_argument(
        "--view-tokens",
        type=count,
        help=f"tokens that a partial step attends to, default: {VIEW_TOKENS}",
    )
    parser.add_argument(
        "--specpv-storage",
        choices=("paged", "compact"),
        help="what a partial step reads: blocks of the cache (paged, default) or a copy (compact)",
    )
    parser.add_argument(
        "--offload",
        action="store_true",
        help="keep the cache in host memory and copies for partial steps on the device",
    )
    add_sampling_arguments(parser)
    parser.add_argument(
        "--min-p",
        type=float,
        default=0.0,
        help="sample from tokens at least so likely relative to the likeliest; 0 (default): all",
    )
    parser.add_argument(
        "--repetition-penalty",
        type=float,
        default=1.0,
        help="above 1: tokens of the prompt and the answer become less likely; default: 1",
    )
    parser.add_argument(
        "--presence-penalty",
        type=float,
        default=0.0,
        help="taken from the logits of tokens that the answer has; default: 0",
    )
    parser.add_argument(
        "--stop", action="append", metavar="TEXT", help="end before this text; may be repeated"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    add_model_arguments(parser)
    return parser


def run(arguments: argparse.Namespace) -> int:
    from nwor_specpv.transformers.calls.processors import Processors
    from nwor_specpv.transformers.calls.sampling import Sampling
    from nwor_specpv.transformers.drafting import check_drafter
    from nwor_specpv.transformers.generate import Generator

    # Arguments that need no model are checked before one is loaded.
    text = prompt_text(arguments)
    # The shipped head fits the default model only.
    drafter = arguments.drafter
    if drafter is None:
        drafter = "eagle3" if arguments.model is None else "ngram"
    check_drafter(drafter, arguments.draft_model)
    Sampling(arguments.temperature, arguments.top_k, arguments.top_p, arguments.min_p)
    Processors(arguments.repetition_penalty, arguments.presence_penalty)
    specpv = _views(arguments)
    model, tokenizer = load(arguments)
    generator = Generator(
        model, tokenizer, drafter, specpv=specpv, draft_model=arguments.draft_model
    )
    stream = None if arguments.json else TextPrinter(tokenizer, tuple(arguments.stop or ()))
    generation = generator.generate(
        encode(tokenizer, text, raw=arguments.raw),
        arguments.max_new_tokens,
        arguments.temperature,
        arguments.top_k,
        arguments.top_p,
        arguments.seed,
        on_token=stream,
        min_p=arguments.min_p,
        repetition_penalty=arguments.repetition_penalty,
        presence_penalty=arguments.presence_penalty,
        stop=arguments.stop,
    )
    stats = generation.stats
    if stream is None:
        record = {
            "token_ids": generation.token_ids,
            "text": generation.text,
            "finish": generation.finish,
            "stats": stats.as_dict(),
        }
        print(json.dumps(record))
        return 0
    stream.end()
    print(
        f"{stats.new_tokens} tokens, {stats.tokens_per_second:.1f} per second, "
        f"{stats.tokens_per_step:.2f} per step",
        file=sys.stderr,
    )
    return 0


def _views(arguments: argparse.Namespace) -> SpecPVConfig | None:
    given = {
        "--view-tokens": arguments.view_tokens,
        "--specpv-storage": arguments.specpv_storage,
        "--offload": arguments.offload or None,
    }
    option = next((name for name, value in given.items() if value is not None), None)
    if arguments.specpv == "off" and option is not None:
        raise NworError(
            f"{option}: got {given[option]} beside --specpv off, which has no views; expected "
            "--specpv rectify, refresh or lossless"
        )
    config = view_config(arguments.specpv, arguments.view_tokens or VIEW_TOKENS)
    if arguments.offload and arguments.specpv_storage == "paged":
        raise NworError("--offload: got --specpv-storage paged beside it, expected compact")
    if config is not None and (arguments.offload or arguments.specpv_storage == "compact"):
        config.specpv_storage, config.specpv_offload = "compact", arguments.offload
    return config


class TextPrinter:
    """Prints text as tokens arrive."""

    def __init__(self, tokenizer: Any, stop: tuple[str, ...] = ()) -> None:
        from nwor_specpv.transformers.calls.streaming import TextPieces

        self._pieces = TextPieces(tokenizer, stop)

    def __call__(self, token: int) -> None:
        print(self._pieces.add(token), end="", flush=True)

    def end(self) -> None:
        print(self._pieces.end())
