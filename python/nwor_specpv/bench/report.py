"""What every benchmark's command line and report have in common."""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import nwor_specpv
from nwor_specpv import NworError, _stamp
from nwor_specpv._files import write_whole
from nwor_specpv.cli.parser import count, output_file, require_device

# `--json` alone: to stdout, instead of the table.
_STDOUT = Path("-")


def add_json_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--json",
        type=output_file,
        nargs="?",
        const=_STDOUT,
        metavar="FILE",
        help="one JSON document and nothing else; with FILE the table, and the document there",
    )


def add_machine_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=["cuda", "cpu"], help="default: cuda when there is one")
    parser.add_argument("--threads", type=count, help="CPU threads, default: torch's")
    add_json_argument(parser)


def choose_device(arguments: argparse.Namespace) -> str:
    """The device to measure; sets the number of threads that was asked for."""
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    if arguments.device:
        require_device(arguments.device)
        return arguments.device
    return "cuda" if torch.cuda.is_available() else "cpu"


def machine(device: str) -> dict[str, Any]:
    """Where figures come from: the head of every report."""
    cpu = f"CPU, {torch.get_num_threads()} threads"
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else cpu,
        "processor": platform.machine(),
        "torch": torch.__version__,
        "revision": _stamp.read_stamp().revision,
        "version": nwor_specpv.__version__,
    }


def publish(
    report: dict[str, Any], describe: Callable[[dict[str, Any]], str], path: Path | None
) -> int:
    document = json.dumps(report, indent=2)
    print(document if path == _STDOUT else describe(report))
    if path is not None and path != _STDOUT:
        _write(path, document + "\n")
    return 0


def _write(path: Path, text: str) -> None:
    try:
        write_whole(path, text)
    except OSError as error:
        told = error.strerror or error
        raise NworError(f"--json: got {str(path)!r}, which cannot be written: {told}") from None
