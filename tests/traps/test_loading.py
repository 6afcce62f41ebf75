"""Reports about loading and quantisation (group D)."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaForCausalLM

from hf_specdec import EASDConfig, InvalidConfigError, load_model, verify_lossless
from hf_specdec.networks.export import export_drafter
from tests.networks import drafter_for, small_target
from tests.toys import prompts, tiny_llama
from tests.traps import ACCEPTED, EXACT, HYBRID, NGRAM, drafter, plain, speculative, target, tokens


@pytest.fixture
def loading(monkeypatch):
    """What `from_pretrained` was asked for."""
    asked = {}

    def from_pretrained(id_or_path, **kwargs):
        asked.update(kwargs, id_or_path=id_or_path)
        return tiny_llama(layers=2)

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", from_pretrained)
    return asked


class TestQuantisedLoading:
    """D1: `load_in_4bit=` was removed; a bare TypeError says so."""

    @pytest.mark.parametrize("bits", [4, 8])
    def test_by_name(self, bits, loading):
        load_model("somewhere", quantization=f"{bits}bit", dtype=torch.float16, device_map="auto")
        assert getattr(loading["quantization_config"], f"load_in_{bits}bit")
        assert not any(name.startswith("load_in") for name in loading)
        assert loading["device_map"] == "auto"
        if bits == 4:
            assert loading["quantization_config"].bnb_4bit_compute_dtype == torch.float16
            assert loading["quantization_config"].bnb_4bit_quant_type == "nf4"

    def test_by_a_configuration_of_ones_own(self, loading):
        own = BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=4.0)
        load_model("somewhere", quantization=own)
        assert loading["quantization_config"] is own

    def test_without(self, loading):
        load_model("somewhere", revision="main")
        assert "quantization_config" not in loading
        assert loading["revision"] == "main"

    @pytest.mark.parametrize("bits", [4, 8])
    def test_the_removed_names(self, bits, loading):
        with pytest.raises(InvalidConfigError, match=f'quantization="{bits}bit"'):
            load_model("somewhere", **{f"load_in_{bits}bit": True})
        assert not loading

    @pytest.mark.parametrize("wrong", ["3bit", 4, True, {"load_in_4bit": True}])
    def test_wrong_values(self, wrong, loading):
        with pytest.raises(InvalidConfigError, match="quantization must be"):
            load_model("somewhere", quantization=wrong)
        assert not loading


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_a_drafter_network_is_no_causal_lm(kind, tmp_path):
    """D7: its folder loads as a Llama of one layer, with random parts."""
    model = small_target()
    network = drafter_for(model, kind)
    for name, save in (
        ("own", network.save_pretrained),
        ("served", lambda path: export_drafter(network, path, "vllm")),
    ):
        save(tmp_path / name)
        with pytest.raises(InvalidConfigError, match=r"drafter network and no causal LM.*AutoDrafter"):
            load_model(tmp_path / name)
        assert verify_lossless(model, [[5, 6, 7]], assistant_model=tmp_path / name, max_new_tokens=4).equal


class PackedLinear(nn.Module):
    """Like a 4-bit layer: its `weight` is bytes, and what it computes is floating point."""

    def __init__(self, linear):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(linear.weight.numel() // 2, 1, dtype=torch.uint8), requires_grad=False)
        step = linear.weight.abs().max() / 7
        self._unpacked = ((linear.weight / step).round() * step).detach()

    def forward(self, hidden_states):
        return nn.functional.linear(hidden_states, self._unpacked)


class Packed(LlamaForCausalLM):
    """A model whose layers are packed and that may not be moved, like a model that bitsandbytes loaded."""

    is_loaded_in_4bit = True

    def __init__(self, model):
        super().__init__(model.config)
        self.load_state_dict(model.state_dict())
        for module in list(self.modules()):
            for name, child in module.named_children():
                if isinstance(child, nn.Linear):
                    setattr(module, name, PackedLinear(child))
        self.eval()

    def _refuse(self, *args, **kwargs):
        raise ValueError("`.to` is not supported for `4-bit` or `8-bit` bitsandbytes models")

    to = cuda = cpu = float = half = bfloat16 = _refuse


class TestQuantisedModels:
    """D2 and D10: `.to` is called on a quantised model; `weight.dtype` (bytes) is taken for the computing type."""

    @pytest.mark.parametrize("batch_size", [1, 3])
    @pytest.mark.parametrize("config", [EXACT, NGRAM, HYBRID], ids=lambda config: config.drafting)
    @pytest.mark.parametrize("accepted", ACCEPTED)
    def test_target_and_drafter(self, accepted, config, batch_size):
        model = Packed(target())
        assert model.lm_head.weight.dtype == torch.uint8
        expected = plain(prompts(batch_size), model)
        assistant = None if config is NGRAM else Packed(drafter(accepted))
        output = speculative(assistant, prompts(batch_size), config, model=model, return_dict_in_generate=True)
        assert tokens(output) == tokens(expected)
        if accepted == "always" and config is EXACT:
            assert output.speculative_stats.acceptance_rate == 1.0

    def test_sampling_and_easd(self):
        model, assistant = Packed(target()), Packed(drafter("sometimes"))
        options = {
            "model": model,
            "do_sample": True,
            "top_k": 0,
            "return_dict_in_generate": True,
            "output_logits": True,
        }
        output = speculative(
            assistant, prompts(3), EASDConfig(entropy_threshold=0.5, on_drafter_error="raise"), **options
        )
        assert all(each.dtype == torch.float32 for each in output.logits)


class TestAssistantsByPath:
    def test_a_folder(self, tmp_path):
        drafter("sometimes").save_pretrained(tmp_path)
        for path in (tmp_path, str(tmp_path)):
            options = {"assistant_model": path, "speculative_config": EXACT, "return_dict_in_generate": True}
            output = plain(prompts(), **options)
            assert tokens(output) == tokens(plain(prompts()))
            assert output.speculative_stats.num_accepted_tokens > 0

    def test_it_is_loaded_in_the_type_and_on_the_device_of_the_target(self, loading):
        speculative(Path("somewhere"), prompts())
        assert loading["dtype"] == torch.float32
        assert loading["device_map"] == {"": torch.device("cpu")}


def test_importing_warns_of_nothing_deprecated():
    """D5: the library breaks on the next release of transformers."""
    code = "import hf_specdec"
    warnings = ["-W", "error::DeprecationWarning:hf_specdec", "-W", "error::FutureWarning"]
    done = subprocess.run(
        [sys.executable, *warnings, "-c", code], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
