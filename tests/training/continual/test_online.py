"""A drafter that learns between calls: it learns the new domain, keeps the old one, and touches nothing else."""

import logging
from dataclasses import dataclass, replace

import pytest
import torch
from accelerate.state import AcceleratorState

from hf_specdec import RCSDConfig, SpeculativeConfig
from hf_specdec.errors import DrafterError, InvalidConfigError
from hf_specdec.networks import DraftNetwork
from hf_specdec.training.acceptance import acceptance_lengths
from hf_specdec.training.continual import ContinualTraining, OnlineAdapter, OnlineOptions
from hf_specdec.training.losses import LossValue
from hf_specdec.training.options import TrainingOptions
from hf_specdec.training.recipes import RECIPES
from hf_specdec.training.texts import Text
from hf_specdec.training.trainer import train
from tests.networks import drafter_for, small_target
from tests.toys import state_of
from tests.training.test_trainer import drafter, sample


NUM_PROMPT, NUM_NEW = 5, 20
CONFIG = SpeculativeConfig(drafting="model", length=3, on_drafter_error="raise")
QUICK = OnlineOptions(every=2, steps=2, batch_size=2, learning_rate=1e-3)


@pytest.fixture(autouse=True)
def _fresh_accelerate():
    """One precision per process is accelerate's rule; each test is a process of its own in that respect."""
    AcceleratorState._reset_state(True)
    yield
    AcceleratorState._reset_state(True)


def domain(target, first_token):
    """Texts whose prompts are made of eight tokens, from `first_token` on."""
    generator = torch.Generator().manual_seed(first_token)
    places = [torch.randint(first_token, first_token + 8, (NUM_PROMPT,), generator=generator) for _ in range(3)]
    return [sample(target, prompt.tolist(), NUM_NEW) for prompt in places]


def tau(target, network, texts):
    prompts = [text.tokens[:NUM_PROMPT] for text in texts]
    found = acceptance_lengths(target, network, prompts, steps=3, max_new_tokens=NUM_NEW)
    return sum(found) / len(found)


def inputs_of(text):
    ids = torch.tensor([text.tokens[:NUM_PROMPT]])
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": NUM_NEW}


@dataclass(frozen=True)
class Trained:
    """A drafter that knows the old domain, and texts of both."""

    target: object
    network: DraftNetwork
    old: list[Text]
    new: list[Text]


@pytest.fixture(scope="module")
def trained():
    target = small_target()
    network, old, new = drafter(target, "hass"), domain(target, 5), domain(target, 40)
    options = TrainingOptions(max_steps=140, batch_size=3, micro_batch_size=3, learning_rate=1e-2, clip=5.0, warmup=0.1)
    train(target, network, old, replace(RECIPES["hass"], num_steps=3), options)
    AcceleratorState._reset_state(True)
    return Trained(target, network, old, new)


def live(adapter, texts):
    for text in texts:
        assert adapter.generate(**inputs_of(text))[0].tolist() == list(text.tokens)


@pytest.mark.parametrize("is_kept", [True, False])
def test_it_learns_a_new_domain_and_forgets_the_old_one_only_without_replay(trained, is_kept):
    target, network = trained.target, trained.network.twin()
    before, foreign = tau(target, network, trained.old), tau(target, network, trained.new)
    kept, random = state_of(target), torch.get_rng_state()
    adapter = OnlineAdapter(
        target,
        network,
        replay=trained.old if is_kept else (),
        continual=None if is_kept else ContinualTraining(replay_share=0.0, reference_weight=0.0),
        options=OnlineOptions(every=3, steps=50, batch_size=6, learning_rate=6e-3),
        config=CONFIG,
    )
    live(adapter, trained.new * 2)
    assert adapter.num_updates == 2
    assert tau(target, network, trained.new) > 2 * foreign
    if is_kept:
        assert tau(target, network, trained.old) >= 0.95 * before
    else:
        assert tau(target, network, trained.old) < 0.6 * before
    assert torch.equal(torch.get_rng_state(), random)
    for mine, theirs in zip(state_of(target)[2].items(), kept[2].items(), strict=True):
        assert mine[0] == theirs[0]
        assert torch.equal(mine[1], theirs[1])
    assert all(parameter.requires_grad and parameter.grad is None for parameter in target.parameters())
    assert not network.training


def adapter_for(trained, network=None, **options):
    return OnlineAdapter(
        trained.target,
        trained.network.twin() if network is None else network,
        **({"replay": trained.old, "options": QUICK, "config": CONFIG} | options),
    )


def weights_of(network):
    return {name: value.clone() for name, value in network.state_dict().items()}


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


def test_it_learns_when_due_or_asked_and_never_within_a_call(trained):
    adapter = adapter_for(trained)
    before = weights_of(adapter.network)
    live(adapter, trained.new[:1])
    assert (adapter.num_updates, same(weights_of(adapter.network), before)) == (0, True)
    rounds = []

    def meddle(round_):
        rounds.append(round_)
        for forbidden in (adapter.update, adapter.reset, lambda: adapter.generate(**inputs_of(trained.new[0]))):
            with pytest.raises(InvalidConfigError, match="while a call or an update runs"):
                forbidden()
        assert same(weights_of(adapter.network), before)

    adapter.generate(**inputs_of(trained.new[1]), round_callback=meddle)
    assert len(rounds) > 5
    assert (adapter.num_updates, same(weights_of(adapter.network), before)) == (1, False)
    assert [each.text for each in adapter.recordings] == trained.new[:2]
    assert [log.step for log in adapter.update()] == [1, 2]
    adapter.reset()
    assert same(weights_of(adapter.network), before)
    with pytest.raises(InvalidConfigError, match="no recorded rounds"):
        adapter.update()


