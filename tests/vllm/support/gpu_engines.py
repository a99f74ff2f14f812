"""Engines on a GPU: the story model, SmolLM2 with the shipped head, and dummy weights."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from nwor_specpv.drafters.vllm_head import write_vllm_head
from nwor_specpv.models import smollm2, stories
from support.engines import own_engine, start

GRAPHS = {
    "enforce_eager": False,
    "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
}
EAGER = {"enforce_eager": True}
# How engines run: full graphs alone, or as vLLM does by default: compiled, full and piecewise.
MODES = {"graphs": GRAPHS, "default": {"enforce_eager": False}}
both_modes = pytest.mark.parametrize("mode", list(MODES))
# Who guesses on model runner V2, and what each stands for in the compatibility table.
SERVES = {
    "lookups": pytest.mark.serves("lossless without a head", "V2"),
    "head": pytest.mark.serves("lossless with a head", "V2"),
}
both_guesses = pytest.mark.parametrize(
    "guesses", [pytest.param(name, marks=mark) for name, mark in SERVES.items()]
)
all_kinds = pytest.mark.parametrize(
    "kind",
    [
        pytest.param(f"{name}-{mode}", marks=mark)
        for name, mark in SERVES.items()
        for mode in ("eager", "graphs")
    ],
)


def both_runners(feature: str) -> pytest.MarkDecorator:
    """A test of a feature on each model runner."""
    marks = {runner: pytest.mark.serves(feature, runner.upper()) for runner in ("v1", "v2")}
    return pytest.mark.parametrize(
        "runner", [pytest.param(name, marks=mark) for name, mark in marks.items()]
    )


def choose_runner(monkeypatch: pytest.MonkeyPatch, runner: str) -> None:
    """Engines that start from now on have this model runner, whatever vLLM's default is."""
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", str(int(runner == "v2")))


def check_runner(runner: str) -> None:
    """The newest engine has run on this one."""
    found = own_engine().runner
    assert found is not None, "no step has ended"
    assert hasattr(found, "input_batch") is (runner == "v1"), f"not on {runner}"


STOCK = {"speculation": None, "attention_backend": "FLASH_ATTN"}
PLAIN = {"enable_nwor": False}
TURN = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
DRAFTS = 8
# The target drafts by itself, on model runner V2.
LOOKUPS = {"method": "ngram_gpu", "num_speculative_tokens": DRAFTS}
SCHEDULER = "nwor_specpv.vllm.specpv.scheduler.LongContextScheduler"
REFRESH = {
    "enable_specpv": True,
    "specpv_mode": "refresh",
    "specpv_n_sink_blocks": 1,
    "specpv_n_retrieval_blocks": 8,
    "specpv_n_window_blocks": 4,
    "specpv_full_refresh_interval": 3,
    "strict": True,
}
# Of 384 tokens, and what is drafted.
VIEW_OF_400 = {
    "enable_specpv": True,
    "specpv_n_sink_blocks": 2,
    "specpv_n_retrieval_blocks": 16,
    "specpv_n_window_blocks": 6,
    "specpv_draft_lookup": 4,
    "specpv_draft_passes": 3,
    "strict": True,
}


def begin(nwor: dict, **options: object):
    from vllm.compilation.monitor import set_cudagraph_capturing_enabled

    defaults = {
        "dtype": "bfloat16",
        "attention_backend": "CUSTOM",
        "kv_cache_memory_bytes": 64 << 20,
    }
    # Model runner V1 forbids captures when it is done, for the whole process; V2 asks before its
    # piecewise ones and never allows them again.
    set_cudagraph_capturing_enabled(True)
    return start(nwor, **(defaults | {"gpu_memory_utilization": 0.1} | options))


def stories_on_gpu(nwor: dict, **options: object):
    return begin(nwor, model=str(stories(64)), skip_tokenizer_init=True, **options)


def smollm2_head(folder: Path, drafts: int = 4) -> dict[str, object]:
    """Speculation with the head that this package ships."""
    head = write_vllm_head(folder, smollm2("bfloat16"))
    return {"method": "eagle3", "model": str(head), "num_speculative_tokens": drafts}


def eagle3(folder: Path, nwor: dict, *, drafts: int = 4, **options: object):
    speculation = {
        "method": "eagle3",
        "model": str(dummy_head(folder)),
        "num_speculative_tokens": drafts,
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_length": 3.0,
    }
    defaults = {
        "model": str(dummy_target(folder)),
        "skip_tokenizer_init": True,
        "load_format": "dummy",
        "max_model_len": 1024,
    }
    return begin(nwor, speculation=speculation, **(defaults | options))


def dummy_target(folder: Path) -> Path:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 1024,
        "intermediate_size": 2048,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "vocab_size": 4096,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "bfloat16",
    }
    return write_config(folder / "target", config)


def dummy_head(folder: Path) -> Path:
    target = json.loads((dummy_target(folder) / "config.json").read_text())
    head = {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1}
    return write_config(folder / "head", target | head | {"draft_vocab_size": 4096})


def write_config(folder: Path, config: dict) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def dummy_prompts() -> list[list[int]]:
    rng = random.Random(5)
    return [[rng.randrange(3, 4096) for _ in range(n)] for n in (30, 5, 200, 64, 17, 90)]
