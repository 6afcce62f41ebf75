"""The door: `speculative_config=` for `generate`, as a mixin and as a hook on transformers' own method."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from transformers import GenerationConfig, GenerationMixin, StoppingCriteriaList
from transformers.generation.stopping_criteria import StopStringCriteria

from hf_specdec._compat import needs_synced_forwards, passed_option
from hf_specdec.compatibility import check_model
from hf_specdec.configs import STOCK_OPTIONS, BaseConfig, load_config, with_stock_options
from hf_specdec.errors import InvalidConfigError, UnsupportedModelError
from hf_specdec.generation import SpeculativeDecoder, require_drafter
from hf_specdec.generation import generate as generate_callable
from hf_specdec.networks import DraftNetwork
from hf_specdec.networks.exit_heads import ExitHeads
from hf_specdec.outputs import TokenStream


__all__ = ["SpeculativeGenerationMixin", "install", "uninstall"]

_MARK = "_hf_specdec_original"
_ATTACHED = object()


def install() -> None:
    """Adds `speculative_config=` to `generate` of every transformers model. Importing `hf_specdec` does this."""
    if hasattr(GenerationMixin.generate, _MARK):
        return
    original = GenerationMixin.generate

    @functools.wraps(original)
    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        return _dispatch(original, self, args, kwargs)

    setattr(generate, _MARK, original)
    GenerationMixin.generate = generate


def uninstall() -> None:
    """Takes the hook away again; `generate` is the original function object afterwards."""
    GenerationMixin.generate = getattr(GenerationMixin.generate, _MARK, GenerationMixin.generate)


class SpeculativeGenerationMixin(GenerationMixin):
    """A `GenerationMixin` whose `generate` takes `speculative_config=`, for model classes of your own and without the hook."""

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """`GenerationMixin.generate` with speculative decoding.

        Args:
            speculative_config ([`BaseConfig`], `dict` or `str`, *optional*): The method; by default the attribute of that
                name on the `generation_config` passed. None decodes as usual.
            args, kwargs: As for `GenerationMixin.generate`; `assistant_model=` says what drafts, `stats_callback=` is
                called with the [`SpeculativeStats`], `row_seeds=` seeds the dice of each row of the batch.
        """
        original = getattr(GenerationMixin.generate, _MARK, GenerationMixin.generate)
        return _dispatch(original, self, args, kwargs)


def _dispatch(original: Callable[..., Any], model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Speculative decoding where a config was given, the original method untouched elsewhere."""
    config = kwargs.pop("speculative_config", _ATTACHED)
    if config is _ATTACHED:
        config = _attached_config(model, args, kwargs)
    if config is None and kwargs.get("custom_generate") is generate_callable:
        config = "exact"  # here it can be given what transformers withholds from a callable
    if config is None:
        if kwargs.get("custom_generate") is None:
            _refuse_network(kwargs.get("assistant_model"))
        return original(model, *args, **kwargs)
    return _speculative_generate(original, model, config, args, kwargs)


def _refuse_network(assistant: Any) -> None:
    """Transformers' own assisted decoding would fail on a network with an `AttributeError` that tells nobody what to do."""
    if isinstance(assistant, DraftNetwork | ExitHeads):
        raise UnsupportedModelError(
            f"{type(assistant).__name__} reads its target's hidden states, which transformers' own assisted decoding does not "
            "show: pass speculative_config=... with it"
        )


