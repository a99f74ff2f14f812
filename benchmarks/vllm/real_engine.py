"""The engines of real.py, one for each side.

* plain: vLLM as it comes, without the plugin.
* ngram: vLLM's own n-gram drafting, on the GPU where there is one.
* eagle3: vLLM's own drafting with a head.
* lossless: the plugin's one switch; with a head, the head and the scheduler class too.
* streaming: as lossless, with views of the same size that have sinks and a window alone.
* idle: as lossless, but the closed loop has plain steps alone to choose from, and measures them as
  in service. Against plain it says what the plugin costs where drafts do not pay.
"""

from __future__ import annotations

import functools
import json
import platform
import time
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from real_measure import Size
from real_records import Cell

STOCK = ("plain", "ngram", "eagle3")
OURS = ("lossless", "streaming", "idle")
SIDES = (*STOCK, *OURS)
HEAD_DRAFTS = 4  # of stock vLLM with a head
LONG_DRAFTS = 15  # of ours with a head
NGRAM_DRAFTS = 5
PREFILL_TOKENS = {"cuda": 16384, "cpu": 1024}  # of a step
CACHE_SHARE = 0.75  # of a GPU's memory, at most: weights, graphs and views need room as well
_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


def environment(side: str, user: Mapping[str, str]) -> dict[str, str]:
    """Variables of a side's process: the user's, then ours. Stock sides do not load the plugin."""
    told = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    told |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "INFO"}
    return told | dict(user) | ({"VLLM_PLUGINS": "none"} if side in STOCK else {})


def speculation(side: str, head: str, *, gpu: bool) -> dict[str, Any] | None:
    """vLLM's speculative config; ours without a head has none, the plugin fills it in."""
    if side == "ngram":
        method = "ngram_gpu" if gpu else "ngram"
        lookups = {"prompt_lookup_max": 4, "prompt_lookup_min": 2}
        return {"method": method, "num_speculative_tokens": NGRAM_DRAFTS} | lookups
    if side == "plain" or not head:
        return None
    drafts = HEAD_DRAFTS if side == "eagle3" else LONG_DRAFTS
    return {"method": "eagle3", "model": head, "num_speculative_tokens": drafts}


def plugin_settings(side: str, keys: dict[str, Any]) -> dict[str, Any]:
    """Keys of the plugin. Streaming views spend all their blocks but the sinks on the window; who
    takes plain steps alone has no fixed passes."""
    from nwor_specpv.config import Settings

    told = {"enable_specpv": True} | keys
    if side == "streaming":
        known = Settings(**told)
        window = known.specpv_n_retrieval_blocks + known.specpv_n_window_blocks
        told |= {"specpv_selector": "streaming", "specpv_n_window_blocks": window}
    elif side == "idle":
        told["specpv_draft_passes"] = 0
    return told


def options(side: str, args: Namespace, cells: Sequence[Cell], *, gpu: bool) -> dict[str, Any]:
    """Arguments of vLLM's LLM."""
    device = "cuda" if gpu else "cpu"
    told: dict[str, Any] = {
        "model": args.model,
        "dtype": args.dtype,
        "max_model_len": longest(args, cells),
        "max_num_seqs": max(cell.requests for cell in cells),
        "max_num_batched_tokens": PREFILL_TOKENS[device],
        "enable_prefix_caching": args.share_prompts,
        "skip_tokenizer_init": True,
        "kv_cache_memory_bytes": cache_bytes(args, cells, gpu=gpu),
        "seed": 0,
    }
    if gpu:
        told["gpu_memory_utilization"] = 0.02  # the size of the cache is given
    else:
        told["enforce_eager"] = True
    drafting = speculation(side, args.head, gpu=gpu)
    if drafting is not None:
        told["speculative_config"] = drafting
    if side in OURS:
        told["additional_config"] = {"nwor_specpv": plugin_settings(side, args.set)}
        if gpu:
            told["attention_backend"] = "CUSTOM"
        if args.head:
            told["scheduler_cls"] = "nwor_specpv.vllm.specpv.scheduler.LongContextScheduler"
    return told | args.engine.get("all", {}) | args.engine.get(side, {})


