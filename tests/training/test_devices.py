"""Losses where target and drafter are on a device of their own, and texts and recorded rounds are made elsewhere."""

from dataclasses import replace

import pytest
import torch

from hf_specdec.training.feature_shards import FeatureShards
from hf_specdec.training.recipes import RECIPES
from hf_specdec.training.texts import observe
from hf_specdec.training.trainer import _Unrolling
from tests.networks import small_target
from tests.training.test_trainer import drafter, rounds_for, some_texts
from tests.traps.test_api import THERE, TwoDevices


def loss_of(target, network, name, observer=observe, put=lambda module: None):
    texts, book = some_texts(), rounds_for(name)
    rounds = None if book is None else book(texts, 3)
    unrolling = _Unrolling(network, replace(RECIPES[name], num_steps=3), None)
    put(unrolling)  # the reference is a copy, which has lost the mark of its device
    with torch.no_grad():
        return float(unrolling(observer(target, network, texts), range(len(texts)), rounds)[0])


def moved(devices, name):
    target = small_target()
    network = drafter(target, name)
    devices.put(target)
    devices.put(network)
    assert network.device == THERE
    return target, network


@pytest.mark.parametrize("name", ["hass", "eagle3", "rcsd-dpo", "rcsd-grpo"])
def test_models_on_another_device(name):
    target = small_target()
    expected = loss_of(target, drafter(target, name), name)
    with TwoDevices() as devices:
        assert loss_of(*moved(devices, name), name, put=devices.put) == pytest.approx(expected)


def test_features_from_the_disk_on_another_device(tmp_path):
    target = small_target()
    expected = loss_of(target, drafter(target, "eagle3"), "eagle3")
    with TwoDevices() as devices:
        target, network = moved(devices, "eagle3")
        shards = FeatureShards(tmp_path, target, network)
        shards.write(target, network, some_texts())
        assert loss_of(target, network, "eagle3", shards) == pytest.approx(expected, rel=1e-5)
