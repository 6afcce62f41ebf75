"""Linear layers whose weights are packed once for the CPU.

PyTorch's CPU linear re-packs its weight in every call with two or more rows, so that verifying four tokens costs about three
plain steps. Packed once by oneDNN, a pass over a few rows costs little more than a pass over one. Small layers are different:
there the call itself is what costs, and PyTorch's own is the cheaper one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn

from hf_specdec.placement import is_sharded


__all__ = ["PackReport", "PackedLinear", "SharedLinear", "pack_linears", "packing_problem"]

_ROWS = 8  # rows that the packed layout is chosen for: a verification pass of a usual draft
# Weights up to which PyTorch's own call is the faster one for 1 to 8 rows (measured: with 1,024 x 1,024 it still is, with
# 1,536 x 1,536 it is not from 4 rows on).
_SMALL = 1 << 20
# Rows from which oneDNN is the faster reader of an ordinary weight (measured with a head of 151,936 x 1,536).
_SEVERAL = 4


@dataclass
class PackReport:
    """What [`pack_linears`] did.

    Args:
        num_packed (`int`): Linear layers packed.
        num_shared (`int`): Layers whose weight stays where it is, because another module uses it too ([`SharedLinear`]).
        skipped (`dict[str, str]`): Layers left dense, each with the reason.
    """

    num_packed: int = 0
    num_shared: int = 0
    skipped: dict[str, str] = field(default_factory=dict)


def packing_problem() -> str | None:
    """Why weights cannot be packed with this build of PyTorch; None where they can."""
    if not torch.backends.mkldnn.is_available():
        return "this build of PyTorch has no oneDNN"
    if not hasattr(torch.ops.mkldnn, "_reorder_linear_weight") or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return "this build of PyTorch has no packed linear operator"
    return None


class _PackedProduct(torch.autograd.Function):
    """A packed product that gradients go through: only they need the ordinary weight."""

    @staticmethod
    def forward(ctx: Any, hidden_states: Tensor, bias: Tensor | None, packed: Tensor) -> Tensor:
        ctx.packed = packed
        return _product(hidden_states, packed, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        to_hidden, to_bias, _ = ctx.needs_input_grad
        return (
            gradient @ ctx.packed.to_dense() if to_hidden else None,
            gradient.flatten(0, -2).sum(0) if to_bias else None,
            None,
        )


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
        served = hidden_states.dtype == torch.float32 and hidden_states.shape[-1:] == (self.in_features,)
        if self._packed is None or not served or torch.is_autocast_enabled("cpu"):
            return nn.functional.linear(hidden_states, self.weight, self.bias)
        wanted = hidden_states.requires_grad or (self.bias is not None and self.bias.requires_grad)
        if torch.is_grad_enabled() and wanted:
            product: Tensor = _PackedProduct.apply(hidden_states, self.bias, self._packed)
            return product
        return _product(hidden_states, self._packed, self.bias)

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
        bias = {key: value for key, value in state_dict.items() if key != f"{prefix}weight"}
        dense, self._dense = self._dense, None
        super()._load_from_state_dict(bias, prefix, *args)
        self._dense = dense
        _, _, missing, _, errors = args
        given, shape = state_dict.get(f"{prefix}weight"), (self.out_features, self.in_features)
        if given is None:
            missing.append(f"{prefix}weight")
        elif tuple(given.shape) != shape:
            errors.append(f"size mismatch for {prefix}weight: got {tuple(given.shape)}, expected {shape}.")
        elif self._packed is not None:
            self._packed = _pack(given.to("cpu", torch.float32))
        else:
            self._dense = nn.Parameter(
                given.to(self.storage.device, self.storage.dtype, copy=True), requires_grad=False
            )


class SharedLinear(nn.Linear):
    """An `nn.Linear` over a weight that stays ordinary, as that of an output head tied to the embedding.

    A pass of several rows goes through oneDNN's operator, which reads an ordinary weight about twice as fast as PyTorch's
    own does there; one row, other dtypes and devices, and gradients take PyTorch's.
    """

    def forward(self, input: Tensor) -> Tensor:
        narrow = input.numel() < _SEVERAL * self.in_features
        learns = torch.is_grad_enabled() and (input.requires_grad or self.weight.requires_grad)
        served = {input.dtype, self.weight.dtype} == {torch.float32} and input.device.type == "cpu"
        if narrow or learns or not served or torch.is_autocast_enabled("cpu"):
            return super().forward(input)
        return _product(input, self.weight, self.bias)


def pack_linears(model: nn.Module, *, tied_head: bool = False, small: bool = False) -> PackReport:
    """Packs the fp32 linear layers of a model in place and releases their original weights.

    A weight that another module uses too, as that of a head tied to the embedding, stays as it is and is only read faster
    where several rows pass ([`SharedLinear`]). Outputs agree with the dense layers' to a relative 1e-4. Each original is
    released before the next layer is packed. Only call this on a model of your own: it replaces submodules.

    Args:
        model (`nn.Module`): A model on the CPU.
        tied_head (`bool`): Pack an output head that shares its weight with the embedding, too. The weight then stands
            twice in memory.
        small (`bool`): Pack layers of 2^20 weights or fewer, too, for which PyTorch's own call is mostly faster.

    Returns:
        What was packed, and what was left as it was, with reasons.
    """
    report = PackReport()
    problem = packing_problem()
    owners: dict[int, int] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                owners[id(parameter)] = owners.get(id(parameter), 0) + 1
    # Other subclasses compute something else. Names alone are kept, since whoever holds a layer holds its weight.
    for name in [name for name, module in model.named_modules() if type(module) in (nn.Linear, SharedLinear)]:
        layer = cast(nn.Linear, model.get_submodule(name))
        reason = problem or _reason_to_stay_dense(layer, small)
        if reason is not None:
            report.skipped[name] = reason
            continue
        shared = owners[id(layer.weight)] > 1 and not tied_head
        faster = _shared(layer) if shared else PackedLinear(layer)
        _replace(model, layer, faster.train(layer.training))
        report.num_shared += shared
        report.num_packed += not shared
        del layer, faster
    return report


def _dense_linear(weight: Tensor, bias: Tensor | None, training: bool) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias, requires_grad=False)
    return linear.train(training)


def _shared(linear: nn.Linear) -> SharedLinear:
    """A layer with the very parameters of another."""
    shared = SharedLinear(linear.in_features, linear.out_features, bias=linear.bias is not None, device="meta")
    shared.weight, shared.bias = linear.weight, linear.bias
    return shared


def _replace(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Puts a module wherever another one was."""
    for parent in model.modules():
        for name, child in parent._modules.items():
            if child is old:
                parent._modules[name] = new


def _reason_to_stay_dense(linear: nn.Linear, small: bool) -> str | None:
    if linear.weight.device.type != "cpu":
        return f"it is on {linear.weight.device}"
    if linear.weight.dtype != torch.float32:
        return f"its dtype is {linear.weight.dtype}; packing serves float32"
    if is_sharded(linear):
        return "it is one of several shards"
    if linear._forward_hooks or linear._forward_pre_hooks:
        return "it carries hooks"
    if linear.weight.numel() <= _SMALL and not small:
        return f"it is small ({linear.out_features} x {linear.in_features}); PyTorch's own call is faster"
    return None


def _product(hidden_states: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    product: Tensor = torch.ops.mkldnn._linear_pointwise(hidden_states, weight, bias, "none", [], "")
    return product


def _pack(weight: Tensor) -> Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), _ROWS)
