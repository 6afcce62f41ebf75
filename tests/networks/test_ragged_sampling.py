"""What a row is sampled hangs on its own prompt and seed: not on the rows beside it, nor on how far they are padded."""

from functools import cache

import pytest
import torch

from hf_specdec import RCSDConfig
from hf_specdec.trees import TreeShape
from tests.families import WINDOW
from tests.networks.test_lossless import TARGETS, small_drafter, small_vocabulary
from tests.test_families import RAGGED_PROMPTS, prompts


NEW_TOKENS = 8
SEEDS = (3, 14, 15, 92)
CONFIGS = {
    "chain": RCSDConfig(steps=3, on_drafter_error="raise"),
    "tree": RCSDConfig(tree=TreeShape(depth=2, top_k=3, total_nodes=6), on_drafter_error="raise"),
}


def ragged():
    """Four prompts of a small vocabulary, padded on the left; two are longer than the window of a target that has one."""
    inputs = prompts(RAGGED_PROMPTS)
    return inputs | {"input_ids": inputs["input_ids"] % 8}


def rows_alone():
    """Each of them by itself, without padding."""
    for ids, mask in zip(*ragged().values(), strict=True):
        alone = ids[mask.bool()][None]
        yield {"input_ids": alone, "attention_mask": torch.ones_like(alone)}


def sampled(name, family, drafting, inputs, seeds):
    """The new tokens of each row, and the statistics."""
    out = small_vocabulary(name).generate(
        **inputs,
        max_new_tokens=NEW_TOKENS,
        do_sample=True,
        top_k=0,
        pad_token_id=0,
        assistant_model=small_drafter(name, family),
        speculative_config=CONFIGS[drafting],
        row_seeds=seeds,
        return_dict_in_generate=True,
    )
    return out.sequences[:, -NEW_TOKENS:].tolist(), out.speculative_stats


@cache
def plainly_drawn(name):
    """What each row's dice make of its laws, with a number for each token; the laws are computed without a cache."""
    texts = []
    for inputs, seed in zip(rows_alone(), SEEDS, strict=True):
        text, dice = inputs["input_ids"], torch.Generator().manual_seed(seed)
        for _ in range(NEW_TOKENS):
            with torch.no_grad():
                law = small_vocabulary(name)(text).logits[0, -1].double().softmax(-1)
            number = torch.rand(1, dtype=torch.float64, generator=dice)
            token = torch.searchsorted(law.cumsum(-1), number, right=True)
            text = torch.cat([text, token[None]], 1)
        texts.append(text[0, -NEW_TOKENS:].tolist())
    return texts


@pytest.mark.parametrize("drafting", CONFIGS)
@pytest.mark.parametrize("family", ["eagle", "eagle3"])
@pytest.mark.parametrize("name", TARGETS)
def test_a_row_is_sampled_as_it_is_alone(name, family, drafting):
    assert sum(length > WINDOW for length in RAGGED_PROMPTS) == 2
    together, stats = sampled(name, family, drafting, ragged(), SEEDS)
    assert 0 < stats.num_accepted_tokens < stats.num_verified_tokens
    each = zip(rows_alone(), SEEDS, strict=True)
    assert together == [sampled(name, family, drafting, inputs, [seed])[0][0] for inputs, seed in each]
    if drafting == "tree":  # which leaves each token to one number, as plain decoding does
        assert together == plainly_drawn(name)
