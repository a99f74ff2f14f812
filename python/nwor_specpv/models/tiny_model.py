"""A Llama of 260 thousand parameters: reads the shipped weights and runs them in float32.

The model runs rows of a batch. Each layer hands its query, key and value to an `attend` callback,
which writes the cache and computes the attention.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn.functional import silu

_FOLDER = Path(__file__).resolve().parent

# attend(layer, query [T, Hq, D], key [T, Hkv, D], value [T, Hkv, D]) -> [T, Hq, D]
Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class TinyModelShape:
    """Sizes of the model, in the order of the file's header."""

    dim: int
    hidden: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    vocabulary: int
    context: int

    @property
    def head_dim(self) -> int:
        return self.dim // self.num_heads


class TinyModel:
    """The weights and one forward pass over rows at given positions."""

    def __init__(self, path: Path = _FOLDER / "stories260K.bin") -> None:
        data = path.read_bytes()
        header = struct.calcsize("7i")
        self.shape = s = TinyModelShape(*struct.unpack("7i", data[:header]))
        weights = torch.frombuffer(bytearray(data[header:]), dtype=torch.float32)
        taken = 0

        def take(*sizes: int) -> torch.Tensor:
            nonlocal taken
            count = torch.Size(sizes).numel()
            taken += count
            return weights[taken - count : taken].view(*sizes)

        layers, kv_dim = s.num_layers, s.num_kv_heads * s.head_dim
        self.embedding = take(s.vocabulary, s.dim)
        self.attention_norm = take(layers, s.dim)
        self.wq, self.wk = take(layers, s.dim, s.dim), take(layers, kv_dim, s.dim)
        self.wv, self.wo = take(layers, kv_dim, s.dim), take(layers, s.dim, s.dim)
        self.ffn_norm = take(layers, s.dim)
        self.w1, self.w2 = take(layers, s.hidden, s.dim), take(layers, s.dim, s.hidden)
        self.w3 = take(layers, s.hidden, s.dim)
        self.final_norm = take(s.dim)
        self.cos = take(s.context, s.head_dim // 2)
        self.sin = take(s.context, s.head_dim // 2)

    def forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        """Logits [T, vocabulary] of rows with these tokens at these positions."""
        s = self.shape
        x = self.embedding[tokens]
        for layer in range(s.num_layers):
            h = _rms_norm(x, self.attention_norm[layer])
            query = self._rotate(
                (h @ self.wq[layer].T).view(-1, s.num_heads, s.head_dim), positions
            )
            key = self._rotate(
                (h @ self.wk[layer].T).view(-1, s.num_kv_heads, s.head_dim), positions
            )
            value = (h @ self.wv[layer].T).view(-1, s.num_kv_heads, s.head_dim)
            x = x + attend(layer, query, key, value).reshape(-1, s.dim) @ self.wo[layer].T
            h = _rms_norm(x, self.ffn_norm[layer])
            x = x + (silu(h @ self.w1[layer].T) * (h @ self.w3[layer].T)) @ self.w2[layer].T
        return _rms_norm(x, self.final_norm) @ self.embedding.T

    def _rotate(self, heads: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        cos, sin = self.cos[positions][:, None], self.sin[positions][:, None]
        even, odd = heads[..., 0::2], heads[..., 1::2]
        return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)


class TinyTokenizer:
    """The shipped 512-token vocabulary."""

    BOS = 1

    def __init__(self, path: Path = _FOLDER / "tok512.bin") -> None:
        data = path.read_bytes()
        self.pieces: list[bytes] = []
        self.scores: list[float] = []
        at = 4  # after the longest piece's length
        while at < len(data):
            score, length = struct.unpack_from("fi", data, at)
            at += 8
            self.pieces.append(data[at : at + length])
            self.scores.append(score)
            at += length
        self._ids = {piece: index for index, piece in enumerate(self.pieces)}

    def encode(self, text: str) -> list[int]:
        """Returns BOS and the pieces of the text; merges the best-scored pair first."""
        ids = [self._ids[b" "]] if text else []
        for character in text:
            piece = self._ids.get(character.encode())
            # Other characters become bytes, whose pieces follow <unk>, BOS and EOS.
            ids += [piece] if piece is not None else [byte + 3 for byte in character.encode()]
        while True:
            merges = [
                (self.scores[merged], i, merged)
                for i in range(len(ids) - 1)
                if (merged := self._ids.get(self.pieces[ids[i]] + self.pieces[ids[i + 1]]))
                is not None
            ]
            if not merges:
                return [self.BOS, *ids]
            _, i, merged = max(merges, key=lambda merge: (merge[0], -merge[1]))
            ids[i : i + 2] = [merged]

    def decode(self, ids: list[int]) -> str:
        out = b""
        for index in ids:
            piece = self.pieces[index]
            if piece.startswith(b"<0x") and len(piece) == 6:
                piece = bytes([int(piece[3:5], 16)])
            out += piece if index > 2 else b""
        return out.decode(errors="replace").lstrip(" ")


def _rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * weight
