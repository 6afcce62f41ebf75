"""EASD as a logits processor masks the tokens that the rule in the loop masks."""

import pytest
import torch

from hf_specdec import (
    ConstantLength,
    EASDConfig,
    EASDLogitsProcessor,
    ExactConfig,
    InvalidConfigError,
    SpeculativeConfig,
)
from tests.toys import noisy_copy, prompts, tiny_llama


OFTEN = {"entropy_threshold": 0.3, "overlap_threshold": 0.2}


@pytest.fixture(scope="module")
def pair():
    model = tiny_llama()
    return model, noisy_copy(model, 0.05)


def greedy(model, inputs, tokens=24, **options):
    return model.generate(**inputs, max_new_tokens=tokens, do_sample=False, pad_token_id=0, **options)


def test_thresholds_that_never_fire_leave_the_text(pair):
    model, draft = pair
    processor = EASDLogitsProcessor(draft, EASDConfig(entropy_threshold=99.0))
    assert torch.equal(greedy(model, prompts(), logits_processor=[processor]), greedy(model, prompts()))
    assert (processor.num_steps, processor.num_fired, processor.num_masked) == (24, 0, 0)


def test_each_step_is_the_rule_by_hand(pair):
    """Where the rule fires on an aligned token the runner-up is written, elsewhere the argmax."""
    model, draft = pair
    config = EASDConfig(**OFTEN)
    processor = EASDLogitsProcessor(draft, config)
    text = greedy(model, prompts(), logits_processor=[processor])
    masked = 0
    with torch.no_grad():
        for end in range(7, text.shape[1]):
            target, guess = (each(text[:, :end]).logits[:, -1] for each in (model, draft))
            best = target.topk(2, -1).indices[0]
            fires = bool(config.rule.fires(target, guess, torch.tensor([64])))
            mask = fires and int(guess.argmax()) == int(best[0])
            assert int(text[0, end]) == int(best[1] if mask else best[0])
            masked += mask
    assert masked == processor.num_masked > 0
    assert processor.num_fired >= masked


def test_it_agrees_with_the_loop_where_no_bonus_is_drawn(pair):
    """With a draft of one token, positions that the loop judges alternate with bonus tokens it cannot judge."""
    model, draft = pair
    config = EASDConfig(entropy_threshold=-1.0, overlap_threshold=0.0, length=1)
    processor = EASDLogitsProcessor(draft, config)
    # a rule that always fires rejects every aligned draft, so the loop never draws a bonus
    looped = greedy(model, prompts(), assistant_model=draft, speculative_config=config)
    plain = greedy(model, prompts(), logits_processor=[processor])
    assert torch.equal(looped[:, 7:8], greedy(model, prompts(), tokens=1)[:, 7:])  # the prompt's token has no draft
    again = greedy(
        model, {"input_ids": looped[:, :8]}, tokens=23, logits_processor=[EASDLogitsProcessor(draft, config)]
    )
    assert torch.equal(again, looped)
    assert not torch.equal(plain, looped)


def test_padded_batches_equal_single_rows(pair):
    model, draft = pair
    inputs = prompts(3)
    batch = greedy(model, inputs, logits_processor=[EASDLogitsProcessor(draft, EASDConfig(**OFTEN), pad_token_id=0)])
    for row in range(3):
        ids = inputs["input_ids"][row][inputs["attention_mask"][row].bool()][None]
        alone = greedy(model, {"input_ids": ids}, logits_processor=[EASDLogitsProcessor(draft, EASDConfig(**OFTEN))])
        assert torch.equal(batch[row, 7:], alone[0, ids.shape[1] :])


def test_one_processor_serves_several_calls_and_the_loop(pair):
    model, draft = pair
    processor = EASDLogitsProcessor(draft, EASDConfig(**OFTEN))
    first = greedy(model, prompts(), logits_processor=[processor])
    assert torch.equal(greedy(model, prompts(), logits_processor=[processor]), first)
    speculative = greedy(
        model,
        prompts(),
        logits_processor=[processor],
        assistant_model=draft,
        speculative_config=ExactConfig(drafting="model", length=ConstantLength(3), on_drafter_error="raise"),
    )
    assert torch.equal(speculative, first)


def test_padded_vocabularies(pair):
    model, _ = pair
    for vocab_size in (56, 72):
        processor = EASDLogitsProcessor(tiny_llama(3, vocab_size=vocab_size), EASDConfig(**OFTEN))
        assert greedy(model, prompts(), logits_processor=[processor]).shape == (1, 31)
        assert processor.num_steps == 24


def test_options_without_meaning_are_refused(pair):
    with pytest.raises(InvalidConfigError, match="masked"):
        EASDLogitsProcessor(pair[1], EASDConfig(resample="plain"))
    with pytest.raises(InvalidConfigError, match="EASDConfig"):
        EASDLogitsProcessor(pair[1], SpeculativeConfig())
