"""What the loop itself costs where nothing is drafted, at real sizes: processor seconds, in pairs that take turns."""

import statistics
import time

import pytest
import torch

from hf_specdec import ConstantLength, ScriptedDrafter, SpeculativeConfig, load_model


pytestmark = pytest.mark.real
COLUMNS, NEW_TOKENS, PAIRS = 64, 48, 5


@pytest.mark.parametrize("length", ["auto", ConstantLength(5)], ids=["goodput", "constant"])
def test_a_drafter_that_proposes_nothing_costs_at_most_three_hundredths(real_models, length):
    model = load_model(real_models / "qwen0.5", dtype=torch.float32)
    ids = torch.randint(100, 5000, (1, COLUMNS), generator=torch.Generator().manual_seed(0))
    asked = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "do_sample": False, "min_new_tokens": NEW_TOKENS}
    asked |= {"max_new_tokens": NEW_TOKENS, "pad_token_id": 0}
    ours = {
        "speculative_config": SpeculativeConfig(drafting="model", length=length, on_drafter_error="raise"),
        "assistant_model": lambda settings: ScriptedDrafter(settings, [[]]),
    }

    def seconds(**more):
        started = time.process_time()
        text = model.generate(**asked, **more)
        return time.process_time() - started, text

    seconds()
    ratios = []
    for _ in range(PAIRS):
        plain, expected = seconds()
        speculative, text = seconds(**ours)
        assert torch.equal(text, expected)
        ratios.append(speculative / plain)
    assert statistics.median(ratios) <= 1.03, f"{statistics.median(ratios):.3f} of plain decoding, of {ratios}"
