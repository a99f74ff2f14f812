"""Packs small tensors into one piece of memory, so that one copy moves them to a device."""

from __future__ import annotations

import torch

Sizes = dict[str, tuple[torch.dtype, tuple[int, ...]]]


def num_words(sizes: Sizes) -> int:
    """Words of 8 bytes for all tensors; each begins at a new word."""
    return sum(_words(*one) for one in sizes.values())


def split_memory(memory: torch.Tensor, sizes: Sizes) -> dict[str, torch.Tensor]:
    """Returns the tensors as views of `memory`, [num_words] int64."""
    found, at = {}, 0
    for name, (dtype, size) in sizes.items():
        taken = _words(dtype, size)
        numel = torch.Size(size).numel()
        found[name] = memory[at : at + taken].view(dtype)[:numel].view(size)
        at += taken
    return found


def copy_to_device(
    tensors: dict[str, torch.Tensor], device: torch.device
) -> dict[str, torch.Tensor]:
    """Copies contiguous host tensors to `device` without waiting for the copy."""
    if device.type == "cpu":
        return tensors
    sizes = {name: (one.dtype, tuple(one.shape)) for name, one in tensors.items()}
    memory = torch.empty(num_words(sizes), dtype=torch.int64, pin_memory=True)
    for name, place in split_memory(memory, sizes).items():
        place.copy_(tensors[name])
    return split_memory(memory.to(device, non_blocking=True), sizes)


def _words(dtype: torch.dtype, size: tuple[int, ...]) -> int:
    return -(-torch.Size(size).numel() * dtype.itemsize // 8)
