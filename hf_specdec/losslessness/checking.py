"""`verify_lossless`: plain against speculative greedy decoding, and rounding told from faults."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_specdec._compat import undecorated_model
from hf_specdec.configs import BaseConfig, SelfDraftConfig, load_config
from hf_specdec.errors import InvalidConfigError
from hf_specdec.loading import load_assistant
from hf_specdec.losslessness.report import Comparison, Kind, LosslessReport
from hf_specdec.losslessness.runs import GreedyRuns, RowTexts


__all__ = ["Prompt", "compare_texts", "default_tolerance", "verify_lossless"]

Prompt = str | Sequence[int] | Tensor

# Ours. Measured on a real 0.5B model between passes over one, six and all tokens of a text: the gap of two logits moved by
# at most 1.9 units of the number format in half precision, and by 2e-5 in single precision.
_UNITS, _UNITS_QUANTIZED = 4.0, 8.0
_SINGLE_PRECISION_FLOOR = 1e-4

# What the check sets itself.
_RESERVED = ("custom_generate", "return_dict_in_generate", "speculative_config", "stats_callback", "streamer")


def verify_lossless(
    model: Any,
    prompts: Sequence[Prompt],
    config: BaseConfig | str | Path = "exact",
    *,
    assistant_model: Any = None,
    tokenizer: Any = None,
    max_new_tokens: int = 64,
    batch_size: int = 1,
    tolerance: float | None = None,
    progress: Callable[[int, int], None] | None = None,
    **generate_kwargs: Any,
) -> LosslessReport:
    """Decodes every prompt plainly and speculatively, both greedily, and compares the texts token for token.

    Where two texts part, the target's scores after their common prefix are computed anew, in one pass without a cache. If
    both tokens are within `tolerance` of the best one the texts part by rounding, else by a fault.

    Args:
        model (`PreTrainedModel`): The target.
        prompts (sequence of `str`, token ids or 1-D tensors): What to continue; strings need `tokenizer`.
        config ([`BaseConfig`] or `str`): The method to check. A failing drafter raises here, whatever the config says.
        assistant_model (`PreTrainedModel`, path, Hub id or factory, *optional*): What drafts; prompt lookup without one, or
            the model itself with a [`SelfDraftConfig`].
        tokenizer (`PreTrainedTokenizerBase`, *optional*): The target's tokenizer.
        max_new_tokens (`int`): Longest continuation.
        batch_size (`int`): Prompts decoded together, padded on the left. The reference is plain batched decoding.
        tolerance (`float`, *optional*): Largest distance that counts as rounding; [`default_tolerance`] if not given.
        progress (`Callable`, *optional*): Called with the number of finished prompts and of all prompts.
        generate_kwargs: Further options of `generate`, for both runs, such as `repetition_penalty`.

    Returns:
        A [`LosslessReport`].

    Raises:
        [`InvalidConfigError`]: For sampling, whose texts are equal in law only, and for prompts that cannot be read.
    """
    _check_options(generate_kwargs, batch_size)
    config = load_config(config)
    if assistant_model is None and not isinstance(config, SelfDraftConfig):
        config.drafting_for(has_assistant=False, deterministic=True)  # raises where nothing could draft
        config = replace(config, drafting="ngram")
    config = replace(config, on_drafter_error="raise")
    if isinstance(assistant_model, str | os.PathLike):
        assistant_model = load_assistant(assistant_model, model)
    rows = [_token_ids(prompt, tokenizer) for prompt in prompts]
    if not rows:
        raise InvalidConfigError("verify_lossless needs at least one prompt")
    runs = GreedyRuns(model, assistant_model, tokenizer, config, max_new_tokens, generate_kwargs)
    comparisons: list[Comparison] = []
    for start in range(0, len(rows), batch_size):
        for texts in runs.decode(rows[start : start + batch_size]):
            comparisons.append(compare_texts(len(comparisons), runs, texts, tolerance))
        if progress is not None:
            progress(len(comparisons), len(rows))
    return LosslessReport(tuple(comparisons), config.rule.lossless, runs.plain_seconds, runs.speculative_seconds)


def default_tolerance(model: Any, scale: float) -> float:
    """The distance between two logits that rounding can bridge; ours.

    Plain decoding computes one token at a time and verification several, and kernels of different shape round differently.

    Args:
        model (`PreTrainedModel`): Its dtype decides; quantised weights count double, since their kernels differ more.
        scale (`float`): Size of the largest logit.

    Returns:
        4 units of the number format at `scale` (8 where the weights are quantised); in single precision at least 1e-4.
    """
    bare = undecorated_model(model)
    quantized = getattr(bare, "hf_quantizer", None) is not None
    units = (_UNITS_QUANTIZED if quantized else _UNITS) * torch.finfo(bare.dtype).eps * max(abs(scale), 1.0)
    return max(units, _SINGLE_PRECISION_FLOOR) if bare.dtype == torch.float32 else units


def compare_texts(index: int, runs: GreedyRuns, texts: RowTexts, tolerance: float | None) -> Comparison:
    """Whether the two texts of a row are equal, and what the target says where they part.

    Args:
        index (`int`): Which prompt it is.
        runs ([`GreedyRuns`]): What made the texts.
        texts ([`RowTexts`]): The texts.
        tolerance (`float`, *optional*): As for [`verify_lossless`].
    """
    common = min(len(texts.plain), len(texts.speculative))
    position = next((i for i in range(common) if texts.plain[i] != texts.speculative[i]), common)
    kind: Kind = "fault" if runs.config.rule.lossless else "relaxed"
    judged: dict[str, Any] = {}
    if texts.plain == texts.speculative:
        kind = "equal"
    elif position < common:  # else one text ended where the other goes on: no score explains that
        scores = runs.scores_after(texts, position)
        best = scores.topk(2).values
        shortfall = float(best[0] - scores[[texts.plain[position], texts.speculative[position]]].min())
        limit = default_tolerance(runs.model, float(best[0])) if tolerance is None else tolerance
        judged = {"gap": float(best[0] - best[1]), "shortfall": shortfall, "tolerance": limit}
        if kind == "fault" and shortfall <= limit:
            kind = "rounding"
    return Comparison(
        index=index,
        num_prompt_tokens=int(texts.prompt_mask.sum()),
        plain_tokens=tuple(texts.plain),
        speculative_tokens=tuple(texts.speculative),
        kind=kind,
        position=None if kind == "equal" else position,
        num_draft_tokens=texts.stats.num_draft_tokens,
        num_accepted_tokens=texts.stats.num_accepted_tokens,
        **judged,
    )


def _check_options(options: dict[str, Any], batch_size: int) -> None:
    passed = getattr(options.get("generation_config"), "do_sample", None)
    if options.get("do_sample", passed):
        raise InvalidConfigError(
            "verify_lossless compares greedy texts: sampled texts are equal in law only, since plain and speculative decoding "
            "throw different dice. Drop do_sample=True"
        )
    if taken := sorted(set(options) & set(_RESERVED)):
        raise InvalidConfigError(f"verify_lossless sets {', '.join(taken)} itself: drop it")
    if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
        raise InvalidConfigError(f"batch_size must be an integer of at least 1, got {batch_size!r}")


def _token_ids(prompt: Prompt, tokenizer: Any) -> Tensor:
    if isinstance(prompt, str):
        if tokenizer is None:
            raise InvalidConfigError("prompts that are strings need the target's tokenizer: pass tokenizer=...")
        prompt = tokenizer(prompt)["input_ids"]
    tokens = torch.as_tensor(prompt)
    if tokens.ndim == 2 and tokens.shape[0] == 1:
        tokens = tokens[0]
    if tokens.ndim != 1 or len(tokens) == 0 or tokens.is_floating_point():
        raise InvalidConfigError(
            f"a prompt must be a string or one non-empty row of token ids, got shape {tuple(tokens.shape)}, {tokens.dtype}"
        )
    return tokens.long().cpu()
