"""CSD's memory and NSD's mass from texts, against the same figures from logits without any cache."""

import math

import pytest
import torch

from hf_specdec import CorrectionMemory, CSDConfig, InvalidConfigError, NucleusConfig, teacher_forcing
from hf_specdec.acceptance import pair_fingerprint
from hf_specdec.csd_calibration import calibrate_csd
from hf_specdec.laws import in_nucleus
from hf_specdec.nucleus_calibration import calibrate_nucleus
from tests.toys import noisy_copy, state_of, tiny_llama


TEXTS = [torch.randint(1, 64, (n,), generator=torch.Generator().manual_seed(n)) for n in (22, 9, 40)]


@pytest.fixture(scope="module")
def pair():
    model = tiny_llama(layers=1)
    return model, noisy_copy(model, noise=0.3)


@pytest.fixture(autouse=True)
def _small_steps(monkeypatch):
    monkeypatch.setattr(teacher_forcing, "_POSITIONS_PER_PASS", 7)
    monkeypatch.setattr(teacher_forcing, "_POSITIONS_PER_STEP", 3)


# --- nucleus --------------------------------------------------------------------------------------------------------


@torch.no_grad()
def logits_of(model):
    return torch.cat([model(text[None], use_cache=False).logits[0, :-1] for text in TEXTS]).double()


@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_a_mass_accepts_and_departs_as_enumeration_says(pair, temperature):
    found = calibrate_nucleus(*pair, TEXTS, temperature=temperature, masses=(0.3, 0.8, 1.0))
    ours, theirs = (logits_of(model) for model in pair)
    p, q, gate = (ours / temperature).softmax(-1), (theirs / temperature).softmax(-1), ours.softmax(-1)
    assert (found.num_texts, found.num_positions) == (3, 21 + 8 + 39)
    assert [each.nucleus_p for each in found.grid] == [0.0, 0.3, 0.8, 1.0]
    for each in found.grid:
        inside = torch.stack([in_nucleus(gate, torch.full(gate.shape[:1], x), each.nucleus_p) for x in range(64)], -1)
        accepted = q * torch.where(inside, 1.0, (p / q).clamp(max=1))
        rejected = 1 - accepted.sum(-1, keepdim=True)
        excess = (p - q).clamp(min=0)
        emitted = accepted + rejected * excess / excess.sum(-1, keepdim=True)
        distance = 0.5 * (emitted - p).abs().sum(-1)
        assert each.acceptance == pytest.approx(float(accepted.sum(-1).mean()), abs=1e-5)
        assert each.mean_tv == pytest.approx(float(distance.mean()), abs=1e-5)
        assert each.max_tv == pytest.approx(float(distance.max()), abs=1e-5)
        drafted, wanted = theirs.argmax(-1), ours.argmax(-1)
        foreign = inside.gather(-1, drafted[:, None])[:, 0] & (drafted != wanted)
        assert each.greedy_tv == pytest.approx(float(foreign.double().mean()))
        assert each.greedy_acceptance == pytest.approx(float((foreign | (drafted == wanted)).double().mean()))
    assert found.grid[0].mean_tv == 0 < found.grid[1].mean_tv < found.grid[3].mean_tv


def test_the_largest_mass_within_the_bound_is_chosen(pair):
    free = calibrate_nucleus(*pair, TEXTS, tv_bound=1.0)
    assert free.chosen.nucleus_p == 1.0
    for greedy in (False, True):
        bound = 0.5 * (free.chosen.greedy_tv if greedy else free.chosen.mean_tv)
        base = NucleusConfig(guard=7)
        found = calibrate_nucleus(*pair, TEXTS, tv_bound=bound, greedy=greedy, config=base)
        cost = {each.nucleus_p: each.greedy_tv if greedy else each.mean_tv for each in found.grid}
        assert found.config == NucleusConfig(nucleus_p=found.chosen.nucleus_p, guard=7)
        assert cost[found.chosen.nucleus_p] <= bound
        assert all(value > bound for mass, value in cost.items() if mass > found.chosen.nucleus_p)
        assert 0 < found.chosen.nucleus_p < 1
    assert calibrate_nucleus(*pair, TEXTS, tv_bound=0.0).chosen.mean_tv == 0.0
    assert f"nucleus_p={found.chosen.nucleus_p:g}" in found.summary()
    assert found.to_dict()["config"] == found.config.to_dict()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tv_bound": 1.5}, "tv_bound must lie"),
        ({"temperature": 0.0}, "greedy=True"),
        ({"masses": (0.5, 1.2)}, "nucleus_p must lie"),
        ({"max_tokens": 1}, "max_tokens must be"),
        ({"texts": [[3]]}, "no position"),
    ],
)
def test_nucleus_mistakes_are_refused(pair, options, message):
    options = {"texts": TEXTS} | options
    with pytest.raises(InvalidConfigError, match=message):
        calibrate_nucleus(*pair, **options)


