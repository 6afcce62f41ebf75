"""Fully sharded data parallelism (FSDP): each process trains its part of the weights, with its part of the moments."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor


__all__ = ["Sharding"]


@final
class Sharding:
    """A copy of a module that torch's `fully_shard` splits among the processes, and the optimiser, which now trains the copy.

    The module itself stays whole in each process, and gets its weights when [`~Sharding.collect`] is called. Every process must
    call each of the methods.

    Args:
        module (`nn.Module`): The module, the same in every process.
        copied (`nn.Module`): A copy of it, which is changed in place.
        optimizer (`torch.optim.Optimizer`): Of some of the module's parameters; changed in place. Moments that it has are
            split too.
    """

    def __init__(self, module: nn.Module, copied: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        self._whole = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        place = self._whole[0].device.type
        mesh = init_device_mesh(place, (torch.distributed.get_world_size(),))
        self.module: Any = fully_shard(copied, mesh=mesh)
        if place == "cpu":
            self.module.set_force_sum_reduction_for_comms(True)  # gloo has no average
        own = dict(copied.named_parameters())
        self._split = [own[names[id(parameter)]] for parameter in self._whole]
        self.optimizer, before = optimizer, dict(optimizer.state)
        for group in optimizer.param_groups:
            group["params"] = [own[names[id(parameter)]] for parameter in group["params"]]
        optimizer.state = defaultdict(dict)
        for parameter, part in zip(self._whole, self._split, strict=True):
            if parameter in before:
                optimizer.state[part] = {name: _parted(value, part) for name, value in before[parameter].items()}

    @torch.no_grad()
    def collect(self) -> None:
        """Gives the module the trained weights."""
        for parameter, part in zip(self._whole, self._split, strict=True):
            parameter.copy_(_joined(part))

    def whole_optimizer(self) -> torch.optim.Optimizer:
        """All moments, under the parameters of the module; to be saved."""
        holder = torch.optim.SGD(self._whole, lr=0.0)
        for parameter, part in zip(self._whole, self._split, strict=True):
            moments = self.optimizer.state.get(part, {})
            holder.state[parameter] = {name: _joined(value) for name, value in moments.items()}
        return holder

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients add up in each process, and are not shared yet."""
        self.module.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self.module.set_requires_gradient_sync(True)

    def clip(self, largest: float) -> None:
        """Scales all gradients so that their common norm is at most `largest`."""
        gradients = [part.grad for part in self._split if part.grad is not None]
        squares = torch.stack([_local(each).float().square().sum() for each in gradients]).sum()
        torch.distributed.all_reduce(squares)
        scale = min(1.0, largest / (float(squares.sqrt()) + 1e-6))
        for each in gradients:
            each.mul_(scale)


def _parted(value: Tensor, like: Any) -> Tensor:
    return value if value.ndim == 0 else distribute_tensor(value, like.device_mesh, like.placements)


def _joined(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def _local(value: Tensor) -> Tensor:
    return value.to_local() if isinstance(value, DTensor) else value
