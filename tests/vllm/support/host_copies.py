"""vLLM's offloading connector on the CPU: its plans are its own, copies are done at once.

vLLM copies between a GPU and the host. A spec of another module is its own extension point.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

HOST_BYTES = 64 << 20


def offloading(**more: Any) -> dict[str, Any]:
    """vLLM's `kv_transfer_config`."""
    extra = {"cpu_bytes_to_use": HOST_BYTES, "spec_name": "HostSpec", "spec_module_path": __name__}
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra | more,
    }


class HostCopies(OffloadingWorker):
    """Chunks of one block."""

    newest: ClassVar[HostCopies]

    def __init__(self, caches: Any, num_chunks: int) -> None:
        self.caches = [cache.tensor for cache in caches.tensors]  # each [blocks, bytes]
        self.host = [cache.new_zeros(num_chunks, cache.shape[1]) for cache in self.caches]
        self.stored: list[int] = []  # chunks
        self.loaded: list[int] = []
        self._done: list[TransferResult] = []
        HostCopies.newest = self

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        self._copy(self.caches, src_spec, self.host, dst_spec, job_id)
        self.stored += dst_spec.block_ids.tolist()
        return True

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        self._copy(self.host, src_spec, self.caches, dst_spec, job_id)
        self.loaded += src_spec.block_ids.tolist()
        return True

    def _copy(
        self,
        sources: Sequence[torch.Tensor],
        src: Any,
        destinations: Sequence[torch.Tensor],
        dst: Any,
        job_id: int,
    ) -> None:
        for source, destination in zip(sources, destinations, strict=True):
            destination[torch.tensor(dst.block_ids)] = source[torch.tensor(src.block_ids)]
        self._done.append(TransferResult(job_id=job_id, success=True))

    def get_finished(self) -> list[TransferResult]:
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: set[int]) -> None:
        """Nothing is under way."""


class HostSpec(CPUOffloadingSpec):
    def get_worker(self, kv_caches: Any) -> OffloadingWorker:
        number = getattr(self, "num_chunks", None) or self.num_blocks
        return HostCopies(kv_caches, number)
