"""The arms of a benchmark: plain decoding, transformers' own assisted decoding, peers, and configurations of this package."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hf_specdec.bench.economize import EconomizeArm, economize_problem
from hf_specdec.configs import BaseConfig, EASDConfig, ExactConfig, RCSDConfig, SelfDraftConfig, load_config
from hf_specdec.errors import InvalidConfigError, SpeculativeError
from hf_specdec.trees import TreeShape


__all__ = ["Arm", "check_arms", "parse_arm", "widest_pass"]


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

    @property
    def is_priced(self) -> bool:
        """Whether isolated costs of its draft steps are measured: not those of self-drafts, of trees, and of a draft
        vocabulary that a saved config names."""
        config = self.config
        if config is None or isinstance(config, SelfDraftConfig) or config.tree_shape is not None:
            return False
        return config.draft_vocabulary is None or self.reduced


def widest_pass(arms: Iterable[Arm]) -> int:
    """Tokens of the widest target pass that arms of this package ask for by their settings; 1 where they draft nothing."""
    controllers = [
        arm.config.controller(deterministic=True) for arm in arms if arm.config is not None and arm.is_priced
    ]
    return 1 + max((getattr(each, "longest", getattr(each, "length", 0)) for each in controllers), default=0)


def parse_arm(name: str, draft_vocabulary: Path | None = None) -> Arm:
    """The arm with this name. A drafter that fails in it raises: it must not turn the arm into plain decoding.

    `plain`; `stock-assistant`, `stock-assistant-N`, `stock-lookup-N`, `stock-early-exit-N`; `economize-lookup-N`,
    `economize-model-N` (the package economize, where it is installed); `default`, `model-N`, `ngram-N`,
    `hybrid-N`; `default-reduced`, `model-reduced-N`, `hybrid-reduced-N`, whose draft model scores the ids of
    `draft_vocabulary` only; `self-draft`; `tree`, `tree-NODES` (drafter networks); `easd`, `easd-THRESHOLD`, `easd-plain`
    (the ablation that resamples without the mask). Without `-N` the length is the configuration's own.

    `NAME=CONFIG` is any other configuration under a name of yours: a preset's name, or the path or Hub id of a saved one.

    Raises:
        [`InvalidConfigError`]: For an unknown name, listing the known ones, for a reduced arm without vocabulary, and for a
            configuration that cannot be read.
    """
    own, given, source = name.partition("=")
    arm = _configured(own, source) if given else _known(name, draft_vocabulary)
    return arm if arm.config is None else replace(arm, config=replace(arm.config, on_drafter_error="raise"))


def check_arms(arms: Sequence[Arm], *, has_draft: bool, batch_size: int = 1) -> None:
    """Refuses arms that cannot run beside one another, which needs no model.

    Args:
        arms (`Sequence[Arm]`): The arms.
        has_draft (`bool`): Whether there is a draft model.
        batch_size (`int`): Prompts that are decoded together.

    Raises:
        [`InvalidConfigError`]: If `plain` is missing, an arm stands twice, or one needs what is not there.
    """
    if not any(arm.is_plain for arm in arms):
        raise InvalidConfigError("a benchmark needs the arm plain to compare with")
    if twice := [name for name, count in Counter(arm.name for arm in arms).items() if count > 1]:
        raise InvalidConfigError(f"each arm once, got {', '.join(twice)} more often")
    if not has_draft and (missing := [arm.name for arm in arms if arm.needs_draft]):
        raise InvalidConfigError(f"the arms {', '.join(missing)} need a draft model")
    if batch_size > 1 and (single := [arm.name for arm in arms if arm.stock or arm.economize]):
        raise InvalidConfigError(f"{', '.join(single)} decode one prompt at a time: batch_size must be 1")
    peers = [arm.name for arm in arms if arm.economize is not None]
    if peers and (problem := economize_problem()):
        raise InvalidConfigError(f"the arms {', '.join(peers)} cannot run: {problem}")


def _known(name: str, draft_vocabulary: Path | None) -> Arm:
    for pattern, make in _ARMS.items():
        if match := re.fullmatch(pattern, name):
            arm = make(name, *match.groups())
            return _reduced(arm, draft_vocabulary) if "-reduced" in name else arm
    raise InvalidConfigError(
        f"unknown arm {name!r}; known: {', '.join(_ARMS)}, and NAME=CONFIG for a preset or a saved configuration"
    )


def _configured(name: str, source: str) -> Arm:
    taken = "-reduced" in name or any(re.fullmatch(pattern, name) for pattern in _ARMS)
    if taken or not re.fullmatch(r"[\w.-]+", name):
        raise InvalidConfigError(f"an arm NAME=CONFIG needs a name of its own (letters, digits, . and -), got {name!r}")
    try:
        config = load_config(source)
    except SpeculativeError:
        raise
    except (OSError, ValueError) as error:
        raise InvalidConfigError(
            f"the arm {name} cannot read its configuration {source!r}, which is no preset: {error}"
        ) from error
    drafts_alone = isinstance(config, SelfDraftConfig) or config.drafting == "ngram"
    return Arm(name, config, needs_draft=not drafts_alone)


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


def _tree(name: str, nodes: str | None = None) -> Arm:
    if nodes is None:
        return Arm(name, RCSDConfig(tree="auto"), needs_draft=True)
    number = int(nodes)
    return Arm(name, RCSDConfig(tree=TreeShape(min(TreeShape().depth, number), total_nodes=number)), needs_draft=True)


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
    r"self-draft": lambda name: Arm(name, SelfDraftConfig()),
    r"tree(?:-(\d+))?": _tree,
    r"easd": _easd,
    r"easd-([\d.]+)": _easd,
    r"easd-plain": lambda name: Arm(name, EASDConfig(resample="plain"), needs_draft=True),
}
