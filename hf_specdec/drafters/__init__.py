"""Drafters: what proposes tokens. Each is also a `CandidateGenerator` that works in transformers' own assisted decoding."""

from types import MappingProxyType

from hf_specdec.drafters.assistant import AssistantDrafter
from hf_specdec.drafters.base import DrafterBase, DraftSettings
from hf_specdec.drafters.head import HeadDrafter
from hf_specdec.drafters.hybrid import HybridDrafter
from hf_specdec.drafters.prompt_lookup import PromptLookupDrafter
from hf_specdec.drafters.scripted import ScriptedDrafter


__all__ = [
    "DRAFTERS",
    "AssistantDrafter",
    "DraftSettings",
    "DrafterBase",
    "HeadDrafter",
    "HybridDrafter",
    "PromptLookupDrafter",
    "ScriptedDrafter",
]

DRAFTERS = MappingProxyType({"hybrid": HybridDrafter, "model": AssistantDrafter, "ngram": PromptLookupDrafter})
