"""`nwor-specpv worker`: serves a model's sessions over gRPC to drafters in other processes."""

from __future__ import annotations

import argparse
import logging
import math
import signal
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nwor_specpv.config import load_config, metrics_url
from nwor_specpv.worker.address import check_address, is_loopback
from nwor_specpv.worker.limits import Limits
from nwor_specpv.worker.security import ServerSecurity

from .parser import PROGRAM, Parser, count, count_or_zero, require_device

if TYPE_CHECKING:
    from nwor_specpv import NworConfig, Settings
    from nwor_specpv.transformers.sessions import SessionTarget
    from nwor_specpv.worker.judging import Judge

DEFAULT_PORT = 50051
_EXIT_FAILURE = 1
_OPEN = "other machines can reach %s; there is no TLS or no token, as --insecure says"

logger = logging.getLogger("nwor_specpv")


def build_parser() -> Parser:
    from .generate import add_model_arguments

    parser = Parser(prog="nwor-specpv worker", description=__doc__)
    add_model_arguments(parser)
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen on, default: 127.0.0.1"
    )
    parser.add_argument(
        "--port",
        type=_port,
        default=DEFAULT_PORT,
        help=f"default: {DEFAULT_PORT}; 0: any free port",
    )
    parser.add_argument(
        "--cache-tokens", type=count, default=16384, help="of all sessions together, default: 16384"
    )
    parser.add_argument(
        "--max-sessions",
        type=count_or_zero,
        default=0,
        help="sessions at once; 0 (default): any number",
    )
    parser.add_argument(
        "--ttl",
        type=_seconds,
        default=600.0,
        help="seconds after which an idle session ends, default: 600; 0: never",
    )
    parser.add_argument(
        "--max-batch", type=count, default=64, help="sessions in one pass, default: 64"
    )
    parser.add_argument(
        "--max-tree-rows", type=count, default=256, help="of one call, default: 256"
    )
    parser.add_argument(
        "--max-prompt-tokens", type=count, help="of one call, default: the longest sequence"
    )
    parser.add_argument(
        "--max-calls",
        type=count,
        default=256,
        help="VerifyDrafts calls at once, more are refused; default: 256",
    )
    parser.add_argument(
        "--max-distribution-bytes",
        type=count_or_zero,
        default=Limits.max_distribution_bytes,
        help="of the draft distributions of one call, default: 16777216",
    )
    parser.add_argument(
        "--tls-certificate", type=Path, help="PEM file of the certificate; needs --tls-key"
    )
    parser.add_argument("--tls-key", type=Path, help="PEM file of its key")
    parser.add_argument(
        "--token-file", type=Path, help="file of the bearer token that clients must send"
    )
    parser.add_argument(
        "--insecure",
        action="store_true",
        help="listen without TLS or token where other machines can reach the worker",
    )
    parser.add_argument(
        "--metrics-port", type=_port, help="of the Prometheus endpoint; 0: any free port"
    )
    parser.add_argument("--metrics-host", help="address of that endpoint, default: 127.0.0.1")
    return parser


def run(arguments: argparse.Namespace) -> int:
    try:
        from nwor_specpv.worker.judging import Judge
        from nwor_specpv.worker.server import Server
        from nwor_specpv.worker.token_bytes import token_bytes_of
    except ModuleNotFoundError as error:  # grpcio or protobuf
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return _EXIT_FAILURE
    from .generate import model_name

    # Arguments that need no model are checked before one is loaded.
    given = {name: getattr(arguments, name) for name in ("metrics_port", "metrics_host")}
    settings = load_config({name: value for name, value in given.items() if value is not None})
    require_device(arguments.device)
    security = ServerSecurity.load(
        arguments.tls_certificate, arguments.tls_key, arguments.token_file
    )
    security.check_host(arguments.host, insecure=arguments.insecure)
    check_address(arguments.host, arguments.port)
    _limits(arguments, 1)
    judge = Judge()
    target, tokenizer = _load_target(arguments, settings.nwor(), judge)
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
        judge=judge,
        token_bytes=token_bytes_of(tokenizer),
        security=security,
        insecure=arguments.insecure,
    )
    metrics = _serve_metrics(settings)
    if not is_loopback(arguments.host) and (security.certificate is None or not security.token):
        logger.warning("worker: " + _OPEN, arguments.host)
    stopping = _on_signals()
    with server:
        secured = [("TLS", security.certificate), ("a token", security.token)]
        using = "".join(f", {name}" for name, value in secured if value is not None)
        at = f"{server.address}{using}, model {model_name(arguments)}"
        limited = _describe(arguments, target, limits)
        print(f"worker: listening at {at}, {limited}{metrics}", flush=True)
        stopping.wait()
    return 0


def _limits(arguments: argparse.Namespace, max_length: int) -> Limits:
    return Limits(
        arguments.max_tree_rows,
        arguments.max_prompt_tokens or max_length,
        arguments.max_calls,
        arguments.max_distribution_bytes,
    )


def _describe(arguments: argparse.Namespace, target: SessionTarget, limits: Limits) -> str:
    sessions = arguments.max_sessions or "any number of"
    idle = f"idle ones end after {arguments.ttl:g} s" if arguments.ttl else "idle ones stay"
    return (
        f"at most {limits.max_tree_rows} tree rows and {limits.max_prompt_tokens} prompt tokens a "
        f"call, {target.cache_tokens} cached tokens ({target.cache_bytes / 2**20:.0f} MiB), "
        f"{sessions} sessions, {idle}"
    )


def _serve_metrics(settings: Settings) -> str:
    """Starts the endpoint if one is set; returns the end of the line about the worker."""
    from nwor_specpv.metrics import Metrics

    if (Metrics().serve_settings(settings) or -1) < 0:
        return ""
    at = Metrics().status()
    return f", metrics at {metrics_url(at['host'], at['port'])}"


def _load_target(
    arguments: argparse.Namespace, nwor: NworConfig, judge: Judge
) -> tuple[SessionTarget, Any]:
    """The model's sessions, and its tokenizer or None."""
    import torch

    from nwor_specpv.transformers.loading import load_model
    from nwor_specpv.transformers.sessions import SessionTarget

    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    model, tokenizer = load_model(arguments.model, arguments.dtype, arguments.device)
    target = SessionTarget(
        model,
        cache_tokens=arguments.cache_tokens,
        nwor=nwor,
        ttl_seconds=arguments.ttl,
        max_sessions=arguments.max_sessions,
        max_batch=arguments.max_batch,
        accept=judge.accept,
    )
    return target, tokenizer


def _on_signals() -> threading.Event:
    """The first SIGINT or SIGTERM sets the event; a second one ends the process at once."""
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
