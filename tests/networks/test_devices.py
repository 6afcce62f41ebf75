"""A drafter network on another device than its target's, or than parts of a target that `device_map` has spread."""

import pytest
import torch

from hf_specdec import AutoDrafter, RCSDConfig, TreeShape
from tests.networks import small_target
from tests.toys import prompts
from tests.traps.test_api import THERE, TwoDevices


CONFIGS = {
    "chain": RCSDConfig(steps=3, on_drafter_error="raise"),
    "tree": RCSDConfig(tree=TreeShape(3, 2, 5), on_drafter_error="raise"),
}


@pytest.mark.parametrize(
    ("config", "family", "batch_size", "sampled"),
    [
        ("chain", "eagle", 3, True),
        ("chain", "eagle3", 1, False),
        ("tree", "eagle", 1, True),
        ("tree", "eagle3", 3, False),
    ],
)
def test_a_network_on_another_device(config, family, batch_size, sampled):
    """EAGLE-1 goes to its target's output head for every token, and both to its embeddings."""
    model = small_target()
    network = AutoDrafter.from_target(model, family)
    options = {"max_new_tokens": 6, "do_sample": sampled, "pad_token_id": 0, "assistant_model": network}

    def run():
        torch.manual_seed(0)
        return model.generate(
            **prompts(batch_size), **options, speculative_config=CONFIGS[config], return_dict_in_generate=True
        )

    expected = run()
    with TwoDevices() as devices:
        devices.put(network)
        assert network.device == THERE
        found = run()
    assert torch.equal(found.sequences, expected.sequences)
    assert found.speculative_stats.num_draft_tokens > 0
