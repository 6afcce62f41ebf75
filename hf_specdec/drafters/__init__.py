"""Drafters: what proposes tokens. Each is also a `CandidateGenerator` that works in transformers' own assisted decoding."""

from types import MappingProxyType

from hf_specdec.drafters.assistant import AssistantDrafter
from hf_specdec.drafters.base import DrafterBase, DraftSettings
from hf_specdec.drafters.draft_vocabulary import DraftVocabulary, count_tokens, tokenizer_fingerprint
from hf_specdec.drafters.exit_policy import ExitPolicy
from hf_specdec.drafters.head import HeadDrafter
from hf_specdec.drafters.hybrid import HybridDrafter
from hf_specdec.drafters.prompt_lookup import PromptLookupDrafter
from hf_specdec.drafters.scripted import ScriptedDrafter
from hf_specdec.drafters.self_draft import SelfDrafter
from hf_specdec.drafters.tree import TreeDrafter


__all__ = [
    "DRAFTERS",
    "AssistantDrafter",
    "DraftSettings",
    "DraftVocabulary",
    "DrafterBase",
    "ExitPolicy",
    "HeadDrafter",
    "HybridDrafter",
    "PromptLookupDrafter",
    "ScriptedDrafter",
    "SelfDrafter",
    "TreeDrafter",
    "count_tokens",
    "tokenizer_fingerprint",
]

DRAFTERS = MappingProxyType({"hybrid": HybridDrafter, "model": AssistantDrafter, "ngram": PromptLookupDrafter})
