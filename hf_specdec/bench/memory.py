"""The most memory that is in use while something runs."""

from __future__ import annotations

from pathlib import Path

import torch


__all__ = ["PeakMemory"]

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_CLEAR_PEAK = "5"  # what proc(5) wants written, to start the high-water mark anew


class PeakMemory:
    """Starts counting when it is made.

    On CUDA, what torch has allocated on all devices; else what of the process is resident, of which only Linux tells the peak.
    Weights are in it, and so is everything else that the process holds.

    Args:
        device (`torch.device`): Where the target's inputs are.
    """

    def __init__(self, device: torch.device) -> None:
        self.devices = list(range(torch.cuda.device_count())) if device.type == "cuda" else []
        for each in self.devices:
            torch.cuda.reset_peak_memory_stats(each)
        self.counts = bool(self.devices) or (device.type == "cpu" and _start_anew())

    def read(self) -> int | None:
        """The peak since then in bytes, or None where it cannot be told."""
        if not self.counts:
            return None
        if self.devices:
            return sum(torch.cuda.max_memory_allocated(each) for each in self.devices)
        lines = (line.split() for line in _STATUS.read_text().splitlines())
        return next((int(line[1]) * 1024 for line in lines if line[0] == "VmHWM:"), None)


def _start_anew() -> bool:
    try:
        _CLEAR.write_text(_CLEAR_PEAK)
    except OSError:
        return False
    return True
