"""Rules that ask a policy or a judge at mismatches, and what they show it."""

import logging
import math

import numpy as np
import pytest
import torch
from scipy.spatial.distance import jensenshannon
from scipy.stats import entropy as scipy_entropy

from hf_specdec import CoSpecConfig, InvalidConfigError
from hf_specdec.acceptance import (
    FEATURES,
    CoSpec,
    Exact,
    Judge,
    arbitration_features,
)
from hf_specdec.acceptance.cospec import _warn_without_policy
from hf_specdec.records import Evidence
from tests.acceptance import each_token, members


BANNED = float("-inf")


# --- policies -------------------------------------------------------------------------------------------------------


def test_a_policy_decides_at_plausible_mismatches_only():
    seen = []

    def policy(features):
        seen.append(features)
        return torch.tensor([[0.9]] * features.shape[0])

    logits = [3.0, 2.5, 2.0, -9.0]
    assert members(CoSpec(policy), logits, logits) == [1, 2]  # 0 is the argmax, 3 is far off
    assert members(CoSpec(policy, floor_ratio=0.0), logits, logits) == [1, 2, 3]
    assert members(CoSpec(policy, threshold=0.9), logits, logits) == []
    assert seen[0].shape == (4, 1, len(FEATURES))


def test_features_are_what_their_names_say():
    generator = torch.Generator().manual_seed(2)
    raw, draft = (2 * torch.randn(1, 3, 6, generator=generator, dtype=torch.float64) for _ in range(2))
    tokens = draft.argmax(-1)
    evidence = Evidence(tokens, torch.ones_like(tokens) > 0, raw, raw, False, draft_logits=draft)
    found = dict(zip(FEATURES, arbitration_features(evidence)[0].T.tolist(), strict=True))
    mismatches = 0
    for i in range(3):
        p, q = raw[0, i].softmax(-1).numpy(), draft[0, i].softmax(-1).numpy()
        x, t = int(tokens[0, i]), int(p.argmax())
        mismatches += x != t
        expected = {
            "log_p_target": math.log(p[t]),
            "log_p_draft": math.log(p[x]),
            "log_q_draft": math.log(q[x]),
            "log_q_target": math.log(q[t]),
            "target_entropy": scipy_entropy(p),
            "draft_entropy": scipy_entropy(q),
            "target_margin": np.sort(p)[-1] - np.sort(p)[-2],
            "draft_rank": math.log1p((p > p[x]).sum()),
            "target_rank": math.log1p((q > q[t]).sum()),
            "js_divergence": jensenshannon(p, q) ** 2,
            "overlap": len(set(np.argsort(-p)[:5]) & set(np.argsort(-q)[:5])) / 5,
            "position": i / 3,
            "num_mismatches": mismatches,
            "has_draft_law": 1,
        }
        assert {name: found[name][i] for name in FEATURES} == pytest.approx(expected, abs=1e-7)
    assert mismatches > 0


def test_without_a_policy_cospec_is_exact_and_says_so_once(caplog):
    _warn_without_policy.cache_clear()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            CoSpecConfig()
    assert [record.message for record in caplog.records] == [
        "CoSpec has no policy and decodes exactly. Pass policy=... to let it arbitrate."
    ]
    evidence = each_token([3.0, 2.9, 0.0], [3.0, 2.9, 0.0])
    assert torch.equal(CoSpec().acceptance(evidence), Exact().acceptance(evidence))


def test_a_judge_overrules_the_exact_rule():
    def judge(evidence):
        return torch.tensor([[0.1], [0.6], [0.5], [0.99]])

    evidence = each_token([3.0, 2.0, 1.0, 0.0], scores=[3.0, 2.0, 1.0, BANNED])
    assert Judge(judge).acceptance(evidence)[:, 0].tolist() == [1, 1, 0, 0]


def test_judges_and_policies_of_a_wrong_shape_are_refused():
    evidence = each_token([3.0, 2.9, 0.0], [3.0, 2.9, 0.0])
    for rule in (Judge(lambda evidence: torch.zeros(2)), CoSpec(lambda features: torch.zeros(2))):
        with pytest.raises(InvalidConfigError, match=r"of shape \(3, 1\)"):
            rule.acceptance(evidence)
