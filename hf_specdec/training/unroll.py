"""The forward pass of training: every column of a text at once drafts a chain on the network's own states."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import DynamicCache

from hf_specdec._compat import CACHE_KEY
from hf_specdec.errors import InvalidConfigError
from hf_specdec.networks import DraftNetwork, Eagle3Drafter, EagleDrafter
from hf_specdec.training.losses import Unrolled
from hf_specdec.training.texts import TextBatch


__all__ = ["chain_masks", "drafted_logits", "unroll"]

_MASKABLE = ("eager", "sdpa")


def unroll(network: DraftNetwork, batch: TextBatch, num_steps: int, *, detach: bool = False) -> Unrolled:
    """Drafts `num_steps` tokens from each column of each text, reading the text's own tokens, as inference would if it had
    drafted them.

    At step `j` the chain of column `t` attends to the target's true features up to column `t` and to the `j` states of its
    own after it; all else is masked with `-inf`. This is the training-time test of EAGLE-3 (arXiv 2503.01840, published)
    and, column for column, the harmonised context alignment of HASS (arXiv 2408.15766, published), whose code shifts each
    chain to the column it drafts for and weakens the mask by logits of 0 instead of `-inf` (ours: not so).

    Args:
        network ([`DraftNetwork`]): The network, attached to its target.
        batch ([`TextBatch`]): Texts with the target's features and logits.
        num_steps (`int`): K, drafts per chain.
        detach (`bool`): Whether no gradient flows from a step into the states it reads (HASS, published); EAGLE-3 lets it
            flow (published).

    Raises:
        [`InvalidConfigError`]: If `num_steps` is not positive, or the network's attention takes no masks.
    """
    if num_steps < 1:
        raise InvalidConfigError(f"num_steps must be at least 1, got {num_steps}")
    attention = network.config._attn_implementation
    if attention not in _MASKABLE:
        raise InvalidConfigError(
            f"training needs an attention that takes masks ({' or '.join(_MASKABLE)}), got {attention!r}: call "
            "network.set_attn_implementation('sdpa')"
        )
    fed = [_ahead(batch.tokens, 1 + step) for step in range(num_steps)]
    all_logits, all_states = _advance(network, batch.features, fed, detach)
    steps = range(num_steps)
    return Unrolled(
        student_logits=all_logits,
        target_logits=[_ahead(batch.logits, 1 + step) for step in steps],
        masks=chain_masks(batch.loss_mask, num_steps),
        tokens=[_ahead(batch.tokens, 2 + step) for step in steps],
        target_ids=network.target_ids if isinstance(network, Eagle3Drafter) and network.is_reduced else None,
        student_states=all_states,
        target_states=[_ahead(batch.features, 1 + s) for s in steps] if isinstance(network, EagleDrafter) else (),
    )


def drafted_logits(
    network: DraftNetwork, batch: TextBatch, drafts: Sequence[Tensor], *, detach: bool = False
) -> list[Tensor]:
    """The network's logits along drafts that are not the text's own tokens: entry `j` at column `t` is what the chain
    anchored there says about its draft `j`, having read the drafts before it. What [`unroll`] says of `detach` holds.

    Args:
        network ([`DraftNetwork`]): The network, attached to its target.
        batch ([`TextBatch`]): Texts with the target's features.
        drafts (`Sequence[torch.LongTensor]`): K tensors of shape `(batch, tokens)`, as in [`DraftedRounds`].
    """
    return _advance(network, batch.features, [_ahead(batch.tokens, 1), *drafts[:-1]], detach)[0]


def _advance(
    network: DraftNetwork, features: Tensor, fed: Sequence[Tensor], detach: bool
) -> tuple[list[Tensor], list[Tensor]]:
    """Logits and states of each step, in which column `t` reads the token `fed[step][:, t]`."""
    states, cache = network.combine(features.to(network.device, network.dtype)), DynamicCache()
    all_logits, all_states = [], []
    for step, tokens in enumerate(fed):
        embeddings = network.embed(tokens)
        columns = torch.arange(step, step + embeddings.shape[1], device=embeddings.device)[None]
        states, readable = network.advance(
            embeddings,
            states.detach() if detach else states,
            attention_mask=_alignment(embeddings, step),
            position_embeddings=network.rotary_emb(embeddings, position_ids=columns),
            **{CACHE_KEY: cache},
        )
        all_logits.append(network.to_logits(readable).float())
        all_states.append(states)
    return all_logits, all_states


def _ahead(values: Tensor, distance: int) -> Tensor:
    """What stands `distance` columns later; zeros after the end."""
    kept = values[:, distance:]
    return pad(kept, [0, 0] * (values.ndim - 2) + [0, values.shape[1] - kept.shape[1]])


def chain_masks(loss_mask: Tensor, num_steps: int) -> list[Tensor]:
    """A draft is trained if its token and those of all drafts before it in its chain are."""
    masks = [_ahead(loss_mask, 2)]
    for step in range(1, num_steps):
        masks.append(masks[-1] & _ahead(loss_mask, 2 + step))
    return masks


def _alignment(like: Tensor, step: int) -> Tensor:
    """`(1, 1, columns, (step + 1) * columns)`: true features up to the anchor, then its own states of each step."""
    columns = like.shape[1]
    causal = torch.ones(columns, columns, dtype=torch.bool, device=like.device).tril()
    own = torch.eye(columns, dtype=torch.bool, device=like.device)
    allowed = torch.cat([causal, *[own] * step], -1)
    mask = torch.zeros(allowed.shape, dtype=like.dtype, device=like.device).masked_fill(~allowed, -torch.inf)
    return mask[None, None]
