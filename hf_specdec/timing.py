"""Times of work on a device, which goes on after the host has asked for it.

A phase that ends by reading a value from the device ends on the host's clock, too. Where one ends without, the host either
waits, which is right at the borders of phases that come once per call, or leaves an event in the device's work, which can be
asked later for when it happened and costs no waiting.
"""

from __future__ import annotations

from typing import Any

import torch


__all__ = ["mark", "seconds_between", "wait_for"]


def wait_for(device: torch.device) -> None:
    """Waits until a device has done all that it was asked for; a CPU always has."""
    if device.type == "mps":
        torch.mps.synchronize()
    elif device.type not in ("cpu", "meta"):
        torch.get_device_module(device).synchronize(device)


def mark(device: torch.device) -> Any:
    """An event after all that a device was asked for; None where the host's clock is as good (CPU), or there are no events."""
    backend: Any = None if device.type in ("cpu", "meta") else torch.get_device_module(device)
    if not hasattr(backend, "Event"):
        return None
    event = backend.Event(enable_timing=True)
    event.record(backend.current_stream(device))
    return event


def seconds_between(first: Any, second: Any) -> float | None:
    """Seconds from one [`mark`] to another; None where one of them is none. To be asked once something later was read: by then
    both have happened, and nothing is waited for."""
    if first is None or second is None:
        return None
    if not second.query():
        second.synchronize()
    return float(first.elapsed_time(second)) / 1000
