"""What a checkpoint or a saved file must not be able to do."""

import re
from pathlib import Path

import pytest
import torch
from transformers import GenerationConfig

import hf_specdec
from hf_specdec import EASDConfig, SpeculativeConfig
from tests.toys import noisy_copy, prompts, tiny_llama


ALWAYS = EASDConfig(entropy_threshold=-1.0, overlap_threshold=0.0)
PACKAGE = Path(hf_specdec.__file__).parent


@pytest.fixture
def model():
    return tiny_llama()


def greedy(model, **options):
    return model.generate(**prompts(), max_new_tokens=16, do_sample=False, pad_token_id=0, **options)


@pytest.mark.parametrize("hooked", [True, False])
def test_a_checkpoint_cannot_relax_acceptance(model, hooked):
    plain, draft = greedy(model), noisy_copy(model, 0.05)
    assert not torch.equal(greedy(model, assistant_model=draft, speculative_config=ALWAYS), plain)
    model.generation_config.speculative_config = ALWAYS
    try:
        if not hooked:
            hf_specdec.uninstall()
        assert torch.equal(greedy(model), plain)
        assert torch.equal(greedy(model, custom_generate=hf_specdec.generate, drafter=draft), plain)
    finally:
        hf_specdec.install()


def test_the_config_that_was_passed_does(model):
    passed = GenerationConfig(max_new_tokens=16, do_sample=False, pad_token_id=0, speculative_config=ALWAYS)
    draft = noisy_copy(model, 0.05)
    relaxed = model.generate(**prompts(), generation_config=passed, assistant_model=draft)
    assert torch.equal(relaxed, greedy(model, assistant_model=draft, speculative_config=ALWAYS))


def test_relaxed_acceptance_is_visible(model):
    options = {"assistant_model": noisy_copy(model), "return_dict_in_generate": True}
    assert not greedy(model, speculative_config=ALWAYS, **options).speculative_stats.lossless
    assert greedy(model, speculative_config=SpeculativeConfig(), **options).speculative_stats.lossless


def test_no_source_file_unpickles_or_trusts_remote_code():
    for path in PACKAGE.rglob("*.py"):
        source = path.read_text(encoding="utf-8")
        assert not re.search(r"\btorch\.load\((?!.*weights_only=True)|\bpickle\.load|trust_remote_code=True", source), (
            path.name
        )
