"""Runs of several stages."""

from contextlib import suppress
from dataclasses import replace

import pytest
import torch

from hf_specdec.errors import InvalidConfigError
from hf_specdec.training.losses import DPOLoss, GRPOLoss
from hf_specdec.training.options import TrainingOptions
from hf_specdec.training.rcsd import RCSDTraining
from hf_specdec.training.recipes import RECIPES, STAGES, stages_of
from hf_specdec.training.stages import check_run, train_in_stages
from hf_specdec.training.texts import Text, observe
from tests.networks import drafter_for, small_target
from tests.training.test_trainer import sample


OPTIONS = TrainingOptions(max_steps=5, batch_size=2, learning_rate=1e-3, save_every=2)


def some_texts(target):
    return [sample(target, [1 + seed, 7, 9 + seed], 8) for seed in range(3)]


@pytest.mark.parametrize("stop_at", [1, 2, 4])
def test_an_interrupted_run_of_two_stages_ends_like_a_whole_one(tmp_path, stop_at):
    target, stages = small_target(), stages_of("rcsd-dpo")
    whole, resumed = (drafter_for(target, "eagle") for _ in range(2))
    texts = some_texts(target)
    recorded = []
    options = {"out": tmp_path / "whole", "on_recorded": lambda *done: recorded.append(done)}
    logs = train_in_stages(target, whole, texts, stages, OPTIONS, **options)
    assert recorded == [(3, 3)] * 2
    assert [log.step for log in logs] == [1, 2, 3, 4, 5]

    def stop(log):
        if log.step == stop_at:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_in_stages(
            target, drafter_for(target, "eagle"), texts, stages, OPTIONS, out=tmp_path / "cut", on_step=stop
        )
    rest = train_in_stages(target, resumed, texts, stages, OPTIONS, out=tmp_path / "cut", resume=True)
    assert [log.step for log in rest] == list(range({1: 1, 2: 3, 4: 5}[stop_at], 6))
    for one, other in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(one, other)


def read_by(recipe, texts, *, stop_at=None, max_steps=4, **run):
    """The texts that a run reads, in their order."""
    target, read = small_target(), []

    def observer(target, network, some):
        read.extend(some)
        return observe(target, network, some)

    def stop(log):
        if log.step == stop_at:
            raise KeyboardInterrupt

    stages, options = stages_of(recipe, RCSDTraining(group_size=2)), replace(OPTIONS, max_steps=max_steps)
    with suppress(KeyboardInterrupt):
        network = drafter_for(target, "eagle3")
        train_in_stages(target, network, texts, stages, options, observer=observer, on_step=stop, **run)
    return read


def test_a_stage_reads_the_texts_that_the_one_before_it_has_left(tmp_path):
    texts = [sample(small_target(), [1 + seed, 7, 9 + seed], 8) for seed in range(8)]
    whole = read_by("eal+grpo", texts, out=tmp_path / "whole")
    assert len(whole) == len(set(whole)) == len(texts)
    cut = {"out": tmp_path / "cut", "resume": True}
    assert read_by("eal+grpo", texts, stop_at=3, **cut) == whole[:6]
    assert read_by("eal+grpo", texts, **cut) == whole[4:]  # the second stage has no checkpoint yet


def test_a_stage_with_rounds_reads_each_recorded_text_once_and_in_an_order_of_its_own(tmp_path):
    texts = [sample(small_target(), [1 + seed, 7, 9 + seed], 8) for seed in range(6)]
    read = read_by("rcsd-dpo", texts, max_steps=5, out=tmp_path / "some")  # two steps and three, of two texts each
    assert [len(set(part)) for part in (read[:4], read[4:])] == [4, 6]
    read = read_by("rcsd-dpo", texts, max_steps=6, out=tmp_path / "all")
    assert set(read[:6]) == set(read[6:])
    assert read[:6] != read[6:]


def test_a_run_that_has_ended_is_left_as_it_is_although_it_trained_on_other_texts_than_it_was_given(tmp_path):
    """Stages train on what was decoded from the texts' prompts, and only for the texts given is a resumed run responsible."""
    target, stages = small_target(), stages_of("rcsd-dpo")
    texts = [Text((1 + seed, 7, 9 + seed, *[3] * 8), 3) for seed in range(3)]  # not the target's own answers
    train_in_stages(target, drafter_for(target, "eagle"), texts, stages, OPTIONS, out=tmp_path)
    again = {"out": tmp_path, "resume": True}
    assert train_in_stages(target, drafter_for(target, "eagle"), texts, stages, OPTIONS, **again) == []
    with pytest.raises(InvalidConfigError, match="other texts"):
        train_in_stages(target, drafter_for(target, "eagle"), texts[1:], stages, OPTIONS, **again)


