"""Greedy speculative decoding gives plain decoding's tokens, whatever the architecture, batch and drafter."""

from functools import cache
from itertools import product

import pytest
import torch
from torch import Tensor

import hf_specdec
from tests.families import FAMILIES, REFUSED, VOCAB_SIZE, WINDOW, Family, noisy_copy, random_twin


NEW_TOKENS = 16
# Where every draft is rejected, each token costs a round, and a few rounds show all there is to see.
NUM_TOKENS = {"always": NEW_TOKENS, "sometimes": NEW_TOKENS, "by accident": NEW_TOKENS, "never": NEW_TOKENS // 2}
ONE_PROMPT = (11,)
RAGGED_PROMPTS = (11, 7, 4, 9)
CASES = [(name, attention) for name, family in FAMILIES.items() for attention in family.attentions]
ONE_EACH = [(name, family.attentions[-1]) for name, family in FAMILIES.items()]
SLIDING = [(name, attention) for name, attention in ONE_EACH if FAMILIES[name].sliding]
# One layer of another architecture: it agrees by accident only, and costs little where every draft is drafted in vain.
STRANGER = Family("LlamaConfig", {"num_hidden_layers": 1}, first_seed=1000)
# The other attentions of a family differ in their masks, which padded rows of unequal lengths show best.
SEEN_BEST = ("sometimes", RAGGED_PROMPTS)
EXACT = hf_specdec.SpeculativeConfig(drafting="model", length=4, on_drafter_error="raise")


def each(cases):
    return pytest.mark.parametrize(("name", "attention"), cases, ids=["-".join(case) for case in cases])


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@cache
def target(name: str, attention: str):
    return FAMILIES[name].build(attention)


@cache
def drafter(name: str, attention: str, accepted: str):
    if accepted == "always":
        return target(name, attention)
    if accepted == "sometimes":
        return noisy_copy(target(name, attention))
    return STRANGER.build() if accepted == "never" else random_twin(FAMILIES[name], attention)


def prompts(lengths: tuple[int, ...]) -> dict[str, Tensor]:
    """Random prompts, padded on the left."""
    generator = torch.Generator().manual_seed(0)
    columns = torch.arange(max(lengths))
    mask = (columns >= max(lengths) - torch.tensor(lengths)[:, None]).long()
    ids = torch.randint(1, VOCAB_SIZE, mask.shape, generator=generator)
    return {"input_ids": ids * mask, "attention_mask": mask}


@cache
def plain(name: str, attention: str, lengths: tuple[int, ...], eos: int | None = None):
    return target(name, attention).generate(
        **prompts(lengths),
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=eos,
        return_dict_in_generate=True,
        output_logits=True,
    )


def speculative(name: str, attention: str, accepted: str, lengths: tuple[int, ...], eos: int | None = None):
    return target(name, attention).generate(
        **prompts(lengths),
        max_new_tokens=NUM_TOKENS[accepted],
        do_sample=False,
        pad_token_id=0,
        eos_token_id=eos,
        return_dict_in_generate=True,
        assistant_model=drafter(name, attention, accepted),
        speculative_config=EXACT,
    )


def assert_same(got: Tensor, plain_output, num_tokens: int = NEW_TOKENS) -> None:
    """Compares the prompts and `num_tokens` new tokens.

    A failure says where the first difference is and how close the target's choice was there.
    """
    prompt = plain_output.sequences.shape[1] - len(plain_output.logits)
    expected = plain_output.sequences[:, : prompt + num_tokens]
    assert got.shape == expected.shape
    if torch.equal(got, expected):
        return
    column = int((got != expected).any(0).nonzero()[0])
    row = int((got != expected)[:, column].nonzero()[0])
    best, second = plain_output.logits[column - prompt][row].topk(2).values.tolist()
    pytest.fail(f"row {row} differs at new token {column - prompt}, where the best logit leads by {best - second:.1e}")


@each(ONE_EACH)
def test_toys_are_lively(name: str, attention: str) -> None:
    model = target(name, attention)
    assert all(bool(parameter.isfinite().all()) for parameter in model.parameters())
    texts = model.generate(**prompts(RAGGED_PROMPTS), max_new_tokens=30, do_sample=False)[:, max(RAGGED_PROMPTS) :]
    assert min(len(set(text)) for text in texts.tolist()) >= 8


def every_combination():
    """Families, drafters and prompts; of further attentions all but one combination only where slow tests are asked for."""
    for name, attention in CASES:
        for accepted, lengths in product(("always", "sometimes", "never"), (ONE_PROMPT, RAGGED_PROMPTS)):
            always_run = (name, attention) in ONE_EACH or (accepted, lengths) == SEEN_BEST
            shape = "one" if lengths == ONE_PROMPT else "ragged"
            yield pytest.param(
                name,
                attention,
                accepted,
                lengths,
                id=f"{name}-{attention}-{accepted}-{shape}",
                marks=() if always_run else pytest.mark.slow,
            )


@pytest.mark.parametrize(("name", "attention", "accepted", "lengths"), list(every_combination()))
def test_equals_plain_decoding(name: str, attention: str, accepted: str, lengths: tuple[int, ...]) -> None:
    output = speculative(name, attention, accepted, lengths)
    assert_same(output.sequences, plain(name, attention, lengths), NUM_TOKENS[accepted])
    stats = output.speculative_stats
    if accepted != "never":
        assert stats.num_accepted_tokens > 0
    if accepted == "always" and lengths == ONE_PROMPT:
        assert stats.acceptance_rate == 1.0
        assert stats.num_target_forwards < NEW_TOKENS


@each(ONE_EACH)
def test_rows_stop_at_different_times(name: str, attention: str) -> None:
    endless = plain(name, attention, RAGGED_PROMPTS).sequences[:, max(RAGGED_PROMPTS) :]
    eos = early_in_some_rows(endless)
    expected = plain(name, attention, RAGGED_PROMPTS, eos)
    assert bool((expected.sequences[:, max(RAGGED_PROMPTS) :] == 0).any())
    assert_same(speculative(name, attention, "sometimes", RAGGED_PROMPTS, eos).sequences, expected)


def early_in_some_rows(texts: Tensor) -> int:
    """The token that ends the rows at the most different places, some early and some late or never."""

    def stops(token: int) -> list[int]:
        return [row.index(token) if token in row else NEW_TOKENS for row in texts.tolist()]

    candidates = [token for token in texts.unique().tolist() if token != 0]
    return max(candidates, key=lambda token: (len(set(stops(token))), max(stops(token)) - min(stops(token))))


@pytest.mark.parametrize(
    ("accepted", "lengths"), [("by accident", (3,)), ("sometimes", (5, 3, 2))], ids=["twin-one", "sometimes-ragged"]
)
@each(SLIDING)
def test_prompt_shorter_than_the_window(name: str, attention: str, accepted: str, lengths: tuple[int, ...]) -> None:
    assert max(lengths) < WINDOW < max(lengths) + NEW_TOKENS
    assert_same(speculative(name, attention, accepted, lengths).sequences, plain(name, attention, lengths))


@pytest.mark.parametrize("name", REFUSED)
def test_models_that_cannot_be_rewound_are_refused_before_the_first_token(name: str) -> None:
    model = REFUSED[name].build()
    seen = []
    with pytest.raises(ValueError, match=type(model).__name__):
        model.generate(
            **prompts(ONE_PROMPT),
            max_new_tokens=4,
            do_sample=False,
            assistant_model=model,
            speculative_config=EXACT,
            logits_processor=[lambda ids, scores: seen.append(ids) or scores],
        )
    assert not seen