def test_it_stays_near_to_the_drafter_that_it_was_made_with(trained):
    losses = []
    for weight in (0.0, 1.0):
        adapter = adapter_for(
            trained, options=replace(QUICK, every=0, steps=1), continual=ContinualTraining(reference_weight=weight)
        )
        live(adapter, trained.new[:1])
        with torch.no_grad():
            for parameter in adapter.network.parameters():
                parameter.mul_(1.5)
        losses.append(adapter.update()[0].loss)
    assert losses[1] > losses[0] + 0.01


def test_every_0_waits_to_be_asked_and_only_the_newest_texts_are_kept(trained):
    adapter = adapter_for(trained, options=replace(QUICK, every=0, capacity=2))
    live(adapter, trained.new)
    assert adapter.num_updates == 0
    assert [each.text for each in adapter.recordings] == trained.new[1:]


def test_switched_off_it_only_decodes(trained):
    adapter = adapter_for(trained)
    before = weights_of(adapter.network)
    adapter.enabled = False
    live(adapter, trained.new)
    assert (len(adapter.recordings), adapter.num_updates) == (0, 0)
    assert same(weights_of(adapter.network), before)


@pytest.mark.parametrize("recipe", ["hass", "rcsd-dpo"])
def test_a_restored_adapter_goes_on_as_the_saved_one(trained, tmp_path, recipe):
    options = {"recipe": replace(RECIPES[recipe], num_steps=3)}
    first, second = (
        adapter_for(trained, **options),
        adapter_for(trained, drafter_for(trained.target, "eagle"), **options),
    )
    first.save(tmp_path / "state")
    live(first, trained.new)
    first.save(tmp_path / "state")
    second.restore(tmp_path / "state")
    assert (second.num_updates, second.calls_since_update) == (1, 1)
    for adapter in (first, second):
        live(adapter, trained.new[:1])
        assert adapter.num_updates == 2
    assert same(weights_of(first.network), weights_of(second.network))
    for adapter in (first, second):
        adapter.reset()
    assert same(weights_of(first.network), weights_of(second.network))
    assert [path.name for path in tmp_path.iterdir()] == ["state"]


def test_what_is_no_state_of_this_drafter_is_refused(trained, tmp_path):
    adapter = adapter_for(trained)
    before = weights_of(adapter.network)
    with pytest.raises(InvalidConfigError, match="no state"):
        adapter.restore(tmp_path)
    with pytest.raises(InvalidConfigError, match="another folder"):
        adapter.save(tmp_path)
    adapter_for(trained, drafter_for(trained.target, "eagle3")).save(tmp_path / "other")
    with pytest.raises(InvalidConfigError, match="another network"):
        adapter.restore(tmp_path / "other")
    assert same(weights_of(adapter.network), before)


@dataclass(frozen=True)
class Broken:
    """A loss that is not a number, or raises."""

    error: str = ""

    def __call__(self, unrolled):
        if self.error:
            raise RuntimeError(self.error)
        return LossValue(unrolled.student_logits[0].sum() * float("nan"))


def test_an_update_that_fails_is_undone(trained, caplog):
    recipe = replace(RECIPES["hass"], loss=Broken(), num_steps=2)
    adapter = adapter_for(trained, recipe=recipe)
    before = weights_of(adapter.network)
    with pytest.raises(DrafterError, match="learning_rate"):
        live(adapter, trained.new)
    assert same(weights_of(adapter.network), before)
    assert all(parameter.grad is None for parameter in adapter.network.parameters())
    tolerant = adapter_for(trained, recipe=recipe, config=replace(CONFIG, on_drafter_error="continue"))
    with caplog.at_level(logging.WARNING):
        live(tolerant, trained.new)
    assert not tolerant.enabled
    assert sum("no longer learns" in record.message for record in caplog.records) == 1
    short = replace(recipe, loss=Broken("not enough memory"))
    tolerant = adapter_for(trained, recipe=short, config=replace(CONFIG, on_drafter_error="continue"))
    with caplog.at_level(logging.WARNING):
        live(tolerant, trained.new)
    assert same(weights_of(tolerant.network), before)
    assert sum("RuntimeError: not enough memory" in record.message for record in caplog.records) == 1


def test_what_cannot_work_is_refused_before_the_first_call(trained):
    with pytest.raises(InvalidConfigError, match="a share of 0"):
        adapter_for(trained, replay=())
    with pytest.raises(InvalidConfigError, match="float32"):
        adapter_for(trained, trained.network.twin().bfloat16())
    with pytest.raises(InvalidConfigError, match="SpeculativeConfig"):
        adapter_for(trained, config=RCSDConfig(steps=3))
    with pytest.raises(InvalidConfigError, match="EAGLE-1"):
        adapter_for(trained, drafter_for(trained.target, "eagle3"), recipe=RECIPES["hass"])
    with pytest.raises(InvalidConfigError, match="capacity"):
        OnlineOptions(capacity=0)
    with pytest.raises(InvalidConfigError, match="batch_size"):
        OnlineOptions(batch_size=0)
    with pytest.raises(InvalidConfigError, match="replay_share"):
        ContinualTraining(replay_share=1.0)
    with pytest.raises(InvalidConfigError, match="assistant_model"):
        adapter_for(trained).generate(**inputs_of(trained.new[0]), assistant_model=trained.network)
