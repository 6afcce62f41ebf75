"""Copies between devices: none to a GPU waits, and all that is wanted from one is read at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


__all__ = ["is_host", "read_together", "sent"]


def is_host(device: torch.device) -> bool:
    """Whether it is the CPU on which everything is decided."""
    return device.type == "cpu" and not device.index


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on a device. A copy from the CPU is not waited for; one to the CPU must be, or it would be read too early."""
    return tensor.to(device, non_blocking=is_host(tensor.device))


def read_together(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors on the CPU, by one copy from each device that some of them are on. Those on the CPU are returned as they are.

    They travel as bytes, so that values of all types arrive to the bit (ours).
    """
    found = list(tensors)
    for device in sorted({str(each.device) for each in found if not is_host(each.device)}):
        places = [i for i, each in enumerate(found) if str(each.device) == device]
        if len(places) == 1:
            found[places[0]] = found[places[0]].cpu()
            continue
        parts = [found[i].contiguous().view(-1).view(torch.uint8) for i in places]
        together = torch.cat(parts).cpu()
        for i, part in zip(places, together.split([each.numel() for each in parts]), strict=True):
            # A copy, for a view as a wider type would have to begin at a multiple of its size.
            found[i] = part.clone().view(found[i].dtype).view(found[i].shape)
    return found
