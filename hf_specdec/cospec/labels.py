"""Counterfactual labels: what becomes of the answer if one mismatch is decided for the draft."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_specdec.acceptance import FEATURES
from hf_specdec.bench.batched import eos_token_ids, until_end
from hf_specdec.cospec.rollouts import Decision, Rollouts
from hf_specdec.placement import device_of
from hf_specdec.sequences import pad_left


__all__ = ["Labelled", "label_mismatches"]


@dataclass(frozen=True)
class Labelled:
    """Mismatches along the target's own answers, and whether the draft may be taken there.

    Args:
        features (`torch.FloatTensor` of shape `(samples, len(FEATURES))`): What a policy sees.
        labels (`torch.BoolTensor` of shape `(samples,)`): Whether the answer is right after the flip, or was wrong before too.
        prompts (`torch.LongTensor` of shape `(samples,)`): Of which prompt.
    """

    features: Tensor
    labels: Tensor
    prompts: Tensor


def label_mismatches(
    rollouts: Rollouts,
    *,
    flips_per_prompt: int = 8,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> Labelled:
    """Flips mismatches of the target's greedy answers one at a time to the draft's token, and lets the target go on.

    Published for AutoJudge, whose code does so; ours for CoSpec: the label says that the flip does the answer no harm.

    Args:
        rollouts ([`Rollouts`]): Models, prompts and the judge of answers; its policy is not asked.
        flips_per_prompt (`int`): Mismatches per prompt, chosen at random; each costs one answer.
        seed (`int`): Decides the choice.
        progress (`Callable`, *optional*): Called with the number of prompts done and of all prompts.
    """
    own, dice = rollouts.own(), random.Random(seed)
    features, labels, prompts = [], [], []
    for index, prompt in enumerate(rollouts.prompts):
        (text,), (met,), _ = own.decode(index, 1)
        right = rollouts.is_correct(index, text)
        chosen = dice.sample(met, min(flips_per_prompt, len(met)))
        for decision, flipped in zip(chosen, _continued(own, list(prompt), text, chosen), strict=True):
            features.append(decision.features)
            labels.append(rollouts.is_correct(index, flipped) or not right)
            prompts.append(index)
        if progress is not None:
            progress(index + 1, len(rollouts.prompts))
    return Labelled(
        torch.stack(features) if features else torch.zeros(0, len(FEATURES)),
        torch.tensor(labels, dtype=torch.bool),
        torch.tensor(prompts, dtype=torch.long),
    )


@torch.no_grad()
def _continued(rollouts: Rollouts, prompt: list[int], text: list[int], chosen: list[Decision]) -> list[list[int]]:
    """The target's greedy answers after each flip, decoded together."""
    if not chosen:
        return []
    target: Any = rollouts.target
    starts = [prompt + text[: each.column - len(prompt)] + [each.drafted] for each in chosen]
    inputs = pad_left(
        starts, 0 if target.config.pad_token_id is None else target.config.pad_token_id, device_of(target)
    )
    eos = eos_token_ids(target)
    room = max(rollouts.max_new_tokens - min(map(len, starts)) + len(prompt), 1)
    out = target.generate(**inputs, do_sample=False, max_new_tokens=room, pad_token_id=0)
    width = inputs["input_ids"].shape[1]
    texts = []
    for start, row in zip(starts, out[:, width:].tolist(), strict=True):
        written = start[len(prompt) :]
        if written[-1] not in eos:
            written = until_end(written + row, eos)
        texts.append(written[: rollouts.max_new_tokens])
    return texts
