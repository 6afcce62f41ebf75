"""Options of transformers' own assisted decoding beside a config of ours."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hf_specdec.configs.base import BaseConfig
from hf_specdec.errors import InvalidConfigError
from hf_specdec.lengths import ConstantLength


__all__ = ["STOCK_OPTIONS", "with_stock_options"]

# Options of transformers' own assisted decoding; each contradicts a speculative_config.
STOCK_OPTIONS = (
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


def with_stock_options(config: BaseConfig, given: Mapping[str, Any], default_length: int | None = None) -> BaseConfig:
    """Honours `num_assistant_tokens`, and refuses the other options of transformers' own assisted decoding.

    Args:
        config ([`BaseConfig`]): What the user asked for.
        given (`Mapping`): Options of `generate` that the user set; None counts as unset.
        default_length (`int`, *optional*): The checkpoint's own `num_assistant_tokens`, which gives way to `config.length`.
    """
    for name in STOCK_OPTIONS:
        if given.get(name) is not None:
            raise InvalidConfigError(
                f"{name} belongs to transformers' own assisted decoding and contradicts speculative_config. Say it there: "
                "drafting=..., length=..., acceptance=..."
            )
    number = given.get("num_assistant_tokens")
    if config.length == "auto":
        number = default_length if number is None else number
        return config if number is None else replace(config, length=number)
    if number is None or config.length in (number, ConstantLength(number)):
        return config
    raise InvalidConfigError(
        f"num_assistant_tokens={number} and speculative_config.length={config.length} contradict each other: pass one"
    )
