"""Kept features are what the target would say again."""

import pytest
import torch

from hf_specdec.errors import InvalidConfigError
from hf_specdec.training.kept import KeptFeatures
from hf_specdec.training.texts import Text, observe
from tests.networks import drafter_for, small_target


def texts():
    generator = torch.Generator().manual_seed(0)
    return [Text(tuple(torch.randint(1, 64, (n,), generator=generator).tolist()), 3) for n in (9, 5, 7)]


def test_kept_batches_are_observed_ones():
    target = small_target()
    network = drafter_for(target, "eagle")
    kept, chosen = KeptFeatures(target, network, texts(), batch_size=2), texts()[:2]
    mine, theirs = kept(target, network, chosen), observe(target, network, chosen)
    assert torch.equal(mine.tokens, theirs.tokens)
    assert torch.equal(mine.loss_mask, theirs.loss_mask)
    for row, text in enumerate(chosen):
        columns = len(text.tokens)
        torch.testing.assert_close(mine.features[row, :columns], theirs.features[row, :columns])
        torch.testing.assert_close(mine.logits[row, :columns], theirs.logits[row, :columns])
    assert kept.num_bytes == 21 * 32 * 4


def test_what_cannot_be_kept_is_refused():
    target = small_target()
    with pytest.raises(InvalidConfigError, match="last states"):
        KeptFeatures(target, drafter_for(target, "eagle3"), texts())
    network = drafter_for(target, "eagle")
    kept = KeptFeatures(target, network, texts()[:1])
    with pytest.raises(InvalidConfigError, match="all texts"):
        kept(target, network, texts())


def test_a_target_that_scales_its_logits_is_refused():
    target = small_target()
    network = drafter_for(target, "eagle")
    plain = target.forward

    def scaled(*args, **kwargs):
        outputs = plain(*args, **kwargs)
        outputs.logits = 0.5 * outputs.logits
        return outputs

    target.forward = scaled
    with pytest.raises(InvalidConfigError, match="scale"):
        KeptFeatures(target, network, texts())
