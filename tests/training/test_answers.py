"""Answers that the target writes, and which prompts are kept for evaluation."""

import json

import pytest
import torch

from hf_specdec.errors import InvalidConfigError
from hf_specdec.training.answers import answer_prompts, is_held_out
from tests.toys import noisy_copy, tiny_llama


PROMPTS = [[5, 6, 7], [8, 9], [10, 11, 12, 13]]


def counted(model, calls):
    def generate(**inputs):
        calls.append(inputs["input_ids"].tolist())
        return type(model).generate(model, **inputs)

    model.generate = generate
    return model


def test_answers_are_the_targets_own_and_only_they_are_trained(tmp_path):
    target = tiny_llama()
    texts = answer_prompts(target, PROMPTS, tmp_path / "answers.jsonl", max_new_tokens=5)
    for prompt, text in zip(PROMPTS, texts, strict=True):
        ids = torch.tensor([prompt])
        own = target.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=5)
        assert list(text.tokens) == own[0].tolist()
        assert text.num_prompt_tokens == len(prompt)


def test_an_interrupted_run_goes_on_where_it_stopped(tmp_path):
    file, calls = tmp_path / "answers.jsonl", []
    whole = answer_prompts(tiny_llama(), PROMPTS, file, max_new_tokens=5)
    content = file.read_bytes()
    file.write_bytes(content[: content.rfind(b"\n", 0, -1) + 20])  # cut in the middle of the last answer
    again = answer_prompts(counted(tiny_llama(), calls), PROMPTS, file, max_new_tokens=5)
    assert calls == [[PROMPTS[2]]]
    assert again == whole
    assert [json.loads(line)["prompt"] for line in file.read_text().splitlines()] == PROMPTS


def test_answers_of_another_length_are_refused(tmp_path):
    file = tmp_path / "answers.jsonl"
    answer_prompts(tiny_llama(), PROMPTS[:1], file, max_new_tokens=5)
    with pytest.raises(InvalidConfigError, match="max_new_tokens 5, not 6"):
        answer_prompts(tiny_llama(), PROMPTS[:1], file, max_new_tokens=6)


def test_batches_and_drafters_change_no_answer(tmp_path):
    target, calls = tiny_llama(), []
    alone = answer_prompts(target, PROMPTS, tmp_path / "alone.jsonl", max_new_tokens=9)
    together = {"max_new_tokens": 9, "batch_size": 2, "drafter": noisy_copy(target)}
    assert answer_prompts(counted(target, calls), PROMPTS, tmp_path / "two.jsonl", **together) == alone
    assert calls == [[[5, 6, 7], [0, 8, 9]], [[10, 11, 12, 13]]]
    ends = alone[0].tokens[5]  # an answer that ends early is not followed by filler
    target.generation_config.eos_token_id = ends
    ended = answer_prompts(target, PROMPTS, tmp_path / "ended.jsonl", **together)
    assert ended[0].tokens == alone[0].tokens[: alone[0].tokens.index(ends, 3) + 1]


def test_sampled_answers_have_dice_of_their_own_and_say_so(tmp_path):
    target, sampled = tiny_llama(), {"max_new_tokens": 6, "temperature": 1.0, "seed": 3}
    whole = answer_prompts(target, PROMPTS, tmp_path / "whole.jsonl", **sampled)
    greedy = answer_prompts(target, PROMPTS, tmp_path / "greedy.jsonl", max_new_tokens=6)
    assert all(one.tokens != other.tokens for one, other in zip(whole, greedy, strict=True))
    lines = (tmp_path / "whole.jsonl").read_text().splitlines()
    assert all((row["temperature"], row["seed"]) == (1.0, 3) for row in map(json.loads, lines))
    assert "seed" not in json.loads((tmp_path / "greedy.jsonl").read_text().splitlines()[0])
    (tmp_path / "killed.jsonl").write_text(lines[1] + "\n" + lines[0][:9])
    assert answer_prompts(target, PROMPTS, tmp_path / "killed.jsonl", batch_size=2, **sampled) == whole
    backwards = answer_prompts(target, PROMPTS[::-1], tmp_path / "backwards.jsonl", **sampled)
    assert backwards == whole[::-1]
    other = answer_prompts(target, PROMPTS, tmp_path / "other.jsonl", **sampled | {"seed": 4})
    assert other != whole
    for changed, told in (({"seed": 4}, "seed 3, not 4"), ({"temperature": 0.5}, "temperature 1.0, not 0.5")):
        with pytest.raises(InvalidConfigError, match=told):
            answer_prompts(target, PROMPTS, tmp_path / "whole.jsonl", **sampled | changed)
    with pytest.raises(InvalidConfigError, match=r"temperature 1.0, not 0: "):
        answer_prompts(target, PROMPTS, tmp_path / "whole.jsonl", max_new_tokens=6)
    with pytest.raises(InvalidConfigError, match=r"temperature 0, not 1.0"):
        answer_prompts(target, PROMPTS, tmp_path / "greedy.jsonl", **sampled)


def test_no_two_prompts_share_their_dice(tmp_path, monkeypatch):
    target, seeds = tiny_llama(), []
    real = target.generate
    monkeypatch.setattr(target, "generate", lambda **given: seeds.extend(given["row_seeds"]) or real(**given))
    for seed in (0, 1):
        answer_prompts(
            target, PROMPTS, tmp_path / f"{seed}.jsonl", max_new_tokens=2, temperature=1.0, seed=seed, batch_size=2
        )
    assert len(set(seeds)) == 2 * len(PROMPTS)


def test_answers_of_another_target_are_refused(tmp_path):
    file = tmp_path / "answers.jsonl"
    answer_prompts(tiny_llama(), PROMPTS[:1], file, max_new_tokens=5)
    with pytest.raises(InvalidConfigError, match="other weights"):
        answer_prompts(tiny_llama(seed=1), PROMPTS, file, max_new_tokens=5)


def test_the_share_that_is_held_out():
    prompts = [f"prompt {index}" for index in range(2000)]
    some = {prompt for prompt in prompts if is_held_out(prompt, 0.1)}
    assert 150 < len(some) < 250
    assert some < {prompt for prompt in prompts if is_held_out(prompt, 0.2)}
    assert not any(is_held_out(prompt, 0.0) for prompt in prompts)
    assert all(is_held_out(prompt, 1.0) for prompt in prompts)
