"""`AutoDrafter`: a drafter network for a target, whatever dialect it is published in."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor

from hf_specdec._compat import undecorated_model
from hf_specdec.errors import IncompatibleDraftError, InvalidConfigError
from hf_specdec.networks.base import DraftNetwork
from hf_specdec.networks.checkpoint import Checkpoint, read_checkpoint
from hf_specdec.networks.dialects import read_config, read_maps, read_tensors
from hf_specdec.networks.eagle import EagleConfig, EagleDrafter
from hf_specdec.networks.eagle3 import Eagle3Drafter
from hf_specdec.networks.fresh import fresh_drafter
from hf_specdec.placement import device_of


__all__ = ["AutoDrafter", "load_network"]


@final
class AutoDrafter:
    """Loads or makes the drafter network of a target. Not to be instantiated.

    Dialects: EAGLE-1 and HASS (`layers.0.*`), EAGLE-3 (`midlayer.*`), speculators (`layers.0.*` and a nested config), and what
    `save_pretrained` writes.
    """

    def __init__(self) -> None:
        raise TypeError("AutoDrafter is not instantiated: call AutoDrafter.from_pretrained(id_or_path, target=model)")

    @classmethod
    def from_pretrained(
        cls,
        id_or_path: str | os.PathLike[str],
        *,
        target: Any,
        tokenizer: Any = None,
        revision: str | None = None,
        taps: Sequence[int] | None = None,
        allow_bin: bool = False,
        dtype: torch.dtype | None = None,
        attn_implementation: str | None = None,
    ) -> DraftNetwork:
        """The network of a checkpoint, on the target's device and in its dtype, in evaluation mode.

        Args:
            id_or_path (`str` or path): Folder or Hub id.
            target (`PreTrainedModel`): The model it drafts for; nothing of it is changed.
            tokenizer (`PreTrainedTokenizerBase`, *optional*): The target's tokenizer, for checkpoints that name its hash.
            revision (`str`, *optional*): Branch, tag or commit on the Hub.
            taps (`Sequence[int]`, *optional*): Indices into the target's `hidden_states` that an EAGLE-3 drafter reads, where
                the checkpoint does not say or is wrong.
            allow_bin (`bool`): Whether `pytorch_model.bin` may be read, with `weights_only=True`.
            dtype (`torch.dtype`, *optional*): Data type of the network; that of the target's embeddings by default.
            attn_implementation (`str`, *optional*): As in transformers; the target's by default.

        Raises:
            [`IncompatibleDraftError`]: If a tensor is missing, unexpected or of another shape, or the target is another one.
        """
        network = load_network(read_checkpoint(id_or_path, revision=revision, allow_bin=allow_bin), taps=taps)
        network.attach(target, tokenizer)
        return _placed(network, target, dtype, attn_implementation)

    @classmethod
    def from_target(
        cls,
        target: Any,
        family: str = "eagle3",
        *,
        draft_vocab_size: int | None = None,
        draft_token_ids: Tensor | None = None,
        taps: Sequence[int] | None = None,
        tokenizer: Any = None,
        dtype: torch.dtype | None = None,
    ) -> DraftNetwork:
        """A new, untrained network shaped like one layer of the target.

        EAGLE-3's `lm_head` starts from the target's rows (ours, after speculators); all else is torch's own initialisation.

        Args:
            target (`PreTrainedModel`): The model it will draft for.
            family (`str`): `"eagle"` (also for HASS) or `"eagle3"`.
            draft_vocab_size (`int`, *optional*): Size of an EAGLE-3 draft vocabulary: the lowest ids, unless
                `draft_token_ids` names others.
            draft_token_ids (`torch.LongTensor`, *optional*): The target's tokens that may be drafted, the most frequent ones.
            taps (`Sequence[int]`, *optional*): Indices into the target's `hidden_states` for EAGLE-3; by default `2, n // 2,
                n - 3` for `n` layers, which is possible from three layers on.
            tokenizer (`PreTrainedTokenizerBase`, *optional*): The target's, whose hash the checkpoint then carries.
            dtype (`torch.dtype`, *optional*): Data type of the network; that of the target's embeddings by default.

        Raises:
            [`InvalidConfigError`]: For an unknown family, an impossible vocabulary, or rotary parameters of a type that
                transformers does not compute for a layer of its own.
        """
        network = fresh_drafter(target, family, draft_vocab_size, draft_token_ids, taps, tokenizer)
        network.attach(target, tokenizer)
        return _placed(network, target, dtype, None)


def load_network(checkpoint: Checkpoint, *, taps: Sequence[int] | None = None) -> DraftNetwork:
    """The network of a checkpoint, on the CPU, in the checkpoint's dtype and without a target.

    Raises:
        [`IncompatibleDraftError`]: If a tensor is missing, unexpected or of another shape; the message names them all.
    """
    tensors = read_tensors(checkpoint)
    config = read_config(checkpoint, tensors)
    network: DraftNetwork
    if isinstance(config, EagleConfig):
        if taps is not None:
            raise InvalidConfigError("taps belong to EAGLE-3; this checkpoint reads the last hidden states")
        network = EagleDrafter(config)
    else:
        if taps is not None:
            config.taps = list(taps)
        tensors = read_maps(config, tensors)
        network = Eagle3Drafter(config)
    _fill(network, tensors, checkpoint.name)
    return network.eval()


def _fill(network: DraftNetwork, tensors: dict[str, Tensor], name: str) -> None:
    expected = network.state_dict()
    problems = [f"missing {sorted(expected.keys() - tensors.keys())}"] if expected.keys() - tensors.keys() else []
    if unexpected := sorted(tensors.keys() - expected.keys()):
        problems.append(f"unexpected {unexpected}")
    problems += [
        f"{key} has the shape {tuple(tensors[key].shape)}, expected {tuple(value.shape)}"
        for key, value in expected.items()
        if key in tensors and tensors[key].shape != value.shape
    ]
    if problems:
        raise IncompatibleDraftError(
            f"the weights of {name} do not make a {type(network).__name__}: " + "; ".join(problems)
        )
    floating = {value.dtype for value in tensors.values() if value.is_floating_point()}
    if len(floating) == 1:
        network.to(floating.pop())
    network.load_state_dict(tensors)


def _placed(
    network: DraftNetwork, target: Any, dtype: torch.dtype | None, attn_implementation: str | None
) -> DraftNetwork:
    """Beside its target's head, and set up like it."""
    inner = undecorated_model(target)
    weight = inner.get_input_embeddings().weight
    if dtype is None:
        dtype = weight.dtype if weight.is_floating_point() else torch.float32
    network.to(device_of(inner.get_output_embeddings()), dtype)
    network.set_attn_implementation(attn_implementation or inner.config._attn_implementation or "sdpa")
    return network.eval()
