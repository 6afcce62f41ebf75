"""Every difference between the transformers releases this package supports (5.17 up to 5.24).

Each entry names the release range it serves, so that it can be deleted when that range ends.
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel, cache_utils
from transformers.cache_utils import Cache, DynamicIndexedLayer, DynamicLayer, DynamicSlidingWindowLayer
from transformers.generation import logits_process, stopping_criteria


__all__ = [
    "CACHE_KEY",
    "DELEGATING_CLASSES",
    "OWN_GENERATE_CLASSES",
    "POSITION_FREE_PROCESSORS",
    "ROW_INDEPENDENT_CRITERIA",
    "ROW_INDEPENDENT_PROCESSORS",
    "TREE_CLASSES",
    "cache_argument",
    "empty_cache",
    "empty_layer",
    "forward_parameters",
    "needs_synced_forwards",
    "only_visible_entries",
    "passed_option",
    "uncroppable_layers",
    "undecorated_model",
    "user_set",
    "virtual_tokens",
]

_RELEASE = tuple(map(int, transformers.__version__.split(".")[:2]))

# Up to 5.23 the keyword is `past_key_values`; 5.24 calls it `cache` everywhere.
CACHE_KEY = (
    "cache"
    if "cache" in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
    else ("past_key_values")
)


def _existing(module: Any, names: tuple[str, ...]) -> frozenset[type]:
    return frozenset(getattr(module, name) for name in names if hasattr(module, name))


# Processors that look at the scores only, so that all positions of a draft can be warped in one call.
POSITION_FREE_PROCESSORS = _existing(
    logits_process,
    (
        "EpsilonLogitsWarper",
        "EtaLogitsWarper",
        "InfNanRemoveLogitsProcessor",
        "LogitNormalization",
        "MinPLogitsWarper",
        "SuppressTokensLogitsProcessor",
        "TemperatureLogitsWarper",
        "TopHLogitsWarper",
        "TopKLogitsWarper",
        "TopPLogitsWarper",
        "TypicalLogitsWarper",
    ),
)

# Processors whose result for a row depends on that row's prefix and scores alone and that keep no state between calls.
ROW_INDEPENDENT_PROCESSORS = POSITION_FREE_PROCESSORS | _existing(
    logits_process,
    (
        "ExponentialDecayLengthPenalty",
        "ForcedBOSTokenLogitsProcessor",
        "ForcedEOSTokenLogitsProcessor",
        "MinLengthLogitsProcessor",
        "MinNewTokensLengthLogitsProcessor",
        "NoBadWordsLogitsProcessor",
        "NoRepeatNGramLogitsProcessor",
        "RepetitionPenaltyLogitsProcessor",
        "SequenceBiasLogitsProcessor",
        "SuppressTokensAtBeginLogitsProcessor",
    ),
)

# Criteria that judge each row by its own prefix (or by the clock) and keep no state between calls.
ROW_INDEPENDENT_CRITERIA = _existing(
    stopping_criteria, ("EosTokenCriteria", "MaxLengthCriteria", "MaxTimeCriteria", "StopStringCriteria")
)

# Classes that take an attention mask of four dimensions, or one for each kind of layer, and positions that repeat: on each
# of them trees were seen to give the texts of plain decoding.
TREE_CLASSES = frozenset(
    """
    ApertusForCausalLM ArceeForCausalLM BioGptForCausalLM BitNetForCausalLM CodeGenForCausalLM Cohere2ForCausalLM
    CohereForCausalLM CwmForCausalLM DeepseekV2ForCausalLM DeepseekV3ForCausalLM DiffLlamaForCausalLM DogeForCausalLM
    Dots1ForCausalLM Ernie4_5ForCausalLM Ernie4_5_MoeForCausalLM Exaone4ForCausalLM FlexOlmoForCausalLM GPT2LMHeadModel
    GPTBigCodeForCausalLM GPTJForCausalLM GPTNeoXForCausalLM Gemma2ForCausalLM Gemma3ForCausalLM GemmaForCausalLM
    Glm4ForCausalLM Glm4MoeForCausalLM GlmForCausalLM GptOssForCausalLM GraniteForCausalLM GraniteMoeForCausalLM
    HeliumForCausalLM HunYuanDenseV1ForCausalLM Jais2ForCausalLM JetMoeForCausalLM LlamaForCausalLM MiniCPM3ForCausalLM
    MiniMaxM2ForCausalLM Ministral3ForCausalLM MinistralForCausalLM MistralForCausalLM MixtralForCausalLM
    NanoChatForCausalLM NemotronForCausalLM OPTForCausalLM Olmo2ForCausalLM Olmo3ForCausalLM OlmoForCausalLM
    OlmoeForCausalLM PersimmonForCausalLM Phi3ForCausalLM PhiForCausalLM PhimoeForCausalLM Qwen2ForCausalLM
    Qwen2MoeForCausalLM Qwen3ForCausalLM Qwen3MoeForCausalLM SeedOssForCausalLM SmolLM3ForCausalLM StableLmForCausalLM
    Starcoder2ForCausalLM VaultGemmaForCausalLM XGLMForCausalLM YoutuForCausalLM
    """.split()
)

# Classes that bring a `generate` of their own which is not the ordinary loop over one causal LM: refused by name.
OWN_GENERATE_CLASSES = frozenset(
    """
    BarkCoarseModel BarkModel BarkSemanticModel
    BlipForConditionalGeneration BlipForQuestionAnswering ClvpModelForConditionalGeneration
    CsmForConditionalGeneration DiaForConditionalGeneration GradiumPhononTTSForConditionalGeneration
    GraniteSpeech5ForCTC JanusForConditionalGeneration KyutaiSpeechToTextForConditionalGeneration
    LasrForCTC MoshiForConditionalGeneration MusicgenForCausalLM
    MusicgenForConditionalGeneration MusicgenMelodyForCausalLM MusicgenMelodyForConditionalGeneration
    Nemotron3_5AsrForRNNT Nemotron3_5TranscribeForConditionalGeneration NemotronAsrStreamingForRNNT
    OmniASRForCTC ParakeetForCTC ParakeetForRNNT
    ParakeetForTDT PocketTTSForConditionalGeneration Pop2PianoForConditionalGeneration
    Qwen2_5OmniForConditionalGeneration Qwen3OmniMoeForConditionalGeneration RagTokenForGeneration
    SeamlessM4TForSpeechToSpeech SeamlessM4TForSpeechToText SeamlessM4TForTextToSpeech
    SeamlessM4TForTextToText SeamlessM4TModel SeamlessM4Tv2ForSpeechToSpeech
    SeamlessM4Tv2ForSpeechToText SeamlessM4Tv2ForTextToSpeech SeamlessM4Tv2ForTextToText
    SeamlessM4Tv2Model WhisperForConditionalGeneration
    """.split()
)

# Classes whose own `generate` only prepares inputs and then calls the ordinary one, of itself or of its language model.
DELEGATING_CLASSES = frozenset(
    """
    Blip2ForConditionalGeneration GraniteSpeechForConditionalGeneration GraniteSpeechPlusForConditionalGeneration
    InstructBlipForConditionalGeneration InstructBlipVideoForConditionalGeneration Kosmos2ForConditionalGeneration
    """.split()
)


def cache_argument(model_kwargs: dict[str, Any]) -> Any:
    """The cache among `generate`'s model keywords, under whichever name this release uses; None when there is none."""
    return model_kwargs.get(CACHE_KEY)


