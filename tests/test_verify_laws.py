"""The exact rule's law: by enumeration, and once more from the dice themselves."""

import itertools

import pytest
import torch

from hf_specdec.acceptance import Exact
from hf_specdec.records import Evidence
from hf_specdec.verify import verify
from tests.acceptance import WARPERS, Dice, error, joint_law, random_scores, target_law, warped


TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6}
BANNED = float("-inf")


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
