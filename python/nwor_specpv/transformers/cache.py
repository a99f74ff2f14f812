"""Caches for transformers that stage drafts and free tokens in constant time.

    cache = VirtualKVCache.from_config(model.config, max_seq_len=4096)
    model(input_ids, past_key_values=cache)                  # any forward pass, or generate()
    cache.rollback(100)                                      # O(1): a length

    cache.begin_round(num_drafts=4)                          # the next pass verifies drafts:
    model(root_and_drafts, past_key_values=cache)            # they are staged, not cached
    cache.commit([1, 2])                                     # rows that were accepted

`StaticKVCache` has one piece of memory per sequence; reads are views of it. `VirtualKVCache` has
pages: reads gather, and dropping, forking and reordering tokens moves none.
Not thread-safe. All sequences of a batch have one length.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from nwor_specpv import CapacityError, Interceptor, NworConfig, NworError, RoundPlan, SlotAllocator
from nwor_specpv.ops.kv import write_rows

from .sizes import kv_sizes, text_config

Pair = tuple[torch.Tensor, torch.Tensor]


class _Layer(CacheLayerMixin):
    """One layer's view of its cache."""

    is_compileable = False
    is_croppable = True
    is_sliding = False
    is_initialized = True
    supports_early_init = False

    def __init__(self, cache: _PagedCache, index: int) -> None:
        self._cache, self._index = cache, index

    @property
    def keys(self) -> torch.Tensor:
        return self._cache.get_kv_for_layer(self._index)[0]

    @property
    def values(self) -> torch.Tensor:
        return self._cache.get_kv_for_layer(self._index)[1]

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        pass  # the memory is there from the start

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        cache_kwargs: dict[str, Any] | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Pair:
        position = (cache_kwargs or {}).get("cache_position", kwargs.get("cache_position"))
        return self._cache._update(self._index, key_states, value_states, position)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        return self._cache._lengths[self._index]

    def get_max_length(self) -> int:
        return self._cache.max_seq_len


