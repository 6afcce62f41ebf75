"""What layers are given for columns that the model has not prepared."""

import pytest
import torch
from transformers import DynamicCache

from hf_specdec.layer_gate import LayerGate
from hf_specdec.layered_lm import LayeredLM
from hf_specdec.prepared_layers import Cut
from tests.families import FAMILIES


def test_rotary_embeddings_as_wide_as_there_are_keys_are_no_mask():
    cut = Cut(width=4, columns=3, pending=1, visible=5, keys=8)
    mask, angles = torch.arange(32).view(1, 1, 4, 8), torch.arange(96).view(3, 1, 4, 8)
    assert torch.equal(cut(mask), mask[:, :, 2:3, 2:7])
    assert all(torch.equal(each, angles[:, :, 2:3]) for each in cut((angles, angles)))


@pytest.mark.parametrize("family", ["gpt2", "qwen2"])
def test_no_column_is_prepared_beyond_the_last_position(family):
    """The longer row has one position left, the shorter one may climb as far as its own room allows."""
    model = FAMILIES[family].build("sdpa", seed=0)
    last = model.config.max_position_embeddings
    tokens = torch.randint(1, 60, (2, last), generator=torch.Generator().manual_seed(0))
    lengths, said = torch.tensor([last, last - 4]), []
    for ahead in (1, 4):
        cache = DynamicCache(config=model.config)
        lm = LayeredLM(model, LayerGate(model), cache=cache, held=torch.zeros(2, 0, dtype=torch.long))
        with torch.no_grad(), lm.alone():
            lm.run(tokens, lengths - 1, torch.ones_like(lengths))
            said.append(lm.climb(tokens, lengths, 1, ahead=ahead))
    torch.testing.assert_close(*said)
