"""New texts among old ones."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hf_specdec.errors import InvalidConfigError
from hf_specdec.training.rcsd import Recording
from hf_specdec.training.texts import Text


__all__ = ["cut_recordings", "with_replay"]


def with_replay(new: Sequence[Text], old: Sequence[Text], share: float, seed: int = 0) -> list[Text]:
    """The new texts, followed by as many old ones as make up `share` of all (ours). Each old text comes once before any comes
    twice.

    Args:
        new (`Sequence[Text]`): Texts to learn.
        old (`Sequence[Text]`): Texts not to forget.
        share (`float`): Share of old texts, at least 0 and below 1.
        seed (`int`): Decides which of the old ones; no global random state is read.

    Raises:
        [`InvalidConfigError`]: If the share is out of range, or there is nothing to replay.
    """
    if not 0 <= share < 1:
        raise InvalidConfigError(f"the share of replayed texts must be at least 0 and below 1, got {share}")
    if share and not old:
        raise InvalidConfigError(
            f"there are no old texts to make up a share of {share}: pass some, or a share of 0, which may forget them"
        )
    count, replayed = round(len(new) * share / (1 - share)), list[Text]()
    generator = torch.Generator().manual_seed(seed)
    while len(replayed) < count:
        order = torch.randperm(len(old), generator=generator).tolist()
        replayed += [old[index] for index in order[: count - len(replayed)]]
    return [*new, *replayed]


def cut_recordings(recordings: Sequence[Recording], max_tokens: int) -> list[Recording]:
    """The recordings, their texts cut to `max_tokens`, with the rounds whose first draft is about a token that is left;
    those whose prompt is as long already are left out.

    Raises:
        [`InvalidConfigError`]: If none is left.
    """
    kept = [
        Recording(
            Text(each.text.tokens[:max_tokens], each.text.num_prompt_tokens),
            tuple(round_ for round_ in each.rounds if round_.anchor + 2 < max_tokens),
        )
        for each in recordings
        if each.text.num_prompt_tokens < max_tokens
    ]
    if not kept:
        raise InvalidConfigError(f"every recorded prompt has {max_tokens} tokens or more: pass a larger max_tokens")
    return kept
