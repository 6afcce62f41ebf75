"""A drafter network that is hardly ever right is told of: the text does not show it."""

import logging

import pytest

from hf_specdec import AutoDrafter, RCSDConfig, compatibility
from hf_specdec.compatibility import tell_few_acceptances
from tests.toys import prompts, tiny_llama


@pytest.fixture(autouse=True)
def _nothing_told_yet():
    compatibility._warn_of_few.cache_clear()
    yield
    compatibility._warn_of_few.cache_clear()


@pytest.mark.parametrize(
    ("accepted", "judged", "told"), [(4, 100, True), (5, 100, False), (0, 99, False), (30, 1000, True)]
)
def test_it_is_told_from_enough_drafts_on_and_once(accepted, judged, told, caplog):
    with caplog.at_level(logging.WARNING, "hf_specdec"):
        for _ in range(2):
            tell_few_acceptances("LlamaForCausalLM", (2, 3, 4), accepted, judged)
    assert [record.getMessage().count("[2, 3, 4] of LlamaForCausalLM") for record in caplog.records] == [1] * told


def test_a_run_tells(caplog):
    """An untrained network."""
    model = tiny_llama(layers=4)
    network = AutoDrafter.from_target(model, "eagle3")
    assert network.config.taps == [2, 2, 1]
    config = RCSDConfig(steps=2, on_drafter_error="raise")
    with caplog.at_level(logging.WARNING, "hf_specdec"):
        out = model.generate(
            **prompts(4), assistant_model=network, speculative_config=config, max_new_tokens=60, do_sample=False,
            return_dict_in_generate=True,
        )  # fmt: skip
    stats = out.speculative_stats
    few = stats.num_verified_tokens >= 100 and stats.num_accepted_tokens < 0.05 * stats.num_verified_tokens
    assert few
    assert sum("taps=(low, mid, high)" in record.getMessage() for record in caplog.records) == 1
