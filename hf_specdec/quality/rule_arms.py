"""Arms for acceptance rules by name, and for procedures beside the loop."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from hf_specdec.acceptance import ACCEPTANCE, POLICY_NAME
from hf_specdec.acceptance.correction_memory import MEMORY_NAME
from hf_specdec.bench.arms import Arm
from hf_specdec.configs import BaseConfig, CoSpecConfig, CSDConfig, NucleusConfig, SpeculativeConfig
from hf_specdec.errors import InvalidConfigError
from hf_specdec.quality.rsd import CheckReward, LikelihoodReward, RewardGuided


__all__ = ["Learnt", "procedure_arm", "rule_arm"]

# Their sources name no value, so that they are exact unless told otherwise.
_OFF_BY_DEFAULT = ("asd", "ears", "ensemble", "lenience", "lossy_eps")
_NOT_HERE = {"judge": "it needs a judge of yours", "relaxed_thinking": "it needs the token that ends thinking"}
_LONGEST_WINDOW = 15  # drafts of FLy, as published


@dataclass(frozen=True)
class Learnt:
    """What arms need that was learnt before: where CSD's memory and CoSpec's policy lie."""

    memory: Path | None = None
    policy: Path | None = None

    def fingerprints(self) -> dict[str, str]:
        """Digests of the files that are given, by option: rows that were decoded with others do not go together."""
        given = {"memory": (self.memory, MEMORY_NAME), "policy": (self.policy, POLICY_NAME)}
        return {name: _digest(path, file) for name, (path, file) in given.items() if path is not None}


def rule_arm(name: str, length: int, learnt: Learnt) -> Arm | None:
    """The arm of a rule of [`ACCEPTANCE`], `NAME` at its defaults or `NAME-VALUE` with its first option at a value; None for
    other names.

    Raises:
        [`InvalidConfigError`]: If the rule is exact by default, or needs what is not given.
    """
    match = re.fullmatch(r"([a-z_]+)(?:-(\d*\.?\d+))?", name)
    if match is None or match[1] not in ACCEPTANCE:
        return None
    rule, value = match[1], match[2]
    if rule in _NOT_HERE:
        raise InvalidConfigError(f"the arm {rule} is not measured here: {_NOT_HERE[rule]}")
    if rule in _OFF_BY_DEFAULT and value is None:
        raise InvalidConfigError(f"{rule} is exact at its default: name a value, as in {rule}-0.5")
    config = _config(rule, {} if value is None else _first_option(rule, value), learnt)
    steps = max(length, _LONGEST_WINDOW) if rule == "fly" else length
    return Arm(name, _with(config, length=steps), needs_draft=True)


def procedure_arm(name: str) -> Arm | None:
    """`rsd` and `rsd-checks`, whose reward is arithmetic and form, and `rsd-likelihood`, whose reward is the target's own
    opinion, each with `-THRESHOLD` at the end or at 0.7; None for other names. A step is a line (ours), for the
    worked examples have no empty ones."""
    match = re.fullmatch(r"rsd(-checks|-likelihood)?(?:-(\d*\.?\d+))?", name)
    if match is None:
        return None
    reward = LikelihoodReward() if match[1] == "-likelihood" else CheckReward()
    procedure = RewardGuided(reward, separator="\n")
    if match[2] is not None:
        procedure = replace(procedure, threshold=float(match[2]))
    return Arm(name, procedure=procedure, needs_draft=True)


def _digest(path: Path, name: str) -> str:
    file = path / name if path.is_dir() else path
    if not file.is_file():
        raise InvalidConfigError(f"there is no file {file}: pass one that `specdec calibrate` or `specdec train` wrote")
    return hashlib.sha256(file.read_bytes()).hexdigest()[:16]


def _first_option(rule: str, value: str) -> dict[str, Any]:
    option = fields(ACCEPTANCE[rule])[0]
    if isinstance(option.default, bool) or not isinstance(option.default, int | float):
        raise InvalidConfigError(f"the first option of {rule} is no number: name the arm {rule}")
    return {option.name: int(value) if isinstance(option.default, int) and value.isdigit() else float(value)}


def _config(rule: str, option: dict[str, Any], learnt: Learnt) -> BaseConfig:
    if rule == "csd":
        return CSDConfig(memory=learnt.memory, **option)
    if rule == "cospec":
        if learnt.policy is None:
            raise InvalidConfigError(
                "the arm cospec needs a policy: pass --policy FOLDER, made by `specdec train cospec`"
            )
        return CoSpecConfig(policy=learnt.policy)
    if rule == "nucleus":
        return NucleusConfig(**option)
    return SpeculativeConfig(acceptance=ACCEPTANCE[rule](**option))


def _with(config: BaseConfig, **changes: Any) -> BaseConfig:
    return replace(config, drafting="model", on_drafter_error="raise", **changes)
