"""What `generate` returns: transformers' own output with statistics, and per-token hidden states and attentions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import GenerationConfig
from transformers.generation.utils import GenerateDecoderOnlyOutput

from hf_specdec._compat import CACHE_KEY
from hf_specdec.run import Record
from hf_specdec.stats import SpeculativeStats


__all__ = ["SpeculativeDecoderOnlyOutput", "StepOutputs", "TokenStream", "result_of", "step_outputs"]


@dataclass
class SpeculativeDecoderOnlyOutput(GenerateDecoderOnlyOutput):
    """`GenerateDecoderOnlyOutput` with the statistics of the run.

    Args:
        speculative_stats ([`SpeculativeStats`]): Rounds, drafts, acceptance and times, in total and per row.
    """

    speculative_stats: SpeculativeStats | None = None


class StepOutputs:
    """Cuts the hidden states and attentions of a block of tokens into one entry per token, as plain decoding returns them.

    Args:
        cache: The target's cache, whose sliding layers see a limited window.
    """

    def __init__(self, cache: Any) -> None:
        self.cache = cache
        self.hidden_states: list[tuple[Tensor, ...]] = []
        self.attentions: list[tuple[Tensor, ...]] = []

    def __call__(self, outputs: Any, num_tokens: int, num_cached: int) -> None:
        """Adds the entries of the first `num_tokens` positions of a forward pass over a cache of `num_cached` columns."""
        hidden, attentions = outputs.get("hidden_states"), outputs.get("attentions")
        if not self.hidden_states and not self.attentions:  # the prompt's entry holds all of its positions
            if hidden is not None:
                self.hidden_states.append(hidden)
            if attentions is not None:
                self.attentions.append(attentions)
            return
        for position in range(num_tokens):
            if hidden is not None:
                self.hidden_states.append(tuple(layer[:, position : position + 1] for layer in hidden))
            if attentions is not None:
                self.attentions.append(
                    tuple(self._row(layer, index, position, num_cached) for index, layer in enumerate(attentions))
                )

    def _row(self, attention: Tensor, layer: int, position: int, num_cached: int) -> Tensor:
        """`(batch, heads, 1, keys)`, what the token at `position` attended to."""
        own_column = attention.shape[-1] - attention.shape[-2] + position
        visible = num_cached + position + 1
        if self.cache.is_sliding[layer]:
            visible = min(visible, self.cache.layers[layer].sliding_window)
        return attention[:, :, position : position + 1, own_column + 1 - visible : own_column + 1]


class TokenStream:
    """Feeds a streamer one token per `put`, never one that is cut later, and ends it exactly once.

    Args:
        streamer (`BaseStreamer`, *optional*): The user's streamer.
    """

    def __init__(self, streamer: Any | None) -> None:
        self.streamer = streamer
        self._shown = 0
        self._ended = False

    def skip(self, num_columns: int) -> None:
        """Columns that were already shown, such as the prompt's."""
        self._shown = num_columns

    def show(self, tokens: Tensor, num_columns: int) -> None:
        """Puts what is new in `tokens` (`(batch, columns)`) up to `num_columns`, `(batch,)` at a time."""
        if self.streamer is None:
            return
        while self._shown < num_columns:
            self._shown += 1
            self.streamer.put(tokens[:, self._shown - 1].cpu())

    def end(self) -> None:
        """Ends the streamer; a second call does nothing."""
        if self.streamer is not None and not self._ended:
            self._ended = True
            self.streamer.end()


def step_outputs(generation_config: GenerationConfig, cache: Any) -> StepOutputs | None:
    """Where hidden states and attentions are kept; None where nobody asked for them."""
    wanted = generation_config.output_hidden_states or generation_config.output_attentions
    return StepOutputs(cache) if generation_config.return_dict_in_generate and wanted else None


def result_of(
    generation_config: GenerationConfig,
    sequences: Tensor,
    record: Record,
    steps: StepOutputs | None,
    cache: Any,
    stats: SpeculativeStats,
) -> SpeculativeDecoderOnlyOutput | Tensor:
    """What `generate` returns for a finished run: sequences, or the output object that was asked for."""
    if not generation_config.return_dict_in_generate:
        return sequences
    return SpeculativeDecoderOnlyOutput(
        sequences=sequences,
        scores=tuple(record.scores) if record.keeps_scores else None,
        logits=tuple(record.logits) if record.keeps_logits else None,
        hidden_states=tuple(steps.hidden_states) if steps is not None and steps.hidden_states else None,
        attentions=tuple(steps.attentions) if steps is not None and steps.attentions else None,
        speculative_stats=stats,
        **{CACHE_KEY: cache},
    )
