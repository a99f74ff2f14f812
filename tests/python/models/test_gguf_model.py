"""GGUF files: every format is read as written, and damaged files are errors of one line."""

from __future__ import annotations

import random
import struct
from pathlib import Path

import numpy as np
import pytest

from nwor_specpv import NworError
from nwor_specpv.models.gguf_model import GgufModel
from nwor_specpv.models.weights import load_weights
from tests.python.models.gguf_writer import gguf_file, gguf_string


def half(value: float) -> float:
    return struct.unpack("<e", struct.pack("<e", value))[0]


def q4_1(rng: random.Random, blocks: int) -> tuple[bytes, list[float]]:
    raw, values = b"", []
    for _ in range(blocks):
        scale, low = half(rng.uniform(0.01, 1)), half(rng.uniform(-4, 0))
        nibbles = [rng.randrange(16) for _ in range(32)]
        raw += struct.pack("<ee", scale, low)
        raw += bytes(nibbles[i] | nibbles[i + 16] << 4 for i in range(16))
        values += [np.float32(scale) * np.float32(n) + np.float32(low) for n in nibbles]
    return raw, values


def q8_0(rng: random.Random, blocks: int) -> tuple[bytes, list[float]]:
    raw, values = b"", []
    for _ in range(blocks):
        scale = half(rng.uniform(0.001, 0.1))
        numbers = [rng.randrange(-128, 128) for _ in range(32)]
        raw += struct.pack("<e32b", scale, *numbers)
        values += [np.float32(scale) * np.float32(n) for n in numbers]
    return raw, values


def test_every_format_is_read_as_written(tmp_path: Path) -> None:
    rng = random.Random(7)
    four, four_values = q4_1(rng, 6)
    eight, eight_values = q8_0(rng, 4)
    meta = {"general.architecture": "llama", "n": 3, "x": 0.5, "words": ["a", "ü"], "ids": [1, -2]}
    path = gguf_file(
        tmp_path / "m.gguf",
        meta,
        {
            "q4": ((3, 64), 3, four),
            "q8": ((2, 64), 8, eight),
            "f32": ((3,), 0, struct.pack("<3f", 1, -2, 3.5)),
            "f16": ((2, 2), 1, struct.pack("<4e", 1, 2, 3, -0.5)),
            "bf16": ((2,), 30, struct.pack("<2H", 0x3F80, 0xC000)),
        },
    )
    file = GgufModel(path)
    assert meta.items() <= file.metadata.items()
    assert [file.shape(name) for name in ("q4", "q8", "f32")] == [(3, 64), (2, 64), (3,)]
    assert file.tensor("q4").tolist() == np.array(four_values).reshape(3, 64).tolist()
    assert file.tensor("q8").tolist() == np.array(eight_values).reshape(2, 64).tolist()
    assert file.tensor("f32").tolist() == [1, -2, 3.5]
    assert file.tensor("f16").tolist() == [[1, 2], [3, -0.5]]
    assert file.tensor("bf16").tolist() == [1, -2]


def gguf_bytes(meta: bytes = b"", tensors: tuple[tuple[str, list[int], int], ...] = ()) -> bytes:
    """A file with the given metadata entry, and tensors (name, sizes innermost first, type)."""
    out = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), bool(meta)) + meta
    for name, sizes, kind in tensors:
        out += gguf_string(name) + struct.pack(f"<I{len(sizes)}Q", len(sizes), *sizes)
        out += struct.pack("<IQ", kind, 0)
    return out + bytes(-len(out) % 32 + 64)


def entry(key: str, kind: int, raw: bytes) -> bytes:
    return gguf_string(key) + struct.pack("<I", kind) + raw


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"GGML" + bytes(40), id="another magic"),
        pytest.param(b"GGUF" + struct.pack("<IQQ", 9, 0, 0), id="another version"),
        pytest.param(b"GGUF" + struct.pack("<IQQ", 3, 5, 5), id="no metadata"),
        pytest.param(gguf_bytes(entry("a", 99, b"")), id="unknown metadata type"),
        pytest.param(
            gguf_bytes(entry("a", 8, struct.pack("<Q", 2**64 - 1)), (("w", [2], 0),)),
            id="a string beyond the end",
        ),
        pytest.param(
            gguf_bytes(entry("a", 9, struct.pack("<IQ", 9, 1) * 3000)), id="nested arrays"
        ),
        pytest.param(
            gguf_bytes(entry("general.alignment", 4, struct.pack("<I", 24))), id="alignment 24"
        ),
        pytest.param(
            b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + entry("n", 4, struct.pack("<I", 1)) * 2,
            id="metadata twice",
        ),
        pytest.param(gguf_bytes(tensors=(("w", [2], 0), ("w", [1], 0))), id="tensor twice"),
        pytest.param(gguf_bytes(tensors=(("w", [64], 99),)), id="unknown tensor type"),
        pytest.param(gguf_bytes(tensors=(("w", [33], 8),)), id="part of a Q8_0 block"),
        pytest.param(gguf_bytes(tensors=(("w", [16, 2], 3),)), id="part of a Q4_1 block"),
        pytest.param(gguf_bytes(tensors=(("w", [2**63], 0),)), id="more than the file"),
        pytest.param(gguf_bytes(tensors=(("w", [2**32, 2**32], 0),)), id="product overflows"),
        pytest.param(gguf_bytes(tensors=(("w", [2**62, 2], 0),)), id="bytes overflow"),
    ],
)
def test_damaged_files_are_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    with pytest.raises(NworError, match=r"^[^\n]*m.gguf: not a readable GGUF file: [^\n]+$"):
        GgufModel(path)


def test_a_file_that_is_cut_off_is_refused(tmp_path: Path) -> None:
    path = gguf_file(
        tmp_path / "m.gguf", {"n": 1, "words": ["a", "b"]}, {"w": ((64,), 0, bytes(256))}
    )
    whole = path.read_bytes()
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(NworError, match=r"m.gguf: not a readable GGUF file"):
            GgufModel(path)


def test_a_big_endian_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF" + struct.pack(">IQQ", 3, 0, 0) + bytes(32))
    with pytest.raises(NworError, match=r"m.gguf: got a big-endian GGUF file"):
        GgufModel(path)


def test_a_format_without_a_conversion_is_named(tmp_path: Path) -> None:
    path = gguf_file(tmp_path / "m.gguf", {"n": 1}, {"w": ((4,), 24, bytes(4))})  # 8-bit integers
    with pytest.raises(NworError, match=r"m.gguf: tensor w: .* I8 "):
        GgufModel(path).tensor("w")


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(NworError, match=r"m.gguf: cannot be read: No such file or directory"):
        GgufModel(tmp_path / "m.gguf")


@pytest.mark.parametrize("package", ["gguf", "safetensors"])
def test_a_missing_package_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    read = GgufModel if package == "gguf" else load_weights
    with pytest.raises(
        NworError, match=f"needs the package {package}: run `pip install '{package}"
    ):
        read(tmp_path / "m")
