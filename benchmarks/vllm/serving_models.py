"""The models of serving.py and what their servers are told: real ones, and an 8B model's shapes."""

from __future__ import annotations

import subprocess
from argparse import Namespace
from pathlib import Path
from typing import Any

import model_shapes
import psutil
from real_engine import shipped_head
from server_process import has_gpu
from serving_records import PLAIN, STOCK

SHAPES = "llama-3.1-8b"
SHAPES_HEAD = "dummy"
# Of the drafts of a dummy head, how often the first ones are accepted: 2 of 4 in the mean.
ACCEPTED = (0.75, 0.55, 0.4, 0.3)
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4}
HEAD_DRAFTS, LONG_DRAFTS = 4, 15
CACHE_SHARE = 0.45  # of the memory, of all servers together: weights and graphs need room as well


def resolve(args: Namespace) -> None:
    """Makes the folders of the shipped names and of the shapes."""
    args.name, args.load, args.preset = Path(args.model).name, [], {}
    if args.model in ("smollm2", SHAPES):
        from nwor_specpv.models import smollm2

        real = str(smollm2(args.dtype))
        if args.model == SHAPES:
            args.name = "Llama-3.1-8B shapes"
            args.load = ["--load-format", "dummy"]
            folder = args.out.resolve() / "target"
            args.model = str(model_shapes.write_model(folder, Path(real)))
        else:
            args.model, args.name = real, "SmolLM2-135M-Instruct"
    if args.head == "shipped":
        args.head = shipped_head(args.out, args.model)
    elif args.head == SHAPES_HEAD:
        args.head = str(model_shapes.eagle_head(args.out.resolve()))
        args.preset = {
            "rejection_sample_method": "synthetic",
            "synthetic_acceptance_rates": list(ACCEPTED),
        }


def speculation(side: str, args: Namespace) -> dict[str, Any] | None:
    """vLLM's speculative config. Without a head `enable_specpv` chooses one itself."""
    if side == PLAIN:
        return None
    if args.head:
        drafts = LONG_DRAFTS if side == "long" else HEAD_DRAFTS
        told = {"method": "eagle3", "model": args.head, "num_speculative_tokens": drafts}
        return told | args.preset | args.speculation
    return None if side == "long" else NGRAM | args.speculation


def settings(side: str, args: Namespace) -> dict[str, Any] | None:
    """Keys of the plugin; None: without it."""
    if side in (PLAIN, STOCK):
        return None
    return ({"enable_specpv": True} if side == "long" else {}) | args.set


def cache_bytes(servers: int) -> int:
    """K/V memory of a server. It is given, so that no server measures what is free: all can start
    at once, and all have the same."""
    total = psutil.virtual_memory().total
    if has_gpu():
        command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        total = int(told.split()[0]) << 20
    return int(CACHE_SHARE * total / servers)
