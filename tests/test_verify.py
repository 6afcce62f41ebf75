"""The verdict on a draft by hand, drawing, and the random streams: the only dice."""

import pytest
import torch
from scipy.stats import kstest

from hf_specdec import ExactConfig, SpeculativeConfig
from hf_specdec.acceptance import EASD, Exact
from hf_specdec.records import Draft, Evidence, Verdict
from hf_specdec.verify import RandomStreams, draw, evidence_of, verify
from tests.acceptance import WARPERS, Dice, error, random_scores, warped
from tests.toys import noisy_copy, prompts, tiny_llama


ALMOST_ONE = 1 - 2.0**-53
BANNED = float("-inf")


# --- the verdict, by hand -------------------------------------------------------------------------------------------


def evidence_by_hand(tokens, lengths, p, q=None, do_sample=True):
    """Laws `(rows, width, vocab)` as evidence."""
    p = torch.tensor(p, dtype=torch.float64)
    return Evidence(
        tokens=torch.tensor(tokens),
        valid=torch.arange(p.shape[1]) < torch.tensor(lengths)[:, None],
        scores=p.log(),
        target_logits=p.log(),
        do_sample=do_sample,
        q=None if q is None else torch.tensor(q, dtype=torch.float64),
    )


def test_what_follows_a_rejection_is_not_accepted():
    """Three sure drafts, of which the middle one is impossible."""
    p = [[[0, 1.0, 0], [0, 0, 1.0], [0, 1.0, 0]]]
    evidence = evidence_by_hand([[1, 1, 1]], [3], p)
    verdict = verify(Exact(), evidence, torch.zeros(1, 3), Dice(torch.full((1, 4), 0.3)), torch.tensor([True]))
    assert verdict.num_accepted.tolist() == [1]
    assert verdict.next_tokens.tolist() == [2]


def test_rows_accept_different_numbers_and_take_their_own_bonus():
    p = [[[0, 1.0, 0], [0, 1.0, 0]]] * 3
    evidence = evidence_by_hand([[1, 1], [1, 0], [1, 1]], [2, 2, 1], p)
    bonus = torch.tensor([[0, 0, 1.0], [0, 0, 1.0], [1.0, 0, 0]]).log()
    verdict = verify(Exact(), evidence, bonus, Dice(torch.full((3, 3), 0.3)), torch.ones(3, dtype=torch.bool))
    assert verdict.num_accepted.tolist() == [2, 1, 1]
    assert verdict.next_tokens.tolist() == [2, 1, 0]


def test_no_draft_is_plain_decoding():
    evidence = evidence_of(Draft.empty(2), torch.zeros(2, 0, 3), torch.zeros(2, 0, 3), True, 0, 0)
    bonus = torch.tensor([[0.5, 0.0, 0.5], [0.0, 1.0, 0.0]]).log()
    verdict = verify(Exact(), evidence, bonus, Dice(torch.tensor([[0.6], [0.6]])), torch.ones(2, dtype=torch.bool))
    assert isinstance(verdict, Verdict)
    assert verdict.num_accepted.tolist() == [0, 0]
    assert verdict.next_tokens.tolist() == [2, 1]


@pytest.mark.parametrize("number", [0.0, ALMOST_ONE])
def test_a_certain_draft_is_accepted_and_an_impossible_one_rejected_by_any_number(number):
    p = [[[0, 1.0, 0]], [[0, 1.0, 0]]]
    q = [[[0, 1.0, 0]], [[0.5, 0, 0.5]]]
    evidence = evidence_by_hand([[1], [0]], [1, 1], p, q)
    verdict = verify(
        Exact(), evidence, torch.zeros(2, 3), Dice(torch.full((2, 2), number, dtype=torch.float64)), torch.ones(2) > 0
    )
    assert verdict.num_accepted.tolist() == [1, 0]
    assert int(verdict.next_tokens[1]) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_verdict_takes_any_precision(dtype):
    """Laws come from real models in any precision; a target that is the drafter accepts everything."""
    scores = torch.randn(40, 3, 16).to(dtype)
    law = scores.softmax(-1)
    tokens = law[:, :2].argmax(-1)
    evidence = Evidence(tokens, torch.ones_like(tokens) > 0, scores[:, :2], scores[:, :2], True, q=law[:, :2])
    verdict = verify(Exact(), evidence, scores[:, 2], RandomStreams(40), torch.ones(40) > 0)
    assert verdict.num_accepted.tolist() == [2] * 40
    assert bool((law[:, 2].gather(-1, verdict.next_tokens[:, None]) > 0).all())


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("where", ["judged", "bonus"])
def test_a_law_that_is_no_law_raises_as_plain_sampling_does(bad, where):
    evidence = evidence_by_hand([[1]], [1], [[[0.2, 0.5, 0.3]]])
    bonus = torch.zeros(1, 3)
    (evidence.scores if where == "judged" else bonus)[..., 2] = bad
    with pytest.raises(RuntimeError, match="inf or NaN"):
        verify(Exact(), evidence, bonus, Dice(torch.zeros(1, 2)), torch.tensor([True]))


