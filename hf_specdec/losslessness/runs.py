"""The two runs that are compared, and the target's scores after any prefix."""

from __future__ import annotations

import copy
import time
import warnings
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hf_specdec._compat import undecorated_model
from hf_specdec.configs import BaseConfig
from hf_specdec.generation import generate
from hf_specdec.placement import device_of
from hf_specdec.sequences import end_tokens
from hf_specdec.stats import RowStats, SpeculativeStats
from hf_specdec.timing import wait_for


__all__ = ["GreedyRuns", "RowTexts"]


@dataclass(frozen=True)
class RowTexts:
    """Both texts of one row.

    Args:
        prompt, prompt_mask (`torch.LongTensor` of shape `(1, columns)`): The prompt as both runs saw it.
        plain, speculative (`list[int]`): New tokens.
        stats ([`RowStats`]): Counts of the speculative run.
    """

    prompt: Tensor
    prompt_mask: Tensor
    plain: list[int]
    speculative: list[int]
    stats: RowStats


@dataclass
class GreedyRuns:
    """Decodes batches of prompts greedily, plainly and speculatively.

    Args:
        model (`PreTrainedModel`): The target.
        assistant (`PreTrainedModel` or factory, *optional*): What drafts.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): The target's tokenizer.
        config ([`BaseConfig`]): The method.
        max_new_tokens (`int`): Longest continuation.
        options (`dict`): Further options of `generate`, for both runs.
    """

    model: Any
    assistant: Any
    tokenizer: Any
    config: BaseConfig
    max_new_tokens: int
    options: dict[str, Any]
    plain_seconds: float = 0.0
    speculative_seconds: float = 0.0
    _stats: list[SpeculativeStats] = field(default_factory=list)

    def decode(self, prompts: list[Tensor]) -> list[RowTexts]:
        """Both texts of each prompt; several prompts are padded on the left and decoded together."""
        ids, mask = self._padded(prompts)
        started = time.perf_counter()
        plain = self._generate(ids, mask)
        wait_for(ids.device)
        between = time.perf_counter()
        speculative = self._generate(
            ids,
            mask,
            custom_generate=generate,  # needs no hook, and passes through wrappers such as PEFT's
            speculative_config=self.config,
            drafter=self.assistant,
            text_tokenizer=self.tokenizer,
            stats_callback=self._stats.append,
        )
        wait_for(ids.device)
        self.plain_seconds += between - started
        self.speculative_seconds += time.perf_counter() - between
        trim = self._without_padding if len(prompts) > 1 else Tensor.tolist
        columns = ids.shape[1]
        return [
            RowTexts(
                ids[row : row + 1],
                mask[row : row + 1],
                trim(plain[row, columns:]),
                trim(speculative[row, columns:]),
                self._stats[-1].rows[row],
            )
            for row in range(len(prompts))
        ]

    def scores_after(self, row: RowTexts, num_tokens: int) -> Tensor:
        """`(vocab,)`, the target's scores after the first `num_tokens` tokens of the plain text, through all its processors,
        from one forward pass without a cache. Processors take the prefix for the prompt."""
        new = torch.tensor([row.plain[:num_tokens]], dtype=row.prompt.dtype, device=row.prompt.device)
        kwargs = self._kwargs()
        kwargs.pop("max_length", None)
        if kwargs.get("min_new_tokens") is not None:
            kwargs["min_new_tokens"] = max(0, kwargs["min_new_tokens"] - num_tokens)
        kwargs |= {"do_sample": False, "max_new_tokens": 1, "use_cache": False, "output_scores": True}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # a least length beyond this one token is as it should be
            outputs = self.model.generate(
                input_ids=torch.cat([row.prompt, new], -1),
                attention_mask=torch.nn.functional.pad(row.prompt_mask, (0, num_tokens), value=1),
                return_dict_in_generate=True,
                **kwargs,
            )
        return outputs.scores[0][0].float().cpu()

    def _generate(self, ids: Tensor, mask: Tensor, **more: Any) -> Tensor:
        kwargs = self._kwargs() | {"do_sample": False, "max_new_tokens": self.max_new_tokens} | more
        return self.model.generate(input_ids=ids, attention_mask=mask, return_dict_in_generate=False, **kwargs).cpu()

    def _kwargs(self) -> dict[str, Any]:
        """The caller's options. A speculative config that travels on the generation config stays behind."""
        kwargs = dict(self.options)
        if kwargs.get("generation_config") is not None:
            kwargs["generation_config"] = copy.deepcopy(kwargs["generation_config"])
            vars(kwargs["generation_config"]).pop("speculative_config", None)
        if kwargs.get("stop_strings") is not None:
            kwargs["tokenizer"] = self.tokenizer
        if self._option("pad_token_id") is None:
            kwargs["pad_token_id"] = self._pad_token_id
        return kwargs

    def _padded(self, prompts: list[Tensor]) -> tuple[Tensor, Tensor]:
        columns = max(map(len, prompts))
        ids = torch.full((len(prompts), columns), self._pad_token_id)
        mask = torch.zeros_like(ids)
        for row, tokens in enumerate(prompts):
            ids[row, columns - len(tokens) :] = tokens
            mask[row, columns - len(tokens) :] = 1
        device = device_of(self.model)
        return ids.to(device), mask.to(device)

    def _without_padding(self, tokens: Tensor) -> list[int]:
        """A row's own tokens, without the padding that follows while other rows of its batch go on."""
        text, eos = tokens.tolist(), self._eos_token_ids
        for place, token in enumerate(text):
            if token in eos:
                return text[: place + 1]
        while eos and text and text[-1] == self._pad_token_id:
            text.pop()
        return text

    @property
    def _pad_token_id(self) -> int:
        candidates = [self._option("pad_token_id"), getattr(self.tokenizer, "pad_token_id", None), *self._eos_token_ids]
        return next((int(each) for each in candidates if each is not None), 0)

    @property
    def _eos_token_ids(self) -> list[int]:
        return end_tokens(self._option("eos_token_id"))

    def _option(self, name: str) -> Any:
        """An option as `generate` will resolve it: the keyword, the config passed, the model's own config."""
        sources = (self.options.get("generation_config"), undecorated_model(self.model).generation_config)
        values = (self.options.get(name), *(getattr(source, name, None) for source in sources))
        return next((value for value in values if value is not None), None)
