"""What forward passes cost by themselves, measured outside the loop so that the loop cannot flatter itself."""

from __future__ import annotations

import statistics
import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from transformers import DynamicCache

from hf_specdec._compat import CACHE_KEY, undecorated_model
from hf_specdec.networks import DraftNetwork


__all__ = ["CostMeter", "Costs", "Turn", "measure_costs", "median_costs", "widths_of"]

# Seconds of `target` passes over as many tokens as `widths` says, and of a `draft` and a `reduced` step beside each.
Turn = dict[str, list[float]]
_EVERY = 9  # width up to which each one is measured
_WIDE = (12, 17)  # and these of the wider ones


@dataclass(frozen=True)
class Costs:
    """Median seconds of isolated forward passes over a cached prefix.

    Args:
        target (`dict[int, float]`): Seconds of a target pass, by the number of tokens it is fed.
        draft_step (`float`, *optional*): Seconds of one draft step.
        prefix_length (`int`): Tokens in the cache.
        reduced_step (`float`, *optional*): Seconds of one draft step whose head scores a draft vocabulary only.
        batch_size (`int`): Rows of each pass.
    """

    target: dict[int, float]
    draft_step: float | None
    prefix_length: int
    reduced_step: float | None = None
    batch_size: int = 1

    @property
    def reduced(self) -> Costs:
        """The costs of arms with a draft vocabulary."""
        return replace(self, draft_step=self.reduced_step)

    @property
    def typical(self) -> Costs:
        """These costs, which know of no time."""
        return self

    def beside(self, prompt: int) -> Costs:
        """These costs, whatever the prompt."""
        return self

    def times(self, pace: float) -> Costs:
        """The costs of a machine that takes `pace` times as long."""
        draft_step, reduced_step = (
            None if each is None else each * pace for each in (self.draft_step, self.reduced_step)
        )
        target = {width: seconds * pace for width, seconds in self.target.items()}
        return replace(self, target=target, draft_step=draft_step, reduced_step=reduced_step)

    @property
    def c(self) -> float | None:
        """Cost of a draft step in plain target steps."""
        return None if self.draft_step is None else self.draft_step / self.target[1]

    def v(self, num_drafts: int) -> float:
        """Cost of verifying `num_drafts` tokens, in plain target steps."""
        return self.pass_seconds(num_drafts + 1) / self.target[1]

    def pass_seconds(self, width: int) -> float:
        """Seconds of a target pass over `width` tokens: between two widths that were measured a straight line, and beyond the
        widest the last slope continues."""
        if width in self.target:
            return self.target[width]
        widths = sorted(self.target)
        place = min(bisect_left(widths, width), len(widths) - 1)
        before, after = widths[place - 1], widths[place]
        slope = (self.target[after] - self.target[before]) / (after - before)
        if width > after:
            slope = max(0.0, slope)
        return self.target[after] + slope * (width - after)

    def to_dict(self) -> dict[str, Any]:
        """All figures, with `c` and `v`."""
        return asdict(self) | {"c": self.c, "v": {width - 1: self.v(width - 1) for width in self.target}}


class CostMeter:
    """Measures target passes of 1 to 9, 12, 17 and `widest` tokens, as far as that is, and draft steps in turn.

    What is timed is the call of the model with a cache and the arrival of its logits, and nothing of this package: no
    masks, no bookkeeping. What a pass left in the cache is cropped before the next, outside the time. Between turns nothing
    is kept.

    Args:
        target, draft (`PreTrainedModel`): The models; the draft may be a drafter network, or None.
        reduced_draft (`PreTrainedModel`, *optional*): The draft model with a reduced head.
        prefix_length (`int`): Tokens in the cache while measuring.
        widest (`int`): Widest pass.
        batch_size (`int`): Rows of each pass.
    """

    def __init__(
        self,
        target: Any,
        draft: Any | None,
        *,
        reduced_draft: Any | None = None,
        prefix_length: int = 192,
        widest: int = 9,
        batch_size: int = 1,
    ) -> None:
        drafts = {"draft": draft, "reduced": reduced_draft}
        self._models = {"target": target} | {name: model for name, model in drafts.items() if model is not None}
        self.prefix_length, self.batch_size = prefix_length, batch_size
        self.widths = [width for width in (*range(1, _EVERY + 1), *_WIDE) if width < widest] + [widest]

    @torch.no_grad()
    def turn(self) -> Turn:
        """Seconds of one pass of each width, and of a draft step beside each, once every model has run a step untimed."""
        vocab_size = self._models["target"].config.get_text_config().vocab_size
        shape = (self.batch_size, self.prefix_length + self.widths[-1])
        tokens = torch.randint(0, vocab_size, shape, generator=torch.Generator().manual_seed(0))
        passes = {name: _Passes(model, tokens, self.prefix_length) for name, model in self._models.items()}
        for each in passes.values():
            each.seconds(1)
        seconds: Turn = {"widths": [*self.widths], **{name: [] for name in passes}}
        for width in self.widths:
            for name, each in passes.items():
                seconds[name].append(each.seconds(width if name == "target" else 1))
        return seconds


