"""Decisions, labels and rewards of a tiny pair of language models, found again without any cache."""

import pytest
import torch

from hf_specdec import CoSpecConfig, InvalidConfigError
from hf_specdec.acceptance import PolicyNetwork, pair_fingerprint
from hf_specdec.cospec import (
    CoSpecOptions,
    LabelFile,
    ReinforceOptions,
    Rollouts,
    label_mismatches,
    reinforce,
    train_cospec,
)
from tests.toys import noisy_copy, state_of, tiny_llama


PROMPTS = [torch.randint(1, 64, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (5, 8, 6, 7)]


@pytest.fixture(scope="module")
def pair():
    model = tiny_llama(layers=1)
    return model, noisy_copy(model, noise=0.3)


def rollouts(pair, prompts=PROMPTS, policy=None, judge=lambda index, text: True, **options):
    options = {"max_new_tokens": 14, "length": 3, "floor_ratio": 0.0} | options
    return Rollouts(*pair, prompts, judge, policy, **options)


def always(value):
    return lambda features: torch.full(features.shape[:-1], value)


@torch.no_grad()
def argmax(model, tokens):
    return int(model(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax())


def test_decisions_are_the_reached_mismatches(pair):
    ours = rollouts(pair, policy=always(0.5))
    texts, met, stats = ours.decode([1] * 6)
    assert len({tuple(text) for text in texts}) > 1  # the rows throw dice of their own
    taken = 0
    for text, decisions in zip(texts, met, strict=True):
        whole = PROMPTS[1] + text
        for each in decisions:
            column = len(PROMPTS[1]) + each.place
            before = whole[:column]
            drafted, wanted = argmax(pair[1], before), argmax(pair[0], before)
            assert each.drafted == drafted != wanted
            assert whole[column] == (drafted if each.taken else wanted)
            taken += each.taken
        columns = {len(PROMPTS[1]) + each.place for each in decisions if each.taken}
        foreign = {c for c in range(len(PROMPTS[1]), len(whole)) if whole[c] != argmax(pair[0], whole[:c])}
        assert columns == foreign
    assert 0 < taken < sum(map(len, met))
    assert sum(row.events["relaxed_accepted"] for row in stats.rows) == 0  # it is a rule of its own


def test_texts_without_a_decision_stand_beside_others(pair):
    """One prompt is answered alike by both models, another is not; and rows end apart."""
    model, draft = pair
    for rows, drafter in ((8, draft), (2, model)):
        texts, met, _ = rollouts((model, drafter), policy=always(0.5), max_new_tokens=30).decode([1] * rows)
        for text, decisions in zip(texts, met, strict=True):
            whole = PROMPTS[1] + text
            columns = {len(PROMPTS[1]) + each.place for each in decisions if each.taken}
            assert columns == {c for c in range(8, len(whole)) if whole[c] != argmax(model, whole[:c])}
    episodes = [*rollouts((model, model))(0, 1), *rollouts(pair)(0, 1)]
    assert [len(each.taken) > 0 for each in episodes] == [False, True]
    list(reinforce(PolicyNetwork(4), lambda prompt, number: episodes, 1, ReinforceOptions(num_steps=1, group_size=2)))


def test_without_a_policy_the_text_is_the_targets(pair):
    (text,), (met,), _ = rollouts(pair).decode([0])
    plain = pair[0].generate(torch.tensor([PROMPTS[0]]), do_sample=False, max_new_tokens=14)[0, len(PROMPTS[0]) :]
    assert text == plain.tolist()
    assert met
    assert not any(each.taken for each in met)


def test_a_reward_is_correctness_and_speed(pair):
    for policy in (always(1.0), None):
        ours = rollouts(pair, policy=policy, judge=lambda index, text: index == 2, speed_weight=0.1)
        for prompt in (1, 2):
            episodes = ours(prompt, 2)
            stats = ours.decode([prompt] * 2)[2]
            for row, episode in enumerate(episodes):
                expected = (prompt == 2) + 0.1 * stats.rows[row].tokens_per_round
                assert episode.reward == pytest.approx(expected)
                assert bool(episode.taken.all()) == (policy is not None) or not len(episode.taken)


def test_answers_of_several_prompts_are_those_of_each(pair):
    """They are padded to one width, which no decision's place may show."""
    texts, met, _ = rollouts(pair).decode([2, 0, 1])
    for prompt, text, decisions in zip([2, 0, 1], texts, met, strict=True):
        (alone,), (decided,), _ = rollouts(pair).decode([prompt])
        assert text == alone
        assert [(each.place, each.drafted) for each in decisions] == [(each.place, each.drafted) for each in decided]
    assert sum(map(len, met)) > 3


@pytest.mark.parametrize("batch_size", [1, 3])
def test_a_label_is_what_becomes_of_the_answer(pair, batch_size):
    """Right is a text without a certain token; the counterfactual text is decoded plainly, without any cache."""

    def judge(index, text):
        return 54 not in text[4:]

    ours = rollouts(pair, judge=judge)
    found = label_mismatches(ours, flips_per_prompt=99, batch_size=batch_size)
    expected = []
    for index, prompt in enumerate(PROMPTS):
        (text,), (met,), _ = ours.decode([index])
        right = judge(index, text)
        for decision in met:
            flipped = [*prompt, *text[: decision.place], decision.drafted]
            while len(flipped) < len(prompt) + 14:
                flipped.append(argmax(pair[0], flipped))
            expected.append((index, judge(index, flipped[len(prompt) :]) or not right))
    told = list(zip(found.prompts.tolist(), found.labels.tolist(), strict=True))
    assert sorted(told) == sorted(expected)
    assert 0 < int(found.labels.sum()) < len(found.labels)
    assert len(label_mismatches(ours, flips_per_prompt=1).labels) == 4


def test_labels_of_a_killed_run_are_those_of_one_that_was_not(pair, tmp_path):
    whole = label_mismatches(rollouts(pair), flips_per_prompt=2, batch_size=2)
    file = LabelFile(tmp_path / "labels.safetensors", "these")

    def killed(labelled, number):
        file.write(labelled, number)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        label_mismatches(rollouts(pair), flips_per_prompt=2, batch_size=2, progress=killed)
    assert 0 < len(file.read()[0].labels) < len(whole.labels)
    resumed = label_mismatches(rollouts(pair), flips_per_prompt=2, batch_size=2, done=file.read(), progress=file.write)
    kept, number = file.read()
    assert number == 4
    for found in (resumed, kept):
        for mine, theirs in zip(vars(found).values(), vars(whole).values(), strict=True):
            assert torch.equal(mine, theirs)
    with pytest.raises(InvalidConfigError, match="expected others, got these"):
        LabelFile(file.path, "others").read()


@pytest.mark.parametrize("free", [True, False])
def test_training_finds_the_best_policy_of_a_pair(pair, free):
    """Where every text is right the best policy takes every draft, where only the target's own is, none."""
    short = {"max_new_tokens": 5, "speed_weight": 0.2 if free else 0.02}
    own = [tuple(rollouts(pair, **short).decode([index])[0][0]) for index in range(4)]

    def judge(index, text):
        return free or tuple(text) == own[index]

    before = [state_of(model)[:2] for model in pair]
    options = CoSpecOptions(
        hidden_size=8, warm_steps=1, flips_per_prompt=8,
        reinforcement=ReinforceOptions(num_steps=25, groups_per_step=2, group_size=6, learning_rate=0.05),
    )  # fmt: skip
    ours = rollouts(pair, judge=judge, **short)
    held_out = rollouts(pair, PROMPTS[:2], judge=judge, **short)
    result = train_cospec(ours, held_out, options)
    _, met, _ = rollouts(pair, policy=result.policy, **short).decode([3] * 8)
    taken = [each.taken for row in met for each in row]
    assert sum(taken) / len(taken) > 0.9 if free else sum(taken) / len(taken) < 0.1
    assert result.held_out_agreement > 0.8 > result.steps[0].taken > 0.1
    assert result.policy.fingerprint == pair_fingerprint(pair[0].config, pair[1].config)
    assert len(result.steps) == 25
    assert [state_of(model)[:2] for model in pair] == before


def test_a_trained_policy_is_what_a_config_takes(pair, tmp_path):
    policy = PolicyNetwork(4, pair_fingerprint(pair[0].config, pair[1].config))
    policy.save(tmp_path / "policy.safetensors")
    config = CoSpecConfig(policy=tmp_path, length=3, on_drafter_error="raise", guard=None, floor_ratio=0.0)
    inputs = torch.tensor([PROMPTS[0]])
    options = {"max_new_tokens": 12, "do_sample": False, "speculative_config": config}
    pair[0].generate(inputs, assistant_model=pair[1], **options)
    with pytest.raises(InvalidConfigError, match="another pair of models"):
        pair[0].generate(inputs, assistant_model=tiny_llama(layers=2), **options)


def test_prompts_without_a_mismatch_are_refused(pair):
    model = pair[0]
    with pytest.raises(InvalidConfigError, match="no mismatch to label"):
        train_cospec(rollouts((model, model)), rollouts((model, model)), CoSpecOptions())
