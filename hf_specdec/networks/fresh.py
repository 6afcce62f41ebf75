"""New, untrained drafters for a target."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import rms_norm
from transformers import PreTrainedConfig

from hf_specdec._compat import undecorated_model
from hf_specdec.errors import InvalidConfigError
from hf_specdec.networks.base import DraftNetwork
from hf_specdec.networks.eagle import EagleConfig, EagleDrafter
from hf_specdec.networks.eagle3 import Eagle3Config, Eagle3Drafter
from hf_specdec.networks.eagle3.modeling import NUM_TAPS, default_taps
from hf_specdec.networks.rotary import rotary_like
from hf_specdec.networks.target import TargetIdentity
from hf_specdec.networks.vocabulary import offsets_of
from hf_specdec.placement import is_sharded, weight_of


__all__ = ["fresh_drafter", "layer_options"]


def fresh_drafter(
    target: Any,
    family: str,
    draft_vocab_size: int | None,
    draft_token_ids: Tensor | None,
    taps: Sequence[int] | None,
    tokenizer: Any,
) -> DraftNetwork:
    """An untrained network; see [`AutoDrafter.from_target`]."""
    inner = undecorated_model(target)
    config = inner.config.get_text_config(decoder=True)
    identity = TargetIdentity.of(inner, tokenizer)
    options = layer_options(config) | {
        "target_name": identity.name,
        "target_tokenizer": identity.tokenizer,
        "target_weights": identity.weights,
    }
    if family == "eagle":
        if any(each is not None for each in (draft_vocab_size, draft_token_ids, taps)):
            raise InvalidConfigError(
                'a draft vocabulary and taps need family="eagle3": EAGLE-1 uses the target\'s own head and last hidden states'
            )
        return EagleDrafter(EagleConfig(**options))
    if family != "eagle3":
        raise InvalidConfigError(f"family must be eagle or eagle3, got {family!r}")
    ids = _draft_ids(config.vocab_size, draft_vocab_size, draft_token_ids)
    network = Eagle3Drafter(
        Eagle3Config(**options, draft_vocab_size=len(ids), taps=_taps(taps, config.num_hidden_layers))
    )
    if network.is_reduced:
        network.load_state_dict(offsets_of(ids, config.vocab_size), strict=False)
    _copy_head(network, inner, ids)
    _copy_norm(network, inner)
    return network


def _draft_ids(vocab_size: int, draft_vocab_size: int | None, draft_token_ids: Tensor | None) -> Tensor:
    if draft_token_ids is not None:
        ids = draft_token_ids.cpu().long().unique()
        if draft_vocab_size not in (None, len(ids)):
            raise InvalidConfigError(
                f"draft_vocab_size={draft_vocab_size}, but draft_token_ids names {len(ids)} tokens"
            )
    else:
        ids = torch.arange(vocab_size if draft_vocab_size is None else draft_vocab_size)
    if not len(ids) or int(ids[0]) < 0 or int(ids[-1]) >= vocab_size:
        raise InvalidConfigError(
            f"the draft vocabulary must be 1 to {vocab_size} of the target's tokens, got {len(ids)}"
        )
    return ids


def layer_options(config: PreTrainedConfig) -> dict[str, Any]:
    """The shape of one of the target's layers, and its rotary parameters."""
    heads = config.num_attention_heads
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": _widest(getattr(config, "intermediate_size", None)) or 4 * config.hidden_size,
        "num_attention_heads": heads,
        "num_key_value_heads": getattr(config, "num_key_value_heads", None) or heads,
        "head_dim": getattr(config, "head_dim", None) or config.hidden_size // heads,
        "rms_norm_eps": getattr(config, "rms_norm_eps", None) or 1e-5,
        "max_position_embeddings": getattr(config, "max_position_embeddings", 2048),
        "rope_parameters": rotary_like(getattr(config, "rope_parameters", None)),
        "bos_token_id": config.bos_token_id,
        "eos_token_id": config.eos_token_id,
        "pad_token_id": config.pad_token_id,
    }


def _widest(sizes: int | Sequence[int] | None) -> int | None:
    """The MLP's size, the largest one where it differs from layer to layer."""
    return sizes if sizes is None or isinstance(sizes, int) else max(sizes)


def _taps(given: Sequence[int] | None, num_layers: int) -> list[int] | None:
    """The layers, written down although they are the usual ones: a checkpoint must say what it was trained on."""
    if given is not None:
        return list(given)
    return list(default_taps(num_layers)) if num_layers >= NUM_TAPS else None


def _copy_head(network: Eagle3Drafter, target: Any, ids: Tensor) -> None:
    """Starts the draft head from the target's own rows; a quantised head cannot be copied."""
    head = target.get_output_embeddings()
    if head is not None and head.weight.is_floating_point() and head.weight.shape[1] == network.lm_head.weight.shape[1]:
        with weight_of(head) as weight:
            network.lm_head.load_state_dict({"weight": weight.detach()[ids.to(weight.device)]})


@torch.no_grad()
def _copy_norm(network: Eagle3Drafter, target: Any) -> None:
    """Starts the norm before the draft head from the target's final one, which the head was trained behind, where that is an
    RMS norm of the same width, whole in this process; a LayerNorm has no such weight."""
    size = network.norm.weight.shape
    norms = [each for each in target.get_decoder().children() if "norm" in type(each).__name__.lower()]
    norms = [each for each in norms if getattr(getattr(each, "weight", None), "shape", None) == size]
    if len(norms) != 1 or is_sharded(norms[0]):
        return
    with weight_of(norms[0]) as own:
        probe = torch.linspace(-1.0, 2.0, size[0], device=own.device, dtype=own.dtype)
        wanted = norms[0](probe[None, None])[0, 0].float().cpu()
        weight = own.detach().float().cpu()
    for each in (weight, 1.0 + weight):  # Gemma's weights are distances from 1
        made = rms_norm(probe.float().cpu(), size, each, network.config.rms_norm_eps)
        if torch.allclose(made, wanted, rtol=2e-2, atol=2e-2):
            network.norm.load_state_dict({"weight": each})
            return
