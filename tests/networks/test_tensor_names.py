"""A drafter without a telling config is told by its tensors' names, which are read without running a pickle."""

import json

import pytest
import torch
from huggingface_hub.errors import EntryNotFoundError
from safetensors.torch import save_file

from hf_specdec.networks import checkpoint


CONFIG = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 1}
LAYER = {"layers.0.mlp.down_proj.weight": torch.zeros(2, 2)}
DRAFTER = {"fc.weight": torch.zeros(2, 4)} | LAYER
LLAMA = {"lm_head.weight": torch.zeros(2, 2)} | LAYER


class RanError(Exception):
    """A pickle was run."""


class Trap:
    def __reduce__(self):
        return _spring, ()


def _spring():
    raise RanError


def write(folder, form, tensors):
    (folder / "config.json").write_text(json.dumps(CONFIG))
    if form == "safetensors":
        save_file(tensors, folder / "model.safetensors")
    elif "shards" in form:
        index = {"weight_map": dict.fromkeys(tensors, "part")}
        (folder / f"{form.removeprefix('shards of ')}.index.json").write_text(json.dumps(index))
    else:
        torch.save(tensors | ({"trap": Trap()} if "trap" in form else {}), folder / "pytorch_model.bin")


@pytest.mark.parametrize(
    "form", ["safetensors", "shards of model.safetensors", "bin", "shards of pytorch_model.bin", "bin with a trap"]
)
@pytest.mark.parametrize("hub", [False, True])
@pytest.mark.parametrize("tensors", [DRAFTER, LLAMA], ids=["drafter", "llama"])
def test_a_one_layer_llama_config_without_a_bias_field(form, hub, tensors, tmp_path, monkeypatch):
    write(tmp_path, form, tensors)

    def download(repo, name):
        assert repo == "org/drafter"
        if not (tmp_path / name).is_file():
            raise EntryNotFoundError(name)
        return str(tmp_path / name)

    monkeypatch.setattr(checkpoint, "hf_hub_download", download)
    assert checkpoint.is_draft_checkpoint("org/drafter" if hub else tmp_path) == (tensors is DRAFTER)


def test_the_old_format_of_torch_is_left_to_the_config(tmp_path):
    torch.save(DRAFTER, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    for config, expected in ((CONFIG, False), (CONFIG | {"bias": True}, True)):
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert checkpoint.is_draft_checkpoint(tmp_path) == expected
