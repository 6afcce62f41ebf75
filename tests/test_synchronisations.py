"""How often the host waits for the device: once per round, and once more per decision on a drafter's confidence.

The device is a fake one, see [`FakeDevice`], on which a tensor in the wrong place is an error, too.
"""

import pytest
import torch

from hf_specdec import ConfidenceLength, ExactConfig, GoodputLength, RCSDConfig, SelfDraftConfig, SpeculativeConfig
from hf_specdec.acceptance import CSD, EARS, EASD, RelaxedThinking
from hf_specdec.drafters import SelfDrafter
from hf_specdec.errors import DrafterError
from hf_specdec.lengths import CostTable
from hf_specdec.readback import read_together
from tests.networks import drafter_for, small_target
from tests.toys import noisy_copy, prompts, tiny_llama


fake_device = pytest.importorskip("tests.fake_device")
pytestmark = [
    pytest.mark.own_process,
    pytest.mark.skipif(torch.cuda.is_available(), reason="a second accelerator would be one too many"),
]

EXACT = {"on_drafter_error": "raise"}


class Syncs:
    """Times that the host waited in each round, seen by a callback of rounds."""

    def __init__(self, device):
        self.device, self.seen, self.rounds = device, [], []

    def __call__(self, round_):
        self.seen.append(self.device.syncs)
        self.rounds.append(round_)

    @property
    def per_round(self):
        """Of each round after the first two: the drafter's cache is made in the first."""
        return [after - before for before, after in zip(self.seen[1:], self.seen[2:], strict=False)][1:]


def pair(network=None):
    """A target and what drafts for it, made anew."""
    if network is not None:
        target = small_target(attn_implementation="eager")
        return target, drafter_for(target, network)
    target = tiny_llama(layers=2, attn_implementation="eager")
    return target, noisy_copy(target)


def decode(target, assistant, inputs, config, **options):
    torch.manual_seed(5)
    options = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0} | options
    return target.generate(
        **inputs, **options, assistant_model=assistant, speculative_config=config, return_dict_in_generate=True
    )


def decode_away(target, assistant, inputs, config, **options):
    """The same on the device: the output, and the counts."""
    for each in {id(each): each for each in (target, assistant) if each is not None}.values():
        fake_device.moved(each)
    with fake_device.FakeDevice() as device, torch.no_grad():
        syncs = Syncs(device)
        inputs = {name: value.to(fake_device.DEVICE) for name, value in inputs.items()}
        output = decode(target, assistant, inputs, config, round_callback=syncs, **options)
        return output, output.sequences.cpu(), syncs


CONSTANT = SpeculativeConfig(drafting="model", length=4, **EXACT)
SAMPLED = {"do_sample": True, "temperature": 0.6, "top_k": 0}
CASES = {
    "an assistant": (None, CONSTANT, {}),
    "an assistant, sampled": (None, CONSTANT, SAMPLED),
    "an assistant, sampled from the best": (None, CONSTANT, {"do_sample": True, "top_k": 8, "top_p": 0.9}),
    "an assistant that drafts to the end": (None, CONSTANT, {"eos_token_id": [5, 9, 21]}),
    "an assistant, sampled to the end": (None, CONSTANT, SAMPLED | {"eos_token_id": [5, 9, 21]}),
    "an assistant, with a penalty": (None, CONSTANT, {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3}),
    "eagle": ("eagle", RCSDConfig(steps=4, **EXACT), {}),
    "eagle3": ("eagle3", RCSDConfig(steps=4, **EXACT), {}),
    "eagle3, sampled": ("eagle3", RCSDConfig(steps=4, **EXACT), SAMPLED),
    "eagle3, reduced": ("eagle3-reduced", RCSDConfig(steps=4, **EXACT), {}),
    "n-grams": (None, SpeculativeConfig(drafting="ngram", length=4, **EXACT), {}),
    "n-grams, sampled": (None, SpeculativeConfig(drafting="ngram", length=4, **EXACT), SAMPLED),
    "both": (None, SpeculativeConfig(drafting="hybrid", length=4, **EXACT), {}),
}


@pytest.mark.parametrize("case", CASES)
def test_one_row_waits_once_per_round(case):
    """Where no length is decided on the way. The texts are those of the CPU, sampled ones with their seed."""
    network, config, options = CASES[case]
    inputs = prompts(1)
    expected = decode(*pair(network), inputs, config, **options)
    output, sequences, syncs = decode_away(*pair(network), inputs, config, **options)
    assert torch.equal(sequences, expected.sequences)
    assert output.speculative_stats.num_draft_tokens == expected.speculative_stats.num_draft_tokens > 0
    assert output.speculative_stats.num_accepted_tokens == expected.speculative_stats.num_accepted_tokens
    assert set(syncs.per_round) == {1} if syncs.per_round else "eos_token_id" in options


