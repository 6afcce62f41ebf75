"""Writing a drafter in the dialects that serving engines read (their loaders were read, not run)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from hf_specdec.errors import InvalidConfigError
from hf_specdec.networks.auto import load_network
from hf_specdec.networks.base import DraftNetwork
from hf_specdec.networks.checkpoint import read_checkpoint
from hf_specdec.networks.eagle3 import Eagle3Drafter
from hf_specdec.networks.eagle3.modeling import default_taps
from hf_specdec.networks.serving import serving_page
from hf_specdec.placement import weight_of


__all__ = ["FORMATS", "export_drafter"]

_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
_AUX = "eagle_aux_hidden_state_layer_ids"
_OURS = ("target_name", "target_tokenizer", "target_weights", "recipe")


def export_drafter(network: DraftNetwork, directory: str | Path, format: str = "hf", *, steps: int = 5) -> Path:
    """Writes `config.json` and `model.safetensors`, reads them back, and writes `serve.md` where an engine reads the format.

    Args:
        network ([`DraftNetwork`]): The network. It is not changed.
        directory (`str` or path): Folder to write to. vLLM tells the method by `eagle3` or `eagle-` in its name.
        format (`str`): `"hf"` (this package, everything), `"eagle3"` (the EAGLE repository, vLLM and SGLang), `"speculators"`,
            `"vllm"` or `"sglang"`.
        steps (`int`): Tokens per round that a speculators config proposes.

    Raises:
        [`InvalidConfigError`]: If the format is unknown or cannot say what this network is; the message names the option.
    """
    if format not in FORMATS:
        raise InvalidConfigError(f"format must be one of {', '.join(FORMATS)}, got {format!r}")
    folder = Path(directory)
    if format == "hf":
        network.save_pretrained(folder)
    else:
        config, tensors = FORMATS[format](network, steps)
        # What a served checkpoint says about its target and its training is ours; engines ignore fields that they do not know.
        config |= {name: getattr(network.config, name) for name in _OURS if getattr(network.config, name)}
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        stored = {name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()}
        save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    _check(network, folder)
    method = "eagle3" if isinstance(network, Eagle3Drafter) else "eagle"
    if (page := serving_page(format, network.config.target_name or None, method, steps)) is not None:
        (folder / "serve.md").write_text(page, encoding="utf-8")
    return folder


def _hf(network: DraftNetwork, steps: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
    return network.config.to_dict(), network.state_dict()


def _eagle3(network: DraftNetwork, steps: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Layout that every reader of EAGLE-3 knows, for networks without any of the later options."""
    three = _as_eagle3(network, "eagle3")
    own = () if _has_default_taps(three) else ("taps",)
    _refuse(network, "eagle3", (*_FLAGS, *own, "qk_norm", "attention_bias"))
    return _flat(three, "LlamaForCausalLMEagle3"), three.state_dict()


def _has_default_taps(network: DraftNetwork) -> bool:
    """Whether a reader that is told of no layers reads the right ones, as far as it is known how many the target has."""
    layers = network.target_num_layers
    return network.config.taps is None or (layers is not None and tuple(network.config.taps) == default_taps(layers))


