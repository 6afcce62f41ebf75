"""Features on the disk are what the target would say again."""

import pytest
import torch
from accelerate.state import AcceleratorState
from safetensors.torch import load_file

from hf_specdec.errors import InvalidConfigError
from hf_specdec.training.feature_shards import FeatureShards
from hf_specdec.training.options import TrainingOptions
from hf_specdec.training.recipes import RECIPES
from hf_specdec.training.texts import Text, observe
from hf_specdec.training.trainer import train
from tests.networks import drafter_for, scale_logits, small_target


@pytest.fixture(autouse=True)
def _fresh_accelerate():
    yield
    AcceleratorState._reset_state(True)


def some_texts():
    generator = torch.Generator().manual_seed(0)
    return [Text(tuple(torch.randint(1, 64, (n,), generator=generator).tolist()), 3) for n in (9, 5, 7, 8)]


def counted(target):
    passes = []
    target.register_forward_hook(lambda *_: passes.append(1))
    return passes


@pytest.mark.parametrize("family", ["eagle", "eagle3"])
def test_batches_are_observed_ones_without_a_pass_of_the_target(tmp_path, family):
    target, texts = small_target(), some_texts()
    network, passes = drafter_for(target, family), counted(target)
    shards = FeatureShards(tmp_path, target, network)
    size = shards.size_of(texts)
    shards.write(target, network, texts, texts_per_shard=3)
    assert len(passes) == len(texts)
    written = [load_file(file) for file in sorted(tmp_path.glob("*.safetensors"))]
    assert [len(each) for each in written] == [3, 1]
    assert size.num_bytes == sum(states.nbytes for each in written for states in each.values())
    assert shards.size_of(texts).num_bytes == 0
    found = FeatureShards(tmp_path, target, network)(target, network, texts[:3])
    assert len(passes) == len(texts)
    observed = observe(target, network, texts[:3])
    assert torch.equal(found.tokens, observed.tokens)
    assert torch.equal(found.loss_mask, observed.loss_mask)
    for row, text in enumerate(texts[:3]):
        columns = len(text.tokens)
        # Alone and in a batch a text's states differ by rounding.
        torch.testing.assert_close(
            found.features[row, :columns], observed.features[row, :columns], rtol=1e-5, atol=2e-5
        )
        torch.testing.assert_close(found.logits[row, :columns], observed.logits[row, :columns])


@pytest.mark.parametrize("name", ["hass", "eagle3"])
def test_training_from_the_disk_is_training_beside_the_target(tmp_path, name):
    target, texts = small_target(), some_texts()
    options, losses = TrainingOptions(max_steps=4, batch_size=2, learning_rate=1e-3), []
    for kept in (False, True):
        network, passes = drafter_for(target, RECIPES[name].family), counted(target)
        observer = observe
        if kept:
            observer = FeatureShards(tmp_path, target, network)
            observer.write(target, network, texts)
            passes.clear()
        logs = train(target, network, texts, RECIPES[name], options, observer=observer)
        assert (len(passes) == 0) == kept
        losses.append(torch.tensor([log.loss for log in logs]))
    torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-5)


def test_what_is_there_is_not_computed_again_and_what_is_not_is_observed(tmp_path):
    target, texts = small_target(), some_texts()
    network, passes = drafter_for(target, "eagle"), counted(target)
    FeatureShards(tmp_path, target, network).write(target, network, texts[:2])
    (tmp_path / "features-0000-00000001.unfinished").write_bytes(b"half a shard")
    again = FeatureShards(tmp_path, target, network)
    passes.clear()
    again.write(target, network, [*texts[:3], texts[0]])
    assert len(passes) == 1
    assert torch.equal(again(target, network, texts).logits, observe(target, network, texts).logits)


def test_what_cannot_be_written_is_refused(tmp_path, monkeypatch):
    target, texts = small_target(), some_texts()
    network = drafter_for(target, "eagle")
    shards = FeatureShards(tmp_path, target, network)
    shards.write(target, network, texts[:1])
    with pytest.raises(InvalidConfigError, match="another folder"):
        FeatureShards(tmp_path, target, drafter_for(target, "eagle3"))
    with torch.no_grad():
        target.get_output_embeddings().weight.mul_(2.0)
    with pytest.raises(InvalidConfigError, match="another folder"):
        FeatureShards(tmp_path, target, network)
    monkeypatch.setattr("shutil.disk_usage", lambda folder: type("Usage", (), {"free": 100})())
    with pytest.raises(InvalidConfigError, match="100 are free"):
        shards.write(target, network, texts)
    monkeypatch.undo()
    scale_logits(target)
    with pytest.raises(InvalidConfigError, match="scale"):
        shards.write(target, network, texts)
