"""What goes on from HASS, by name."""

import pytest
import torch

from hf_specdec import InvalidConfigError
from hf_specdec.quality.drafters.cross_entropy import ChoiceLoss
from hf_specdec.quality.drafters.variants import VARIANTS, variant_of
from hf_specdec.training.losses import KLLoss, Unrolled
from hf_specdec.training.rcsd import RCSDTraining


OPTIONS = RCSDTraining(refreshes=2, recorded_texts=7)


@pytest.mark.parametrize(
    ("name", "pairs", "masked"),
    [
        ("rcsd-dpo", "continuation", True),
        ("rcsd-dpo-unmasked", "continuation", False),
        ("rcsd-dpo-literal", "literal", True),
        ("rcsd-dpo-literal-unmasked", "literal", False),
    ],
)
def test_dpo_stands_in_both_readings_with_and_without_the_mask(name, pairs, masked):
    stages = VARIANTS[name].stages(OPTIONS)
    assert [(each.loss.pairs, each.loss.masked, each.recorded_texts) for each in stages] == [(pairs, masked, 7)] * 2


def test_grpo_and_the_controls_are_one_stage_each():
    stages = {name: VARIANTS[name].stages(OPTIONS) for name in VARIANTS if "dpo" not in name}
    assert {name: (len(each), each[0].family, each[0].num_steps) for name, each in stages.items()} == dict.fromkeys(
        ["rcsd-grpo", "control", "control-ce", "rcsd-grpo-unmasked"], (1, "eagle", 6)
    )
    assert [stages[name][0].loss.masked for name in ("rcsd-grpo", "rcsd-grpo-unmasked")] == [True, False]
    assert [stages[name][0].loss for name in ("control", "control-ce")] == [KLLoss(), ChoiceLoss()]


def test_further_variants_are_read_from_text():
    name, found = variant_of("sixteen=rcsd-grpo,group_size=16,kl_weight=0.1,rate=1e-4")
    (stage,) = found.stages(OPTIONS)
    assert (name, found.rate, stage.loss.group_size, stage.loss.kl_weight) == ("sixteen", 1e-4, 16, 0.1)
    changed = variant_of("other=rcsd-dpo-literal-unmasked,beta=0.5")[1].stages(OPTIONS)[0].loss
    assert (changed.pairs, changed.masked, changed.beta) == ("literal", False, 0.5)
    assert variant_of("bare=rcsd-dpo,masked=false")[1].changes["masked"] is False
    for text in ("nothing", "=rcsd-dpo", "one=", "one=rcsd-dpo,beta"):
        with pytest.raises(InvalidConfigError, match="reads NAME=RECIPE"):
            variant_of(text)
    with pytest.raises(InvalidConfigError, match="one of rcsd-dpo, rcsd-grpo, kl, ce, got 'hass'"):
        variant_of("one=hass")
    with pytest.raises(InvalidConfigError, match="got size"):
        variant_of("one=rcsd-grpo,size=3")


def test_the_choice_loss_is_cross_entropy_on_the_targets_best_tokens():
    student, target = torch.randn(2, 1, 2, 3, 5).unbind()
    masks = [torch.tensor([[True, True, False]]), torch.tensor([[True, False, False]])]
    student, target = student[0], target[0]
    value = ChoiceLoss()(Unrolled([row[None] for row in student], [row[None] for row in target], masks, []))
    rows = [(0, 0), (0, 1), (1, 0)]
    expected = [-student[step, t].log_softmax(-1)[target[step, t].argmax()] for step, t in rows]
    assert float(value.total) == pytest.approx(float(sum(expected)) / 2, rel=1e-5)
