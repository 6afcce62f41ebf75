"""Self-drafting gives plain decoding's tokens on every family, wherever tokens leave and whatever is accepted."""

import pytest
import torch

import hf_specdec.layer_gate
from hf_specdec import SelfDraftConfig, UnsupportedModelError
from tests.drafters.self_drafting import Director
from tests.families import FAMILIES
from tests.test_families import (
    NEW_TOKENS,
    NUM_TOKENS,
    ONE_EACH,
    ONE_PROMPT,
    RAGGED_PROMPTS,
    SLIDING,
    assert_same,
    each,
    early_in_some_rows,
    plain,
    prompts,
    target,
)


CONFIG = SelfDraftConfig(exit_layers=[1, 2, 3], length=4, confidence_threshold=0.0, on_drafter_error="raise")
# Layers that share keys and values, keep an indexer's keys, or a convolution's state.
REFUSED = [name for name in ("deepseek_v32", "gemma3n", "gemma4-shared", "glm_moe_dsa", "lfm2") if name in FAMILIES]
GATED = [case for case in ONE_EACH if case[0] not in REFUSED]
RIGHT = {
    "always": lambda row, column: True,
    "sometimes": lambda row, column: (row + column) % 3 != 0,
    "never": lambda row, column: False,
}


def wanders(row, column, depth):
    """Leaves at depths that change from token to token and row to row; about one token in four is hard."""
    return (row + column) % 4 < depth


def self_draft(name, attention, lengths, director, eos=None, config=CONFIG, **options):
    with director.directing():
        return target(name, attention).generate(
            **prompts(lengths),
            do_sample=False,
            pad_token_id=0,
            eos_token_id=eos,
            return_dict_in_generate=True,
            speculative_config=config,
            **{"max_new_tokens": NEW_TOKENS} | options,
        )


@pytest.mark.parametrize(
    ("accepted", "lengths"),
    [
        pytest.param("always", ONE_PROMPT, id="always-one"),
        pytest.param("sometimes", ONE_PROMPT, id="sometimes-one", marks=pytest.mark.slow),
        pytest.param("sometimes", RAGGED_PROMPTS, id="sometimes-ragged"),
        pytest.param("never", RAGGED_PROMPTS, id="never-ragged"),
    ],
)
@each(GATED)
def test_equals_plain_decoding(name, attention, accepted, lengths):
    reference = plain(name, attention, lengths)
    director = Director(reference.sequences, RIGHT[accepted], wanders)
    out = self_draft(name, attention, lengths, director, max_new_tokens=NUM_TOKENS[accepted])
    assert_same(out.sequences, reference, NUM_TOKENS[accepted])
    stats = out.speculative_stats
    assert set(stats.events["exit_depths"]) == {1, 2, 3}
    assert sum(stats.events["exit_depths"].values()) == stats.num_draft_tokens > 0
    assert (stats.num_accepted_tokens > 0) == (accepted != "never")
    if accepted == "always":
        assert stats.acceptance_rate == 1.0
        assert stats.num_target_forwards < NEW_TOKENS


@each(GATED)
def test_rows_stop_at_different_times(name, attention):
    endless = plain(name, attention, RAGGED_PROMPTS).sequences[:, max(RAGGED_PROMPTS) :]
    eos = early_in_some_rows(endless)
    reference = plain(name, attention, RAGGED_PROMPTS, eos)
    director = Director(plain(name, attention, RAGGED_PROMPTS).sequences, RIGHT["sometimes"], wanders)
    assert_same(self_draft(name, attention, RAGGED_PROMPTS, director, eos).sequences, reference)


@each([case for case in SLIDING if case in GATED])
def test_a_window_is_crossed_in_the_middle_of_a_round(name, attention):
    for lengths in ((3,), (5, 3, 2)):
        reference = plain(name, attention, lengths)
        out = self_draft(name, attention, lengths, Director(reference.sequences, RIGHT["sometimes"], wanders))
        assert_same(out.sequences, reference)


@pytest.mark.parametrize("name", REFUSED)
def test_families_whose_layers_cannot_run_at_different_times_are_refused(name):
    model = FAMILIES[name].build()
    seen = []
    with pytest.raises(UnsupportedModelError, match=type(model).__name__):
        model.generate(
            **prompts(ONE_PROMPT),
            max_new_tokens=4,
            do_sample=False,
            speculative_config=CONFIG,
            logits_processor=[lambda ids, scores: seen.append(ids) or scores],
        )
    assert not seen


@pytest.mark.parametrize(("name", "attention"), [("llama", "sdpa"), ("mistral", "sdpa")])
def test_without_the_view_the_text_would_be_wrong(name, attention, monkeypatch):
    """The mutation of the specification: the model is given the real cache."""
    reference = plain(name, attention, RAGGED_PROMPTS)
    monkeypatch.setattr(hf_specdec.layer_gate, "CacheView", lambda cache, columns: cache)
    director = Director(reference.sequences, RIGHT["sometimes"], wanders)
    try:
        out = self_draft(name, attention, RAGGED_PROMPTS, director)
    except RuntimeError:  # a mask as wide as the layer that was asked
        return
    assert not torch.equal(out.sequences, reference.sequences)
