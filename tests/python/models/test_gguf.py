"""Reading GGUF files: what was written is read, and what is damaged is refused."""

from __future__ import annotations

import os
import random
import struct
from pathlib import Path

import numpy as np
import pytest

from nwor_specpv import NworError
from nwor_specpv.models.gguf import GgufFile
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
    with GgufFile(path) as file:
        assert file.metadata == meta
        assert file.tensor("q4").tolist() == np.array(four_values).reshape(3, 64).tolist()
        assert file.tensor("q8").tolist() == np.array(eight_values).reshape(2, 64).tolist()
        assert file.tensor("f32").tolist() == [1, -2, 3.5]
        assert file.tensor("f16").tolist() == [[1, 2], [3, -0.5]]
        assert file.tensor("bf16").tolist() == [1, -2]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not a readable GGUF file"),
        (b"GGML" + bytes(40), "expected GGUF version 2 or 3"),
        (b"GGUF" + struct.pack("<IQQ", 9, 0, 0), "version 9, expected GGUF version 2 or 3"),
        (b"GGUF" + struct.pack("<IQQ", 3, 5, 5), "not a readable GGUF file"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    with pytest.raises(NworError, match=message):
        GgufFile(path)


def test_a_cut_off_file_is_refused(tmp_path: Path) -> None:
    path = gguf_file(tmp_path / "m.gguf", {"n": 1}, {"w": ((64,), 0, bytes(256))})
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(NworError, match=r"tensor w ends at .*, beyond the file's end"):
        GgufFile(path)


def test_an_unknown_tensor_type_is_named(tmp_path: Path) -> None:
    with pytest.raises(NworError, match="tensor w has type 12, expected one of F32"):
        GgufFile(gguf_file(tmp_path / "m.gguf", {"n": 1}, {"w": ((64,), 12, bytes(64))}))


def gguf_bytes(meta: bytes = b"", tensors: tuple[tuple[str, list[int], int], ...] = ()) -> bytes:
    """A file with the given metadata entry, and tensors (name, sizes innermost first, type)."""
    out = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), bool(meta)) + meta
    for name, sizes, kind in tensors:
        out += gguf_string(name) + struct.pack(f"<I{len(sizes)}Q", len(sizes), *sizes)
        out += struct.pack("<IQ", kind, 0)
    return out + bytes(-len(out) % 32 + 64)


def entry(key: str, kind: int, raw: bytes) -> bytes:
    return gguf_string(key) + struct.pack("<I", kind) + raw


@pytest.mark.parametrize("alignment", [0, 24])
def test_an_alignment_is_a_power_of_two(tmp_path: Path, alignment: int) -> None:
    path = gguf_file(tmp_path / "m.gguf", {"general.alignment": alignment}, {})
    line = f"m.gguf: general.alignment: got {alignment}, expected a power of two"
    with pytest.raises(NworError, match=line):
        GgufFile(path)


def test_an_alignment_is_a_number(tmp_path: Path) -> None:
    path = gguf_file(tmp_path / "m.gguf", {"general.alignment": [32]}, {})
    with pytest.raises(NworError, match=r"alignment: got \[32\], expected a power of two"):
        GgufFile(path)


@pytest.mark.parametrize("length", [84, 5000, 2**63, 2**64 - 1])
def test_a_string_ends_within_the_file(tmp_path: Path, length: int) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_bytes(entry("a", 8, struct.pack("<Q", length) + b"abc")))
    line = f"not a readable GGUF file: a string of {length} bytes at byte 45, 83 are left"
    with pytest.raises(NworError, match=line):
        GgufFile(path)


def test_arrays_are_not_nested_without_end(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_bytes(entry("a", 9, struct.pack("<IQ", 9, 1) * 3000)))
    with pytest.raises(NworError, match="not a readable GGUF file: arrays nested more than 8 deep"):
        GgufFile(path)


def test_an_array_of_arrays_is_read_as_written(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    rows = b"".join(struct.pack("<IQ2i", 5, 2, *row) for row in ((1, -2), (3, 4)))
    path.write_bytes(gguf_bytes(entry("a", 9, struct.pack("<IQ", 9, 2) + rows)))
    with GgufFile(path) as file:
        assert file.metadata == {"a": [[1, -2], [3, 4]]}


@pytest.mark.parametrize(
    ("sizes", "kind", "message"),
    [
        ([2**63], 0, f"ends at {128 + 2**65}, beyond the file's end at 192"),
        ([2**32, 2**32], 0, f"ends at {128 + 2**66}, beyond the file's end at 192"),
        ([2**62, 2], 0, f"ends at {128 + 2**65}, beyond the file's end at 192"),
        ([33], 8, "has rows of 33 elements, expected whole Q8_0 blocks of 32"),
        ([16, 2], 8, "has rows of 16 elements, expected whole Q8_0 blocks of 32"),
        ([16, 2], 3, "has rows of 16 elements, expected whole Q4_1 blocks of 32"),
        ([2**63, 0], 0, r"has sizes \[9223372036854775808, 0\], expected at least 1 each"),
        ([1] * 5, 0, "has 5 sizes, expected at most 4"),
    ],
)
def test_a_tensor_has_the_size_it_says(
    tmp_path: Path, sizes: list[int], kind: int, message: str
) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_bytes(entry("pad", 8, gguf_string("x" * 20)), (("w", sizes, kind),)))
    with pytest.raises(NworError, match=f"m.gguf: tensor w {message}"):
        GgufFile(path)


def test_a_tensor_without_sizes_is_one_number(tmp_path: Path) -> None:
    path = gguf_file(tmp_path / "m.gguf", {"n": 1}, {"w": ((), 0, struct.pack("<f", 2.5))})
    with GgufFile(path) as file:
        assert file.tensor("w").tolist() == 2.5


def test_a_name_stands_once(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_bytes(tensors=(("w", [2], 0), ("w", [1], 0))))
    with pytest.raises(NworError, match=r"m.gguf: tensor w: described twice"):
        GgufFile(path)
    twice = entry("n", 4, struct.pack("<I", 1)) * 2
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + twice)
    with pytest.raises(NworError, match=r"m.gguf: metadata n: stands twice"):
        GgufFile(path)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(NworError, match=r"m.gguf: cannot be read: No such file or directory"):
        GgufFile(tmp_path / "m.gguf")


def test_a_tensor_that_is_not_there_is_named(tmp_path: Path) -> None:
    path = gguf_file(tmp_path / "m.gguf", {"n": 1}, {})
    with GgufFile(path) as file, pytest.raises(NworError, match="tensor w is not in the file"):
        file.tensor("w")


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs /proc")
def test_a_refused_file_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_bytes(entry("a", 8, struct.pack("<Q", 2**64 - 1))))
    with pytest.raises(NworError) as told:  # it holds the reader as long as it lives
        GgufFile(path)
    links = [os.path.realpath(link) for link in Path("/proc/self/fd").iterdir()]
    assert str(path) not in links, told.value