@pytest.mark.parametrize("options", [{}, SAMPLED, {"do_sample": True, "top_k": 8}], ids=["greedy", "sampled", "best"])
@pytest.mark.parametrize("away", [(True, False), (False, True)], ids=["target", "assistant"])
def test_target_and_assistant_on_two_devices(away, options):
    models, inputs = pair(), prompts(1)
    expected = decode(*pair(), inputs, CONSTANT, **options)
    for model, is_away in zip(models, away, strict=True):
        if is_away:
            fake_device.moved(model)
    with fake_device.FakeDevice(), torch.no_grad():
        inputs = {name: value.to(models[0].device) for name, value in inputs.items()}
        output = decode(*models, inputs, CONSTANT, **options)
        assert torch.equal(output.sequences.cpu(), expected.sequences)
    assert output.speculative_stats.num_accepted_tokens == expected.speculative_stats.num_accepted_tokens > 0


@pytest.mark.parametrize("options", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_each_decision_on_the_confidence_waits_once_more(options):
    config = ExactConfig(length=ConfidenceLength(0.3, longest=4), drafting="model", **EXACT)
    inputs = prompts(1)
    expected = decode(*pair(), inputs, config, **options)
    output, sequences, syncs = decode_away(*pair(), inputs, config, **options)
    assert torch.equal(sequences, expected.sequences)
    assert output.speculative_stats.num_draft_tokens == expected.speculative_stats.num_draft_tokens
    drafted = [int(each.num_drafted[0]) for each in syncs.rounds][3:-3]  # the last drafts have less room
    decisions = [min(each + 1, 4) for each in drafted]
    assert syncs.per_round[:-3] == [1 + each for each in decisions]
    assert len(set(decisions)) > 1


def test_the_default_waits_once_per_round_and_draft_step():
    """It decides by the drafter's confidence, too; n-gram matches cost nothing."""
    costs = CostTable(0.1, tuple((width, 1.0 + 0.01 * width) for width in range(1, 18)))
    config = ExactConfig(length=GoodputLength(costs=costs), **EXACT)
    inputs = {"input_ids": torch.tensor([[3, 9, 4, 3, 9, 4, 3, 9]])}
    expected = decode(*pair(), inputs, config)
    output, sequences, syncs = decode_away(*pair(), inputs, config)
    assert torch.equal(sequences, expected.sequences)
    assert output.speculative_stats.num_draft_tokens == expected.speculative_stats.num_draft_tokens
    from_model = [sum(n for kind, n in each.kinds[0] if kind == "model") for each in syncs.rounds[3:]]
    assert all(waits <= 1 + each for waits, each in zip(syncs.per_round, from_model, strict=True))
    assert max(from_model) > 1


BATCHES = {
    "an assistant": (None, CONSTANT, {}, 1),
    "an assistant, sampled": (None, CONSTANT, SAMPLED, 1),
    "an assistant, rows end": (None, CONSTANT, {"eos_token_id": [5, 9, 21, 40, 33]}, 1),
    "eagle3": ("eagle3", RCSDConfig(steps=3, **EXACT), {}, 1),
    "n-grams": (None, SpeculativeConfig(drafting="ngram", length=4, **EXACT), {}, 1),
    "both": (
        None,
        SpeculativeConfig(drafting="hybrid", length=4, **EXACT),
        {},
        2,
    ),  # some rows match, others are drafted
    "in step": (None, ExactConfig(length=3, drafting="model", batching="lockstep", **EXACT), {}, 9),
}


@pytest.mark.parametrize("case", BATCHES)
def test_ragged_batches_wait_no_more(case):
    """Caches whose rows are moved, masks and positions are prepared on the host, which knows all lengths. Rows that must go in
    step show processors and criteria each position: the draft, and two questions at each."""
    network, config, options, most = BATCHES[case]
    inputs = prompts(3)
    expected = decode(*pair(network), inputs, config, **options)
    output, sequences, syncs = decode_away(*pair(network), inputs, config, **options)
    assert torch.equal(sequences, expected.sequences)
    assert output.speculative_stats.num_draft_tokens == expected.speculative_stats.num_draft_tokens > 0
    assert output.speculative_stats.num_accepted_tokens == expected.speculative_stats.num_accepted_tokens
    assert max(syncs.per_round) <= most
    assert min(syncs.per_round) >= 1


def test_self_drafting_waits_once_for_each_exit_that_is_looked_at():
    config = SelfDraftConfig(exit_layers=[1, 2], confidence_threshold=0.2, length=4, **EXACT)
    inputs, exits, exit_after = prompts(1), [], SelfDrafter._exit_after

    def counted(self, *args):
        exits.append(len(syncs.seen))
        return exit_after(self, *args)

    target = tiny_llama(layers=3, attn_implementation="eager")
    expected = decode(target, None, inputs, config)
    fake_device.moved(target)
    with fake_device.FakeDevice() as device, torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        syncs = Syncs(device)
        patch.setattr(SelfDrafter, "_exit_after", counted)
        inputs = {name: value.to(fake_device.DEVICE) for name, value in inputs.items()}
        output = decode(target, None, inputs, config, round_callback=syncs)
        assert torch.equal(output.sequences.cpu(), expected.sequences)
    assert output.speculative_stats.num_accepted_tokens == expected.speculative_stats.num_accepted_tokens > 0
    looked_at = [exits.count(number) for number in range(3, len(syncs.seen))]
    assert syncs.per_round == [1 + each for each in looked_at]
    assert len(set(looked_at)) > 1


@pytest.mark.parametrize("name", ["easd", "typical", "relaxed_thinking", "csd", "ears"])
def test_a_relaxed_rule_waits_for_its_verdict_and_its_counts(name):
    made = {"easd": EASD(), "csd": CSD(), "relaxed_thinking": RelaxedThinking(end_token_id=7), "ears": EARS()}
    config = SpeculativeConfig(acceptance=made.get(name, name), drafting="model", length=4, **EXACT)
    inputs, options = prompts(1), {"do_sample": True, "top_k": 0, "temperature": 0.7}
    expected = decode(*pair(), inputs, config, **options)
    output, sequences, syncs = decode_away(*pair(), inputs, config, **options)
    assert torch.equal(sequences, expected.sequences)
    assert output.speculative_stats.events == expected.speculative_stats.events
    assert max(syncs.per_round) <= (6 if name == "csd" else 2)  # its memory is on the CPU


@pytest.mark.parametrize("options", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_logits_that_are_no_numbers_are_found_when_the_draft_is_read(options):
    """Nothing of such a draft is accepted, and decoding goes on without its drafter."""
    target, assistant = pair()
    with torch.no_grad():
        assistant.lm_head.weight[3] = float("nan")
    inputs, config = prompts(1), SpeculativeConfig(drafting="model", length=4)
    plain = target.generate(**inputs, max_new_tokens=20, do_sample=False, pad_token_id=0)
    output, sequences, _ = decode_away(target, assistant, inputs, config, **options)
    assert output.speculative_stats.problems == [
        "the drafter AssistantDrafter failed: DrafterError: the logits of the draft model LlamaForCausalLM contain NaN"
    ]
    assert output.speculative_stats.num_accepted_tokens == 0
    if not options:
        assert torch.equal(sequences, plain)


def test_a_drafter_that_must_not_fail_does_so_when_its_draft_is_read():
    target, assistant = pair()
    with torch.no_grad():
        assistant.lm_head.weight[3] = float("nan")
    with pytest.raises(DrafterError, match="contain NaN"):
        decode_away(target, assistant, prompts(1), CONSTANT)


def test_what_the_device_counts():
    with fake_device.FakeDevice() as device:
        away = torch.arange(6).to(fake_device.DEVICE, non_blocking=True)
        doubled = (away + away).view(2, 3)[:, 1:].sum()
        assert (device.reads, device.blocking_uploads) == (0, 0)
        assert doubled.item() == 24
        assert bool(doubled > 3)
        assert int(doubled) == 24
        assert away.tolist() == away.cpu().tolist() == [0, 1, 2, 3, 4, 5]
        assert device.reads == 5
        away[away > 2], away.nonzero(), away.masked_select(away > 2), torch.equal(away, away)
        assert device.reads == 9
        assert device.blocking_uploads == 0
        away[torch.tensor([1, 2])], torch.tensor([1], device=fake_device.DEVICE), torch.arange(2).to(away.device)
        assert (device.reads, device.blocking_uploads) == (9, 3)
        with pytest.raises(RuntimeError, match="to be on the same device"):
            away + torch.arange(6)
        with pytest.raises(RuntimeError, match="to be on the same device"):
            torch.where(away > 2, away, torch.arange(6))


def test_tensors_of_all_types_are_read_at_once():
    values = [
        torch.tensor([True, False]), torch.tensor(2.5), torch.tensor([[1 << 40]]), torch.zeros(0),
        torch.tensor(3, dtype=torch.int8), torch.tensor([float("nan")], dtype=torch.bfloat16), torch.arange(3),
    ]  # fmt: skip
    with fake_device.FakeDevice() as device:
        away = [each.to(fake_device.DEVICE, non_blocking=True) for each in values[:-1]] + values[-1:]
        read = read_together(away)
        assert device.reads == 1
    assert read[-1] is values[-1]
    for found, given in zip(read, values, strict=True):
        assert found.dtype == given.dtype
        assert torch.equal(found.isnan(), given.isnan())
        assert torch.equal(found.nan_to_num(), given.nan_to_num())
