"""Where modules compute, which is not where their weights lie once accelerate has offloaded them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain

import torch
from accelerate.hooks import AlignDevicesHook
from accelerate.utils import align_module_device
from torch import Tensor, nn


__all__ = ["device_of", "weight_of"]


def device_of(module: nn.Module) -> torch.device:
    """The device on which a module takes its inputs.

    It is that of its first weight; where that is offloaded and thus on the meta device, the one that accelerate brings it to
    when it is called. Packed layers, which show no weight, are on the CPU.
    """
    first = next(chain(module.parameters(), module.buffers()), None)
    if first is None:
        return torch.device("cpu")
    if first.device.type == "meta":
        for each in module.modules():
            hook = getattr(each, "_hf_hook", None)
            if isinstance(hook, AlignDevicesHook) and hook.execution_device is not None:
                return torch.device(hook.execution_device)
    return first.device


@contextmanager
def weight_of(module: nn.Module) -> Iterator[Tensor]:
    """A module's weight, without a call of the module. If it is offloaded, it is loaded until the block is left."""
    with align_module_device(module):
        weight = module.weight
        assert isinstance(weight, Tensor)
        yield weight
