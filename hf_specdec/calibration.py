"""Thresholds for EASD from the entropies that two models have along given texts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, cast

import torch
from torch import Tensor

from hf_specdec.acceptance import EASD
from hf_specdec.compatibility import check_tokenizers
from hf_specdec.configs import EASDConfig
from hf_specdec.errors import InvalidConfigError
from hf_specdec.laws import entropy, top_overlap, total_variation
from hf_specdec.teacher_forcing import Text, logits_along


__all__ = ["QUANTILES", "EASDCalibration", "FireRate", "calibrate_easd"]

QUANTILES = (0.5, 0.75, 0.9, 0.95, 0.98, 0.99)
_GRID = (0.5, 1.0, 1.5, 2.0, 2.5, 3.0)  # ours; in units of the entropy's base


@dataclass(frozen=True)
class FireRate:
    """How often EASD would fire at given thresholds.

    Args:
        target_entropy_threshold, draft_entropy_threshold (`float`): The thresholds.
        fires (`float`): Share of all positions where the rule fires.
        fires_aligned (`float`): Share of all positions where it fires and both models prefer the same token: under greedy
            decoding these tokens change.
    """

    target_entropy_threshold: float
    draft_entropy_threshold: float
    fires: float
    fires_aligned: float


@dataclass(frozen=True)
class EASDCalibration:
    """What [`calibrate_easd`] measured and chose.

    Args:
        num_texts, num_positions (`int`): What was read; a position is one whose next token the text holds.
        percentile (`float`): Share of positions, in percent, whose entropy lies below the chosen thresholds.
        target_entropy_threshold, draft_entropy_threshold (`float`): That percentile of each model's entropies.
        target_quantiles, draft_quantiles (`dict[float, float]`): Quantiles of the entropies.
        overlap (`float`): Mean share of common tokens among the two top-n sets.
        agreement (`float`): Share of positions where both models prefer the same token.
        expected_acceptance (`float`): Mean of 1 - TV of the untempered laws, which is the acceptance rate of exact
            speculative sampling at temperature 1.
        chosen (`FireRate`): How often the rule fires at the chosen thresholds.
        grid (`tuple[FireRate, ...]`): The same for common thresholds; the values are ours.
        config ([`EASDConfig`]): The config with the chosen thresholds, ready for `generate`.
    """

    num_texts: int
    num_positions: int
    percentile: float
    target_entropy_threshold: float
    draft_entropy_threshold: float
    target_quantiles: dict[float, float]
    draft_quantiles: dict[float, float]
    overlap: float
    agreement: float
    expected_acceptance: float
    chosen: FireRate
    grid: tuple[FireRate, ...]
    config: EASDConfig

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain Python values, ready for JSON."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        for name in ("target_quantiles", "draft_quantiles"):
            values[name] = {str(key): value for key, value in values[name].items()}
        return values | {
            "chosen": asdict(self.chosen),
            "grid": [asdict(each) for each in self.grid],
            "config": self.config.to_dict(),
        }

    def summary(self) -> str:
        """A few lines to print."""
        return "\n".join(
            [
                f"{self.num_positions} positions of {self.num_texts} texts: overlap {self.overlap:.2f}, "
                f"same argmax {self.agreement:.1%}, expected acceptance {self.expected_acceptance:.1%}",
                f"entropy thresholds at the {self.percentile:g}th percentile: target {self.target_entropy_threshold:.3f}, "
                f"draft {self.draft_entropy_threshold:.3f}",
                f"the rule fires there on {self.chosen.fires:.1%} of all positions, on {self.chosen.fires_aligned:.1%} "
                "where both models prefer the same token",
            ]
        )


@torch.no_grad()
def calibrate_easd(
    target: Any,
    draft: Any,
    texts: Sequence[Text],
    *,
    tokenizer: Any = None,
    percentile: float = 95.0,
    max_tokens: int = 512,
    config: EASDConfig | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> EASDCalibration:
    """Measures both models along the texts, teacher-forced, and sets EASD's thresholds to a percentile of their entropies.

    Published (arXiv 2512.23765, as its reviewers describe it): one fixed threshold from "entropy percentile values" on the
    LIMO data. Ours: the percentile, one threshold per model, and the grid of other thresholds.

    Args:
        target, draft (`PreTrainedModel`): The two models. Vocabularies may be padded differently, as in decoding.
        texts (sequence of `str`, token ids, or pairs `(prompt, text)` of `str`): What to read; strings need `tokenizer`. The
            positions of a pair's prompt are read but not counted: EASD judges generated tokens only.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): The target's tokenizer.
        percentile (`float`): Between 0 and 100.
        max_tokens (`int`): Longest part of a text that is read, prompt included.
        config ([`EASDConfig`], *optional*): Kind and base of the entropies, `top_n` and `overlap_threshold`.
        progress (`Callable`, *optional*): Called with the number of texts read and of all texts.

    Returns:
        An [`EASDCalibration`].

    Raises:
        [`InvalidConfigError`]: If an argument is out of range or the texts hold no position to measure.
        [`IncompatibleDraftError`]: If the models use different tokenizers.
    """
    config = EASDConfig() if config is None else config
    if not 0.0 <= percentile <= 100.0:
        raise InvalidConfigError(f"percentile must lie in [0, 100], got {percentile}")
    if not isinstance(config, EASDConfig):
        raise InvalidConfigError(f"expected an EASDConfig, got {type(config).__name__}")
    rule = cast(EASD, replace(config, guard=None).rule)
    check_tokenizers(target, draft, tokenizer, None)
    along = logits_along(target, draft, texts, tokenizer=tokenizer, max_tokens=max_tokens, progress=progress)
    found = [_statistics(rule, *logits) for logits in along]
    return _calibration(_Positions.joined(found), len(texts), percentile, config)


@dataclass(frozen=True)
class _Positions:
    """One number per position: entropies, overlap, whether the rule's other conditions hold, argmax equality, 1 - TV."""

    target_entropy: Tensor
    draft_entropy: Tensor
    overlap: Tensor
    may_fire: Tensor
    aligned: Tensor
    acceptance: Tensor

    @classmethod
    def joined(cls, parts: Sequence[_Positions]) -> _Positions:
        return cls(*(torch.cat([getattr(part, each.name) for part in parts]) for each in fields(cls)))

    def fire_rate(self, target_threshold: float, draft_threshold: float) -> FireRate:
        fires = self.may_fire & (self.target_entropy > target_threshold) & (self.draft_entropy > draft_threshold)
        aligned = fires & self.aligned
        return FireRate(target_threshold, draft_threshold, float(fires.double().mean()), float(aligned.double().mean()))


