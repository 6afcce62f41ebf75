"""The only dice: the exact law by enumeration, drawing, the verdict on a draft, and the random streams."""

import itertools

import pytest
import torch
from scipy.stats import kstest

from hf_specdec import ExactConfig, SpeculativeConfig
from hf_specdec.acceptance import EASD, Exact
from hf_specdec.records import Draft, Evidence, Verdict
from hf_specdec.verify import RandomStreams, draw, evidence_of, verify
from tests.acceptance import WARPERS, joint_law, random_scores, target_law, warped
from tests.toys import noisy_copy, prompts, tiny_llama


TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6}
ALMOST_ONE = 1 - 2.0**-53
BANNED = float("-inf")


class Dice:
    """Streams that give the numbers they were loaded with, `(rows, throws)`."""

    def __init__(self, numbers):
        self.numbers, self.thrown = numbers, 0

    def uniforms(self, rows):
        self.thrown += 1
        return self.numbers[:, self.thrown - 1]


def error(ours, exact):
    return float((ours - exact).abs().max())


# --- the exact law, by enumeration ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("vocab_size", "width"), [(8, 1), (5, 2), (8, 2), (5, 3)])
@pytest.mark.parametrize("name", WARPERS)
def test_a_sampled_draft_leaves_the_targets_joint_law(name, vocab_size, width, dtype):
    """Draft and target go through the same warpers, as in `generate`; all `width + 1` tokens, the bonus included."""
    target = warped(random_scores(width, vocab_size, seed=1, dtype=dtype), WARPERS[name])
    draft = warped(random_scores(width - 1, vocab_size, seed=2, dtype=dtype), WARPERS[name])
    joint = joint_law(Exact(), target, [table.softmax(-1) for table in draft])
    assert error(joint, target_law(target)) <= TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", WARPERS)
@pytest.mark.parametrize("draft_name", ["T=1", "top-k", "T=.5"])
def test_the_draft_may_be_warped_differently(name, draft_name, dtype):
    """Whatever law the drafts come from: wider or narrower than the target's, with a support of its own."""
    target = warped(random_scores(2, 6, seed=3, dtype=dtype), WARPERS[name])
    draft = warped(random_scores(1, 6, seed=4, dtype=dtype), WARPERS[draft_name])
    joint = joint_law(Exact(), target, [table.softmax(-1) for table in draft])
    assert error(joint, target_law(target)) <= TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", WARPERS)
def test_point_mass_drafts_leave_the_targets_joint_law(name, dtype):
    target = warped(random_scores(2, 5, seed=5, dtype=dtype), WARPERS[name])
    exact = target_law(target)
    for path in itertools.product(range(5), repeat=2):
        assert error(joint_law(Exact(), target, path=path), exact) <= TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("sampled_draft", [True, False])
def test_greedy_decoding_is_the_one_hot_law(sampled_draft, dtype):
    target = random_scores(2, 5, seed=6, dtype=dtype)
    exact = target_law(target, do_sample=False)
    assert sorted(exact.flatten().tolist())[-2:] == [0.0, 1.0]
    if sampled_draft:
        laws = [table.softmax(-1) for table in random_scores(1, 5, seed=7, dtype=dtype)]
        assert error(joint_law(Exact(), target, laws, do_sample=False), exact) <= TOLERANCE[dtype]
        return
    for path in itertools.product(range(5), repeat=2):
        assert error(joint_law(Exact(), target, path=path, do_sample=False), exact) == 0


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", WARPERS)
def test_a_smaller_draft_vocabulary_leaves_the_targets_joint_law(name, dtype):
    """The draft model knows six of eight ids; the last two have no column of its law."""
    target = warped(random_scores(2, 8, seed=8, dtype=dtype), WARPERS[name])
    draft = random_scores(1, 8, seed=9, dtype=dtype)
    for table in draft:
        table[..., 6:] = BANNED
    laws = [table.softmax(-1) for table in warped(draft, WARPERS[name])]
    assert float(laws[0][6:].sum()) == 0
    assert name != "T=1" or float(target_law(target)[6:].sum()) > 0.05
    assert error(joint_law(Exact(), target, laws), target_law(target)) <= TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_equal_laws_accept_everything(dtype):
    target = random_scores(2, 6, seed=10, dtype=dtype)
    laws = [table.softmax(-1) for table in target[:2]]
    evidence = first_evidence(target, laws)
    assert bool((Exact().acceptance(evidence) == 1).all())
    assert error(joint_law(Exact(), target, laws), target_law(target)) <= TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_disjoint_laws_accept_nothing(dtype):
    target, draft = random_scores(2, 6, seed=11, dtype=dtype), random_scores(1, 6, seed=12, dtype=dtype)
    for table in target:
        table[..., :3] = BANNED
    for table in draft:
        table[..., 3:] = BANNED
    laws = [table.softmax(-1) for table in draft]
    evidence = first_evidence(target, laws)
    assert bool((Exact().acceptance(evidence)[:3] == 0).all())
    assert error(joint_law(Exact(), target, laws), target_law(target)) <= TOLERANCE[dtype]


