"""Whose seconds are whose, where a device works on after the host has asked it for something; the clock is a fake one."""

import pytest
import torch

import hf_specdec.generation
import hf_specdec.loop
from hf_specdec import RCSDConfig, SpeculativeConfig
from hf_specdec.bench.clock import Clock
from hf_specdec.drafters import assistant, head
from hf_specdec.timing import mark, seconds_between, wait_for
from tests.networks import drafter_for, small_target
from tests.toys import noisy_copy, prompts, tiny_llama


fake_device = pytest.importorskip("tests.fake_device")
pytestmark = [
    pytest.mark.own_process,
    pytest.mark.skipif(torch.cuda.is_available(), reason="a second accelerator would be one too many"),
]

LAUNCH, TARGET, DRAFT = 1e-5, 1e-3, 1e-4  # seconds of an operation: for the host, and for the device


@pytest.fixture
def device(monkeypatch):
    with fake_device.FakeDevice() as device, torch.no_grad():
        for module in (hf_specdec.loop, hf_specdec.generation, assistant, head):
            monkeypatch.setattr(module, "time", device)
        device.launch = LAUNCH
        yield device


def working(device, model, seconds):
    """The model, on the device, which takes so long for each of its operations."""

    def begins(module, args):
        before.append(device.work)
        device.work = seconds

    def ends(module, args, output):
        device.work = before.pop()

    before = []
    fake_device.moved(model)
    model.register_forward_pre_hook(begins)
    model.register_forward_hook(ends)
    return model


def pair(kind):
    target = small_target(attn_implementation="eager")
    return target, noisy_copy(target) if kind == "model" else drafter_for(target)


@pytest.mark.parametrize("kind", ["model", "network"])
def test_drafting_and_verifying_are_told_apart_without_waiting(device, monkeypatch, kind):
    models = [working(device, *each) for each in zip(pair(kind), (TARGET, DRAFT), strict=True)]
    proposals, ends, propose = [], [], hf_specdec.loop._propose

    def watched(*args):
        begun = device.now
        result = propose(*args)
        proposals.append((begun, device.now, device.done))
        return result

    monkeypatch.setattr(hf_specdec.loop, "_propose", watched)
    config = {"model": SpeculativeConfig(drafting="model", length=3), "network": RCSDConfig(steps=3)}[kind]
    rounds, inputs = [], prompts(1)["input_ids"].to(fake_device.DEVICE)

    def note(round_):
        rounds.append(round_)
        ends.append(device.now)

    models[0].generate(
        inputs, max_new_tokens=16, do_sample=False, assistant_model=models[1], speculative_config=config,
        round_callback=note,
    )  # fmt: skip
    seen = list(zip(proposals, ends[1:], rounds[1:], strict=True))[
        1:-1
    ]  # the first reads the prompt, the last is short
    assert len(seen) > 2
    for (begun, asked, drafted), ended, round_ in seen:
        assert round_.draft_seconds == pytest.approx(drafted - begun)
        assert round_.verify_seconds == pytest.approx(ended - drafted)
        assert drafted - begun > 2 * (asked - begun)  # what the host's clock alone would say
        assert round_.verify_seconds > 3 * round_.draft_seconds
    assert device.waited_for_events == 0


@pytest.mark.parametrize("kind", ["model", "network"])
def test_the_prompts_passes_are_told_apart(device, kind):
    target, drafter = (working(device, *each) for each in zip(pair(kind), (TARGET, DRAFT), strict=True))
    spent = {target: [], drafter: []}
    for model, passes in spent.items():
        # Hooks of a module run in the order in which they were registered: this one sees the work of the whole pass.
        model.register_forward_hook(lambda module, args, output, passes=passes: passes.append(device.done))
    config = {"model": SpeculativeConfig(drafting="model", length=3), "network": RCSDConfig(steps=3)}[kind]
    rounds, found = [], []
    target.generate(
        prompts(1)["input_ids"].to(fake_device.DEVICE), max_new_tokens=8, do_sample=False, assistant_model=drafter,
        speculative_config=config, round_callback=rounds.append, stats_callback=found.append,
    )  # fmt: skip
    own_steps = [each for each in spent[drafter] if each < spent[target][1]]
    before = spent[target][0]
    assert rounds[1].prefill_seconds == pytest.approx(own_steps[0] - before, rel=0.2)
    assert found[0].prefill_seconds - rounds[1].prefill_seconds == pytest.approx(before, rel=0.1)  # of the target alone
    assert found[0].total_seconds == pytest.approx(device.done, rel=0.05)


def test_steps_of_plain_decoding_end_when_the_device_is_done(device, monkeypatch):
    monkeypatch.setattr("hf_specdec.bench.clock.time", device)
    target, clock = working(device, tiny_llama(layers=1, attn_implementation="eager"), TARGET), Clock()
    ends = []
    target.register_forward_hook(lambda *_: ends.append(device.done))
    inputs = prompts(1)["input_ids"].to(fake_device.DEVICE)
    target.generate(inputs, max_new_tokens=4, do_sample=False, stopping_criteria=[clock])
    assert [moment for moment, _ in clock.steps] == pytest.approx(ends, abs=30 * LAUNCH)


def test_the_cpu_needs_no_events():
    cpu = torch.device("cpu")
    wait_for(cpu)
    assert mark(cpu) is None
    assert seconds_between(mark(cpu), mark(cpu)) is None


def test_an_event_that_has_not_happened_is_waited_for(device):
    device.work = 2.0
    first = mark(fake_device.DEVICE)
    torch.zeros(1, device=fake_device.DEVICE)
    assert seconds_between(first, mark(fake_device.DEVICE)) == pytest.approx(2.0 + LAUNCH)
    assert device.waited_for_events == 1
    torch.zeros(1, device=fake_device.DEVICE)
    wait_for(fake_device.DEVICE)
    assert device.now == device.done == pytest.approx(4.0 + 2 * LAUNCH)
