"""Drafts along texts are those that decoding from each of their columns would verify."""

import numpy as np
import pytest
import torch

from hf_specdec.quality.drafters.along import Along, acceptance_by_entropy, drafts_along
from hf_specdec.training.kept import KeptFeatures
from hf_specdec.training.losses import KLLoss
from hf_specdec.training.rcsd import roll_out
from hf_specdec.training.texts import Text, observe
from hf_specdec.training.unroll import unroll
from tests.networks import drafter_for, small_target


STEPS, PROMPT, LENGTH = 3, 4, 24


@pytest.fixture
def target():
    return small_target(vocab_size=5)  # so few tokens that some drafts are accepted


@pytest.fixture
def texts(target):
    prompts = torch.tensor([[1, 2, 3, 4], [4, 3, 2, 1], [0, 2, 4, 1]])
    rows = target.generate(
        prompts, attention_mask=torch.ones_like(prompts), do_sample=False, max_new_tokens=LENGTH - PROMPT
    )
    return [Text(tuple(row), PROMPT) for row in rows.tolist()]


def verified(target, network, text, column):
    """Drafts of the round after the token `column` that are verified, and how many are accepted, up to the text's end."""
    (recording,) = roll_out(target, network, [Text((*text.tokens[:column], *[0] * 8), column)], steps=STEPS)
    left, accepted = LENGTH - column - 1, recording.rounds[0].num_accepted
    return min(accepted + 1, STEPS, left), min(accepted, left)


def test_what_is_counted_is_what_decoding_does(target, texts):
    network = drafter_for(target, "eagle")
    found = drafts_along(target, network, texts, steps=STEPS, batch_size=2)
    counts = [verified(target, network, text, column) for text in texts for column in range(PROMPT - 1, LENGTH - 1)]
    drafts, accepted = np.sum(counts, axis=0)
    assert (len(found.accepted), found.accepted.sum()) == (drafts, accepted)
    assert 0 < accepted < drafts
    assert found.rate == accepted / drafts
    assert len(found.first_entropies) == len(counts)


def test_the_divergence_is_that_of_first_drafts_and_batches_do_not_matter(target, texts):
    network = drafter_for(target, "eagle")
    whole = unroll(network, observe(target, network, texts), 1)
    with torch.no_grad():
        expected = KLLoss()(whole).parts["step_0"]
    for size in (1, 3):
        found = drafts_along(target, network, texts, steps=2, batch_size=size, observer=KeptFeatures())
        assert found.kl == pytest.approx(expected, rel=1e-5)
        law = whole.target_logits[0][whole.masks[0]].log_softmax(-1)
        assert found.first_entropies == pytest.approx(-(law.exp() * law).sum(-1).numpy(), rel=1e-4)


def test_deciles_are_those_of_all_columns():
    entropies = np.arange(100.0)
    first = Along(0.0, entropies, entropies, entropies < 50)
    second = Along(0.0, entropies, entropies[:15], np.ones(15, bool))
    found = acceptance_by_entropy({"one": [first], "two": [first, second], "few": [second]})
    assert found["edges"][:2] == pytest.approx([0, 9.9])
    assert found["arms"]["one"] == {"acceptance": [1.0] * 5 + [0.0] * 5, "drafts": [10] * 10}
    assert found["arms"]["two"]["drafts"] == [20, 15, *[10] * 8]
    assert found["arms"]["few"]["acceptance"] == [1.0, 1.0, *[None] * 8]