def test_a_stage_is_made_as_it_was_asked_for():
    options = RCSDTraining(
        masked=False, pairs="literal", rejected="first", beta=0.7, refreshes=3, group="response", group_size=4,
        credit="window", draft_temperature=0.5, kl_weight=0.5, anchor_weight=0.0,
    )  # fmt: skip
    first, *others = stages_of("rcsd-dpo", options)
    assert (len(others), first.loss) == (
        2,
        DPOLoss(pairs="literal", rejected="first", masked=False, beta=0.7, anchor_weight=0.0),
    )
    eal, grpo = stages_of("eal+grpo", options)
    assert eal == RECIPES["eal"]
    assert grpo.loss == GRPOLoss(
        group_size=4, group="response", credit="window", temperature=0.5, masked=False, kl_weight=0.5, anchor_weight=0.0
    )
    assert (RCSDTraining().dpo, RCSDTraining().grpo) == (DPOLoss(), GRPOLoss())
    assert all(stages_of(name) for name in (*RECIPES, *STAGES))
    with pytest.raises(InvalidConfigError, match="rcsd-grpo"):
        stages_of("ppo")
    with pytest.raises(InvalidConfigError, match="refreshes"):
        RCSDTraining(refreshes=0)


def test_fewer_steps_than_stages_are_refused(tmp_path):
    target = small_target()
    options = TrainingOptions(max_steps=1)
    with pytest.raises(InvalidConfigError, match="one for each stage"):
        train_in_stages(
            target, drafter_for(target, "eagle"), some_texts(target), stages_of("rcsd-dpo"), options, out=tmp_path
        )


def test_rounds_of_another_run_are_not_resumed(tmp_path):
    """The run was killed after its rounds were recorded and before its first checkpoint."""
    target, texts = small_target(), some_texts(small_target())
    started = stages_of("rcsd-dpo", RCSDTraining(recorded_texts=2, refreshes=1))

    def stop(log):
        raise KeyboardInterrupt

    def resume(texts, stages):
        return train_in_stages(
            target, drafter_for(target, "eagle"), texts, stages, OPTIONS, out=tmp_path, resume=True, on_step=stop
        )

    with pytest.raises(KeyboardInterrupt):
        resume(texts, started)
    others = [sample(target, [2 + seed, 5, 11], 8) for seed in range(3)]
    for wrong in ((texts, stages_of("rcsd-dpo", RCSDTraining(recorded_texts=1, refreshes=1))), (others, started)):
        with pytest.raises(InvalidConfigError, match="holds rounds of other texts"):
            resume(*wrong)
    with pytest.raises(KeyboardInterrupt):  # it gets to its first step
        resume(texts, started)


def test_a_checkpoint_is_resumed_with_its_recipe_only(tmp_path):
    target, texts = small_target(), some_texts(small_target())
    train_in_stages(target, drafter_for(target, "eagle3"), texts, stages_of("kl"), OPTIONS, out=tmp_path)
    with pytest.raises(InvalidConfigError, match="EALLoss"):
        train_in_stages(
            target, drafter_for(target, "eagle3"), texts, stages_of("eal"), OPTIONS, out=tmp_path, resume=True
        )


def test_what_a_run_cannot_do_is_refused_before_anything_is_decoded_for_it():
    target = small_target()
    with pytest.raises(InvalidConfigError, match="one for each stage"):
        check_run(stages_of("eal+grpo"), replace(OPTIONS, max_steps=1), 1)
    with pytest.raises(InvalidConfigError, match="evenly by 3 processes"):
        check_run(stages_of("hass"), OPTIONS, 3)
    with pytest.raises(InvalidConfigError, match="EAGLE-1"):
        check_run(stages_of("hass"), OPTIONS, 1, drafter_for(target, "eagle3"))
    check_run(stages_of("rcsd-dpo"), OPTIONS, 2, drafter_for(target, "eagle3"))