# In 5.17 a recording sliding layer attends to all that it holds, though the mask counts its window only; 5.18 cuts it.
_ATTENDS_TO_ALL_RECORDED = _RELEASE < (5, 18)

# In 5.17 `reset` overwrites growing layers with zeros that still count and are attended to; 5.18 drops their entries.
_RESET_KEEPS_COLUMNS = _RELEASE < (5, 18)

# Up to 5.23 quantised layers call themselves croppable, but only their unquantised rest is cut; 5.24 says that they are not.
_MISTAKEN_FOR_CROPPABLE: tuple[type, ...] = (
    tuple(_existing(cache_utils, ("BaseQuantizedLayer", "QuantizedLayer"))) if _RELEASE < (5, 24) else ()
)

# Up to 5.19 pipelines pass a generation config in which all defaults of checkpoint and library are filled in.
_PIPELINES_PASS_DEFAULTS = _RELEASE < (5, 20)


@contextmanager
def only_visible_entries(cache: Any) -> Iterator[None]:
    """Within it, a forward pass sees of each sliding layer the window alone, and what was recorded before it is kept."""
    set_aside = []
    for layer in getattr(cache, "layers", ()) if _ATTENDS_TO_ALL_RECORDED else ():
        if isinstance(layer, DynamicSlidingWindowLayer) and layer.is_initialized and layer.record_past:
            older = layer.keys.shape[-2] - (layer.sliding_window - 1)
            if older > 0:
                set_aside.append((layer, layer.keys[:, :, :older], layer.values[:, :, :older]))
                layer.keys, layer.values = layer.keys[:, :, older:], layer.values[:, :, older:]
    try:
        yield
    finally:
        for layer, keys, values in set_aside:
            layer.keys = torch.cat([keys, layer.keys], dim=-2)
            layer.values = torch.cat([values, layer.values], dim=-2)