class _PagedCache(Cache):
    """The common part of both caches: a pool of pages for all layers, and its allocator.

    `num_heads` counts KV heads.
    """

    def __init__(
        self,
        num_layers: int,
        num_heads: int,
        max_seq_len: int,
        head_dim: int,
        batch_size: int = 1,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        **options: Any,
    ) -> None:
        sizes = {
            "num_layers": num_layers,
            "num_heads": num_heads,
            "max_seq_len": max_seq_len,
            "head_dim": head_dim,
            "batch_size": batch_size,
        }
        for name, size in sizes.items():
            if not isinstance(size, int) or size < 1:
                raise NworError(f"{name}: got {size!r}, expected 1 or more")
        self.num_layers, self.num_heads, self.head_dim = num_layers, num_heads, head_dim
        self.max_seq_len, self._batch_size = max_seq_len, batch_size
        self.dtype, self.device = dtype, torch.device(device)
        num_pages, page_size = self._count_pages(**options)
        self._allocator = SlotAllocator(num_pages, page_size)
        self._pool = self._make_pool(num_pages, page_size)  # K and V: [L, P, S, H, D]
        self._interceptor = Interceptor(NworConfig(max_staging_bytes=1 << 40))
        for layer in range(num_layers):
            self._interceptor.bind_layer(str(layer), *(side[layer] for side in self._pool))
        self._requests: list[int] = []
        self._next_request = 0
        self._round: _OpenRound | None = None
        self._start_over(batch_size)
        super().__init__(layers=[_Layer(self, layer) for layer in range(num_layers)])

    @classmethod
    def from_config(
        cls,
        config: Any,
        max_seq_len: int,
        batch_size: int = 1,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        **options: Any,
    ) -> Any:
        """Makes a cache for a decoder's configuration."""
        layers, heads, dim = kv_sizes(text_config(config))
        return cls(layers, heads, max_seq_len, dim, batch_size, dtype, device, **options)

    # ---- properties -----------------------------------------------------------------------------

    @property
    def batch_size(self) -> int:
        return self._batch_size

    @property
    def seq_len(self) -> int:
        """Tokens cached in every layer."""
        return min(self._lengths)

    def stats(self) -> dict[str, Any]:
        """Statistics of the allocator and the interceptor."""
        return {"slots": self._allocator.stats(), "rounds": self._interceptor.stats()}

    def get_kv_for_layer(self, layer_idx: int) -> Pair:
        """K and V of the cached tokens, [B, H, length, D]."""
        self._check_layer(layer_idx)
        return self._read(layer_idx, self._lengths[layer_idx])

    def get_all_kv(self) -> tuple[Pair, ...]:
        return tuple(self.get_kv_for_layer(layer) for layer in range(self.num_layers))

    # ---- growing ---------------------------------------------------------------------------------

    def append(self, new_keys: torch.Tensor, new_values: torch.Tensor) -> None:
        """Appends K and V of new tokens for all layers: [L, B, H, n, D]."""
        expected = (self.num_layers, self.batch_size, self.num_heads)
        for name, rows in (("new_keys", new_keys), ("new_values", new_values)):
            if rows.dim() != 5 or rows.shape[:3] != expected or rows.shape[4] != self.head_dim:
                shape = (*expected, "n", self.head_dim)
                raise NworError(f"{name}: got shape {tuple(rows.shape)}, expected {shape}")
        self._check_room(self.seq_len, new_keys.shape[3])
        for layer in range(self.num_layers):
            self._update(layer, new_keys[layer], new_values[layer], None, read=False)

    def _update(
        self,
        layer: int,
        key: torch.Tensor,
        value: torch.Tensor,
        position: torch.Tensor | None,
        read: bool = True,
    ) -> Pair | None:
        """A layer's `update`; rows at a `cache_position` replace everything from there on."""
        self._check_rows(key, value)
        count = key.shape[2]
        if position is not None:
            start = _first_of_range(position, count)
            length = self._lengths[layer]
            if start > length:
                raise NworError(
                    f"cache_position: got {start}, expected at most the length {length}"
                )
            if start < length:
                self.rollback(start)
        # Rows as the pool has them: [B * n, H, D], a sequence's one after the other.
        rows = [side.transpose(1, 2).flatten(0, 1) for side in (key, value)]
        if self._round is not None:
            return self._update_round(layer, key, value, rows)
        start = self._lengths[layer]
        self._grow(start + count)
        slots = self._slots[:, start : start + count].reshape(-1).contiguous()
        write_rows(*rows, *(side[layer] for side in self._pool), slots)
        self._lengths[layer] = start + count
        return self._read(layer, start + count) if read else None

    def _grow(self, length: int) -> None:
        """Makes slots for tokens up to `length`; only the first layer of a pass has to."""
        now = self._allocated
        if length <= now:
            return
        self._check_room(now, length - now)
        state = self._allocator.backup()
        try:
            for request in self._requests:
                self._allocator.extend(request, length - now)
        except CapacityError:
            self._allocator.restore(state)
            raise
        self._copy_pages()
        # A copied page changes the slots of tokens that were in it.
        self._refresh_slots(max(0, now - self._allocator.page_size), length)

    def _refresh_slots(self, first: int, last: int) -> None:
        slots = [self._allocator.slots(request, first, last) for request in self._requests]
        self._slots[:, first:last] = torch.stack(slots).to(self.device)
        self._allocated = last

    def _copy_pages(self) -> None:
        for source, target in self._allocator.take_copies():
            for side in self._pool:
                side[:, target] = side[:, source]

    # ---- shrinking -------------------------------------------------------------------------------

    def rollback(self, accepted_length: int) -> None:
        """Keeps the first tokens. The time does not depend on the length."""
        if not 0 <= accepted_length <= self._allocated:
            raise NworError(
                f"accepted_length: got {accepted_length}, expected 0 to {self._allocated}"
            )
        self._no_open_round("rollback")
        self._release_to(accepted_length)
        self._lengths = [min(length, accepted_length) for length in self._lengths]

    def _release_to(self, length: int) -> None:
        # Backwards: pages are reused in reverse order, so sequence b gets its own again.
        for request in reversed(self._requests):
            self._allocator.truncate(request, length)
        self._allocated = length

    def crop(self, tokens_to_remove: int) -> None:
        """-n removes n tokens, 0 none; a positive number is the length to keep."""
        if tokens_to_remove > 0:
            self.rollback(min(tokens_to_remove, self.seq_len))
        elif tokens_to_remove < 0:
            self.rollback(max(0, self.seq_len + tokens_to_remove))

    def compact(self, keep_indices: Sequence[int]) -> None:
        """Keeps these positions, in ascending order; they become 0, 1, 2, .."""
        self._no_open_round("compact")
        keep = [int(index) for index in keep_indices]
        length = self.seq_len
        rising = all(a < b for a, b in itertools.pairwise(keep))
        if not rising or (keep and not 0 <= keep[0] <= keep[-1] < length):
            raise NworError(
                f"keep_indices: got {keep}, expected ascending positions from 0 to {length - 1}"
            )
        # Tokens that keep their position need no mask.
        first = next((i for i, index in enumerate(keep) if i != index), len(keep))
        mask = torch.ones(length - first, dtype=torch.bool)
        mask[[index - first for index in keep[first:]]] = False
        self.rollback(length)
        for request in self._requests:
            self._allocator.free(request, mask)
        self._close_holes()
        self._lengths = [len(keep)] * self.num_layers
        if keep:
            self._refresh_slots(min(first, len(keep) - 1), len(keep))
        self._allocated = len(keep)

    def reset(self) -> None:
        """Drops all tokens; the memory stays."""
        if self._round is not None:
            self.abort_round()
        self._start_over(self.batch_size)

    def _start_over(self, batch_size: int) -> None:
        for request in reversed(self._requests):
            self._allocator.free(request)
        self._requests = [self._new_request() for _ in range(batch_size)]
        for request in self._requests:
            self._allocator.extend(request, 0)
        self._batch_size = batch_size
        self._lengths = [0] * self.num_layers
        self._allocated = 0
        self._slots = torch.zeros(
            batch_size, self.max_seq_len, dtype=torch.int64, device=self.device
        )

    def _new_request(self) -> int:
        self._next_request += 1
        return self._next_request

    # ---- rounds ----------------------------------------------------------------------------------

    def begin_round(self, num_drafts: int, parents: Sequence[int] | None = None) -> None:
        """Makes the next forward pass verify drafts: its last `num_drafts` rows are staged.

        `parents`: for a tree, the parent row of each draft; rows count from 0 over the whole pass.
        For a tree the pass needs its attention mask and position ids; a chain needs nothing.
        """
        self._no_open_round("begin_round")
        if num_drafts < 0 or (parents is not None and len(parents) != num_drafts):
            raise NworError(
                f"num_drafts: got {num_drafts}, expected 0 or more, and as many as parents"
            )
        if len(set(self._lengths)) != 1:
            raise NworError(
                f"begin_round: layers have lengths {self._lengths}, expected equal lengths"
            )
        self._round = _OpenRound(num_drafts, None if parents is None else list(parents))

    def _update_round(
        self, layer: int, key: torch.Tensor, value: torch.Tensor, rows: list[torch.Tensor]
    ) -> Pair:
        current = self._round
        count = key.shape[2]
        if current.num_rows == 0:
            self._open_round(current, count)
        elif count != current.num_rows:
            raise NworError(
                f"key_states: got {count} rows, expected {current.num_rows} as in the first layer"
            )
        outcome = self._interceptor.write(str(layer), *rows, current.slots)
        if outcome.action == "bypass":
            raise NworError(f"key_states: the interceptor refused the write: {outcome.reason}")
        cached = self._read(layer, current.start)
        self._lengths[layer] = current.start + current.num_direct
        return (torch.cat((cached[0], key), 2), torch.cat((cached[1], value), 2))

    def _open_round(self, current: _OpenRound, count: int) -> None:
        if current.num_drafts >= count:
            raise NworError(
                f"num_drafts: got {current.num_drafts} of {count} rows, expected a root before them"
            )
        start = self.seq_len
        direct = count - current.num_drafts
        self._check_room(start, count)
        parents = [] if current.parents is None else [current.parents] * self.batch_size
        plan = RoundPlan([count] * self.batch_size, [current.num_drafts] * self.batch_size, parents)
        self._grow(start + direct)
        decision = self._interceptor.begin(plan)
        if current.num_drafts > 0 and not decision.stage:
            self._interceptor.abort()
            self._release_to(start)
            raise CapacityError(f"staging: got {count} rows, expected room ({decision.reason})")
        slots = torch.full((self.batch_size, count), -1, dtype=torch.int64, device=self.device)
        slots[:, :direct] = self._slots[:, start : start + direct]
        current.num_rows, current.start, current.num_direct = count, start, direct
        current.slots = slots.flatten().contiguous()

    def commit(self, path: Sequence[int] | Sequence[Sequence[int]]) -> None:
        """Caches accepted draft rows, a path from the root down; all layers or none.

        Rows count from 0 over the pass. For a batch: one path per sequence, all of one length.
        """
        current = self._round
        if current is None or current.num_rows == 0:
            raise NworError(
                "commit: no round is open; call begin_round and run a forward pass first"
            )
        paths = [list(path)] * self.batch_size if _is_flat(path) else [list(one) for one in path]
        depth = len(paths[0]) if paths else 0
        if len(paths) != self.batch_size or any(len(one) != depth for one in paths):
            lengths = [len(one) for one in paths]
            raise NworError(f"path: got lengths {lengths}, expected {self.batch_size} equal ones")
        length = current.start + current.num_direct + depth
        state = self._allocator.backup()
        self._grow(length)
        slots = self._slots[:, length - depth : length] if depth else self._slots[:, :1]
        rows = torch.tensor(paths if depth else [[-1]] * self.batch_size, dtype=torch.int32)
        counts = torch.full((self.batch_size,), depth, dtype=torch.int32, device=self.device)
        try:
            receipt = self._interceptor.commit(
                rows.to(self.device), counts, slots.contiguous(), rows="request"
            )
            if not receipt.ok:
                raise NworError(f"commit: got {receipt.verdict.error}, expected ok")
        except NworError:
            self._allocator.restore(state)
            self._allocated = length - depth
            raise
        self._lengths = [length] * self.num_layers
        self._round = None

    def abort_round(self) -> None:
        """Ends a round without drafts: rows before the drafts stay cached.

        After a pass that failed half-way nothing of it stays.
        """
        if self._round is None:
            return
        if self._round.num_rows > 0:
            self._interceptor.abort()
        self._round = None
        self.rollback(self.seq_len)  # the tokens that all layers have

    # ---- checks ----------------------------------------------------------------------------------

    def _check_layer(self, layer: int) -> None:
        if not 0 <= layer < self.num_layers:
            raise NworError(f"layer_idx: got {layer}, expected 0 to {self.num_layers - 1}")

    def _check_rows(self, key: torch.Tensor, value: torch.Tensor) -> None:
        expected = (self.batch_size, self.num_heads)
        for name, rows in (("key_states", key), ("value_states", value)):
            if rows.dim() != 4 or rows.shape[:2] != expected or rows.shape[3] != self.head_dim:
                shape = (*expected, "n", self.head_dim)
                raise NworError(f"{name}: got shape {tuple(rows.shape)}, expected {shape}")
        if key.shape[2] != value.shape[2]:
            raise NworError(
                f"value_states: got {value.shape[2]} rows, expected {key.shape[2]} as in key_states"
            )

    def _check_sequences(self, indices: torch.Tensor) -> list[int]:
        chosen = [int(index) for index in indices]
        if not chosen or not all(0 <= index < self.batch_size for index in chosen):
            raise NworError(f"indices: got {chosen}, expected some of 0 to {self.batch_size - 1}")
        return chosen

    def _check_room(self, start: int, count: int) -> None:
        if start + count > self.max_seq_len:
            raise CapacityError(
                f"max_seq_len: got {start + count} tokens, expected at most {self.max_seq_len}"
            )

    def _no_open_round(self, what: str) -> None:
        if self._round is not None:
            raise NworError(f"{what}: a round is open; call commit or abort_round first")

    def _count_pages(self, **options: Any) -> tuple[int, int]:
        """The number of pages, and of tokens in a page."""
        raise NotImplementedError

    def _make_pool(self, num_pages: int, page_size: int) -> Pair:
        raise NotImplementedError

    def _read(self, layer: int, length: int) -> Pair:
        raise NotImplementedError

    def _close_holes(self) -> None:
        raise NotImplementedError