def test_a_bad_law_after_the_first_rejection_is_never_looked_at():
    evidence = evidence_by_hand([[1, 1]], [2], [[[1.0, 0, 0], [float("nan")] * 3]])
    bonus = torch.full((1, 3), float("nan"))
    verdict = verify(Exact(), evidence, bonus, Dice(torch.full((1, 3), 0.5)), torch.tensor([True]))
    assert verdict.num_accepted.tolist() == [0]
    assert verdict.next_tokens.tolist() == [0]


def test_evidence_of_cuts_the_wanted_positions():
    draft = Draft(
        tokens=torch.tensor([[1, 2, 3], [4, 5, 6]]),
        lengths=torch.tensor([3, 1]),
        q=torch.rand(2, 3, 8),
        logits=torch.rand(2, 3, 8),
    )
    scores, logits = torch.rand(2, 2, 8), torch.rand(2, 2, 8)
    evidence = evidence_of(draft, scores, logits, True, first=1, width=1)
    assert evidence.tokens.tolist() == [[2], [5]]
    assert evidence.valid.tolist() == [[True], [False]]
    assert torch.equal(evidence.q, draft.q[:, 1:2])
    assert torch.equal(evidence.draft_logits, draft.logits[:, 1:2])
    assert torch.equal(evidence.scores, scores[:, :1])
    assert torch.equal(evidence.target_logits, logits[:, :1])
    ended = evidence_of(draft, torch.rand(2, 4, 8), torch.rand(2, 4, 8), True, 0, 3).at(torch.tensor([2, 0]))
    assert ended.tokens.tolist() == [[3], [4]]
    assert torch.equal(ended.q[:, 0], torch.stack([draft.q[0, 2], draft.q[1, 0]]))


# --- drawing --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
@pytest.mark.parametrize("number", [0.0, 2.0**-53, 0.3, 0.999999, 1 - 2.0**-50, ALMOST_ONE, 1.0])
def test_a_token_without_probability_is_never_drawn(dtype, number):
    laws = warped(random_scores(1, 16, seed=3, dtype=dtype), WARPERS["top-k"])[1].softmax(-1)
    laws = torch.cat([laws, torch.eye(16, dtype=dtype), torch.eye(16, dtype=dtype) * 0.1])
    tokens = draw(laws, torch.full((len(laws),), number, dtype=torch.float64))
    assert bool((laws.gather(-1, tokens[:, None]) > 0).all())


def test_tiny_probabilities_at_both_ends_do_not_break_the_inversion():
    law = torch.tensor([[0.0, 1e-300, 1.0, 1e-300, 0.0], [0.0, 0.0, 5e-324, 0.0, 0.0]], dtype=torch.float64)
    assert draw(law, torch.tensor([0.0, 0.0], dtype=torch.float64)).tolist() == [1, 2]
    assert draw(law, torch.tensor([ALMOST_ONE] * 2, dtype=torch.float64)).tolist() == [2, 2]


def test_drawing_inverts_the_distribution_function():
    """On a fine lattice each token gets its share of the numbers, to within one point of the lattice."""
    law = random_scores(0, 7, seed=4)[0].softmax(-1)
    points = (torch.arange(10_000, dtype=torch.float64) + 0.5) / 10_000
    shares = torch.bincount(draw(law.expand(10_000, -1), points), minlength=7) / 10_000
    assert error(shares, law) <= 1e-4


def test_a_law_needs_not_be_normalised_to_be_drawn_from():
    law = torch.tensor([[0.25, 0.0, 0.25]] * 3)
    assert draw(law, torch.tensor([0.0, 0.49, 0.51], dtype=torch.float64)).tolist() == [0, 0, 2]


def test_laws_in_any_memory_layout_are_drawn_from():
    law = torch.tensor([[0.0, 1.0], [1.0, 0.0], [0.0, 0.0]]).T
    assert draw(law, torch.tensor([0.5, 0.5])).tolist() == [1, 0]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), BANNED])
def test_drawing_from_inf_or_nan_raises(bad):
    with pytest.raises(RuntimeError, match="inf or NaN"):
        draw(torch.tensor([[0.5, 0.5], [0.5, bad]]), torch.tensor([0.1, 0.1]))


def test_drawing_from_a_law_without_mass_raises():
    with pytest.raises(RuntimeError, match="no mass"):
        draw(torch.zeros(1, 4), torch.tensor([0.1]))


# --- the streams ----------------------------------------------------------------------------------------------------