def uncroppable_layers(cache: Cache) -> list[Any]:
    """The layers of a cache out of which rejected drafts cannot be taken."""
    return [layer for layer in cache.layers if not layer.is_croppable or isinstance(layer, _MISTAKEN_FOR_CROPPABLE)]


def empty_layer(layer: Any) -> None:
    """Takes everything out of a cache layer, so that it is as before its first use."""
    layer.reset()
    if _RESET_KEEPS_COLUMNS and isinstance(layer, DynamicLayer):
        layer.keys = layer.values = None
        layer.is_initialized = False
        if isinstance(layer, DynamicIndexedLayer):
            layer.indexer_keys = None
            layer.is_indexer_initialized = False


def empty_cache(cache: Cache) -> None:
    """Takes everything out of all layers of a cache."""
    for layer in cache.layers:
        empty_layer(layer)


def undecorated_model(model: Any) -> Any:
    """The transformers model inside a PEFT wrapper, or the model itself."""
    return (
        model
        if isinstance(model, PreTrainedModel) or not callable(getattr(model, "get_base_model", None))
        else (model.get_base_model())
    )


def virtual_tokens(model: Any) -> str | None:
    """Name of the PEFT config whose learnt prompt stands before the model's text, else None.

    While PEFT generates it calls the wrapped model, of which only the `prepare_inputs_for_generation` is PEFT's.
    """
    wrapper = getattr(getattr(model, "prepare_inputs_for_generation", None), "__self__", model)
    config = getattr(wrapper, "active_peft_config", None)
    return type(config).__name__ if getattr(config, "is_prompt_learning", False) else None


def needs_synced_forwards(model: Any, synced_gpus: bool | None) -> bool:
    """Whether all processes must run the same number of forward passes: what `generate` makes of its `synced_gpus`."""
    if synced_gpus is not None:
        return bool(synced_gpus)
    kwargs: dict[str, Any] = {}
    found = undecorated_model(model)._extract_generation_mode_kwargs(None, kwargs, None, None, None)
    return bool(found["synced_gpus"])


def user_set(generation_config: GenerationConfig, name: str, model: Any) -> Any:
    """An option of a prepared `generation_config` that neither the checkpoint nor a global default put there, else None."""
    value = getattr(generation_config, name, None)
    defaults = generation_config._get_default_generation_params()
    return None if value in (defaults.get(name), getattr(model.generation_config, name, None)) else value


def passed_option(passed: GenerationConfig | None, name: str, model: Any) -> Any:
    """An option of the generation config that was passed to `generate`, unless a pipeline filled it in; else None."""
    if passed is None:
        return None
    if _PIPELINES_PASS_DEFAULTS:
        defaults = passed._get_default_generation_params()
        if all(getattr(passed, key, None) is not None for key, value in defaults.items() if value is not None):
            return user_set(passed, name, model)
    return getattr(passed, name, None)


def forward_parameters(model: Any) -> frozenset[str]:
    """Names that the model's `forward` takes, looked up inside a PEFT wrapper."""
    return frozenset(inspect.signature(undecorated_model(model).forward).parameters)
