"""Toy problems whose best policy is known, without any language model."""

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from hf_specdec import CoSpecConfig, InvalidConfigError
from hf_specdec.acceptance import FEATURES, PolicyNetwork
from hf_specdec.cospec import Episode, ReinforceOptions, agreement, reinforce, warm_start


WIDTH = len(FEATURES)
DECISIONS = 3


def harmless(features):
    """The best policy: take the draft iff it is plausible enough for how unsure the target is."""
    return features[..., 1] + 0.5 * features[..., 4] > 0.2


class Toy:
    """Texts of three mismatches. A right text has no harmful draft in it; each draft taken makes it faster."""

    def __init__(self, policy, seed=0, bonus=0.1):
        self.policy, self.bonus = policy, bonus
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, prompt, number):
        features = torch.randn(number, DECISIONS, WIDTH, generator=self.generator)
        taken = torch.rand(number, DECISIONS, generator=self.generator) < self.policy(features)
        rewards = self.rewards(features, taken).tolist()
        return [Episode(*each) for each in zip(features, taken, rewards, strict=True)]

    def rewards(self, features, taken):
        return (~(taken & ~harmless(features)).any(-1)).float() + self.bonus * taken.float().sum(-1)


def samples(number, seed=9):
    return torch.randn(number, WIDTH, generator=torch.Generator().manual_seed(seed))


def fresh(seed=0):
    torch.manual_seed(seed)
    return PolicyNetwork()


def mean_reward(policy, number=2000):
    toy = Toy(policy)
    features = samples(number * DECISIONS, seed=5).view(number, DECISIONS, WIDTH)
    chosen = policy(features) > 0.5
    return float(toy.rewards(features, chosen).mean())


def best(features):
    return harmless(features).float()


def test_labels_teach_the_best_policy_to_within_two_percent():
    policy, features = fresh(), samples(8000)
    warm_start(policy, features, harmless(features))
    unseen = samples(4000, seed=11)
    assert agreement(policy, unseen, harmless(unseen)) > 0.98
    assert mean_reward(policy) > 0.98 * mean_reward(best)
    assert mean_reward(fresh()) < 0.8 * mean_reward(best)


def test_rewards_alone_teach_the_best_policy_to_within_two_percent():
    policy = fresh()
    options = ReinforceOptions(num_steps=300, groups_per_step=2, group_size=256, learning_rate=1e-2)
    steps = list(reinforce(policy, Toy(policy, seed=1), 10, options))
    unseen = samples(4000, seed=11)
    assert agreement(policy, unseen, harmless(unseen)) > 0.97
    assert mean_reward(policy) > 0.98 * mean_reward(best)
    assert sum(each.reward for each in steps[-20:]) > sum(each.reward for each in steps[:20])


def test_reinforcement_mends_wrong_labels():
    """Labels that call every draft harmful cost the speed; rewards bring it back."""
    policy, features = fresh(), samples(2000)
    warm_start(policy, features, torch.zeros(2000) > 1, num_steps=20)
    before = mean_reward(policy)
    options = ReinforceOptions(num_steps=80, groups_per_step=2, group_size=128, learning_rate=1e-2)
    list(reinforce(policy, Toy(policy, seed=1), 10, options))
    assert mean_reward(policy) > before + 0.05


def test_equal_rewards_and_empty_episodes_teach_nothing():
    policy = fresh()
    before = {name: value.clone() for name, value in policy.state_dict().items()}

    def same(prompt, number):
        return [Episode(samples(2, seed), torch.tensor([True, False]), 1.0) for seed in range(number)]

    def none(prompt, number):
        return [Episode(torch.zeros(0, WIDTH), torch.zeros(0) > 0, float(each)) for each in range(number)]

    for rollouts in (same, none):
        (step,) = reinforce(policy, rollouts, 1, ReinforceOptions(num_steps=1))
        assert all(torch.equal(before[name], value) for name, value in policy.state_dict().items())
    assert (step.num_decisions, step.taken) == (0, 0.0)


def test_the_divergence_holds_the_policy_near_its_start():
    moved = []
    for weight in (0.0, 5.0):
        policy = fresh()
        list(reinforce(policy, Toy(policy, 1), 4, ReinforceOptions(num_steps=40, group_size=32, kl_weight=weight)))
        unseen = samples(500)
        moved.append(float((policy(unseen) - fresh()(unseen)).abs().mean()))
    assert moved[1] < 0.5 * moved[0]


# --- the file -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("change", ["absent", "short", "scalar"])
def test_a_damaged_policy_is_told(tmp_path, change):
    path = tmp_path / "policy.safetensors"
    PolicyNetwork(5).save(path)
    with safe_open(path, "pt") as file:
        about, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    if change == "absent":
        del tensors["hidden.bias"]
    else:
        tensors["hidden.bias"] = torch.zeros(3) if change == "short" else torch.tensor(1.0)
    save_file(tensors, path, about)
    with pytest.raises(InvalidConfigError, match=r"policy\.safetensors lacks tensors of a policy"):
        PolicyNetwork.load(path)


def test_a_policy_is_saved_and_loaded(tmp_path):
    policy = PolicyNetwork(5, "abc")
    policy.standardise(samples(50) * 3 + 1)
    path = tmp_path / "policy.safetensors"
    policy.save(path)
    for where in (path, tmp_path):
        twin = PolicyNetwork.load(where)
        assert torch.equal(twin(samples(9)), policy(samples(9)))
        assert twin.fingerprint == "abc"
    config = CoSpecConfig(policy=tmp_path)
    assert config.fingerprint == "abc"
    assert CoSpecConfig().fingerprint == ""
    CoSpecConfig(policy=str(tmp_path)).save_pretrained(tmp_path / "config")
    assert CoSpecConfig.from_pretrained(tmp_path / "config").policy == str(tmp_path)


def test_files_that_are_no_policy_are_refused(tmp_path):
    with pytest.raises(InvalidConfigError, match="there is no policy"):
        PolicyNetwork.load(tmp_path / "nowhere")
    (tmp_path / "text").write_text("no")
    with pytest.raises(InvalidConfigError, match="not a safetensors file"):
        PolicyNetwork.load(tmp_path / "text")
    from safetensors.torch import save_file

    save_file({"x": torch.zeros(1)}, tmp_path / "other", metadata={"format": "else"})
    with pytest.raises(InvalidConfigError, match="expected"):
        PolicyNetwork.load(tmp_path / "other")
    with pytest.raises(InvalidConfigError, match="hidden_size"):
        PolicyNetwork(0)
    with pytest.raises(InvalidConfigError, match="no labelled mismatch"):
        warm_start(fresh(), torch.zeros(0, WIDTH), torch.zeros(0) > 0)
    with pytest.raises(InvalidConfigError, match="group_size"):
        ReinforceOptions(group_size=1)
