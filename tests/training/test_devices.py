"""Training where target and drafter are on a device of their own, and what the texts become is made elsewhere."""

from dataclasses import replace

import pytest
from accelerate import Accelerator
from accelerate.state import AcceleratorState

from hf_specdec.training.feature_shards import FeatureShards
from hf_specdec.training.options import TrainingOptions
from hf_specdec.training.recipes import RECIPES
from hf_specdec.training.texts import observe
from hf_specdec.training.trainer import train
from tests.networks import small_target
from tests.training.test_trainer import drafter, rounds_for, some_texts
from tests.traps.test_api import THERE, TwoDevices


OPTIONS = TrainingOptions(max_steps=2, batch_size=2, micro_batch_size=2, learning_rate=1e-3)


@pytest.fixture(autouse=True)
def _fresh_accelerate():
    yield
    AcceleratorState._reset_state(True)


def losses(target, network, name, observer):
    recipe = replace(RECIPES[name], num_steps=3)
    run = {"rounds": rounds_for(name), "observer": observer, "accelerator": Accelerator(device_placement=False)}
    return [log.loss for log in train(target, network, some_texts(), recipe, OPTIONS, **run)]


@pytest.mark.parametrize("name", ["hass", "eagle3", "vat", "rcsd-dpo", "rcsd-grpo"])
def test_models_on_another_device(name):
    target = small_target()
    expected = losses(target, drafter(target, name), name, observe)
    target = small_target()
    network = drafter(target, name)
    with TwoDevices() as devices:
        devices.put(target)
        devices.put(network)
        assert network.device == THERE
        assert losses(target, network, name, observe) == pytest.approx(expected)


def test_features_from_the_disk_on_another_device(tmp_path):
    target = small_target()
    network = drafter(target, "eagle3")
    expected = losses(target, network, "eagle3", observe)
    target = small_target()
    network = drafter(target, "eagle3")
    with TwoDevices() as devices:
        devices.put(target)
        devices.put(network)
        shards = FeatureShards(tmp_path, target, network)
        shards.write(target, network, some_texts())
        assert losses(target, network, "eagle3", shards) == pytest.approx(expected, rel=1e-5)