def longest(args: Namespace, cells: Sequence[Cell]) -> int:
    """Tokens of a request that is ahead of the others, in the largest cell."""
    size = Size(args.tokens, args.warm_tokens, 0.0)
    wanted = max(cell.context for cell in cells) + size.most - size.room
    return min(wanted, model_config(args.model)["max_position_embeddings"])


def model_config(folder: str) -> dict[str, Any]:
    config = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    return config.get("text_config", config)


def shipped_head(out: Path, model: str) -> str:
    """The folder of SmolLM2's head, made in `out`."""
    from nwor_specpv.drafters.vllm_head import write_vllm_head

    folder = out.resolve() / "head"
    if not (folder / "config.json").exists():
        write_vllm_head(folder, Path(model))
    return str(folder)


def cache_bytes(args: Namespace, cells: Sequence[Cell], *, gpu: bool) -> int:
    """K/V memory of the largest cell, the same on all sides; less where the GPU has less for an
    engine."""
    config = model_config(args.model)
    heads = config["num_attention_heads"]
    size = config.get("head_dim") or config["hidden_size"] // heads
    dtype = args.dtype if args.dtype != "auto" else config.get("torch_dtype", "bfloat16")
    layers = config["num_hidden_layers"] + bool(args.head)
    token = 2 * layers * config.get("num_key_value_heads", heads) * size * _BYTES.get(dtype, 2)
    wanted = int(1.05 * max(c.requests * (c.context + 64) for c in cells) + 1024) * token
    if not gpu:
        return wanted
    import torch

    engines = len(args.sides) if args.together else 1
    total = torch.cuda.get_device_properties(0).total_memory
    return min(wanted, int(CACHE_SHARE * total / engines))


def take_plain_steps(llm: Any) -> None:
    """The plugin's scheduler, which is in this process, has nothing else to choose from."""
    from nwor_specpv.arms import PLAIN

    choice = llm.llm_engine.engine_core.engine_core.scheduler.decisions.choice
    choice.choose = functools.partial(choice.choose, only=(PLAIN,))


def start(side: str, args: Namespace, cells: Sequence[Cell]) -> tuple[Any, dict[str, Any]]:
    """The engine, and what is recorded about it."""
    import torch
    from engine_state import origin
    from vllm import LLM

    gpu, began = torch.cuda.is_available(), time.monotonic()
    chosen = options(side, args, cells, gpu=gpu)
    llm = LLM(**chosen)
    if side == "idle":
        take_plain_steps(llm)
    config = llm.llm_engine.vllm_config
    drafting = config.speculative_config
    told: dict[str, Any] = {
        "engine": side,
        "start_s": time.monotonic() - began,
        "device": torch.cuda.get_device_name() if gpu else f"{platform.machine()} CPU",
        "python": platform.python_version(),
        "cuda": torch.version.cuda if gpu else None,
        "dtype": str(config.model_config.dtype).removeprefix("torch."),
        "quantisation": config.model_config.quantization,
        "runner": "V2" if config.use_v2_model_runner else "V1",
        "scheduler": str(config.scheduler_config.scheduler_cls or "vLLM's"),
        "async_scheduling": bool(config.scheduler_config.async_scheduling),
        "drafter": drafting.method if drafting is not None else None,
        "drafts": drafting.num_speculative_tokens if drafting is not None else 0,
        "cudagraph_mode": str(config.compilation_config.cudagraph_mode),
        "cache_tokens": (config.cache_config.num_gpu_blocks or 0) * config.cache_config.block_size,
        "options": {name: value for name, value in chosen.items() if name != "model"},
    }
    if drafting is not None and args.head:
        told["options"]["speculative_config"] = dict(
            told["options"].get("speculative_config", {}), model=Path(args.head).name
        )
    return llm, told | origin()