def _vllm(network: DraftNetwork, steps: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
    _refuse(network, "vllm", ("qk_norm", "attention_bias", "bias"))
    if not isinstance(network, Eagle3Drafter):
        return _flat(network, "LlamaForCausalLM"), network.state_dict()
    config = _flat(_as_eagle3(network, "vllm"), "LlamaForCausalLMEagle3")
    config |= {name: getattr(network.config, name) for name in _FLAGS}
    if network.config.taps is not None:
        config[_AUX] = list(network.config.taps)
    return config, network.state_dict()


def _sglang(network: DraftNetwork, steps: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
    _refuse(network, "sglang", (*_FLAGS, "qk_norm", "attention_bias"))
    if not isinstance(network, Eagle3Drafter):  # its `fc` is built with a bias
        zero = network.state_dict()["fc.weight"].new_zeros(network.config.hidden_size)
        return _flat(network, "LlamaForCausalLMEagle") | {"bias": True}, {"fc.bias": zero} | network.state_dict()
    config = _flat(_as_eagle3(network, "sglang"), "LlamaForCausalLMEagle3")
    if network.config.taps is not None:  # it adds one
        if 0 in network.config.taps:
            raise InvalidConfigError(
                "sglang names layers by their outputs and cannot tap the embeddings (taps holds 0)"
            )
        config["eagle_config"] = {_AUX: [index - 1 for index in network.config.taps]}
    return config, network.state_dict()


def _speculators(network: DraftNetwork, steps: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
    three = _as_eagle3(network, "speculators")
    _refuse(network, "speculators", ("attention_bias",))
    config = three.config
    layer = _flat(three, "Qwen3ForCausalLM" if config.qk_norm else "LlamaForCausalLM")
    layer.pop("draft_vocab_size")
    layer["model_type"] = "qwen3" if config.qk_norm else "llama"
    written = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "draft_vocab_size": three.draft_vocab_size,
        "target_hidden_size": None if config.target_hidden_size == config.hidden_size else config.target_hidden_size,
        _AUX: None if config.taps is None else list(config.taps),
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
        "transformer_layer_config": layer,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": steps,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {"name_or_path": config.target_name, "architectures": list(three.target_architectures)},
        },
    } | {name: getattr(config, name) for name in _FLAGS}
    tensors = {name.replace("midlayer.", "layers.0.", 1): value for name, value in three.state_dict().items()}
    if not config.has_embedding:
        with weight_of(three.borrowed.embedding) as weight:
            tensors["embed_tokens.weight"] = weight.to(three.dtype)
    return written, tensors


FORMATS: MappingProxyType[str, Callable[[DraftNetwork, int], tuple[dict[str, Any], dict[str, Tensor]]]] = (
    MappingProxyType({"hf": _hf, "eagle3": _eagle3, "speculators": _speculators, "vllm": _vllm, "sglang": _sglang})
)


def _as_eagle3(network: DraftNetwork, format: str) -> Eagle3Drafter:
    if not isinstance(network, Eagle3Drafter):
        raise InvalidConfigError(
            f'{format} holds EAGLE-3 drafters only: write this EAGLE-1 drafter as "hf", "vllm" or "sglang"'
        )
    if not network.config.has_head:
        raise InvalidConfigError(
            f"{format} needs the drafter's own lm_head, and this one uses its target's: write it as \"hf\""
        )
    return network


def _refuse(network: DraftNetwork, format: str, options: tuple[str, ...]) -> None:
    """Raises if the network has an option that the format's readers would ignore or get wrong."""
    if found := [name for name in options if getattr(network.config, name, None)]:
        raise InvalidConfigError(
            f'the readers of the format {format} do not know {", ".join(found)}, which this drafter has: write it as "hf"'
            + (
                ', "vllm" or "speculators"'
                if set(found) <= {*_FLAGS, "taps"} and format in ("eagle3", "sglang")
                else ""
            )
            + (
                ". They may be its target's defaults: pass the target (--target)"
                if found == ["taps"] and network.target_num_layers is None
                else ""
            )
        )


def _flat(network: DraftNetwork, architecture: str) -> dict[str, Any]:
    """A Llama config of one layer, with the rotary parameters under their old names too."""
    config = network.config
    rope = dict(config.rope_parameters)
    written = {
        "architectures": [architecture],
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "num_hidden_layers": 1,
        "hidden_act": config.hidden_act,
        "rms_norm_eps": config.rms_norm_eps,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_position_embeddings,
        "rope_theta": rope.pop("rope_theta"),
        "rope_parameters": dict(config.rope_parameters),
        "tie_word_embeddings": False,
        "attention_bias": config.attention_bias,
        "bias": getattr(config, "bias", False),
        "torch_dtype": str(network.dtype).removeprefix("torch."),
        "bos_token_id": config.bos_token_id,
        "eos_token_id": config.eos_token_id,
    }
    if rope.pop("rope_type", "default") != "default":
        written["rope_scaling"] = {"rope_type": config.rope_parameters["rope_type"], **rope}
    if isinstance(network, Eagle3Drafter):
        written["draft_vocab_size"] = network.draft_vocab_size
        written["target_hidden_size"] = config.target_hidden_size
    return written


def _check(network: DraftNetwork, folder: Path) -> None:
    """Reads the files back: every tensor must be there bit for bit, and the network must be of the same shape."""
    again = load_network(read_checkpoint(folder))
    written, expected = again.state_dict(), network.state_dict()
    lost = [name for name in expected if name not in written or not torch.equal(written[name], expected[name].cpu())]
    left_out = isinstance(again, Eagle3Drafter) and again.config.taps is None and _has_default_taps(network)
    names = (*(() if left_out else ("taps",)), "qk_norm", "rope_parameters", "rms_norm_eps", "head_dim", *_FLAGS)
    changed = [name for name in names if getattr(again.config, name, None) != getattr(network.config, name, None)]
    if lost or changed:
        raise RuntimeError(f"{folder} does not read back as it was written: tensors {lost}, options {changed}")