def _statistics(rule: EASD, target_logits: Tensor, draft_logits: Tensor) -> _Positions:
    kind, top_k, base = rule.entropy_kind, rule.entropy_top_k, rule.entropy_base
    candidates = torch.full(target_logits.shape[:-1], target_logits.shape[-1], device=target_logits.device)
    # The rule itself, with thresholds that every entropy exceeds, says where its other conditions hold.
    unbounded = replace(rule, target_entropy_threshold=-math.inf, draft_entropy_threshold=-math.inf)
    values = (
        entropy(target_logits, kind, top_k, base),
        entropy(draft_logits, kind, top_k, base),
        top_overlap(target_logits, draft_logits, rule.top_n),
        unbounded.fires(target_logits, draft_logits, candidates),
        target_logits.argmax(-1) == draft_logits.argmax(-1),
        1 - total_variation(target_logits.softmax(-1), draft_logits.softmax(-1)),
    )
    return _Positions(*(value.cpu() for value in values))


def _calibration(found: _Positions, num_texts: int, percentile: float, config: EASDConfig) -> EASDCalibration:
    measured = (found.target_entropy.double(), found.draft_entropy.double())
    if any(bool(values.isnan().any()) for values in measured):
        raise InvalidConfigError("a model's logits contain NaN along these texts, so there is nothing to calibrate on")
    quantiles = [{each: float(values.quantile(each)) for each in QUANTILES} for values in measured]
    thresholds = [float(values.quantile(percentile / 100)) for values in measured]
    return EASDCalibration(
        num_texts=num_texts,
        num_positions=len(found.aligned),
        percentile=percentile,
        target_entropy_threshold=thresholds[0],
        draft_entropy_threshold=thresholds[1],
        target_quantiles=quantiles[0],
        draft_quantiles=quantiles[1],
        overlap=float(found.overlap.mean()),
        agreement=float(found.aligned.double().mean()),
        expected_acceptance=float(found.acceptance.double().mean()),
        chosen=found.fire_rate(*thresholds),
        grid=tuple(found.fire_rate(each, each) for each in _GRID),
        config=replace(config, target_entropy_threshold=thresholds[0], draft_entropy_threshold=thresholds[1]),
    )