def median_costs(turns: Sequence[Turn], meter: CostMeter) -> Costs:
    """The medians of turns.

    Args:
        turns (`Sequence[Turn]`): One turn or more.
        meter ([`CostMeter`]): What measured them.
    """
    steps = {
        name: statistics.median(seconds for turn in turns for seconds in turn[name])
        for name in ("draft", "reduced")
        if name in turns[0]
    }
    by_width: defaultdict[int, list[float]] = defaultdict(list)
    for turn in turns:
        for width, seconds in zip(widths_of(turn), turn["target"], strict=True):
            by_width[width].append(seconds)
    return Costs(
        {width: statistics.median(by_width[width]) for width in sorted(by_width)},
        steps.get("draft"),
        meter.prefix_length,
        steps.get("reduced"),
        meter.batch_size,
    )


def widths_of(turn: Turn) -> list[int]:
    """Tokens of each target pass of a turn; 1, 2, ... in one that does not say it."""
    return [int(width) for width in turn.get("widths", range(1, len(turn["target"]) + 1))]


def measure_costs(target: Any, draft: Any | None, *, repeats: int = 5, **options: Any) -> Costs:
    """Medians of `repeats` turns, one directly after the other.

    Args:
        target, draft (`PreTrainedModel`), options: See [`CostMeter`].
        repeats (`int`): Turns.
    """
    meter = CostMeter(target, draft, **options)
    return median_costs([meter.turn() for _ in range(repeats)], meter)


class _Passes:
    """Bare calls of a model after a prefix that is cached once."""

    def __init__(self, model: Any, tokens: torch.Tensor, prefix_length: int) -> None:
        plain = undecorated_model(model)
        known = (
            plain.num_embeddings if isinstance(plain, DraftNetwork) else plain.get_input_embeddings().weight.shape[0]
        )
        self.model, self.cache = model, DynamicCache(config=plain.config.get_text_config(decoder=True))
        self.tokens = tokens.clamp(max=known - 1).to(plain.device)
        self.states = _states(plain, self.tokens)
        self.prefix_length = prefix_length
        self._call(self.tokens[:, :prefix_length])
        self.cache.activate_past_recording()  # sliding layers then give back what a crop needs

    def seconds(self, width: int) -> float:
        """Seconds of a pass over `width` tokens after the prefix, until its logits are there."""
        ids = self.tokens[:, self.prefix_length : self.prefix_length + width]
        started = time.perf_counter()
        self._call(ids).logits.max().item()  # waits for the device
        ended = time.perf_counter()
        self.cache.crop(-width)
        return ended - started

    def _call(self, ids: torch.Tensor) -> Any:
        states = {name: each[:, : ids.shape[1]] for name, each in self.states.items()}
        return self.model(input_ids=ids, use_cache=True, **states, **{CACHE_KEY: self.cache})


def _states(model: Any, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """What a drafter network reads beside tokens; of which values makes no difference to its time."""
    if not isinstance(model, DraftNetwork):
        return {}
    size = model.config.hidden_size
    return {"hidden_states": torch.zeros(*tokens.shape, size, dtype=model.dtype, device=model.device)}
