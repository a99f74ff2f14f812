"""CUDA graphs without a GPU: operations are recorded once and replayed on the same memory.

Python does not run in a replay, so whatever the host decided in the recording stays as it was, and
what no operation wrote to lasting memory is gone afterwards (it is overwritten here). Code of ours
that reads a tensor on the host during a recording raises, as it would on a GPU.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

_READS = ("item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__")
# Plans attention of vLLM's own layers on the CPU, in as much memory as it needs; no GPU has it.
_SCHEDULE = "_C::get_scheduler_metadata"


class RecordedGraph:
    """Stands where torch.cuda.CUDAGraph is expected."""

    def __init__(self) -> None:
        self.calls: list[Callable[[], None]] = []
        self.made: list[torch.Tensor] = []  # by the recording: not seen outside of a replay
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1
        for call in self.calls:
            call()
        for tensor in self.made:
            spoil(tensor)


def spoil(tensor: torch.Tensor) -> None:
    if tensor.is_floating_point():
        tensor.fill_(float("nan"))
    elif tensor.dtype != torch.bool and tensor.numel():
        tensor.fill_(-77)


class _Recorder(TorchDispatchMode):
    def __init__(self, graph: RecordedGraph) -> None:
        super().__init__()
        self._graph = graph

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        assert func.namespace != "vllm", f"{func} is written in Python, which a replay does not run"
        found = func(*args, **kwargs)
        given = {storage(t) for t in pytree.tree_leaves((args, kwargs)) if is_tensor(t)}
        made = [t for t in pytree.tree_leaves(found) if is_tensor(t) and storage(t) not in given]
        self._graph.made += made
        fresh: list[Any] = []  # kept until the next replay: a schedule points into itself

        def again() -> None:
            nonlocal fresh
            fresh = pytree.tree_leaves(func(*args, **kwargs))
            for old, new in zip(pytree.tree_leaves(found), fresh, strict=True):
                if not is_tensor(old) or storage(old) == storage(new):
                    continue
                if func.name() == _SCHEDULE:
                    old.set_(new)
                    continue
                assert old.shape == new.shape, f"{func}: a shape depends on data"
                old.copy_(new)

        self._graph.calls.append(again)
        return found


def is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr() or id(tensor)


@contextlib.contextmanager
def record(graph: RecordedGraph, _pool: Any = None) -> Iterator[None]:
    """Stands where torch.cuda.graph is expected."""
    with _launches_recorded(graph), _host_reads_refused(), _Recorder(graph):
        yield


@contextlib.contextmanager
def _launches_recorded(graph: RecordedGraph) -> Iterator[None]:
    """Launches of Triton's interpreter are no operations of torch's."""
    from triton.runtime.interpreter import GridExecutor

    launch = GridExecutor.__call__

    def launched(self: Any, *args: Any, **kwargs: Any) -> None:
        with _disable_current_modes():
            launch(self, *args, **kwargs)
        graph.calls.append(lambda: launch(self, *args, **kwargs))

    GridExecutor.__call__ = launched
    try:
        yield
    finally:
        GridExecutor.__call__ = launch


@contextlib.contextmanager
def _host_reads_refused() -> Iterator[None]:
    originals = {name: getattr(torch.Tensor, name) for name in _READS}

    def refusing(name: str, original: Any) -> Any:
        def read(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            caller = sys._getframe(1).f_globals.get("__name__", "")
            if caller.startswith("nwor_specpv"):
                raise RuntimeError(f"{caller} reads a tensor on the host ({name}) in a recording")
            return original(self, *args, **kwargs)

        return read

    for name, original in originals.items():
        setattr(torch.Tensor, name, refusing(name, original))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(torch.Tensor, name, original)