class _OpenRound:
    """A round between begin_round and commit; the first layer's rows open it."""

    def __init__(self, num_drafts: int, parents: list[int] | None) -> None:
        self.num_drafts, self.parents = num_drafts, parents
        self.num_rows = self.start = self.num_direct = 0
        self.slots: torch.Tensor | None = None


class StaticKVCache(_PagedCache):
    """One piece of memory per sequence; reads are views of it.

    The memory is allocated at the start: 2 * num_layers * batch_size * num_heads * max_seq_len *
    head_dim elements.
    """

    def _count_pages(self) -> tuple[int, int]:
        return self._batch_size, self.max_seq_len

    def _make_pool(self, num_pages: int, page_size: int) -> Pair:
        # A sequence is one page, in the order that attention reads: [L, B, H, S, D].
        shape = (self.num_layers, num_pages, self.num_heads, page_size, self.head_dim)
        memory = [torch.zeros(shape, dtype=self.dtype, device=self.device) for _ in range(2)]
        return tuple(side.transpose(2, 3) for side in memory)

    def _read(self, layer: int, length: int) -> Pair:
        return tuple(side[layer, :, :length].transpose(1, 2) for side in self._pool)

    def _close_holes(self) -> None:
        for request in self._requests:
            sources, targets = (slots.to(self.device) for slots in self._allocator.compact(request))
            size = self._allocator.page_size
            for side in self._pool:
                moved = side[:, sources // size, sources % size]
                side[:, targets // size, targets % size] = moved

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Sequence i becomes a copy of sequence indices[i]; the batch keeps its size."""
        self._no_open_round("batch_select_indices")
        chosen = self._check_sequences(indices)
        if len(chosen) != self.batch_size:
            expected = f"{self.batch_size}: the memory is fixed"
            raise NworError(f"indices: got {len(chosen)} sequences, expected {expected}")
        length = self.seq_len
        for side in self._pool:
            side[:, :, :length] = side[:, torch.tensor(chosen, device=self.device), :length]

    def batch_repeat_interleave(self, repeats: int) -> None:
        if repeats != 1:
            raise NworError(f"repeats: got {repeats}, expected 1: the memory is fixed")


class VirtualKVCache(_PagedCache):
    """Pages; reads gather them.

    `compact` only frees slots, and the batch operations of beam search share pages until one of the
    sequences writes. Options: `page_size` (16), `num_pages` (default: twice what the longest batch
    needs).
    """

    def _count_pages(self, *, page_size: int = 16, num_pages: int | None = None) -> tuple[int, int]:
        if not isinstance(page_size, int) or page_size < 1:
            raise NworError(f"page_size: got {page_size!r}, expected 1 or more")
        if num_pages is None:
            num_pages = 2 * self._batch_size * -(-self.max_seq_len // page_size)
        return num_pages, page_size

    def get_physical_indices(self, sequence: int = 0) -> torch.Tensor:
        """The slots of a sequence's tokens."""
        return self._slots[sequence, : self.seq_len].clone()

    def _make_pool(self, num_pages: int, page_size: int) -> Pair:
        shape = (self.num_layers, num_pages, page_size, self.num_heads, self.head_dim)
        return tuple(torch.zeros(shape, dtype=self.dtype, device=self.device) for _ in range(2))

    def _read(self, layer: int, length: int) -> Pair:
        slots = self._slots[:, :length]
        return tuple(side[layer].flatten(0, 1)[slots].transpose(1, 2) for side in self._pool)

    def _close_holes(self) -> None:
        pass  # tokens stay where they are

    # ---- beam search: sequences share pages ------------------------------------------------------

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        sequences = torch.arange(self.batch_size)
        self.batch_select_indices(sequences.repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Sequence i becomes a copy of sequence indices[i]; no K/V is moved."""
        self._no_open_round("batch_select_indices")
        chosen = self._check_sequences(indices)
        forks = [self._new_request() for _ in chosen]
        for fork, index in zip(forks, chosen, strict=True):
            self._allocator.fork(self._requests[index], fork)
        for request in self._requests:
            self._allocator.free(request)
        self._slots = self._slots[torch.tensor(chosen, device=self.device)]
        self._requests, self._batch_size = forks, len(forks)


def _first_of_range(position: torch.Tensor, count: int) -> int:
    values = position.flatten().tolist()
    if len(values) != count or any(b != a + 1 for a, b in itertools.pairwise(values)):
        raise NworError(
            f"cache_position: got {values}, expected {count} consecutive positions, one per row"
        )
    return values[0]


def _is_flat(path: Sequence[Any]) -> bool:
    return all(isinstance(row, int) for row in path)
