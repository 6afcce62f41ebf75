"""Reward-guided decoding: which steps stay, what a reward sees, and the text step by step."""

import math

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hf_specdec import InvalidConfigError
from hf_specdec.quality import CheckReward, LikelihoodReward, RewardGuided
from hf_specdec.quality.rsd import Step
from tests.toys import noisy_copy, tiny_llama


def letter_tokenizer():
    """One token per character, 64 of them."""
    letters = ["<pad>", "<unk>", "\n", *map(chr, range(48, 109))]
    raw = Tokenizer(models.WordLevel({text: index for index, text in enumerate(letters)}, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    raw.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<pad>", unk_token="<unk>")


@pytest.fixture(scope="module")
def pair():
    model = tiny_llama(layers=1)
    return model, noisy_copy(model, noise=0.3)


PROMPT = [6, 7, 8, 9]
TOKENIZER = letter_tokenizer()


def greedy(model, prefix, number):
    return model.generate(torch.tensor([prefix]), do_sample=False, max_new_tokens=number)[0, len(prefix) :].tolist()


def answer(pair, reward, tokens=20, ends=(), **options):
    options = {"max_step_tokens": 4} | options
    rsd = RewardGuided(reward, **options)
    return rsd.answer(*pair, TOKENIZER, PROMPT, max_new_tokens=tokens, ends=set(ends), options={"pad_token_id": 0})


@pytest.mark.parametrize("keeps", [True, False])
def test_all_steps_stay_or_none_does(pair, keeps):
    tokens, counts = answer(pair, lambda step: float(keeps))
    model = pair[1] if keeps else pair[0]
    assert tokens == greedy(model, PROMPT, 20)
    assert counts == {"rsd_steps": 5, "rsd_kept": 5 * keeps}


def test_each_step_is_the_drafts_or_the_targets(pair):
    seen = []

    def reward(step):
        seen.append(step)
        assert step.text == TOKENIZER.decode(step.tokens, skip_special_tokens=True)
        return float(len(seen) % 2)

    tokens, counts = answer(pair, reward)
    expected = []
    for number in range(5):
        model = pair[1] if number % 2 == 0 else pair[0]
        assert seen[number].prefix == PROMPT + expected
        expected += greedy(model, PROMPT + expected, 4)
    assert tokens == expected
    assert counts == {"rsd_steps": 5, "rsd_kept": 3}


def test_a_separator_ends_a_step_and_an_end_the_answer(pair):
    first = greedy(pair[1], PROMPT, 12)
    word = TOKENIZER.decode([first[5]])
    lengths = []
    answer(pair, lambda step: lengths.append(len(step.tokens)) or 1.0, separator=word, max_step_tokens=12)
    assert lengths[0] <= 6
    end = first[3]
    tokens, counts = answer(pair, lambda step: 1.0, ends=[end])
    assert tokens == first[:4]
    assert counts["rsd_steps"] == 1
    assert len(answer(pair, lambda step: 1.0, max_steps=2)[0]) == 8


def test_the_likelihood_is_the_geometric_mean(pair):
    tokens = [11, 12, 13]
    with torch.no_grad():
        law = pair[0](torch.tensor([PROMPT + tokens])).logits[0].log_softmax(-1)
    expected = math.exp(sum(float(law[3 + i, token]) for i, token in enumerate(tokens)) / 3)
    assert LikelihoodReward()(Step(pair[0], PROMPT, tokens, "")) == pytest.approx(expected, rel=1e-5)
    assert LikelihoodReward()(Step(pair[0], PROMPT, [], "")) == 0.0


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("He has 3 + 4 = 7 pens.", 1.0),
        ("He has 3 + 4 = 8 pens.", 0.0),
        ("2 * 3 = 6, then 6 - 1 = 4.", 0.5),
        ("10 / 3 = 3.33", 1.0),
        ("10 / 3 = 3.3 and 10 / 3 = 3.4", 0.5),
        ("$1,200 x 2 = $2,400", 1.0),
        ("5 / 0 = 1", 0.0),
        ("No numbers here.", 1.0),
        ("\n\n", 0.0),
        ("3 - 5 = -2", 1.0),
        ("10 + 20 + 30 = 60, and 2 * 3 + 4 = 10", 1.0),  # "20 + 30 = 60" is none of them
        ("2 + 3 = 1 + 4, and 16 / 2 = 1", 0.0),
        ("It falls by -5 + 3 = -2 degrees.", 1.0),
        ("Sum:\n- 3 + 4 = 8", 0.0),
    ],
)
def test_arithmetic_is_checked(text, reward):
    assert CheckReward()(Step(None, [], [], text)) == reward


@pytest.mark.parametrize("options", [{"separator": ""}, {"max_steps": 0}, {"max_step_tokens": 0}])
def test_options_out_of_range_are_refused(options):
    with pytest.raises(InvalidConfigError, match=next(iter(options))):
        RewardGuided(CheckReward(), **options)
