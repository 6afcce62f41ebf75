"""Statistics: counts folded from hand-made rounds, identities, and the cases without any draft."""

import json

import pytest
import torch

from hf_specdec import SpeculativeConfig, SpeculativeStats
from hf_specdec.records import Round
from tests.toys import drafters_for, prompts, tiny_llama


def round_(emitted, drafted, verified, accepted, **more):
    """One hand-made round; the lists have an entry per row."""
    counts = [torch.tensor(each) for each in (drafted, verified, accepted)]
    return Round(emitted, *counts, torch.ones(len(emitted), dtype=torch.bool), **more)


PREFILL = round_([[1], [2]], [0, 0], [0, 0], [0, 0], is_prefill=True, verify_seconds=9.0)
ROUNDS = [
    PREFILL,
    round_([[3, 4, 5], [6]], [3, 3], [3, 1], [2, 0], draft_seconds=0.5, verify_seconds=1.0, events={"x": torch.tensor([1, 2])}),
    round_([[7, 8, 9, 10], []], [3, 0], [3, 0], [3, 0], draft_seconds=0.25, verify_seconds=2.0, prefill_seconds=0.125),
    round_([[11], []], [0, 0], [0, 0], [0, 0], verify_seconds=1.0),
]  # fmt: skip


def test_counts_by_hand():
    stats = SpeculativeStats.fold(ROUNDS)
    first, second = stats.rows
    assert (first.num_rounds, second.num_rounds, stats.num_rounds) == (3, 1, 4)
    assert (first.num_new_tokens, second.num_new_tokens, stats.num_new_tokens) == (9, 2, 11)
    assert (first.num_draft_tokens, first.num_verified_tokens, first.num_accepted_tokens) == (6, 6, 5)
    assert (second.num_draft_tokens, second.num_verified_tokens, second.num_accepted_tokens) == (3, 1, 0)
    assert first.accepted_at_position == [2, 2, 1]
    assert first.drafted_at_position == [2, 2, 2]
    assert second.accepted_at_position == []
    assert first.tokens_per_round == 8 / 3
    assert second.tokens_per_round == 1.0
    assert stats.tokens_per_round == 9 / 4
    assert stats.acceptance_rate == 5 / 7
    assert (stats.draft_seconds, stats.verify_seconds, stats.prefill_seconds) == (0.75, 4.0, 0.125)
    assert stats.events["x"] == 3
    assert second.events["x"] == 2
    assert stats.events["never"] == 0


def test_the_prefill_is_not_a_round():
    stats = SpeculativeStats.fold([PREFILL])
    assert stats.num_rounds == 0
    assert stats.num_new_tokens == 2
    assert stats.tokens_per_round == stats.acceptance_rate == stats.tokens_per_second == 0.0


def test_problems_are_told_in_words_and_counted():
    stats = SpeculativeStats.fold([PREFILL, round_([[1], [1]], [0, 0], [0, 0], [0, 0], problem="it broke")])
    assert stats.problems == ["it broke"]
    assert stats.events["drafter_failed"] == 1
    assert "it broke" in stats.summary()


@pytest.mark.parametrize("name", ["always", "sometimes", "never"])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_identities_of_a_run(name, batch_size):
    model = tiny_llama()
    stats = model.generate(
        **prompts(batch_size),
        max_new_tokens=24,
        do_sample=False,
        pad_token_id=0,
        assistant_model=drafters_for(model)[name],
        speculative_config=SpeculativeConfig(drafting="model", length=3, on_drafter_error="raise"),
        return_dict_in_generate=True,
    ).speculative_stats
    for row in stats.rows:
        assert row.num_new_tokens == 24
        assert row.num_accepted_tokens + row.num_rounds + 1 == row.num_new_tokens  # no round was cut short
        assert sum(row.accepted_at_position) == row.num_accepted_tokens
        assert sum(row.drafted_at_position) == row.num_draft_tokens
        assert row.accepted_at_position == sorted(row.accepted_at_position, reverse=True)
        assert row.num_accepted_tokens <= row.num_verified_tokens <= row.num_draft_tokens
    for field in ("num_rounds", "num_new_tokens", "num_draft_tokens", "num_accepted_tokens"):
        assert getattr(stats, field) == sum(getattr(row, field) for row in stats.rows)
    if name == "always":
        assert stats.acceptance_rate == 1.0
    assert stats.draft_seconds > 0
    assert stats.total_seconds >= stats.verify_seconds + stats.draft_seconds
    assert stats.num_target_forwards <= 24
    json.dumps(stats.to_dict(), allow_nan=False)


def test_a_disjoint_drafter_accepts_nothing_and_costs_no_forward_pass():
    model = tiny_llama()
    plain = model.generate(**prompts(), max_new_tokens=12, do_sample=False)
    wrong = [(int(token) + 1) % 64 for token in plain[0, 7:]]
    from hf_specdec import ScriptedDrafter

    stats = model.generate(
        **prompts(),
        max_new_tokens=12,
        do_sample=False,
        assistant_model=lambda settings: ScriptedDrafter(settings, [wrong], prompt_columns=7),
        speculative_config=SpeculativeConfig(length=3, on_drafter_error="raise"),
        return_dict_in_generate=True,
    ).speculative_stats
    assert stats.num_draft_tokens > 0
    assert stats.acceptance_rate == 0.0
    assert stats.tokens_per_round == 1.0
    assert stats.num_target_forwards == 12


def test_nothing_is_verified_when_nothing_is_drafted():
    model = tiny_llama()
    stats = model.generate(
        **prompts(),
        max_new_tokens=6,
        do_sample=False,
        assistant_model=model,
        speculative_config=SpeculativeConfig(drafting="model", length=0),
        return_dict_in_generate=True,
    ).speculative_stats
    assert (stats.acceptance_rate, stats.num_draft_tokens, stats.num_rounds) == (0.0, 0, 5)
