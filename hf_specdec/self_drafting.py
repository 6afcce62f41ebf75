"""From a config and an assistant to a drafter that is the target itself."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import GenerationConfig

from hf_specdec._compat import undecorated_model
from hf_specdec.configs import BaseConfig, SelfDraftConfig
from hf_specdec.drafters import DrafterBase, DraftSettings, ExitPolicy, HybridDrafter, PromptLookupDrafter, SelfDrafter
from hf_specdec.errors import InvalidConfigError, UnsupportedModelError
from hf_specdec.features import TargetFeatures
from hf_specdec.layer_gate import LayerGate
from hf_specdec.layered_lm import LayeredLM
from hf_specdec.loading import load_exit_heads
from hf_specdec.networks.exit_heads import ExitHeads
from hf_specdec.placement import device_of
from hf_specdec.prefix_lm import PrefixLM


__all__ = ["SelfDraft", "self_draft_of"]

_ATTENTIONS = ("eager", "sdpa")
_LOADED: weakref.WeakKeyDictionary[Any, dict[Any, ExitHeads]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class SelfDraft:
    """What a self-drafting run is made of.

    Args:
        policy ([`ExitPolicy`]): When tokens leave.
        heads ([`ExitHeads`], *optional*): Exit heads; raw ones without them.
        ngram_size (`int`, *optional*): Longest suffix that prompt lookup searches for where no exit is confident; None
            drafts nothing there.
    """

    policy: ExitPolicy
    heads: ExitHeads | None
    ngram_size: int | None

    def gate(self, model: Any, generation_config: GenerationConfig, synced: bool) -> LayerGate:
        """The gate before the model's layers, not installed yet. Everything that speaks against it is found out here.

        Raises:
            [`UnsupportedModelError`], [`InvalidConfigError`], [`IncompatibleDraftError`]: If something does.
        """
        bare, gate = undecorated_model(model), LayerGate(model)
        name, attention = type(bare).__name__, bare.config.get_text_config(decoder=True)._attn_implementation
        if attention not in _ATTENTIONS:
            raise UnsupportedModelError(
                f"{name} runs with {attention} attention, whose masks cannot be cut for layers that run at different times: "
                f'load it with attn_implementation="sdpa" or "eager" for self-drafting'
            )
        if generation_config.return_dict_in_generate and generation_config.output_attentions:
            raise InvalidConfigError(
                "output_attentions cannot be had from a self-drafting run, whose layers see a token at different times: drop "
                "it, or draft with another model"
            )
        if synced:
            raise UnsupportedModelError(
                "self-drafting cannot keep several processes in step (synced_gpus): its passes end at different layers. Draft "
                "with another model, or pass synced_gpus=False"
            )
        if self.heads is not None:
            self.heads.check_target(bare)
        self.exits(len(gate.layers))
        return gate

    def exits(self, num_layers: int) -> tuple[int, ...]:
        """The layers after which tokens of a model with `num_layers` layers may leave."""
        return self.policy.exits_of(num_layers, None if self.heads is None else tuple(self.heads.config.exit_layers))

    def prompt_states(self, model: Any, gate: LayerGate) -> dict[int, TargetFeatures]:
        """By exit layer, what keeps the hidden states of the prompt for heads that read them."""
        if self.heads is None or not self.heads.reads_context:
            return {}
        return {depth: TargetFeatures(model, (depth,)) for depth in self.exits(len(gate.layers))}

    def drafter(
        self, settings: DraftSettings, target: PrefixLM, prompt_states: Mapping[int, TargetFeatures]
    ) -> DrafterBase:
        """The drafter of a run whose target has a gate."""
        if not isinstance(target, LayeredLM):
            raise TypeError(f"self-drafting needs a LayeredLM as target, got {type(target).__name__}")
        drafter = SelfDrafter(settings, target, self.policy, self.heads, prompt_states)
        if self.ngram_size is None:
            return drafter
        return HybridDrafter(settings, PromptLookupDrafter(settings, self.ngram_size), drafter, model_first=True)


def self_draft_of(config: BaseConfig, assistant: Any, model: Any) -> SelfDraft | None:
    """The self-draft that a config or exit heads ask for; None where something else drafts.

    Raises:
        [`InvalidConfigError`]: If the config says self-draft and the assistant is another model.
    """
    heads = assistant if isinstance(assistant, ExitHeads) else None
    if not isinstance(config, SelfDraftConfig):
        if heads is None:
            return None
        if config.drafting == "ngram":
            raise InvalidConfigError(
                'exit heads as assistant_model and drafting="ngram" contradict each other: pass one'
            )
        return SelfDraft(ExitPolicy(), heads, config.ngram_size if config.drafting == "hybrid" else None)
    if assistant is not None and heads is None:
        raise InvalidConfigError(
            f"SelfDraftConfig drafts with the model itself, but assistant_model is {type(assistant).__name__}: drop it, pass "
            "exit heads, or use another config"
        )
    if config.exit_heads is not None:
        if heads is not None:
            raise InvalidConfigError("exit_heads of the config and exit heads as assistant_model: pass one of them")
        heads = _load_heads(str(config.exit_heads), model)
    return SelfDraft(config, heads, config.ngram_size if config.drafting == "hybrid" else None)


def _load_heads(name: str, model: Any) -> ExitHeads:
    """The heads of a path or Hub id, read once for each model, and again when their folder has changed."""
    folder = Path(name) / "config.json"
    key = (name, folder.stat().st_mtime_ns if folder.is_file() else 0, model.dtype, device_of(model))
    known = _LOADED.setdefault(undecorated_model(model), {})
    if key not in known:
        known.clear()
        known[key] = load_exit_heads(name, model)
    return known[key]
