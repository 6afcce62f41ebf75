"""Counterfactual labels: what becomes of the answer if one mismatch is decided for the draft."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_specdec.acceptance import FEATURES
from hf_specdec.bench.batched import eos_token_ids, until_end
from hf_specdec.cospec.rollouts import Decision, Rollouts
from hf_specdec.placement import device_of
from hf_specdec.sequences import pad_left, padding_of


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

    @classmethod
    def empty(cls) -> Labelled:
        """No label."""
        return cls(torch.zeros(0, len(FEATURES)), torch.zeros(0, dtype=torch.bool), torch.zeros(0, dtype=torch.long))

    def __add__(self, other: Labelled) -> Labelled:
        return Labelled(
            *(torch.cat([mine, theirs]) for mine, theirs in zip(vars(self).values(), vars(other).values(), strict=True))
        )


def label_mismatches(
    rollouts: Rollouts,
    *,
    flips_per_prompt: int = 8,
    seed: int = 0,
    batch_size: int = 8,
    done: tuple[Labelled, int] | None = None,
    progress: Callable[[Labelled, int], None] | None = None,
) -> Labelled:
    """Flips mismatches of the target's greedy answers one at a time to the draft's token, and lets the target go on.

    Published for AutoJudge, whose code does so; ours for CoSpec: the label says that the flip does the answer no harm.

    Args:
        rollouts ([`Rollouts`]): Models, prompts and the judge of answers; its policy is not asked.
        flips_per_prompt (`int`): Mismatches per prompt, chosen at random; each costs one answer.
        seed (`int`): Decides the choice.
        batch_size (`int`): Texts that are decoded together.
        done (`tuple[Labelled, int]`, *optional*): Labels of the first prompts, and of how many, to go on from.
        progress (`Callable`, *optional*): Called with all labels so far and the number of prompts done.
    """
    own, total = rollouts.own(), len(rollouts.prompts)
    labelled, first = done or (Labelled.empty(), 0)
    for start in range(first, total, batch_size):
        together = range(start, min(start + batch_size, total))
        labelled += _labels_of(own, together, flips_per_prompt, seed, batch_size)
        if progress is not None:
            progress(labelled, together.stop)
    return labelled


def _labels_of(own: Rollouts, together: range, flips_per_prompt: int, seed: int, batch_size: int) -> Labelled:
    texts, met, _ = own.decode(together)
    right = {index: own.is_correct(index, text) for index, text in zip(together, texts, strict=True)}
    flips = [
        _Flip(index, text, decision)
        for index, text, decisions in zip(together, texts, met, strict=True)
        for decision in random.Random(f"{seed}:{index}").sample(decisions, min(flips_per_prompt, len(decisions)))
    ]
    if not flips:
        return Labelled.empty()
    answers = zip(flips, _continued(own, flips, batch_size), strict=True)
    return Labelled(
        torch.stack([flip.decision.features for flip in flips]),
        torch.tensor([own.is_correct(flip.prompt, flipped) or not right[flip.prompt] for flip, flipped in answers]),
        torch.tensor([flip.prompt for flip in flips]),
    )


@dataclass(frozen=True)
class _Flip:
    """A mismatch of the target's own answer (`text`) to a prompt, to be decided for the draft."""

    prompt: int
    text: list[int]
    decision: Decision

    @property
    def start(self) -> list[int]:
        """The new tokens up to the flipped one."""
        return [*self.text[: self.decision.place], self.decision.drafted]


def _continued(rollouts: Rollouts, flips: Sequence[_Flip], batch_size: int) -> list[list[int]]:
    """The target's greedy answers after each flip."""
    texts = []
    for start in range(0, len(flips), batch_size):
        texts += _continued_together(rollouts, flips[start : start + batch_size])
    return texts


@torch.no_grad()
def _continued_together(rollouts: Rollouts, flips: Sequence[_Flip]) -> list[list[int]]:
    target: Any = rollouts.target
    starts = [flip.start for flip in flips]
    inputs = pad_left(
        [[*rollouts.prompts[flip.prompt], *start] for flip, start in zip(flips, starts, strict=True)],
        padding_of(target),
        device_of(target),
    )
    eos = eos_token_ids(target)
    room = max(rollouts.max_new_tokens - min(map(len, starts)), 1)
    out = target.generate(**inputs, do_sample=False, max_new_tokens=room, pad_token_id=0)
    texts = []
    for start, row in zip(starts, out[:, inputs["input_ids"].shape[1] :].tolist(), strict=True):
        written = start if start[-1] in eos else until_end(start + row, eos)
        texts.append(written[: rollouts.max_new_tokens])
    return texts
