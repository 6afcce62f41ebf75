"""The arms of a quality measurement, by name."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from hf_specdec.acceptance import ACCEPTANCE
from hf_specdec.bench.arms import Arm, parse_arm
from hf_specdec.configs import BaseConfig, EASDConfig, ExactConfig, SpeculativeConfig
from hf_specdec.errors import InvalidConfigError
from hf_specdec.quality.control import RandomRejection
from hf_specdec.quality.rule_arms import Learnt, procedure_arm, rule_arm


__all__ = ["CONTROL", "MATCHED", "parse_quality_arms", "random_arm", "throws_dice"]

CONTROL, MATCHED = "random", "easd"  # the arm whose rate is measured, and the arm it is measured on
_OURS = ("exact", "easd", "easd-plain", "easd-THRESHOLD", "random", "random-RATE", "rsd", *ACCEPTANCE)


def parse_quality_arms(names: Iterable[str], threshold: float, length: int, learnt: Learnt | None = None) -> list[Arm]:
    """The arms with these names, each drafting `length` tokens with the model.

    `plain`; `exact`; `easd` and `easd-plain` at `threshold`; `easd-THRESHOLD`; `random-RATE`, and `random` at the rate at
    which `easd` turns out to change tokens; every other rule by its name in [`hf_specdec.acceptance.ACCEPTANCE`], at its
    defaults, or as `RULE-VALUE` with its first option at a value; `rsd-checks` and `rsd-likelihood`; besides, `model-N`,
    `ngram-N` and `hybrid-N` of [`parse_arm`]. `learnt` says where CSD's memory and CoSpec's policy lie.

    Raises:
        [`InvalidConfigError`]: For an unknown or repeated name, an arm that decodes one prompt at a time, or `random`
            without `easd`.
    """
    names = list(names)
    if len(set(names)) < len(names):
        raise InvalidConfigError(f"each arm once, got {', '.join(names)}")
    if CONTROL in names and MATCHED not in names:
        raise InvalidConfigError(
            f"the arm {CONTROL} takes its rate from the arm {MATCHED}: add {MATCHED}, or say {CONTROL}-RATE"
        )
    return [_arm(name, threshold, length, learnt or Learnt()) for name in names]


def random_arm(name: str, rate: float, length: int) -> Arm:
    """The control at a rate."""
    return _ours(name, SpeculativeConfig(acceptance=RandomRejection(rate)), length)


def throws_dice(arm: Arm) -> bool:
    """Whether the arm's greedy texts depend on a seed."""
    return arm.config is not None and arm.config.rule.throws_dice


def _arm(name: str, threshold: float, length: int, learnt: Learnt) -> Arm:
    if match := re.fullmatch(r"random(?:-(\d*\.?\d+))?", name):
        return random_arm(name, float(match[1] or 0.0), length)
    if match := re.fullmatch(r"easd(?:-(\d*\.?\d+))?", name):
        return _ours(name, EASDConfig(entropy_threshold=threshold if match[1] is None else float(match[1])), length)
    if name == "easd-plain":
        return _ours(name, EASDConfig(entropy_threshold=threshold, resample="plain"), length)
    if name == "exact":
        return _ours(name, ExactConfig(), length)
    if (special := procedure_arm(name) or rule_arm(name, length, learnt)) is not None:
        return special
    if "=" in name:
        raise InvalidConfigError(
            f"{name}: a quality measurement knows its arms by name alone, so that it can be resumed"
        )
    try:
        arm = parse_arm(name)
    except InvalidConfigError as error:
        raise InvalidConfigError(f"{error}; in a quality measurement also {', '.join(_OURS)}") from None
    if arm.stock is not None:
        raise InvalidConfigError(f"{name} decodes one prompt at a time; a quality measurement decodes in batches")
    return arm if arm.config is None else replace(arm, config=_strict(arm.config))


def _ours(name: str, config: BaseConfig, length: int) -> Arm:
    return Arm(name, _strict(config, drafting="model", length=length), needs_draft=True)


def _strict(config: BaseConfig, **changes: Any) -> BaseConfig:
    """A drafter that fails must not turn an arm into plain decoding."""
    return replace(config, on_drafter_error="raise", **changes)
