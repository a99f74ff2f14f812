"""Seconds of a verification step by its rows: measured once, kept between processes."""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import time
from pathlib import Path
from typing import Any

import torch

from nwor_specpv import _stamp
from nwor_specpv._files import write_whole
from nwor_specpv.models.folder import cache_root
from nwor_specpv.transformers.request import Part, Request
from nwor_specpv.transformers.round import Round
from nwor_specpv.transformers.runner import ModelRunner

from .chooser import SIZES

_WORTH_KEEPING = 0.5  # seconds of a measurement; a shorter one is made again
# Of a configuration, what says how much work a row is.
_SIZES_OF_MODEL = (
    "model_type",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "num_experts",
    "num_experts_per_tok",
)


def row_costs(runner: ModelRunner) -> dict[int, float]:
    """Kept costs, or measured ones. REQUIRES: room in the cache for the largest size."""
    place = _place(runner)
    kept = _read(place)
    if kept is not None:
        return kept
    began = time.perf_counter()
    costs = measure(runner)
    if time.perf_counter() - began >= _WORTH_KEEPING:
        _keep(place, costs)
    return costs


def measure(runner: ModelRunner) -> dict[int, float]:
    """Seconds of passes of 1 to 32 rows, the best of four each.

    Sizes take turns, so that what holds the machine up for a while holds up all of them. Fewer
    rows never cost more: a size that was held up every time is as quick as the next.
    """
    costs = dict.fromkeys(SIZES, math.inf)
    with runner.installed():
        for rows in SIZES * 4:
            costs[rows] = min(costs[rows], _time_pass(runner, rows))
    least = [min(costs[more] for more in SIZES if more >= rows) for rows in SIZES]
    return dict(zip(SIZES, least, strict=True))


def _time_pass(runner: ModelRunner, rows: int) -> float:
    request = Request(runner.new_key(), 0, [0] * rows, rows, 1, 0, rows)
    runner.cache.allocator.extend(request.key, 0)
    part = Part(request, [0] * (rows - 1), [0], [-1], 0, want_fed_logits=True)
    try:
        started = time.perf_counter()
        round_ = Round(runner, [part])
        try:
            round_.run(None, 1)
            round_.commit([[]])
        except BaseException:
            round_.abort()
            raise
        runner.synchronize()
        return time.perf_counter() - started
    finally:
        runner.cache.allocator.free(request.key)


# ---- the file ------------------------------------------------------------------------------------


def _place(runner: ModelRunner) -> Path:
    name = hashlib.sha256(json.dumps(_key(runner), sort_keys=True).encode()).hexdigest()[:24]
    return cache_root() / "row_costs" / f"{name}.json"


def _key(runner: ModelRunner) -> dict[str, Any]:
    """All that costs depend on: the model's sizes, the machine, its threads, the library."""
    text = runner.model.config.get_text_config(decoder=True)
    on_gpu = runner.device.type == "cuda"
    return {
        "model": {name: getattr(text, name, None) for name in _SIZES_OF_MODEL},
        "classes": sorted({type(one).__qualname__ for one in runner.model.modules()}),
        "dtype": str(runner.dtype),
        "device": torch.cuda.get_device_name(runner.device) if on_gpu else "cpu",
        "machine": [platform.node(), platform.machine(), _cpu_name(), os.cpu_count()],
        "threads": torch.get_num_threads(),
        "offload": runner.offload,
        "versions": [_stamp.read_stamp().version, torch.__version__],
    }


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines()
    except OSError:  # not Linux
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if "model name" in line), "")


def _read(place: Path) -> dict[int, float] | None:
    """None: there are none, or the file is damaged; it is then written again."""
    try:
        kept = json.loads(place.read_text("utf-8"))
        costs = {int(rows): float(seconds) for rows, seconds in kept["seconds"].items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None
    right = tuple(costs) == SIZES and all(0 < one < math.inf for one in costs.values())
    return costs if right else None


def _keep(place: Path, costs: dict[int, float]) -> None:
    """Writes them; a folder that cannot be written only means that they are measured again."""
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        write_whole(place, json.dumps({"seconds": costs}) + "\n")
    except OSError:
        return
