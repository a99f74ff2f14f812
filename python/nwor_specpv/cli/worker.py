"""`nwor-specpv worker`: a model's sessions over gRPC, for drafters in other processes."""

from __future__ import annotations

import argparse
import logging
import math
import signal
import sys
import threading
from typing import TYPE_CHECKING

from nwor_specpv import Metrics, load_config
from nwor_specpv.config import metrics_url
from nwor_specpv.worker.address import check_address, is_loopback
from nwor_specpv.worker.limits import Limits

from .parser import PROGRAM, Parser, count, count_or_zero, require_device

if TYPE_CHECKING:
    from nwor_specpv import NworConfig, Settings
    from nwor_specpv.transformers.sessions import SessionTarget

DEFAULT_PORT = 50051
_EXIT_FAILURE = 1
_OPEN = "{} can be reached from other machines, and whoever reaches it may use it, unencrypted"

logger = logging.getLogger("nwor_specpv")


def main(argv: list[str]) -> int:
    try:
        from nwor_specpv.worker import rpc  # noqa: F401  (before anything is loaded)
    except ModuleNotFoundError as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return _EXIT_FAILURE
    arguments = _parser().parse_args(argv)
    return _serve(arguments)


def _parser() -> Parser:
    from .generate import add_model_arguments

    parser = Parser(prog="nwor-specpv worker", description=__doc__)
    add_model_arguments(parser)
    parser.add_argument("--host", default="127.0.0.1", help="address, default: 127.0.0.1")
    parser.add_argument(
        "--port", type=_port, default=DEFAULT_PORT, help=f"default: {DEFAULT_PORT}; 0: any free one"
    )
    parser.add_argument(
        "--cache-tokens", type=count, default=16384, help="of all sessions, default: 16384"
    )
    parser.add_argument(
        "--max-sessions", type=count_or_zero, default=0, help="at once; 0 (default): any number"
    )
    parser.add_argument(
        "--ttl",
        type=_seconds,
        default=600.0,
        help="seconds after which idle sessions go, default: 600; 0: never",
    )
    parser.add_argument("--max-batch", type=count, default=64, help="of a pass, default: 64")
    parser.add_argument("--max-tree-rows", type=count, default=256, help="of a call, default: 256")
    parser.add_argument(
        "--max-prompt-tokens", type=count, help="of a call, default: what a sequence may have"
    )
    parser.add_argument(
        "--max-calls",
        type=count,
        default=256,
        help="VerifyDrafts at once, others are refused; default: 256",
    )
    parser.add_argument("--metrics-port", type=_port, help="of the Prometheus endpoint; 0: any")
    parser.add_argument("--metrics-host", help="its address, default: 127.0.0.1")
    return parser


def _serve(arguments: argparse.Namespace) -> int:
    from nwor_specpv.worker.server import Server

    from .generate import model_name

    # What needs no model is looked at before one is loaded.
    given = {name: getattr(arguments, name) for name in ("metrics_port", "metrics_host")}
    settings = load_config({name: value for name, value in given.items() if value is not None})
    require_device(arguments.device)
    check_address(arguments.host, arguments.port)
    _limits(arguments, 1)
    target = _load_target(arguments, settings.nwor())
    limits = _limits(arguments, target.max_length)
    server = Server(
        target.store,
        model=model_name(arguments),
        vocab_size=target.vocab_size,
        limits=limits,
        host=arguments.host,
        port=arguments.port,
        max_batch=arguments.max_batch,
        max_sessions=arguments.max_sessions,
        max_length=target.max_length,
        sweep_seconds=max(1.0, arguments.ttl / 4) if arguments.ttl else None,
    )
    metrics = _serve_metrics(settings)
    if not is_loopback(arguments.host):
        logger.warning("worker: %s", _OPEN.format(arguments.host))
    stopping = _on_signals()
    with server:
        told = _describe(arguments, target, limits)
        at = f"{server.address}, model {model_name(arguments)}"
        print(f"worker: listening at {at}, {told}{metrics}", flush=True)
        stopping.wait()
    return 0


def _limits(arguments: argparse.Namespace, max_length: int) -> Limits:
    return Limits(
        arguments.max_tree_rows, arguments.max_prompt_tokens or max_length, arguments.max_calls
    )


def _describe(arguments: argparse.Namespace, target: SessionTarget, limits: Limits) -> str:
    sessions = arguments.max_sessions or "any number of"
    idle = f"idle ones go after {arguments.ttl:g} s" if arguments.ttl else "idle ones stay"
    return (
        f"at most {limits.max_tree_rows} tree rows and {limits.max_prompt_tokens} prompt tokens a "
        f"call, {target.cache_tokens} cached tokens ({target.cache_bytes / 2**20:.0f} MiB), "
        f"{sessions} sessions, {idle}"
    )


def _serve_metrics(settings: Settings) -> str:
    """Where they are, as the line about the worker goes on."""
    if (Metrics().serve_settings(settings) or -1) < 0:
        return ""
    at = Metrics().status()
    return f", metrics at {metrics_url(at['host'], at['port'])}"


def _load_target(arguments: argparse.Namespace, nwor: NworConfig) -> SessionTarget:
    import torch

    from nwor_specpv.transformers.loading import load_model
    from nwor_specpv.transformers.sessions import SessionTarget

    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    model, _ = load_model(arguments.model, arguments.dtype, arguments.device)
    return SessionTarget(
        model,
        cache_tokens=arguments.cache_tokens,
        nwor=nwor,
        ttl_seconds=arguments.ttl,
        max_sessions=arguments.max_sessions,
        max_batch=arguments.max_batch,
    )


def _on_signals() -> threading.Event:
    """Set by the first SIGINT or SIGTERM; a second one ends the process at once."""
    stopping = threading.Event()
    numbers = (signal.SIGINT, signal.SIGTERM)

    def stop(number: int, frame: object) -> None:
        for one in numbers:
            signal.signal(one, signal.SIG_DFL)
        stopping.set()

    for one in numbers:
        signal.signal(one, stop)
    return stopping


def _port(text: str) -> int:
    value = count_or_zero(text)
    if value > 65535:
        raise argparse.ArgumentTypeError(f"got {value}, expected 0 to 65535")
    return value


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected seconds, 0 or more")
    return value
