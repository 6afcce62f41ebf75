"""The dialects in which drafters are published, read into one: a network's config and its own tensor names."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import fields
from typing import Any

import torch
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
        bias=bool(config.get("bias")) or "fc.bias" in tensors,
        **_target_options(checkpoint),
    )


def _eagle3(checkpoint: Checkpoint, tensors: Mapping[str, Tensor]) -> Eagle3Config:
    config = checkpoint.config
    nested = _section(checkpoint, "transformer_layer_config")
    flags = _flags(checkpoint, tensors, by_default={"norm_before_residual"} if nested else set())
    options = _layer_options(nested or config, tensors, "midlayer.")
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
        qk_norm=nested.get("model_type") == "qwen3" or "midlayer.self_attn.q_norm.weight" in tensors,
        has_head="lm_head.weight" in tensors,
        **_target_options(checkpoint),
    )


def _flags(checkpoint: Checkpoint, tensors: Mapping[str, Tensor], by_default: Set[str]) -> dict[str, bool]:
    """The norms that the config asks for, at top level or under `eagle_config`, and those whose tensors are there.

    `by_default` are those that a config asks for by silence: `norm_before_residual` in speculators' config class (published).
    """
    config, nested = checkpoint.config, _section(checkpoint, "eagle_config")
    flags = {}
    for name in _FLAGS:
        said = [each[name] for each in (config, nested) if each.get(name) is not None]
        flags[name] = bool(said[0]) if said else name in by_default
    flags["norm_before_fc"] |= "input_norm.weight" in tensors
    flags["fc_norm"] |= any(name.startswith("fc_norm.") for name in tensors)
    return flags


def _section(checkpoint: Checkpoint, name: str) -> dict[str, Any]:
    """A nested part of the config, empty where it is missing or null."""
    section = checkpoint.config.get(name)
    if section is not None and not isinstance(section, dict):
        raise IncompatibleDraftError(f"{name} in the config of {checkpoint.name} must be an object, got {section!r}")
    return section or {}


def _layer_options(config: Mapping[str, Any], tensors: Mapping[str, Tensor], layer: str) -> dict[str, Any]:
    options = {name: config[name] for name in _LAYER if name in config}
    for name in ("rope_theta", "rope_scaling", "rope_parameters"):
        if options.get(name) is None:
            options.pop(name, None)
    asked = bool(options.get("attention_bias") or config.get("qkv_bias"))
    return options | {
        "num_hidden_layers": 1,
        "tie_word_embeddings": False,  # some configs say true although lm_head is a tensor of its own
        "attention_bias": asked or f"{layer}self_attn.q_proj.bias" in tensors,
        "has_embedding": "embed_tokens.weight" in tensors,
    }


def _target_options(checkpoint: Checkpoint) -> dict[str, Any]:
    config, verifier = checkpoint.config, _section(checkpoint, "speculators_config").get("verifier") or {}
    found = {name: config[name] for name in _TARGET if config.get(name)}
    if isinstance(config.get("recipe"), str):  # others may call something else so
        found["recipe"] = config["recipe"]
    return {"target_name": verifier.get("name_or_path")} | found


def _taps(checkpoint: Checkpoint) -> list[int] | None:
    """Indices into `hidden_states`. A field at top level holds those (as vLLM reads it); one under `eagle_config` holds layers
    whose *outputs* are tapped, one less (as SGLang reads it)."""
    config = checkpoint.config
    plain: Any = config.get(_AUX) if config.get("taps") is None else config["taps"]
    nested: Any = _section(checkpoint, "eagle_config").get(_AUX)
    shifted = None if nested is None else [index + 1 for index in nested]
    if plain is not None and shifted is not None and list(plain) != shifted:
        raise IncompatibleDraftError(
            f"{checkpoint.name} names its layers twice, as {list(plain)} and as outputs of {list(nested)}, which disagree: "
            "pass taps=(low, mid, high)"
        )
    taps: Any = shifted if plain is None else plain
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
        if d2t is not None and not _is_identity(d2t, config.vocab_size):
            raise IncompatibleDraftError(
                f"the draft vocabulary is the target's whole one of {config.vocab_size} tokens, but d2t renames them, which no "
                "published drafter does: expected zeros (offsets), 0, 1, 2, ... (ids) or no d2t; sort the rows of lm_head "
                "by the target's ids and drop d2t and t2d"
            )
        return rest
    if d2t is None:
        raise IncompatibleDraftError(
            f"the draft vocabulary has {config.draft_vocab_size} of {config.vocab_size} tokens, but d2t is missing: nobody "
            "knows which ones"
        )
    return rest | read_vocabulary(d2t, t2d, config.vocab_size)


def _is_identity(d2t: Tensor, vocab_size: int) -> bool:
    """Whether a map of the whole vocabulary, as offsets or as ids, says nothing."""
    ids = torch.arange(vocab_size, device=d2t.device)
    return d2t.shape == ids.shape and (not bool(d2t.any()) or torch.equal(d2t.long(), ids))
