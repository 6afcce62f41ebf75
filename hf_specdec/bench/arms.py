"""The arms of a benchmark: plain decoding, transformers' own assisted decoding, peers, and configurations of this package."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hf_specdec.bench.economize import EconomizeArm
from hf_specdec.configs import BaseConfig, EASDConfig, ExactConfig
from hf_specdec.errors import InvalidConfigError


__all__ = ["Arm", "parse_arm"]


@dataclass(frozen=True)
class Arm:
    """One way of decoding.

    Args:
        name (`str`): Its name in tables.
        config ([`BaseConfig`], *optional*): A configuration of this package; None for plain and stock arms.
        stock (`dict`, *optional*): Keywords of transformers' own assisted decoding. `assistant_model=True` stands for the
            draft model, whose `num_assistant_tokens` is set for the call only.
        economize ([`EconomizeArm`], *optional*): What the package economize shall do.
        procedure (*optional*): A way of answering of its own, built on `generate`, for quality measurements only.
        needs_draft (`bool`): Whether the arm uses the draft model.
        reduced (`bool`): Whether the draft model's head scores a draft vocabulary only.
    """

    name: str
    config: BaseConfig | None = None
    stock: dict[str, Any] | None = None
    economize: EconomizeArm | None = None
    procedure: Any | None = None
    needs_draft: bool = False
    reduced: bool = False

    @property
    def is_plain(self) -> bool:
        return self.config is None and self.stock is None and self.economize is None and self.procedure is None


def parse_arm(name: str, draft_vocabulary: Path | None = None) -> Arm:
    """The arm with this name.

    `plain`; `stock-assistant`, `stock-assistant-N`, `stock-lookup-N`, `stock-early-exit-N`; `economize-lookup-N`,
    `economize-model-N` (the package economize, where it is installed); `default`, `model-N`, `ngram-N`,
    `hybrid-N`; `default-reduced`, `model-reduced-N`, `hybrid-reduced-N`, whose draft model scores the ids of
    `draft_vocabulary` only; `easd`, `easd-THRESHOLD`, `easd-plain` (the ablation that resamples without the mask). Without
    `-N` the length is the configuration's own.

    Raises:
        [`InvalidConfigError`]: For an unknown name, listing the known ones, and for a reduced arm without vocabulary.
    """
    for pattern, make in _ARMS.items():
        if match := re.fullmatch(pattern, name):
            arm = make(name, *match.groups())
            return _reduced(arm, draft_vocabulary) if "-reduced" in name else arm
    raise InvalidConfigError(f"unknown arm {name!r}; known: {', '.join(_ARMS)}")


def _ours(drafting: str) -> Callable[..., Arm]:
    def make(name: str, number: str | None = None) -> Arm:
        length: Any = "auto" if number is None else int(number)
        return Arm(name, ExactConfig(drafting=drafting, length=length), needs_draft=drafting != "ngram")  # type: ignore[arg-type]

    return make


def _reduced(arm: Arm, draft_vocabulary: Path | None) -> Arm:
    if draft_vocabulary is None or arm.config is None:
        raise InvalidConfigError(
            f"the arm {arm.name} needs a draft vocabulary: pass --draft-vocabulary FILE, made by `specdec calibrate vocabulary`"
        )
    return replace(arm, config=replace(arm.config, draft_vocabulary=draft_vocabulary), reduced=True)


def _easd(name: str, threshold: str | None = None) -> Arm:
    config = EASDConfig() if threshold is None else EASDConfig(entropy_threshold=float(threshold))
    return Arm(name, config, needs_draft=True)


def _stock_assistant(name: str, number: str | None = None) -> Arm:
    length = {} if number is None else {"num_assistant_tokens": int(number)}
    return Arm(name, stock={"assistant_model": True, **length}, needs_draft=True)


_ARMS: dict[str, Callable[..., Arm]] = {
    r"plain": lambda name: Arm(name),
    r"stock-assistant(?:-(\d+))?": _stock_assistant,
    r"stock-lookup-(\d+)": lambda name, number: Arm(name, stock={"prompt_lookup_num_tokens": int(number)}),
    r"stock-early-exit-(\d+)": lambda name, number: Arm(name, stock={"assistant_early_exit": int(number)}),
    r"economize-lookup-(\d+)": lambda name, number: Arm(name, economize=EconomizeArm("lookup", int(number))),
    r"economize-model-(\d+)": lambda name, number: Arm(
        name, economize=EconomizeArm("draft_model", int(number)), needs_draft=True
    ),
    r"default(?:-reduced)?": _ours("auto"),
    r"model(?:-reduced)?(?:-(\d+))?": _ours("model"),
    r"ngram(?:-(\d+))?": _ours("ngram"),
    r"hybrid(?:-reduced)?(?:-(\d+))?": _ours("hybrid"),
    r"easd": _easd,
    r"easd-([\d.]+)": _easd,
    r"easd-plain": lambda name: Arm(name, EASDConfig(resample="plain"), needs_draft=True),
}
