"""Adapters start as the next layer of their target where the copy does what that layer does, and as the identity elsewhere."""

import pytest
import torch

from hf_specdec import ExitHeads
from hf_specdec.training.exit_heads import Observer
from hf_specdec.training.texts import Text
from tests.families import FAMILIES
from tests.toys import state_of


TEXT = Text((5, 9, 40, 7, 11, 3), 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "qwen3", "seed_oss"])
def test_a_copy_gives_the_hidden_states_of_the_layer(name, dtype):
    target = FAMILIES[name].build().to(dtype)
    before = state_of(target)
    heads = ExitHeads.for_target(target, "adapter", [1, 2])
    states = Observer(target, [1, 2, 3]).observe(TEXT).states
    with torch.no_grad():
        for depth in (1, 2):
            found, given, wanted = heads(states[depth], layer=depth), states[depth], states[depth + 1]
            close = 1e-3 if dtype == torch.float32 else 0.1
            assert (found - wanted).norm() < close * (wanted - given).norm()
    after = state_of(target)
    assert before[0] == after[0]
    assert before[3:] == after[3:]
    assert all(torch.equal(value, after[2][key]) for key, value in before[2].items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["gemma", "granite"])
def test_parameters_that_mean_something_else_are_not_copied(name, dtype):
    """Gemma's norms scale by 1 + w, and Granite takes a factor of what its layers add: names and shapes are Llama's."""
    family = FAMILIES[name]
    if name == "granite":
        family = family.__class__(family.config_name, {"residual_multiplier": 0.4})
    target = family.build().to(dtype)
    heads = ExitHeads.for_target(target, "adapter", [1])
    layer, names = heads.head(1).layer, Observer(target, [1]).layers[1].state_dict()
    assert {key: value.shape for key, value in layer.state_dict().items()} == {
        key: value.shape for key, value in names.items()
    }
    hidden = torch.randn(1, 5, 32, generator=torch.Generator().manual_seed(0))
    assert torch.equal(heads(hidden, layer=1), hidden)
    assert bool((layer.input_layernorm.weight == 1).all())


def test_the_layer_has_the_targets_activation():
    for name, activation in (("gemma", "gelu_pytorch_tanh"), ("llama", "silu"), ("gptj", "silu")):
        heads = ExitHeads.for_target(FAMILIES[name].build(), "adapter", [1])
        assert heads.config.adapter["hidden_act"] == activation, name
        assert heads.config.adapter_config().hidden_act == activation
