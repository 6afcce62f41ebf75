"""Adapters that start as the layers of their target, where the copies do what the layers do (ours)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.activations import ACT2FN

from hf_specdec.networks.exit_heads.adapter import ExitAdapter
from hf_specdec.placement import device_of


__all__ = ["activation_of", "start_as_layers"]

_COLUMNS = 8
# Of what the layer adds, and of the stream that it is added to, which a half-precision target rounds.
_TOLERANCE, _HALF_TOLERANCE = (1e-3, 1e-6), (5e-2, 2.0**-8)


def activation_of(config: PreTrainedConfig) -> str:
    """The name of the target's activation, as far as transformers knows it; that of Llama elsewhere."""
    names = (getattr(config, name, None) for name in ("hidden_activation", "hidden_act"))
    return next((name for name in names if isinstance(name, str) and name in ACT2FN), "silu")


@torch.no_grad()
def start_as_layers(target: Any, layers: Sequence[nn.Module], adapters: Mapping[int, ExitAdapter]) -> None:
    """Makes each adapter's layer a copy of the target's next one. Names and shapes do not say what a family does with its
    parameters (norms that scale by `1 + w`, factors on what is added), so a copy must show it: one that does not give the
    layer's own hidden states on some tokens is taken back.

    Args:
        target (`PreTrainedModel`): The target in evaluation mode; nothing of it is changed.
        layers (`Sequence[nn.Module]`): Its layers.
        adapters (`dict[int, ExitAdapter]`): By the number of layers below.
    """
    same = {depth: each for depth, each in adapters.items() if _shapes(each.layer) == _shapes(layers[depth])}
    if not same:
        return
    seen = _hidden_states(target, layers, {each for depth in same for each in (depth, depth + 1)})
    for depth, adapter in same.items():
        fresh = {name: value.clone() for name, value in adapter.layer.state_dict().items()}
        theirs = {name: value.detach().float() for name, value in layers[depth].state_dict().items()}
        adapter.layer.load_state_dict(theirs)
        given, wanted = (each.to(adapter.device, adapter.dtype) for each in (seen[depth], seen[depth + 1]))
        is_half = seen[depth].dtype in (torch.bfloat16, torch.float16)
        if not _agrees(adapter.body(given), given, wanted, _HALF_TOLERANCE if is_half else _TOLERANCE):
            adapter.layer.load_state_dict(fresh)


def _shapes(layer: nn.Module) -> dict[str, torch.Size]:
    return {name: value.shape for name, value in layer.state_dict().items()}


def _hidden_states(target: Any, layers: Sequence[nn.Module], depths: set[int]) -> dict[int, Tensor]:
    """By number of layers, the hidden states `(1, columns, hidden_size)` along tokens from all over the vocabulary."""
    seen: dict[int, Tensor] = {}

    def keeps(depth: int) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            seen[depth] = (output if isinstance(output, Tensor) else output[0]).detach().clone()

        return hook

    size = target.get_input_embeddings().weight.shape[0]
    ids = (torch.arange(1, _COLUMNS + 1, device=device_of(target)) * size // (_COLUMNS + 1))[None]
    handles = [layers[depth - 1].register_forward_hook(keeps(depth)) for depth in depths]
    try:
        target(input_ids=ids, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return seen


def _agrees(found: Tensor, given: Tensor, wanted: Tensor, tolerance: tuple[float, float]) -> bool:
    """Whether at the middle one of the columns the distance is small beside what the layer adds. Some columns, the first one
    above all, carry numbers in which half precision leaves little of what is added."""
    added, stream = (each.norm(dim=-1) for each in (wanted - given, wanted))
    allowed = tolerance[0] * added + tolerance[1] * stream
    return bool(((found - wanted).norm(dim=-1) / allowed.clamp(min=1e-12)).median() <= 1.0)
