"""Linear layers whose weights are packed once for the CPU.

PyTorch's CPU linear re-packs its weight in every call with two or more rows, so that verifying four tokens costs about three
plain steps. Packed once by oneDNN, a pass over a few rows costs little more than a pass over one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn

from hf_specdec.placement import is_sharded


__all__ = ["PackReport", "PackedLinear", "pack_linears", "packing_problem"]

_ROWS = 8  # rows that the packed layout is chosen for: a verification pass of a usual draft


@dataclass
class PackReport:
    """What [`pack_linears`] did.

    Args:
        num_packed (`int`): Linear layers packed.
        skipped (`dict[str, str]`): Layers left dense, each with the reason.
    """

    num_packed: int = 0
    skipped: dict[str, str] = field(default_factory=dict)


def packing_problem() -> str | None:
    """Why weights cannot be packed with this build of PyTorch; None where they can."""
    if not torch.backends.mkldnn.is_available():
        return "this build of PyTorch has no oneDNN"
    if not hasattr(torch.ops.mkldnn, "_reorder_linear_weight") or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return "this build of PyTorch has no packed linear operator"
    return None


class PackedLinear(nn.Module):
    """An `nn.Linear` that keeps its weight in oneDNN's packed layout, for inference in fp32 on the CPU.

    `weight`, `state_dict` and everything built on them give the ordinary weight, unpacked on request; copying and pickling
    give an ordinary `nn.Linear`; moving or casting the module makes it dense from then on.

    Args:
        linear (`nn.Linear`): The layer to take over. Its own storage is not kept.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        self._packed: Tensor | None = _pack(linear.weight)
        self.register_parameter("_dense", None)  # holds the weight where it is not packed

    @property
    def weight(self) -> nn.Parameter:
        """The ordinary weight, `(out_features, in_features)`: a fresh copy while the layer is packed."""
        if self._packed is not None:
            return nn.Parameter(self._packed.to_dense(), requires_grad=False)
        return cast(nn.Parameter, self._dense)

    @property
    def storage(self) -> Tensor:
        """The tensor that holds the weight, in whatever layout it is now."""
        return cast(Tensor, self._dense if self._packed is None else self._packed)

    def forward(self, hidden_states: Tensor) -> Tensor:
        if self._packed is None or hidden_states.requires_grad:
            return nn.functional.linear(hidden_states, self.weight, self.bias)
        return torch.ops.mkldnn._linear_pointwise(hidden_states, self._packed, self.bias, "none", [], "")

    def unpacked(self) -> nn.Linear:
        """An ordinary layer with the same weight."""
        bias = None if self.bias is None else self.bias.detach().clone()
        return _dense_linear(self.weight.detach().clone(), bias, self.training)

    def extra_repr(self) -> str:
        kind = "packed" if self._packed is not None else "dense"
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, {kind}"

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Linear:
        return self.unpacked()

    def __reduce_ex__(self, protocol: Any) -> Any:
        linear = self.unpacked()
        bias = None if linear.bias is None else linear.bias.detach()
        return _dense_linear, (linear.weight.detach(), bias, self.training)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> PackedLinear:
        super()._apply(fn, recurse)
        weight = fn(self.weight.detach())
        if weight.device.type == "cpu" and weight.dtype == torch.float32:
            self._packed, self._dense = _pack(weight), None
        else:
            self._packed, self._dense = None, nn.Parameter(weight, requires_grad=False)
        return self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination.pop(f"{prefix}_dense", None)
        destination[f"{prefix}weight"] = self.weight.detach()

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        weight = state_dict.pop(f"{prefix}weight", None)
        super()._load_from_state_dict(state_dict, prefix, *args)
        if weight is not None:
            self._packed, self._dense = _pack(weight.float()), None


def pack_linears(model: nn.Module, *, tied_head: bool = False) -> PackReport:
    """Packs the fp32 linear layers of a model in place and releases their original weights.

    Outputs agree with the dense layers' to a relative 1e-4. Only call this on a model of your own: it replaces submodules.

    Args:
        model (`nn.Module`): A model on the CPU.
        tied_head (`bool`): Also pack an output head that shares its weight with the embedding. The weight then stands
            twice in memory.

    Returns:
        What was packed and what was left dense, with reasons.
    """
    report = PackReport()
    problem = packing_problem()
    owners: dict[int, int] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                owners[id(parameter)] = owners.get(id(parameter), 0) + 1
    for name, module in list(model.named_modules()):
        if type(module) is not nn.Linear:  # subclasses compute something else
            continue
        reason = problem or _reason_to_stay_dense(module, shared=owners[id(module.weight)] > 1 and not tied_head)
        if reason is not None:
            report.skipped[name] = reason
            continue
        parent = model.get_submodule(name.rpartition(".")[0])
        setattr(parent, name.rpartition(".")[2], PackedLinear(module).train(module.training))
        report.num_packed += 1
    return report


def _dense_linear(weight: Tensor, bias: Tensor | None, training: bool) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias, requires_grad=False)
    return linear.train(training)


def _reason_to_stay_dense(linear: nn.Linear, shared: bool) -> str | None:
    if shared:
        return "its weight is shared with another module; packed it would stand twice"
    if linear.weight.device.type != "cpu":
        return f"it is on {linear.weight.device}"
    if linear.weight.dtype != torch.float32:
        return f"its dtype is {linear.weight.dtype}; packing serves float32"
    if is_sharded(linear):
        return "it is one of several shards"
    if linear._forward_hooks or linear._forward_pre_hooks:
        return "it carries hooks"
    return None


def _pack(weight: Tensor) -> Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), _ROWS)
