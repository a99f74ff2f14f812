"""Safetensors files: read as written, saved whole, and refused when they are damaged."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch

from nwor_specpv import NworError
from nwor_specpv.models.weights import load_weights, save_weights


def write(path: Path, header: dict[str, object], size: int) -> Path:
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(size))
    return path


def entry(shape: list[int], start: int, end: int, dtype: str = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


@pytest.mark.parametrize(
    ("header", "size"),
    [
        ({"w": entry([2, 2], 0, 0)}, 0),
        ({"w": entry([2, 2], 0, 12)}, 12),
        ({"w": entry([2, 2], 0, 20)}, 20),
        ({"w": entry([-1, 2], 0, 16)}, 16),
        ({"w": entry([0], 0, 4)}, 4),
        ({"w": entry([2, 2], 0, 16)}, 12),
        ({"v": entry([2], 0, 8), "w": entry([2], 4, 12)}, 12),
        ({"w": entry([2], 0, 8, "F33")}, 8),
        ({"__metadata__": {"a": 1}}, 0),
    ],
)
def test_damaged_files_are_refused(tmp_path: Path, header: dict[str, object], size: int) -> None:
    path = write(tmp_path / "m.safetensors", header, size)
    with pytest.raises(NworError, match=r"m.safetensors: not a readable safetensors file: [^\n]+$"):
        load_weights(path)


@pytest.mark.parametrize("content", [b"", b"abc", b"x" * 100, struct.pack("<Q", 5) + b"hello"])
def test_other_files_are_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(content)
    with pytest.raises(NworError, match=r"m.safetensors: not a readable safetensors file"):
        load_weights(path)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(NworError, match=r"m.safetensors: cannot be read: No such file"):
        load_weights(tmp_path / "m.safetensors")


def test_an_unusual_type_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "m.safetensors", {"w": entry([4], 0, 4, "F8_E4M3")}, 4)
    with pytest.raises(NworError, match=r"tensor w has type torch.float8_e4m3fn, expected float64"):
        load_weights(path)


def test_weights_are_read_as_written(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    weights = {
        "none": torch.zeros(0, 3),
        "one": torch.tensor(2.5),
        "columns": torch.arange(6.0).view(2, 3).T,
        "half": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
        "ids": torch.tensor([3, 1], dtype=torch.int32),
    }
    save_weights(path, weights, {"format": "pt"})
    found, metadata = load_weights(path)
    assert metadata == {"format": "pt"}
    assert found.keys() == weights.keys()
    for name, weight in weights.items():
        assert found[name].dtype == weight.dtype
        assert torch.equal(found[name], weight)


def test_loaded_weights_do_not_change_with_the_file(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    save_weights(path, {"w": torch.ones(4)})
    found, _ = load_weights(path)
    with path.open("r+b") as file:
        file.seek(-16, 2)
        file.write(bytes(16))
    assert found["w"].tolist() == [1, 1, 1, 1]
