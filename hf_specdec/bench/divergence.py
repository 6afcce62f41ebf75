"""Where exact greedy texts part from plain decoding's, and whether that is rounding or a fault."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hf_specdec.bench.runner import Benchmark, Row
from hf_specdec.configs import ExactConfig
from hf_specdec.losslessness.checking import compare_texts
from hf_specdec.losslessness.runs import GreedyRuns, RowTexts
from hf_specdec.placement import device_of
from hf_specdec.stats import RowStats


__all__ = ["divergences"]


def divergences(benchmark: Benchmark, rows: Sequence[Row]) -> dict[str, list[dict[str, Any]]]:
    """The prompts whose text is not plain decoding's, for each exact arm that has any.

    The target's scores at the place where two texts part are computed anew. If both tokens are as good as the best one, up to
    what rounding can bridge ([`hf_specdec.losslessness.default_tolerance`]), the texts part by rounding, else by a fault.

    Args:
        benchmark ([`Benchmark`]): A greedy one.
        rows (`Sequence[Row]`): Its rows.

    Returns:
        By arm, for each such prompt its number (`prompt`), the new token at which the texts part (`position`), the distance of
        the target's two largest scores there (`gap`, None where one text ends and the other goes on), and `kind`,
        `"rounding"` or `"fault"`.
    """
    plain = {row.prompt: row for row in rows if row.arm == "plain"}
    found: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        if not row.stats.get("lossless", True):
            continue
        own, theirs = (each.batch or [each.tokens] for each in (row, plain[row.prompt]))
        for place, (text, expected) in enumerate(zip(own, theirs, strict=True)):
            if text != expected:
                number = row.prompt * benchmark.batch_size + place
                found.setdefault(row.arm, []).append(_divergence(benchmark, number, expected, text))
    return found


def _divergence(benchmark: Benchmark, number: int, plain: list[int], text: list[int]) -> dict[str, Any]:
    runs = GreedyRuns(benchmark.target, None, benchmark.tokenizer, ExactConfig(), benchmark.max_new_tokens, {})
    ids = torch.tensor([benchmark.prompts[number]], device=device_of(benchmark.target))
    compared = compare_texts(number, runs, RowTexts(ids, torch.ones_like(ids), plain, text, RowStats()), None)
    return {"prompt": number, "position": compared.position, "gap": compared.gap, "kind": compared.kind}