def numbers_of(batch_size, throws, rows=None):
    streams = RandomStreams(batch_size)
    everyone = torch.ones(batch_size, dtype=torch.bool)
    return torch.stack([streams.uniforms(everyone if rows is None else rows[i]) for i in range(throws)], -1)


def test_a_seed_repeats_the_numbers_and_another_changes_them():
    torch.manual_seed(5)
    first = numbers_of(3, 4)
    torch.manual_seed(5)
    assert torch.equal(numbers_of(3, 4), first)
    torch.manual_seed(6)
    assert not bool((numbers_of(3, 4) == first).any())


def test_the_numbers_of_a_row_do_not_depend_on_its_batch():
    torch.manual_seed(5)
    many = numbers_of(6, 4)
    for batch_size in (1, 2, 5):
        torch.manual_seed(5)
        assert torch.equal(numbers_of(batch_size, 4), many[:batch_size])


def test_rows_that_are_not_asked_throw_no_dice():
    torch.manual_seed(5)
    every = numbers_of(3, 3)
    asked = torch.tensor([[True, False, True], [False, False, True], [True, True, True]])
    torch.manual_seed(5)
    some = numbers_of(3, 3, asked)
    assert some[0, [0, 2]].tolist() == every[0, :2].tolist()
    assert some[1, 2] == every[1, 0]
    assert torch.equal(some[2], every[2])


def test_the_verdict_throws_dice_for_drafted_positions_of_asked_rows_only():
    """One number per drafted position and one for the token after it, whatever the verdict; none for finished rows."""

    class Counting(Dice):
        def __init__(self):
            self.thrown_by_row = torch.zeros(4, dtype=torch.long)

        def uniforms(self, rows):
            self.thrown_by_row += rows
            return torch.full((4,), 0.5, dtype=torch.float64)

    dice = Counting()
    evidence = evidence_by_hand([[1, 1]] * 4, [2, 1, 0, 2], [[[0.2, 0.5, 0.3]] * 2] * 4)
    rows = torch.tensor([True, True, True, False])
    verify(Exact(), evidence, torch.zeros(4, 3), dice, rows)
    assert dice.thrown_by_row.tolist() == [3, 2, 1, 0]


def test_streams_take_one_number_of_the_global_generator_and_only_when_asked():
    before = torch.get_rng_state()
    streams = RandomStreams(2)
    assert torch.equal(torch.get_rng_state(), before)
    streams.uniforms(torch.tensor([True, True]))
    streams.uniforms(torch.tensor([True, True]))
    after = torch.get_rng_state()
    torch.set_rng_state(before)
    torch.randint(2**62, (1,))
    assert torch.equal(torch.get_rng_state(), after)


def test_the_streams_are_uniform_and_independent_along_and_across_rows():
    """Rows are seeded one after the other; neighbours must not resemble each other for it."""
    numbers = numbers_of(4000, 3)
    assert float(numbers.min()) >= 0
    assert float(numbers.max()) < 1
    for column in numbers.T:
        assert kstest(column.numpy(), "uniform").pvalue > 1e-3
    pairs = [(numbers[:-1, 0], numbers[1:, 0]), (numbers[:-2, 0], numbers[2:, 0]), (numbers[:, 0], numbers[:, 1])]
    pairs += [(numbers[:-1, 1], numbers[1:, 0]), (numbers[:, 1], numbers[:, 2])]
    for left, right in pairs:
        correlation = float(torch.corrcoef(torch.stack([left, right]))[0, 1])
        assert abs(correlation) < 4 / 4000**0.5


# --- the same through generate --------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", [Exact(), EASD(0.5, 0.5, 0.0)], ids=["exact", "easd"])
@pytest.mark.parametrize("batching", ["ragged", "lockstep"])
def test_greedy_runs_leave_torchs_random_state_alone(rule, batching):
    model = tiny_llama(layers=2)
    config = SpeculativeConfig(acceptance=rule, drafting="model", batching=batching, on_drafter_error="raise")
    before = torch.get_rng_state()
    model.generate(
        **prompts(3), assistant_model=noisy_copy(model), speculative_config=config, do_sample=False, max_new_tokens=9
    )
    assert torch.equal(torch.get_rng_state(), before)


def test_sampled_runs_take_one_number_of_the_global_generator():
    """However many tokens are drawn: what the caller does next does not depend on the text."""
    model = tiny_llama(layers=2)
    states = []
    for tokens in (2, 9):
        torch.manual_seed(3)
        model.generate(
            **prompts(2),
            assistant_model=noisy_copy(model),
            speculative_config=ExactConfig(on_drafter_error="raise"),
            do_sample=True,
            max_new_tokens=tokens,
        )
        states.append(torch.get_rng_state())
    assert torch.equal(states[0], states[1])
