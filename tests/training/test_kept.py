"""Kept features are what the target would say again."""

import pytest
import torch

from hf_specdec.errors import InvalidConfigError
from hf_specdec.training.kept import KeptFeatures
from hf_specdec.training.texts import Text, observe
from tests.networks import drafter_for, scale_logits, small_target


def texts():
    generator = torch.Generator().manual_seed(0)
    return [Text(tuple(torch.randint(1, 64, (n,), generator=generator).tolist()), 3) for n in (9, 5, 7)]


def test_kept_batches_are_observed_ones_without_a_pass_of_the_target():
    target = small_target()
    network = drafter_for(target, "eagle")
    kept, chosen, passes = KeptFeatures(), texts()[:2], []
    target.register_forward_hook(lambda *_: passes.append(1))
    first = kept(target, network, chosen)
    assert len(passes) == 1
    again = kept(target, network, chosen[::-1])
    assert len(passes) == 1
    observed = observe(target, network, chosen)
    assert torch.equal(first.logits, observed.logits)
    assert torch.equal(again.tokens.flip(0), observed.tokens)
    assert torch.equal(again.loss_mask.flip(0), observed.loss_mask)
    for row, text in enumerate(chosen):
        columns = len(text.tokens)
        torch.testing.assert_close(again.features[1 - row, :columns], observed.features[row, :columns])
        torch.testing.assert_close(again.logits[1 - row, :columns], observed.logits[row, :columns])
    assert kept.num_bytes == 14 * 32 * 4


def test_memory_is_bounded():
    target = small_target()
    network = drafter_for(target, "eagle")
    kept = KeptFeatures(max_bytes=10 * 32 * 4)
    for _ in range(2):
        batch = kept(target, network, texts())
        assert torch.equal(batch.logits, observe(target, network, texts()).logits)
    assert kept.num_bytes == 9 * 32 * 4


def test_what_cannot_be_kept_is_refused():
    target = small_target()
    with pytest.raises(InvalidConfigError, match="last states"):
        KeptFeatures()(target, drafter_for(target, "eagle3"), texts())
    network = drafter_for(target, "eagle")
    scale_logits(target)
    with pytest.raises(InvalidConfigError, match="scale"):
        KeptFeatures()(target, network, texts())
