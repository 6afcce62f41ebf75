"""The door: `speculative_config=` for `generate`, as a mixin and as a hook on transformers' own method."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from transformers import GenerationConfig, GenerationMixin, StoppingCriteriaList
from transformers.generation.stopping_criteria import StopStringCriteria

from hf_specdec.configs import BaseConfig, load_config
from hf_specdec.errors import InvalidConfigError
from hf_specdec.compatibility import check_model
from hf_specdec.generation import SpeculativeDecoder
from hf_specdec.generation import generate as generate_callable
from hf_specdec.lengths import ConstantLength
from hf_specdec.outputs import TokenStream


__all__ = ["SpeculativeGenerationMixin", "install", "uninstall"]

_MARK = "_hf_specdec_original"

# Options of transformers' own assisted decoding; each contradicts a speculative_config.
_STOCK_OPTIONS = (
    "assistant_confidence_threshold",
    "assistant_early_exit",
    "assistant_ensemble_weight",
    "assistant_lookbehind",
    "max_matching_ngram_size",
    "num_assistant_tokens_schedule",
    "prompt_lookup_num_tokens",
    "speculation_type",
    "target_lookbehind",
    "use_mtp",
)


def install() -> None:
    """Adds `speculative_config=` to `generate` of every transformers model. Importing `hf_specdec` does this."""
    if hasattr(GenerationMixin.generate, _MARK):
        return
    original = GenerationMixin.generate

    @functools.wraps(original)
    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        config = kwargs.pop("speculative_config", None)
        if config is None:
            config = _attached_config(args, kwargs)
        if config is None:
            return original(self, *args, **kwargs)
        return _speculative_generate(original, self, config, args, kwargs)

    setattr(generate, _MARK, original)
    GenerationMixin.generate = generate


def uninstall() -> None:
    """Takes the hook away again; `generate` is the original function object afterwards."""
    GenerationMixin.generate = getattr(GenerationMixin.generate, _MARK, GenerationMixin.generate)


class SpeculativeGenerationMixin(GenerationMixin):
    """A `GenerationMixin` whose `generate` takes `speculative_config=`, for model classes of your own and without the hook."""

    def generate(self, *args: Any, speculative_config: BaseConfig | str | None = None, **kwargs: Any) -> Any:
        """`GenerationMixin.generate` with speculative decoding.

        Args:
            speculative_config ([`BaseConfig`] or `str`, *optional*): The method; None decodes as usual.
            args, kwargs: As for `GenerationMixin.generate`; `assistant_model=` says what drafts, `stats_callback=` is
                called with the [`SpeculativeStats`].
        """
        original = getattr(GenerationMixin.generate, _MARK, GenerationMixin.generate)
        if speculative_config is None:
            return original(self, *args, **kwargs)
        return _speculative_generate(original, self, speculative_config, args, kwargs)


def _attached_config(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The config that travels on the `generation_config` passed."""
    passed = kwargs.get("generation_config", args[1] if len(args) > 1 else None)
    return getattr(passed, "speculative_config", None)


def _speculative_generate(
    original: Callable[..., Any], model: Any, given: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    check_model(model)
    bound = inspect.signature(original).bind(model, *args, **kwargs)
    arguments = dict(bound.arguments)
    arguments.pop("self", None)
    arguments |= arguments.pop("kwargs", {})
    arguments.pop("speculative_config", None)
    config = load_config(given)
    if arguments.get("custom_generate") not in (None, generate_callable):
        raise InvalidConfigError(
            "speculative_config and custom_generate both replace the decoding loop: pass one of them"
        )
    streamer = arguments.get("streamer")
    stream = TokenStream(streamer)
    decoder = SpeculativeDecoder(
        config=_with_stock_length(config, model, arguments),
        assistant=_one_of(arguments, "assistant_model", "drafter"),
        tokenizer=_one_of(arguments, "tokenizer", "text_tokenizer"),
        assistant_tokenizer=_one_of(arguments, "assistant_tokenizer", "draft_tokenizer"),
        stream=stream,
        stats_callback=arguments.pop("stats_callback", None),
        synced_gpus=bool(arguments.get("synced_gpus")),
        round_callback=arguments.pop("round_callback", None),
    )
    _take_stop_strings(model, arguments, decoder.tokenizer)
    arguments["custom_generate"] = decoder
    try:
        return original(model, **arguments)
    finally:
        stream.end()


def _one_of(arguments: dict[str, Any], *names: str) -> Any:
    """Takes the one of several synonymous arguments that was given."""
    given = {name: arguments.pop(name) for name in names if arguments.get(name) is not None}
    for name in names:
        arguments.pop(name, None)
    if len(given) > 1:
        raise InvalidConfigError(f"{' and '.join(given)} mean the same: pass one of them")
    return next(iter(given.values()), None)


def _with_stock_length(config: BaseConfig, model: Any, arguments: dict[str, Any]) -> BaseConfig:
    """Honours `num_assistant_tokens`, and refuses the other options of transformers' own assisted decoding."""
    passed: GenerationConfig | None = arguments.get("generation_config")
    for name in _STOCK_OPTIONS:
        if arguments.get(name) is not None or getattr(passed, name, None) is not None:
            raise InvalidConfigError(
                f"{name} belongs to transformers' own assisted decoding and contradicts speculative_config. Say it there: "
                "drafting=..., length=..., acceptance=..."
            )
        if getattr(model.generation_config, name, None) is not None:
            arguments[name] = None  # a default of the checkpoint; the caller asked for something else
    number = arguments.pop("num_assistant_tokens", None) or getattr(passed, "num_assistant_tokens", None)
    if number is None:
        return config
    if config.length == "auto":
        return type(config).from_dict(config.to_dict() | {"length": int(number)})
    if config.length not in (number, ConstantLength(number)):
        raise InvalidConfigError(
            f"num_assistant_tokens={number} and speculative_config.length={config.length} contradict each other: pass one"
        )
    return config


def _take_stop_strings(model: Any, arguments: dict[str, Any], tokenizer: Any) -> None:
    """Builds the stop-string criterion here: transformers withholds the tokenizer from a decoding callable."""
    passed = arguments.get("generation_config")
    for source in (
        arguments.get("stop_strings"),
        getattr(passed, "stop_strings", None),
        model.generation_config.stop_strings,
    ):
        if source is not None:
            break
    else:
        return
    if tokenizer is None:
        raise InvalidConfigError("stop_strings need the target's tokenizer: pass tokenizer=... to generate")
    strings = [source] if isinstance(source, str) else list(source)
    criterion = StopStringCriteria(tokenizer=tokenizer, stop_strings=strings)
    arguments["stopping_criteria"] = StoppingCriteriaList([criterion, *(arguments.get("stopping_criteria") or [])])
    arguments["stop_strings"] = None
