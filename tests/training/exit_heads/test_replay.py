"""Trace replay: what a policy would do, against hand-made traces and against real runs."""

import pytest
import torch

from hf_specdec import ConstantLength, DraftVocabulary, InvalidConfigError, SelfDraftConfig
from hf_specdec.drafters import ExitPolicy
from hf_specdec.training.exit_heads import ExitTrace, LayerCosts, Observer, best_policy, replay, trace_exits
from hf_specdec.training.texts import Text
from tests.families import FAMILIES
from tests.toys import prompts, tiny_llama


COSTS = LayerCosts(layer=1.0, heads=dict.fromkeys((2, 4, 5), 0.5), step=10.5, row=0.1)


def test_a_trace_replayed_by_hand():
    sure = torch.tensor([0.9, 0.9, 0.9, 0.2, 0.9, 0.9])
    right = torch.tensor([True, True, False, True, True, True])
    trace = ExitTrace({2: right}, {(2, 0.0): sure})
    policy = ExitPolicy(exit_layers=(2,), annealing=0.0, confidence_threshold=0.5, max_width=3)
    found = replay([trace], policy, 10, COSTS)
    # Rounds: three drafts, two right; a hard token; two drafts until the text ends, both right.
    assert found.tokens_per_round == pytest.approx(7 / 3)
    assert found.acceptance == pytest.approx(4 / 5)
    drafting = (3 * 2 + 2 * 2) * 1.0 + 6 * 0.5  # a hard token costs its exit alone: it is the newest one of its pass
    verifying = 3 * 10.5 + 8.5 * (0.3 + 0.2)
    assert found.speed_up == pytest.approx(7 * 10.5 / (drafting + verifying))


def test_each_exit_has_its_price_and_an_adapter_reads_what_left_below_it():
    leaves, right = [2, 4, 2, 0, 2, 2], torch.tensor([True, True, False, True, True, True])
    sure = {2: [0.9 if depth == 2 else 0.1 for depth in leaves], 4: [0.9 if depth else 0.1 for depth in leaves]}
    trace = ExitTrace({2: right, 4: right}, {(depth, 0.0): torch.tensor(each) for depth, each in sure.items()})
    costs = LayerCosts(layer=1.0, heads={2: 0.5, 4: 0.75}, step=10.5, row=0.1, catch_up={2: 0.1, 4: 0.2})
    policy = ExitPolicy(exit_layers=(2, 4), annealing=0.0, confidence_threshold=0.5, max_width=3)
    found = replay([trace], policy, 10, costs)
    # Rounds: drafts after 2, 4 and 2 layers, the third one wrong; a hard token; drafts after 2 and 2 layers.
    layers = (2 + 4 + 2) + (2 + 2) + 3 * 10.5 + 0.1 * (3 + 2) * (10.5 - 2)
    asked = (3 * 0.5 + 0.75) + (0.5 + 0.75) + 2 * 0.5
    # The adapter after 4 layers lacks what left after 2, and both lack the last draft, which nobody was asked about; the
    # wrong draft of the first round left before it and is nobody's.
    lacking = 2 * 0.2 + (2 * 0.2 + (0.1 + 0.2))
    assert found.speed_up == pytest.approx(7 * 10.5 / (layers + asked + lacking))


def test_it_foretells_the_rounds_of_a_run():
    model = tiny_llama(layers=6)
    asked = {"max_new_tokens": 40, "do_sample": False, "pad_token_id": 0}
    text = model.generate(**prompts(), **asked)[0].tolist()
    observer = Observer(model, [4, 5])
    trace = trace_exits(observer, None, Text(tuple(text), 8), 6)
    for threshold in (0.0, 0.35):
        policy = ExitPolicy(exit_layers=(4, 5), confidence_threshold=threshold, annealing=0.5, max_width=3)
        found = replay([trace], policy, 6, COSTS)
        config = SelfDraftConfig(**vars(policy), length=ConstantLength(3), on_drafter_error="raise")
        out = model.generate(**prompts(), **asked, speculative_config=config, return_dict_in_generate=True)
        assert found.tokens_per_round == pytest.approx(out.speculative_stats.tokens_per_round, rel=0.06)
        assert out.speculative_stats.num_accepted_tokens > 0