def _attached_config(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The config that travels on the `generation_config` passed.

    The model's own `generation_config` is not asked: a checkpoint must not switch relaxed acceptance on by itself.
    """
    passed = kwargs.get("generation_config", args[1] if len(args) > 1 else None)
    return passed_option(passed, "speculative_config", model)


def _speculative_generate(
    original: Callable[..., Any], model: Any, given: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    bound = inspect.signature(original).bind(model, *args, **kwargs)
    arguments = dict(bound.arguments)
    arguments.pop("self", None)
    arguments |= arguments.pop("kwargs", {})
    stream = TokenStream(_one_of(arguments, "streamer", "token_streamer"))
    arguments["streamer"] = stream.streamer
    try:
        arguments["custom_generate"] = _decoder(model, load_config(given), arguments, stream)
        return original(model, **arguments)
    finally:
        stream.end()


def _decoder(model: Any, config: BaseConfig, arguments: dict[str, Any], stream: TokenStream) -> SpeculativeDecoder:
    """The decoding method; takes its own options out of `arguments` and leaves those of `generate`."""
    check_model(model)
    _refuse_other_paths(model, arguments)
    decoder = SpeculativeDecoder(
        config=_with_stock_length(config, model, arguments),
        assistant=_one_of(arguments, "assistant_model", "drafter"),
        tokenizer=_one_of(arguments, "tokenizer", "text_tokenizer"),
        assistant_tokenizer=_one_of(arguments, "assistant_tokenizer", "draft_tokenizer"),
        stream=stream,
        stats_callback=arguments.pop("stats_callback", None),
        synced_gpus=needs_synced_forwards(model, arguments.get("synced_gpus")),
        round_callback=arguments.pop("round_callback", None),
        row_seeds=arguments.pop("row_seeds", None),
    )
    if arguments.get("custom_generate") is generate_callable:
        require_drafter(decoder.config, decoder.assistant)
    _take_stop_strings(model, arguments, decoder.tokenizer)
    return decoder


def _one_of(arguments: dict[str, Any], *names: str) -> Any:
    """Takes the one of several synonymous arguments that was given."""
    given = {name: arguments.pop(name) for name in names if arguments.get(name) is not None}
    for name in names:
        arguments.pop(name, None)
    if len(given) > 1:
        raise InvalidConfigError(f"{' and '.join(given)} mean the same: pass one of them")
    return next(iter(given.values()), None)


def _with_stock_length(config: BaseConfig, model: Any, arguments: dict[str, Any]) -> BaseConfig:
    """Takes the options of transformers' own assisted decoding out of the arguments and reconciles the config with them."""
    passed: GenerationConfig | None = arguments.get("generation_config")
    names = (*STOCK_OPTIONS, "num_assistant_tokens")
    given = {name: passed_option(passed, name, model) for name in names}
    given |= {name: arguments[name] for name in names if arguments.get(name) is not None}
    config = with_stock_options(config, given, getattr(model.generation_config, "num_assistant_tokens", None))
    arguments.pop("num_assistant_tokens", None)
    for name in STOCK_OPTIONS:
        if getattr(model.generation_config, name, None) is not None:
            arguments[name] = None  # a default of the checkpoint; the caller asked for something else
    return config


def _refuse_other_paths(model: Any, arguments: dict[str, Any]) -> None:
    """Options that would lead `generate` past the decoding method, or ask it for what it cannot do with one."""
    other = arguments.get("custom_generate")
    if isinstance(other, str):
        raise InvalidConfigError(
            "speculative_config and custom_generate both replace the decoding loop: for the drafter there "
            f'pass assistant_model="{other}" with speculative_config, or draft_config=... with custom_generate'
        )
    if other not in (None, generate_callable):
        raise InvalidConfigError(
            "speculative_config and custom_generate both replace the decoding loop: pass one of them"
        )
    if arguments.get("cache_implementation") == "paged":
        raise UnsupportedModelError(
            'cache_implementation="paged" starts continuous batching, which speculative_config cannot take part in: drop one'
        )
    for source in (arguments.get("generation_config"), model.generation_config):
        if arguments.get("token_healing", getattr(source, "token_healing", False)):
            raise InvalidConfigError(
                "token_healing rewrites the prompt, which speculative_config does not support: drop one"
            )


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
    criteria = list(arguments.get("stopping_criteria") or [])
    if StopStringCriteria not in map(type, criteria):  # the user's own takes precedence, as in `generate`
        criteria.insert(0, StopStringCriteria(tokenizer=tokenizer, stop_strings=strings))
    arguments["stopping_criteria"] = StoppingCriteriaList(criteria)
    arguments["stop_strings"] = None
