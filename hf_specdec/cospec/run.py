"""Training a policy from the first label to the last reinforcement step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from hf_specdec.acceptance import PolicyNetwork, pair_fingerprint
from hf_specdec.cospec.label_file import LabelFile
from hf_specdec.cospec.labels import Labelled, label_mismatches
from hf_specdec.cospec.reinforce import ReinforceOptions, ReinforceStep, reinforce
from hf_specdec.cospec.rollouts import Rollouts
from hf_specdec.cospec.warm_start import agreement, warm_start
from hf_specdec.errors import InvalidConfigError


__all__ = ["CoSpecOptions", "CoSpecResult", "train_cospec"]


@dataclass(frozen=True)
class CoSpecOptions:
    """How a policy is trained. The values are ours.

    Args:
        hidden_size (`int`): Width of its hidden layer.
        flips_per_prompt (`int`): Labelled mismatches per prompt.
        warm_steps (`int`): Steps of the fit to the labels.
        threshold (`float`): The draft is taken above it; agreements are measured with it.
        reinforcement ([`ReinforceOptions`]): The second stage; `num_steps=0` leaves it out.
        batch_size (`int`): Texts that are decoded together for the labels.
        seed (`int`): Decides the first weights and the choice of mismatches.
    """

    hidden_size: int = 64
    flips_per_prompt: int = 8
    warm_steps: int = 500
    threshold: float = 0.5
    reinforcement: ReinforceOptions = field(default_factory=ReinforceOptions)
    batch_size: int = 8
    seed: int = 0


@dataclass(frozen=True)
class CoSpecResult:
    """What came of it.

    Args:
        policy ([`PolicyNetwork`]): The policy, with the fingerprint of the two models.
        num_labels, num_held_out (`int`): Labelled mismatches of the training and of the held-out prompts.
        harmless, held_out_harmless (`float`): Share of them where the draft may be taken: what a policy that always takes it,
            or never, would agree with.
        warm_agreement, held_out_warm_agreement (`float`): Share of them decided as labelled after the first stage.
        held_out_agreement (`float`): The same after the second stage, on held-out prompts.
        steps (`tuple[ReinforceStep, ...]`): The second stage.
    """

    policy: PolicyNetwork
    num_labels: int
    num_held_out: int
    harmless: float
    held_out_harmless: float
    warm_agreement: float
    held_out_warm_agreement: float
    held_out_agreement: float
    steps: tuple[ReinforceStep, ...]

    def to_dict(self) -> dict[str, Any]:
        """Everything but the policy as plain Python values, ready for JSON."""
        values = {name: value for name, value in vars(self).items() if name != "policy"}
        return values | {"steps": [vars(each) for each in self.steps]}

    def summary(self) -> str:
        """A line to print."""
        return (
            f"{self.num_labels} labelled mismatches, {self.harmless:.1%} of them harmless; on {self.num_held_out} of held-out "
            f"prompts ({self.held_out_harmless:.1%} harmless) the policy agrees with the label on "
            f"{self.held_out_warm_agreement:.1%} after the fit and on {self.held_out_agreement:.1%} after "
            f"{len(self.steps)} steps of reinforcement"
        )


def train_cospec(
    rollouts: Rollouts,
    held_out: Rollouts,
    options: CoSpecOptions | None = None,
    *,
    files: tuple[LabelFile, LabelFile] | None = None,
    on_label: Callable[[int, int], None] | None = None,
    on_step: Callable[[ReinforceStep], None] | None = None,
) -> CoSpecResult:
    """Labels mismatches, fits a policy to the labels, then reinforces it on correct answers.

    Args:
        rollouts, held_out ([`Rollouts`]): The models with prompts to train on and with prompts to measure on.
        options ([`CoSpecOptions`], *optional*): How.
        files (`tuple[LabelFile, LabelFile]`, *optional*): Where the labels of the two sides are kept as they are made, and
            where those of a killed run are found again.
        on_label (`Callable`, *optional*): Called with the number of prompts labelled and of all prompts.
        on_step (`Callable`, *optional*): Called after each step of reinforcement.

    Raises:
        [`InvalidConfigError`]: If either side holds no mismatch to label.
    """
    options = CoSpecOptions() if options is None else options
    sides = _labels(rollouts, held_out, options, files, on_label)
    with torch.random.fork_rng():
        torch.manual_seed(options.seed)
        fingerprint = pair_fingerprint(rollouts.target.config, rollouts.draft.config)
        policy = PolicyNetwork(options.hidden_size, fingerprint)
    warm_start(policy, sides[0].features, sides[0].labels, num_steps=options.warm_steps)
    warm = [agreement(policy, each.features, each.labels, options.threshold) for each in sides]
    steps = []
    under_policy = replace(rollouts, policy=policy, seed=options.seed)
    for step in reinforce(policy, under_policy, len(rollouts.prompts), options.reinforcement):
        steps.append(step)
        if on_step is not None:
            on_step(step)
    return CoSpecResult(
        policy=policy,
        num_labels=len(sides[0].labels),
        num_held_out=len(sides[1].labels),
        harmless=float(sides[0].labels.double().mean()),
        held_out_harmless=float(sides[1].labels.double().mean()),
        warm_agreement=warm[0],
        held_out_warm_agreement=warm[1],
        held_out_agreement=agreement(policy, sides[1].features, sides[1].labels, options.threshold),
        steps=tuple(steps),
    )


def _labels(
    rollouts: Rollouts,
    held_out: Rollouts,
    options: CoSpecOptions,
    files: tuple[LabelFile, LabelFile] | None,
    on_label: Callable[[int, int], None] | None,
) -> list[Labelled]:
    total = len(rollouts.prompts) + len(held_out.prompts)
    sides = []
    for side, before, file in zip((rollouts, held_out), (0, len(rollouts.prompts)), files or (None, None), strict=True):

        def keep(labelled: Labelled, number: int, before: int = before, file: LabelFile | None = file) -> None:
            if file is not None:
                file.write(labelled, number)
            if on_label is not None:
                on_label(before + number, total)

        labelled = label_mismatches(
            side,
            flips_per_prompt=options.flips_per_prompt,
            seed=options.seed,
            batch_size=options.batch_size,
            done=None if file is None else file.read(),
            progress=keep,
        )
        if not len(labelled.labels):
            raise InvalidConfigError(
                f"the target's answers to {len(side.prompts)} prompts hold no mismatch to label: pass more prompts, for "
                "training and held out"
            )
        sides.append(labelled)
    return sides