def test_nan_is_no_distance(pair):
    broken = noisy_copy(pair[1], noise=0.0)
    with torch.no_grad():
        broken.lm_head.weight[3] = float("nan")
    with pytest.raises(InvalidConfigError, match="NaN"):
        calibrate_nucleus(pair[0], broken, TEXTS)


# --- csd ------------------------------------------------------------------------------------------------------------

PROMPTS = [text[:6].tolist() for text in TEXTS]


@torch.no_grad()
def met(pair, prompts, tokens, length):
    """The mismatches of plain rounds, without any cache: the draft's greedy tokens against the target's text."""
    found = []
    for prompt in prompts:
        text = [*prompt, int(pair[0](torch.tensor([prompt])).logits[0, -1].argmax())]
        while len(text) < len(prompt) + tokens:
            room = len(prompt) + tokens - len(text) - 1
            for _ in range(min(length, room)):
                drafted = int(pair[1](torch.tensor([text])).logits[0, -1].argmax())
                wanted = int(pair[0](torch.tensor([text])).logits[0, -1].argmax())
                text.append(wanted)
                if drafted != wanted:
                    found.append((drafted, wanted))
                    break
            else:
                text.append(int(pair[0](torch.tensor([text])).logits[0, -1].argmax()))
    return found


@pytest.mark.parametrize("batch_size", [1, 2, 8])
def test_the_memory_holds_every_mismatch_that_verification_reached(pair, batch_size):
    before = [state_of(model)[:2] for model in pair]
    prompts = [prompt[index:] for index, prompt in enumerate(PROMPTS)]  # of three lengths
    told = []
    found = calibrate_csd(
        *pair, prompts, max_new_tokens=20, length=3, batch_size=batch_size, progress=lambda *step: told.append(step)
    )
    assert told[-1] == (3, 3)
    assert len(told) == math.ceil(3 / batch_size)
    expected = CorrectionMemory(fingerprint=pair_fingerprint(pair[0].config, pair[1].config))
    expected.add(met(pair, prompts, 20, 3))
    assert dict(found.memory.items()) == dict(expected.items())
    assert found.memory.fingerprint == expected.fingerprint
    assert found.num_mismatches == sum(count for _, count in expected.items()) > 10
    assert (found.num_prompts, found.num_tokens) == (3, 60)
    assert [state_of(model)[:2] for model in pair] == before


def test_it_goes_on_from_a_memory_of_the_same_pair_only(pair):
    first = calibrate_csd(*pair, PROMPTS[:1], max_new_tokens=20, length=3)
    kept = first.memory.copy()
    both = calibrate_csd(*pair, PROMPTS[1:], max_new_tokens=20, length=3, memory=first.memory)
    assert first.memory == kept
    whole = calibrate_csd(*pair, PROMPTS, max_new_tokens=20, length=3)
    assert dict(both.memory.items()) == dict(whole.memory.items())
    with pytest.raises(InvalidConfigError, match="another pair"):
        calibrate_csd(*pair, PROMPTS, memory=CorrectionMemory(fingerprint="0" * 32))
    with pytest.raises(InvalidConfigError, match="no prompt"):
        calibrate_csd(*pair, [])
    assert len(calibrate_csd(*pair, PROMPTS, max_new_tokens=20, length=3, max_entries=4).memory) <= 4


def test_a_memory_of_another_pair_is_refused_before_the_first_token(pair):
    found = calibrate_csd(*pair, PROMPTS, max_new_tokens=8, length=3)
    options = {"max_new_tokens": 4, "do_sample": False, "speculative_config": CSDConfig(memory=found.memory)}
    inputs = torch.tensor([PROMPTS[0]])
    pair[0].generate(inputs, assistant_model=pair[1], **options)
    with pytest.raises(InvalidConfigError, match="another pair of models"):
        pair[0].generate(inputs, assistant_model=tiny_llama(layers=2), **options)


def test_familiar_pairs_are_told(pair):
    found = calibrate_csd(*pair, PROMPTS * 8, max_new_tokens=12, length=3)
    counts = [count for _, count in found.memory.items()]
    assert found.num_familiar == sum(count > 6 for count in counts) == len(counts) > 0  # each was met eight times
    assert found.familiar_share == 1.0
    rule = CSDConfig(memory=found.memory).rule
    assert rule.inner.memory.familiar({t for (_, t), _ in found.memory.items()}, 6)
    assert not any(found.memory.familiar({3}, math.inf).values())
