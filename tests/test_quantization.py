"""Targets with 4-bit and 8-bit weights: the text of the quantised model itself, whatever drafts for it."""

import pytest
import torch

import hf_specdec
from hf_specdec import ExactConfig
from tests.toys import prompts, tiny_llama


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
LAYERS = {"8bit": "Linear8bitLt", "4bit": "Linear4bit"}

pytestmark = pytest.mark.filterwarnings("ignore:MatMul8bitLt")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    tiny_llama(width=128).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("quantization", sorted(LAYERS))
@pytest.mark.parametrize("batch_size", [1, 3])
def test_the_text_is_the_quantised_models_own(checkpoint, quantization, device, batch_size):
    target = hf_specdec.load_model(checkpoint, quantization=quantization, device_map=device)
    draft = hf_specdec.load_model(checkpoint, dtype=torch.float32, device_map=device)
    assert type(target.model.layers[0].mlp.up_proj).__name__ == LAYERS[quantization]
    inputs = {name: value.to(device) for name, value in prompts(batch_size).items()}
    options = {"max_new_tokens": 24, "do_sample": False, "return_dict_in_generate": True}
    plain = target.generate(**inputs, **options)
    config = ExactConfig(length=3, drafting="model", on_drafter_error="raise")
    ours = target.generate(**inputs, **options, assistant_model=draft, speculative_config=config)
    assert torch.equal(ours.sequences, plain.sequences)
    assert ours.speculative_stats.num_accepted_tokens > 0


@pytest.mark.parametrize(
    ("dtype", "computes"), [("float16", "float16"), (torch.float32, "float32"), ("auto", "bfloat16")]
)
def test_four_bits_compute_in_the_dtype_that_was_asked_for(checkpoint, dtype, computes):
    model = hf_specdec.load_model(checkpoint, quantization="4bit", dtype=dtype, device_map="cpu")
    assert model.config.quantization_config.bnb_4bit_compute_dtype == getattr(torch, computes)


def test_a_dtype_that_is_none_is_named(checkpoint):
    assert hf_specdec.load_model(checkpoint, dtype="torch.bfloat16").dtype == torch.bfloat16
    for wrong in ("float17", "int8", "nn"):
        with pytest.raises(hf_specdec.InvalidConfigError, match=f"got '{wrong}'"):
            hf_specdec.load_model(checkpoint, dtype=wrong)


@pytest.mark.gpu
def test_quantised_weights_need_less_memory(tmp_path):
    tiny_llama(width=1024).save_pretrained(tmp_path)
    peaks = {}
    for quantization in (None, "8bit", "4bit"):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        model = hf_specdec.load_model(tmp_path, quantization=quantization, dtype=torch.bfloat16, device_map="cuda")
        inputs = {name: value.cuda() for name, value in prompts(1).items()}
        config = ExactConfig(drafting="ngram", on_drafter_error="raise")
        model.generate(**inputs, max_new_tokens=8, do_sample=False, speculative_config=config)
        peaks[quantization] = torch.cuda.memory_allocated() - before
        del model
    assert peaks["4bit"] < peaks["8bit"] < peaks[None]


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`")
def test_weights_that_were_saved_quantised_are_not_taken_for_others(checkpoint, tmp_path):
    hf_specdec.load_model(checkpoint, quantization="8bit", device_map="cpu").save_pretrained(tmp_path)
    with pytest.raises(hf_specdec.InvalidConfigError, match=r"saved as 8bit and cannot be loaded as 4bit"):
        hf_specdec.load_model(tmp_path, quantization="4bit", device_map="cpu")
    for options in ({}, {"quantization": "8bit"}):
        model = hf_specdec.load_model(tmp_path, device_map="cpu", **options)
        assert type(model.model.layers[0].mlp.up_proj).__name__ == LAYERS["8bit"]
