"""The dialects in which drafters are published, read into one: a network's config and its own tensor names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from torch import Tensor
from transformers import LlamaConfig

from hf_specdec.errors import IncompatibleDraftError
from hf_specdec.networks.checkpoint import Checkpoint
from hf_specdec.networks.eagle import EagleConfig
from hf_specdec.networks.eagle3 import Eagle3Config
from hf_specdec.networks.vocabulary import read_vocabulary


__all__ = ["read_config", "read_maps", "read_tensors"]

_AUX = "eagle_aux_hidden_state_layer_ids"
_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
_TARGET = ("target_name", "target_tokenizer", "target_weights")
# What a Llama config may say about the layer; the rest of a published config is about the target or about training.
_LAYER = (
    *(name for name in LlamaConfig.__annotations__ if name in {each.name for each in fields(LlamaConfig)}),
    *("rope_theta", "rope_scaling", "dtype", "torch_dtype"),
)


def read_tensors(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """The tensors under the network's own names: no `model.` in front, and `midlayer.` for EAGLE-3's only layer."""
    tensors = {name.removeprefix("model."): value for name, value in checkpoint.tensors.items()}
    if "layers.0.hidden_norm.weight" in tensors:
        tensors = {name.replace("layers.0.", "midlayer.", 1): value for name, value in tensors.items()}
    # Rotary tables are computed; some old checkpoints carry them along.
    return {name: value for name, value in tensors.items() if not name.endswith("rotary_emb.inv_freq")}


def read_config(checkpoint: Checkpoint, tensors: Mapping[str, Tensor]) -> EagleConfig | Eagle3Config:
    """The network's config: what the tensors show is taken from them, the rest from the checkpoint's config.

    Raises:
        [`IncompatibleDraftError`]: If it is not the checkpoint of a drafter network.
    """
    if "midlayer.hidden_norm.weight" in tensors:
        return _eagle3(checkpoint, tensors)
    if "fc.weight" in tensors and any(name.startswith("layers.0.self_attn.") for name in tensors):
        return _eagle(checkpoint, tensors)
    raise IncompatibleDraftError(
        f"{checkpoint.name} is no EAGLE-1, HASS or EAGLE-3 checkpoint: expected fc.weight and layers.0.* or midlayer.*, got "
        f"{sorted(tensors)[:8]}"
    )


def _eagle(checkpoint: Checkpoint, tensors: Mapping[str, Tensor]) -> EagleConfig:
    config = checkpoint.config
    return EagleConfig(
        **_layer_options(config, tensors, "layers.0."),
        bias="fc.bias" in tensors,
        **_target_options(config),
    )


def _eagle3(checkpoint: Checkpoint, tensors: Mapping[str, Tensor]) -> Eagle3Config:
    config = checkpoint.config
    nested = config.get("transformer_layer_config")
    flags = {name: bool(config.get(name, config.get("eagle_config", {}).get(name, False))) for name in _FLAGS}
    if nested is not None and "norm_before_residual" not in config:
        flags["norm_before_residual"] = True  # the default of speculators' config class
    flags["norm_before_fc"] |= "input_norm.weight" in tensors
    flags["fc_norm"] |= any(name.startswith("fc_norm.") for name in tensors)
    options = _layer_options(config if nested is None else nested, tensors, "midlayer.")
    vocab_size = options.get("vocab_size")
    draft_vocab_size = config.get("draft_vocab_size") or vocab_size
    if "lm_head.weight" not in tensors and draft_vocab_size != vocab_size:
        raise IncompatibleDraftError(
            f"{checkpoint.name} has a draft vocabulary of {draft_vocab_size} of {vocab_size} tokens and no lm_head.weight"
        )
    if "fc.weight" not in tensors or tensors["fc.weight"].shape[1] % 3:
        raise IncompatibleDraftError(
            f"{checkpoint.name} must hold fc.weight with three times the target's hidden size as columns, got "
            f"{tuple(tensors['fc.weight'].shape) if 'fc.weight' in tensors else 'none'}"
        )
    return Eagle3Config(
        **options,
        **flags,
        draft_vocab_size=draft_vocab_size,
        target_hidden_size=tensors["fc.weight"].shape[1] // 3,
        taps=_taps(checkpoint),
        qk_norm="midlayer.self_attn.q_norm.weight" in tensors,
        has_head="lm_head.weight" in tensors,
        **_target_options(config),
    )


def _layer_options(config: Mapping[str, Any], tensors: Mapping[str, Tensor], layer: str) -> dict[str, Any]:
    options = {name: config[name] for name in _LAYER if name in config}
    asked = bool(options.get("attention_bias") or config.get("qkv_bias"))
    return options | {
        "num_hidden_layers": 1,
        "tie_word_embeddings": False,  # some configs say true although lm_head is a tensor of its own
        "attention_bias": asked or f"{layer}self_attn.q_proj.bias" in tensors,
        "has_embedding": "embed_tokens.weight" in tensors,
    }


def _target_options(config: Mapping[str, Any]) -> dict[str, Any]:
    verifier = config.get("speculators_config", {}).get("verifier", {})
    found = {name: config[name] for name in _TARGET if config.get(name)}
    return {"target_name": verifier.get("name_or_path")} | found


def _taps(checkpoint: Checkpoint) -> list[int] | None:
    """Indices into `hidden_states`. A field at top level holds those (as vLLM reads it); one under `eagle_config` holds layers
    whose *outputs* are tapped, one less (as SGLang reads it)."""
    config = checkpoint.config
    plain, nested = config.get("taps", config.get(_AUX)), config.get("eagle_config", {}).get(_AUX)
    shifted = None if nested is None else [index + 1 for index in nested]
    if plain is not None and shifted is not None and list(plain) != shifted:
        raise IncompatibleDraftError(
            f"{checkpoint.name} names its layers twice, as {list(plain)} and as outputs of {list(nested)}, which disagree: "
            "pass taps=(low, mid, high)"
        )
    taps = plain if plain is not None else shifted
    if taps is not None and len(taps) != 3:
        raise IncompatibleDraftError(
            f"{checkpoint.name} names {len(taps)} tapped layers, EAGLE-3 has 3: got {list(taps)}"
        )
    return None if taps is None else list(taps)


def read_maps(config: Eagle3Config, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors with `d2t` and `t2d` in the published form; without them where the vocabulary is whole."""
    rest = {name: value for name, value in tensors.items() if name not in ("d2t", "t2d")}
    d2t, t2d = tensors.get("d2t"), tensors.get("t2d")
    if config.draft_vocab_size == config.vocab_size:
        if d2t is not None and bool((d2t != 0).any()) and bool((d2t.sort().values != d2t).any()):
            raise IncompatibleDraftError("d2t permutes a whole vocabulary, which no published drafter does")
        return rest
    if d2t is None:
        raise IncompatibleDraftError(
            f"the draft vocabulary has {config.draft_vocab_size} of {config.vocab_size} tokens, but d2t is missing: nobody "
            "knows which ones"
        )
    return rest | read_vocabulary(d2t, t2d, config.vocab_size)
