"""The reduced vocabulary of an EAGLE-3 drafter: which target token each draft token is."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_specdec.errors import IncompatibleDraftError


__all__ = ["offsets_of", "read_vocabulary"]


def offsets_of(target_ids: Tensor, vocab_size: int) -> dict[str, Tensor]:
    """`d2t` as offsets (`target_id - draft_id`) and `t2d` as a mask, from the target's id of each draft token."""
    chosen = torch.zeros(vocab_size, dtype=torch.bool)
    chosen[target_ids] = True
    return {"d2t": target_ids - torch.arange(len(target_ids)), "t2d": chosen}


def read_vocabulary(d2t: Tensor, t2d: Tensor | None, vocab_size: int) -> dict[str, Tensor]:
    """The maps in the published form, whether the checkpoint holds offsets (published) or target ids (seen in conversions).

    Args:
        d2t (`torch.LongTensor` of shape `(draft_vocab,)`): Offsets or ids.
        t2d (`torch.BoolTensor` of shape `(vocab,)`, *optional*): The target's tokens that have a draft token.
        vocab_size (`int`): Size of the target's vocabulary.

    Raises:
        [`IncompatibleDraftError`]: If neither reading is possible, or both are and `t2d` cannot decide.
    """
    d2t = d2t.long()
    if t2d is not None and (t2d.shape != (vocab_size,) or int(t2d.bool().sum()) != len(d2t)):
        raise IncompatibleDraftError(
            f"t2d must mark {len(d2t)} of {vocab_size} tokens, got {int(t2d.bool().sum())} in the shape {tuple(t2d.shape)}"
        )
    readings = {"offsets": d2t + torch.arange(len(d2t)), "target ids": d2t}
    possible = {name: ids for name, ids in readings.items() if _fits(ids, t2d, vocab_size)}
    if len(possible) == 2 and not torch.equal(*possible.values()):
        raise IncompatibleDraftError(
            "d2t can be read as offsets and as target ids, and there is no t2d that decides: add t2d to the checkpoint"
        )
    if not possible:
        raise IncompatibleDraftError(
            f"d2t fits neither as offsets nor as target ids: expected {len(d2t)} different tokens below {vocab_size}"
            + ("" if t2d is None else ", those that t2d marks")
        )
    return offsets_of(next(iter(possible.values())), vocab_size)


def _fits(target_ids: Tensor, t2d: Tensor | None, vocab_size: int) -> bool:
    inside = bool(((target_ids >= 0) & (target_ids < vocab_size)).all())
    distinct = len(target_ids.unique()) == len(target_ids)
    return inside and distinct and (t2d is None or bool(t2d.bool()[target_ids].all()))