def test_it_foretells_the_rounds_of_exits_that_score_a_draft_vocabulary():
    """Rounds are fewer tokens long where the ids that are left out would have been drafted, and the prompt's are there."""
    model = tiny_llama(layers=6)
    asked = {"max_new_tokens": 40, "do_sample": False, "pad_token_id": 0}
    tokens = model.generate(**prompts(), **asked)[0].tolist()
    text, new = Text(tuple(tokens), 8), tokens[8:]
    missing = {each for each in new if each not in tokens[:8]}.intersection(sorted(set(new))[::3])
    assert missing
    vocabulary = DraftVocabulary(
        tuple(each for each in range(64) if each not in missing and each not in tokens[:7]), 64
    )
    trace = trace_exits(Observer(model, [4, 5], vocabulary.token_ids), None, text, 6)
    policy = ExitPolicy(exit_layers=(4, 5), confidence_threshold=0.0, annealing=0.5, max_width=3)
    found = replay([trace], policy, 6, COSTS)
    whole = replay([trace_exits(Observer(model, [4, 5]), None, text, 6)], policy, 6, COSTS)
    config = SelfDraftConfig(
        **vars(policy), length=ConstantLength(3), draft_vocabulary=vocabulary, on_drafter_error="raise"
    )
    out = model.generate(**prompts(), **asked, speculative_config=config, return_dict_in_generate=True)
    assert out.sequences[0].tolist() == tokens
    assert found.tokens_per_round == pytest.approx(out.speculative_stats.tokens_per_round, rel=0.06)
    assert 1.0 < found.tokens_per_round < whole.tokens_per_round


def test_the_prompts_own_ids_are_scored_beside_a_vocabulary():
    model = tiny_llama(layers=6)
    observer = Observer(model, [4], [5, 9, 3]).beside([9, 40, 7, 40])
    assert observer.vocabulary.tolist() == [5, 9, 3, 7, 40]
    assert observer.ids_of(torch.tensor([0, 4])).tolist() == [5, 40]
    states = torch.randn(1, 2, model.config.hidden_size)
    expected = Observer(model, [4]).readout(states)[..., observer.vocabulary]
    torch.testing.assert_close(observer.readout(states), expected, rtol=1e-4, atol=1e-4)
    whole = Observer(model, [4])
    assert whole.beside([1]) is whole


@pytest.mark.parametrize("name", ["llama", "bloom"])
def test_logits_of_states_need_no_text_beforehand(name):
    """Whether layers return tuples is found out first."""
    model = FAMILIES[name].build()
    text = Text((5, 6, 7, 8), 0)
    seen = Observer(model, [1]).observe(text)
    with torch.no_grad():
        torch.testing.assert_close(Observer(model, [1]).readout(seen.final), seen.logits, rtol=1e-3, atol=1e-3)


def test_the_best_policy_pays_where_exits_are_right_and_not_where_they_are_wrong():
    right = torch.ones(50, dtype=torch.bool)
    sure = {(2, annealing): torch.full((50,), 0.95) for annealing in (0.0, 0.5, 1.0)}
    assert best_policy([ExitTrace({2: right}, sure)], [2], 10, COSTS).speed_up > 2
    assert best_policy([ExitTrace({2: ~right}, sure)], [2], 10, COSTS).speed_up < 1
    with pytest.raises(InvalidConfigError, match="no texts"):
        best_policy([], [2], 10, COSTS)


def test_costs_out_of_range_and_exits_without_any_are_refused():
    good = {"layer": 1.0, "heads": {2: 1.0}, "step": 1.0, "row": 0.0}
    for wrong in ({"layer": 0.0}, {"heads": {}}, {"heads": {2: 0.0}}, {"step": 0.0}):
        with pytest.raises(InvalidConfigError, match="above 0"):
            LayerCosts(**good | wrong)
    for wrong in ({"row": -0.1}, {"catch_up": {2: -0.1}}):
        with pytest.raises(InvalidConfigError, match="at least 0"):
            LayerCosts(**good | wrong)
    with pytest.raises(InvalidConfigError, match=r"no costs of the exits \[3\], only of \[2\]"):
        LayerCosts(**good).of_exits((2, 3), 2)
