"""Training on rounds that were recorded in live use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hf_specdec.errors import InvalidConfigError
from hf_specdec.networks import DraftNetwork
from hf_specdec.training.continual.mixing import with_replay
from hf_specdec.training.continual.options import ContinualTraining
from hf_specdec.training.options import TrainingOptions
from hf_specdec.training.rcsd import Recording, RoundBook
from hf_specdec.training.recipes import Recipe
from hf_specdec.training.texts import Text, digest_of
from hf_specdec.training.trainer import StepLog, train


__all__ = ["train_continually"]


def train_continually(
    target: Any,
    network: DraftNetwork,
    recordings: Sequence[Recording],
    replay: Sequence[Text],
    recipe: Recipe,
    options: TrainingOptions,
    continual: ContinualTraining,
    **run: Any,
) -> list[StepLog]:
    """Trains `network` in place on recorded texts and replayed ones, near to a frozen reference.

    Recipes that learn from rounds learn from the recorded ones; replayed texts have none, and keep such a drafter by the
    divergences alone.

    Args:
        target (`PreTrainedModel`): The target.
        network ([`DraftNetwork`]): The network, attached to it, in float32.
        recordings (`Sequence[Recording]`): What was recorded, the oldest first; of two recordings of one text the later counts.
        replay (`Sequence[Text]`): Texts of what is not to be forgotten.
        recipe ([`Recipe`]): Loss and steps, without what keeps the drafter.
        options ([`TrainingOptions`]): Length and pace.
        continual ([`ContinualTraining`]): What keeps the drafter.
        run: Passed on to [`train`].

    Raises:
        [`InvalidConfigError`]: If nothing was recorded, a recorded token is not in the target's vocabulary, or there is nothing
            to replay.
    """
    new = RoundBook(recordings)
    _check_tokens(target, new.texts)
    texts = with_replay(new.texts, replay, continual.replay_share, options.seed)
    rounds = RoundBook([*(Recording(text, ()) for text in replay), *recordings]) if recipe.rounds else None
    seen = [(each.anchor, each.drafts, each.choices, each.num_accepted) for one in recordings for each in one.rounds]
    fingerprint = digest_of(texts, seen)
    return train(
        target, network, texts, continual.recipe(recipe), options, rounds=rounds, fingerprint=fingerprint, **run
    )


def _check_tokens(target: Any, texts: Sequence[Text]) -> None:
    vocab_size = target.config.get_text_config(decoder=True).vocab_size
    largest = max(max(text.tokens) for text in texts)
    if largest >= vocab_size:
        raise InvalidConfigError(
            f"the rounds hold the token {largest}, the target has {vocab_size} tokens: pass rounds of this target"
        )
