"""Times of the forward passes that the cost model needs, in milliseconds."""

import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from transformers import DynamicCache, LlamaForCausalLM

from hf_specdec._compat import CACHE_KEY


CONTEXT = 128


def milliseconds(function: Callable[[], object], repeats: int) -> float:
    """Median time of `function` after two warm-up calls."""
    times = []
    for _ in range(repeats + 2):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return 1000 * statistics.median(times[2:])


@torch.inference_mode()
def pass_times(model: LlamaForCausalLM, rows: tuple[int, ...], repeats: int) -> dict[int, float]:
    """Time of a cached forward pass over each number of rows, after `CONTEXT` tokens."""
    cache = DynamicCache(config=model.config)
    model(input_ids=torch.ones(1, CONTEXT, dtype=torch.long), **{CACHE_KEY: cache})

    def step(count: int) -> None:
        model(input_ids=torch.ones(1, count, dtype=torch.long), **{CACHE_KEY: cache})
        cache.crop(-count)

    return {count: milliseconds(partial(step, count), repeats) for count in rows}


@torch.inference_mode()
def head_time(model: LlamaForCausalLM, repeats: int) -> float:
    """Time of the final norm and the projection to the vocabulary, for one row."""
    hidden = torch.zeros(1, 1, model.config.hidden_size)
    return milliseconds(lambda: model.lm_head(model.model.norm(hidden)), repeats)
