"""What the tests of EASD share: rules, positions, and its formulas written down once more."""

import itertools

import numpy as np
import torch
from scipy.special import softmax
from scipy.stats import entropy as scipy_entropy

from hf_specdec.acceptance import EASD, Exact
from hf_specdec.records import Evidence


__all__ = [
    "BANNED",
    "COUNTERS",
    "SURE",
    "UNSURE",
    "WAYS",
    "always",
    "fired_law",
    "fires",
    "one_position",
    "reference_fires",
    "without",
]


BANNED = float("-inf")
WAYS = list(itertools.product(["masked", "plain"], ["accepted", "all"]))
UNSURE = [0.3, 0.2, 0.1, 0.0]  # entropy 1.38 nats of at most 1.386
SURE = [9.0, 0.2, 0.1, 0.0]  # 0.004
COUNTERS = ("easd_fired", "easd_changed_token")


def always(**options):
    """A rule whose thresholds every uncertain position exceeds."""
    return EASD(0.0, 0.0, overlap_threshold=0.0, **options)


def without(p, token, kept):
    law = p.copy()
    law[token] *= kept
    return law / law.sum() if law.sum() > 0 else p


def fired_law(p, q, resample, apply_to, penalty=0.0):
    """What one position emits where the rule fires: the four formulas, written down once more."""
    excess = np.clip(p - q, 0, None)
    masked = np.array([p if resample == "plain" else without(p, x, penalty) for x in range(len(p))])
    if apply_to == "all":
        return q @ masked
    return np.minimum(p, q) @ masked + excess


def reference_fires(target_logits, draft_logits, rule):
    """The trigger in numpy, one position at a time."""

    def unsure(logits, threshold):
        return scipy_entropy(softmax(logits)) > threshold

    def top(logits):
        return set(np.argsort(-logits)[: rule.top_n].tolist())

    shared = len(top(target_logits) & top(draft_logits)) / rule.top_n
    return (
        unsure(target_logits, rule.target_entropy_threshold)
        and unsure(draft_logits, rule.draft_entropy_threshold)
        and shared >= rule.overlap_threshold
    )


def one_position(target_logits, draft_logits, scores=None, token=0, q=None, do_sample=True):
    """The evidence on one drafted position of one row."""
    target_logits = torch.as_tensor(target_logits, dtype=torch.float64)[None, None]
    draft_logits = None if draft_logits is None else torch.as_tensor(draft_logits, dtype=torch.float64)[None, None]
    return Evidence(
        tokens=torch.tensor([[token]]),
        valid=torch.tensor([[True]]),
        scores=target_logits if scores is None else torch.as_tensor(scores, dtype=torch.float64)[None, None],
        target_logits=target_logits,
        do_sample=do_sample,
        q=q if q is not None else (None if draft_logits is None else draft_logits.softmax(-1)),
        draft_logits=draft_logits,
    )


def fires(rule, evidence):
    """Whether the rule rejects a draft that the exact rule may accept."""
    assert bool((Exact().acceptance(evidence) > 0).all())
    return bool((rule.acceptance(evidence) == 0).all())
