"""Clocks and power of a GPU while something runs, by NVML (PyPI's nvidia-ml-py)."""

from __future__ import annotations

import statistics
import threading
import time
from typing import Any

_INTERVAL = 0.02  # seconds


class Clocks:
    """Reads while its body runs: `found` has the medians of the second half, or why there are none.

    Thread-safety: none; a thread of its own reads, NVML alone.
    """

    def __init__(self, device: int = 0) -> None:
        self.found: dict[str, Any] = {}
        self._device = device
        self._samples: list[tuple[float, float, float, int]] = []
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Clocks:
        try:
            import pynvml

            pynvml.nvmlInit()
            handle = pynvml.nvmlDeviceGetHandleByIndex(self._device)
        except Exception as error:
            self.found = {"missing": f"{type(error).__name__}: {error}"}
            return self
        self._thread = threading.Thread(target=self._read, args=(pynvml, handle))
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._thread is None:
            return
        self._over.set()
        self._thread.join()
        later = self._samples[len(self._samples) // 2 :]
        if not later:
            return
        sm, memory, watts, reasons = zip(*later, strict=True)
        held = 0
        for mask in reasons:
            held |= mask
        self.found = {
            "samples": len(later),
            "sm_mhz": statistics.median(sm),
            "memory_mhz": statistics.median(memory),
            "watts": statistics.median(watts),
            "throttle_reasons": held,  # NVML's nvmlClocksEventReason* bits, any of them seen
        }

    def _read(self, nvml: Any, handle: Any) -> None:
        while not self._over.is_set():
            self._samples.append(
                (
                    nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
                    nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM),
                    nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
                    nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle),
                )
            )
            time.sleep(_INTERVAL)
