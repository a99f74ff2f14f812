"""Llama weights: the order of rotated channels."""

from __future__ import annotations

import torch

from nwor_specpv.models.llama import pairs_to_halves


def test_pairs_to_halves_moves_rows_only() -> None:
    weight = torch.arange(12.0).view(6, 2).repeat(2, 1)
    assert pairs_to_halves(weight, 2)[:6, 0].tolist() == [0, 4, 8, 2, 6, 10]
