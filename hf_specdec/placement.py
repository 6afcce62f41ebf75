"""Where modules compute, which is not where their weights lie once these are offloaded or cut into shards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any, cast

import torch
from accelerate.hooks import AlignDevicesHook  # type: ignore[import-untyped]
from accelerate.utils import align_module_device  # type: ignore[import-untyped]
from torch import Tensor, nn


__all__ = ["device_of", "is_sharded", "weight_of"]

_SHARDED: tuple[type, ...] = ()
if torch.distributed.is_available():
    from torch.distributed.tensor import DTensor

    _SHARDED = (DTensor,)


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
    """A module's whole weight, without a call of the module.

    If it is offloaded, it is loaded until the block is left. If it is sharded, its parts are gathered, for which all processes
    must come here at the same time.
    """
    with align_module_device(module):
        weight = cast(Tensor, module.weight)
        yield cast(Any, weight).full_tensor() if isinstance(weight, _SHARDED) else weight


def is_sharded(module: nn.Module) -> bool:
    """Whether several processes hold parts of the weights and must call the module together (tensor parallelism)."""
    return any(isinstance(each, _SHARDED) for each in module.parameters())
