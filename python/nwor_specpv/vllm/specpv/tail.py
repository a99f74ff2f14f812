"""K/V of drafts that no full step has confirmed: in memory of our own, one page per request.

Partial passes attend to it as to a paged cache. What a pass wrote beyond the tokens it kept is
overwritten by the next one.
"""

from __future__ import annotations

import torch

from nwor_specpv import write_rows

_PAGE_MULTIPLE = 16  # what our GPU kernels want of a page


class Tail:
    """Room for `capacity` tokens of `max_batch` requests in every layer.

    Its K/V is never quantised: `dtype` is the model's, by default that of the caches.
    """

    def __init__(
        self,
        key_caches: list[torch.Tensor],
        max_batch: int,
        capacity: int,
        dtype: torch.dtype | None = None,
    ) -> None:
        first = key_caches[0]
        self.capacity = -(-capacity // _PAGE_MULTIPLE) * _PAGE_MULTIPLE
        shape = (len(key_caches), max_batch, self.capacity, *first.shape[2:])
        self.keys = torch.zeros(shape, dtype=dtype or first.dtype, device=first.device)
        self.values = torch.zeros_like(self.keys)
        pages = torch.arange(max_batch, dtype=torch.int32, device=first.device)
        self.block_table = pages[:, None].contiguous()

    @property
    def bytes(self) -> int:
        return 2 * self.keys.nbytes

    def slot(self, request: int, position: int) -> int:
        """Where token `position` of a request's tail lies, -1 when there is no room."""
        return request * self.capacity + position if position < self.capacity else -1

    def write(
        self, layer: int, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor
    ) -> None:
        write_rows(key, value, self.keys[layer], self.values[layer], slots)