def test_a_wrong_draft_law_is_found_by_enumeration():
    """The enumeration is worth something only if it notices: drafts drawn from `laws`, judged as if from another law."""

    class Wrong:
        def acceptance(self, evidence):
            return Exact().acceptance(self.misled(evidence))

        def replacement(self, evidence):
            return Exact().replacement(self.misled(evidence))

        def misled(self, evidence):
            return Evidence(**{**vars_of(evidence), "q": evidence.q.pow(2) / evidence.q.pow(2).sum(-1, keepdim=True)})

    target, laws = random_scores(2, 5, seed=1), [t.softmax(-1) for t in random_scores(1, 5, seed=2)]
    assert error(joint_law(Wrong(), target, laws), target_law(target)) > 1e-2


def vars_of(evidence):
    return {name: getattr(evidence, name) for name in Evidence.__dataclass_fields__}


def first_evidence(scores, laws):
    """The evidence on the first position, for each token that may be drafted there."""
    vocab_size = scores[0].shape[-1]
    tokens = torch.arange(vocab_size)[:, None]
    here = scores[0].expand(vocab_size, 1, -1)
    q = laws[0].expand(vocab_size, 1, -1)
    return Evidence(tokens, torch.ones_like(tokens, dtype=torch.bool), here, here, True, q=q)


# --- the verdict: the same law once more, from the dice themselves ---------------------------------------------------


def quarters(shape, seed):
    """Laws whose probabilities are quarters, so that a lattice of dice integrates them without error."""
    generator = torch.Generator().manual_seed(seed)
    cuts = torch.randint(0, shape[-1], (*shape[:-1], 4), generator=generator)
    return torch.nn.functional.one_hot(cuts, shape[-1]).sum(-2).double() / 4


def lattice(throws, points=12):
    """The midpoints of a lattice on which every acceptance and every law of quarters has its boundaries."""
    return (torch.cartesian_prod(*[torch.arange(points)] * throws).double() + 0.5) / points


@pytest.mark.parametrize("seed", range(4))
def test_dice_on_a_lattice_give_exactly_the_targets_joint_law(seed):
    """Rows that drafted 0, 1 and 2 tokens stand in one batch; each must follow the target's law over all it emits."""
    vocab_size, width = 3, 2
    p = [quarters((vocab_size,) * (d + 1), seed=10 * seed + d) for d in range(width + 1)]
    q = [quarters((vocab_size,) * (d + 1), seed=10 * seed + 5 + d) for d in range(width)]
    dice = lattice(width + 1)
    paths = torch.cartesian_prod(torch.arange(vocab_size), torch.arange(vocab_size))
    lengths, tokens, numbers = (
        each.reshape(-1, *each.shape[3:])
        for each in (
            torch.arange(3)[:, None, None].expand(-1, len(paths), len(dice)),
            paths[None, :, None].expand(3, -1, len(dice), -1),
            dice[None, None].expand(3, len(paths), -1, -1),
        )
    )
    first, second = tokens.T
    laws_p = torch.stack([p[0].expand(len(tokens), -1), p[1][first]], 1)
    laws_q = torch.stack([q[0].expand(len(tokens), -1), q[1][first]], 1)
    after = torch.stack([p[0].expand(len(tokens), -1), p[1][first], p[2][first, second]], 1)
    evidence = Evidence(
        tokens=tokens,
        valid=torch.arange(width) < lengths[:, None],
        scores=laws_p.log(),
        target_logits=laws_p.log(),
        do_sample=True,
        q=laws_q,
    )
    bonus_scores = after[torch.arange(len(tokens)), lengths].log()
    rows = torch.ones(len(tokens), dtype=torch.bool)
    verdict = verify(Exact(), evidence, bonus_scores, Dice(numbers), rows)

    drafted_with = laws_q.gather(-1, tokens[..., None])[..., 0].prod(-1) / len(dice)
    masses: dict = {}  # (drafted length, emitted tokens) -> probability
    columns = (lengths, tokens, verdict.num_accepted, verdict.next_tokens, drafted_with)
    for length, drafted, accepted, token, mass in zip(*(each.tolist() for each in columns), strict=True):
        assert accepted <= length
        key = (length, *drafted[:accepted], token)
        masses[key] = masses.get(key, 0.0) + mass
    for length in range(3):
        joint, exact = torch.zeros(*[vocab_size] * (length + 1), dtype=torch.float64), p[0]
        for (drafted_length, *emitted), mass in masses.items():
            if drafted_length == length and mass > 0:
                completed = torch.tensor(mass, dtype=torch.float64)
                for depth in range(len(emitted), length + 1):
                    completed = completed[..., None] * p[depth][tuple(emitted)]
                joint[tuple(emitted)] += completed
        for depth in range(1, length + 1):
            exact = exact[..., None] * p[depth]
        assert error(joint, exact) < 1e-12


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
