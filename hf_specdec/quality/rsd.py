"""Reward-guided speculative decoding (RSD, arXiv 2501.19324): a draft's step of reasoning stays if a reward likes it."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Any, Protocol, final

import torch

from hf_specdec.errors import InvalidConfigError
from hf_specdec.placement import device_of


__all__ = ["CheckReward", "LikelihoodReward", "RewardGuided", "Step", "StepReward"]


@dataclass(frozen=True)
class Step:
    """A proposed step of reasoning.

    Args:
        target (`PreTrainedModel`): The target.
        prefix (`list[int]`): The prompt and the steps so far.
        tokens (`list[int]`): The step.
        text (`str`): Its text.
    """

    target: Any
    prefix: list[int]
    tokens: list[int]
    text: str


class StepReward(Protocol):
    """How good a step is, usually in [0, 1]."""

    def __call__(self, step: Step) -> float: ...


@final
@dataclass(frozen=True)
class LikelihoodReward:
    """The target's own opinion (**ours**): the geometric mean of its probabilities of the step's tokens, untempered."""

    @torch.no_grad()
    def __call__(self, step: Step) -> float:
        if not step.tokens:
            return 0.0
        ids = torch.tensor([step.prefix + step.tokens], device=device_of(step.target))
        logits = step.target(ids).logits[0, len(step.prefix) - 1 : -1].float()
        chosen = torch.tensor(step.tokens, device=logits.device)[:, None]
        return math.exp(float(logits.log_softmax(-1).gather(-1, chosen).mean()))


_NUMBER, _SIGN = r"\d[\d,]*+(?:\.\d++)?+", r"[-+*/x\u00d7\u00f7]"
# A number, the operation, a number, and what the step says it is; no part of a longer sum on either side.
_EQUATION = re.compile(
    rf"(?:(?<=^[-*] )|(?<![\d.,])(?<!{_SIGN})(?<!{_SIGN}[ $])(?<!{_SIGN} \$))"  # a sign that begins a line is a bullet
    rf"(?P<left>{_NUMBER})\s*(?P<sign>{_SIGN})\s*\$?(?P<right>{_NUMBER})\s*=\s*\$?(?P<result>-?{_NUMBER})(?!\s*{_SIGN}\s*\$?\d)",
    re.MULTILINE,
)


@final
@dataclass(frozen=True)
class CheckReward:
    """Arithmetic and form (**ours**): the share of a step's equations `a + b = c` that are right, 1 where it states none, 0 for
    a step without any letter or digit. Results may be rounded to the places that they show; longer sums are not judged."""

    def __call__(self, step: Step) -> float:
        if re.search(r"\w", step.text) is None:
            return 0.0
        verdicts = [_is_right(each) for each in _EQUATION.finditer(step.text)]
        return sum(verdicts) / len(verdicts) if verdicts else 1.0


def _is_right(equation: re.Match[str]) -> bool:
    left, right, result = (Decimal(equation[name].replace(",", "")) for name in ("left", "right", "result"))
    try:
        value = {
            "+": left + right,
            "-": left - right,
            "*": left * right,
            "x": left * right,
            "\u00d7": left * right,
        }.get(equation["sign"])
        value = left / right if value is None else value
    except (InvalidOperation, ZeroDivisionError):
        return False
    exponent = result.as_tuple().exponent
    places = -exponent if isinstance(exponent, int) else 0
    return abs(value - result) <= Decimal(1).scaleb(-max(places, 0)) / 2


@final
@dataclass(frozen=True)
class RewardGuided:
    """The procedure, on top of `generate`: it judges steps, so it is no rule of the loop.

    Published (arXiv 2501.19324): the draft writes a step; it stays if its reward reaches a threshold of 0.7, else the target
    writes the step; steps end with an empty line, and there are at most 100. Ours: the rewards, since a process reward model
    is a third model, that a step is also cut after `max_step_tokens`, and greedy decoding.

    Args:
        reward ([`StepReward`]): The reward.
        threshold (`float`): Least reward of a step that stays.
        separator (`str`): What ends a step.
        max_steps (`int`): Most steps.
        max_step_tokens (`int`): Longest step.
    """

    reward: StepReward
    threshold: float = 0.7
    separator: str = "\n\n"
    max_steps: int = 100
    max_step_tokens: int = 128

    def __post_init__(self) -> None:
        if not self.separator:
            raise InvalidConfigError("separator must be a text that ends a step, such as an empty line")
        for name in ("max_steps", "max_step_tokens"):
            if getattr(self, name) < 1:
                raise InvalidConfigError(f"{name} must be at least 1, got {getattr(self, name)}")

    def answer(
        self,
        target: Any,
        draft: Any,
        tokenizer: Any,
        prompt: Sequence[int],
        *,
        max_new_tokens: int,
        ends: set[int],
        options: dict[str, Any],
    ) -> tuple[list[int], dict[str, int]]:
        """The new tokens, and counts of steps and of those that stayed.

        Args:
            target, draft (`PreTrainedModel`): The models.
            tokenizer (`PreTrainedTokenizerBase`): Their tokenizer.
            prompt (sequence of `int`): The prompt.
            max_new_tokens (`int`): Longest answer.
            ends (`set[int]`): Tokens that end it.
            options (`dict`): Further options of `generate`.
        """
        tokens: list[int] = []
        counts = {"rsd_steps": 0, "rsd_kept": 0}
        while len(tokens) < max_new_tokens and counts["rsd_steps"] < self.max_steps:
            prefix, room = [*prompt, *tokens], min(self.max_step_tokens, max_new_tokens - len(tokens))
            step = self._write(draft, tokenizer, prefix, room, options)
            text = tokenizer.decode(step, skip_special_tokens=True)
            kept = self.reward(Step(target, prefix, step, text)) >= self.threshold
            if not kept:
                step = self._write(target, tokenizer, prefix, room, options)
            counts["rsd_steps"] += 1
            counts["rsd_kept"] += kept
            tokens += step
            if not step or step[-1] in ends:
                break
        return tokens, counts

    @torch.no_grad()
    def _write(self, model: Any, tokenizer: Any, prefix: list[int], room: int, options: dict[str, Any]) -> list[int]:
        ids = torch.tensor([prefix], device=model.device)
        output = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), stop_strings=[self.separator], tokenizer=tokenizer,
            **{**options, "max_new_tokens": room, "do_sample": False},
        )  # fmt: skip
        written: list[int] = output[0, len(prefix) :].tolist()
        return written
