"""What forward passes cost by themselves, measured outside the loop so that the loop cannot flatter itself."""

from __future__ import annotations

import statistics
import time
from dataclasses import asdict, dataclass
from typing import Any

import torch

from hf_specdec.prefix_lm import PrefixLM


__all__ = ["Costs", "measure_costs"]


@dataclass(frozen=True)
class Costs:
    """Median seconds of isolated forward passes over a cached prefix.

    Args:
        target (`dict[int, float]`): Seconds of a target pass, by the number of tokens it is fed.
        draft_step (`float`, *optional*): Seconds of one draft step.
        prefix_length (`int`): Tokens in the cache.
    """

    target: dict[int, float]
    draft_step: float | None
    prefix_length: int

    @property
    def c(self) -> float | None:
        """Cost of a draft step in plain target steps."""
        return None if self.draft_step is None else self.draft_step / self.target[1]

    def v(self, num_drafts: int) -> float:
        """Cost of verifying `num_drafts` tokens, in plain target steps."""
        return self.pass_seconds(num_drafts + 1) / self.target[1]

    def pass_seconds(self, width: int) -> float:
        """Seconds of a target pass over `width` tokens; beyond what was measured, the last slope continues."""
        if width in self.target:
            return self.target[width]
        widths = sorted(self.target)
        last, before = widths[-1], widths[-2]
        slope = (self.target[last] - self.target[before]) / (last - before)
        return self.target[last] + max(0.0, slope) * (width - last)

    def to_dict(self) -> dict[str, Any]:
        """All figures, with `c` and `v`."""
        return asdict(self) | {"c": self.c, "v": {width - 1: self.v(width - 1) for width in self.target}}


@torch.no_grad()
def measure_costs(
    target: Any, draft: Any | None, *, prefix_length: int = 192, widest: int = 9, repeats: int = 5
) -> Costs:
    """Measures target passes of 1 to `widest` tokens and draft steps in turn, and takes medians.

    Args:
        target, draft (`PreTrainedModel`): The models; the draft may be None.
        prefix_length (`int`): Tokens in the cache while measuring.
        widest (`int`): Widest pass.
        repeats (`int`): Measurements of each.
    """
    vocab_size = target.config.get_text_config().vocab_size
    tokens = torch.randint(0, vocab_size, (1, prefix_length + widest), generator=torch.Generator().manual_seed(0))
    models = {"target": PrefixLM(target)} | ({} if draft is None else {"draft": PrefixLM(draft)})
    for lm in models.values():
        _seconds(lm, tokens, prefix_length, 1)
    seconds: dict[tuple[str, int], list[float]] = {}
    for _ in range(repeats + 1):  # the first turn warms up
        for width in range(1, widest + 1):
            seconds.setdefault(("target", width), []).append(_seconds(models["target"], tokens, prefix_length, width))
            if draft is not None:
                seconds.setdefault(("draft", 1), []).append(_seconds(models["draft"], tokens, prefix_length, 1))
    medians = {key: statistics.median(values[1:]) for key, values in seconds.items()}
    passes = {width: medians["target", width] for width in range(1, widest + 1)}
    return Costs(passes, medians.get(("draft", 1)), prefix_length)


def _seconds(lm: PrefixLM, tokens: torch.Tensor, prefix_length: int, width: int) -> float:
    started = time.perf_counter()
    logits = lm.score(tokens, torch.tensor([prefix_length + width]), torch.tensor([width]))
    logits.max().item()  # waits for the device
    return time.perf_counter() - started
