"""Training on toys: it learns, it touches nothing else, and it can be cut into processes and sessions."""

import multiprocessing
import os
import shutil
import socket
import time
from dataclasses import replace

import pytest
import torch
from accelerate.state import AcceleratorState

from hf_specdec import AutoDrafter
from hf_specdec.errors import InvalidConfigError
from hf_specdec.training.acceptance import acceptance_lengths
from hf_specdec.training.checkpoints import load_checkpoint, save_checkpoint
from hf_specdec.training.options import TrainingOptions
from hf_specdec.training.rcsd import DraftedRound, Recording, RoundBook, roll_out
from hf_specdec.training.recipes import RECIPES
from hf_specdec.training.texts import Text
from hf_specdec.training.trainer import train
from tests.networks import small_target
from tests.toys import prompts, state_of


NAMES = sorted(RECIPES)
SCRATCH = [name for name in NAMES if not RECIPES[name].reference]
FORK = multiprocessing.get_context("fork")


@pytest.fixture(autouse=True)
def _fresh_accelerate():
    """One precision per process is accelerate's rule; each test is a process of its own in that respect."""
    yield
    AcceleratorState._reset_state(True)


def drafter(target, name):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return AutoDrafter.from_target(target, RECIPES[name].family)


def sample(target, prompt, num_new):
    ids = torch.tensor([prompt])
    with torch.no_grad():
        out = target.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=num_new)
    return Text(tuple(out[0].tolist()), len(prompt))


def some_texts():
    generator = torch.Generator().manual_seed(1)
    lengths = [(9, 4), (12, 5), (7, 2), (11, 6)]
    return [
        Text(tuple(torch.randint(1, 64, (length,), generator=generator).tolist()), prompt) for length, prompt in lengths
    ]


def rounds_for(name):
    """Made-up rounds on `some_texts`, for the recipe that learns from rounds."""
    if name != "rcsd-dpo":
        return None
    generator = torch.Generator().manual_seed(2)
    recordings = []
    for text in some_texts():
        rounds = []
        for anchor in range(text.num_prompt_tokens - 1, len(text.tokens) - 4, 2):
            choices = text.tokens[anchor + 2 : anchor + 5]
            drafts = (choices[0], *torch.randint(1, 64, (2,), generator=generator).tolist())
            rounds.append(DraftedRound(anchor, drafts, choices, 1 + int(drafts[1] == choices[1])))
        recordings.append(Recording(text, tuple(rounds)))
    return RoundBook(recordings)


@pytest.mark.parametrize("name", SCRATCH)
def test_one_text_is_learnt_by_heart(name):
    target = small_target()
    text = sample(target, prompts(1, columns=6)["input_ids"][0].tolist(), 26)
    network = drafter(target, name)
    # The divergence fits the whole law, not only what is accepted, and takes longer; so does `lk`, where it has a part.
    max_steps = 300 if name in ("kl", "lk") else 150
    options = TrainingOptions(max_steps=max_steps, batch_size=1, learning_rate=1e-2, clip=5.0, warmup=0.1)
    recipe = replace(RECIPES[name], num_steps=3)
    options_of_run = {"steps": 3, "max_new_tokens": 26}
    prompt = text.tokens[: text.num_prompt_tokens]
    (before,) = acceptance_lengths(target, network, [prompt], **options_of_run)
    kept = state_of(target)
    train(target, network, [text], recipe, options)
    (after,) = acceptance_lengths(target, network, [prompt], **options_of_run)
    most = 25 / 7  # one token comes from the prefill, and six rounds of four leave one more
    assert before < 2 < 0.95 * most <= after <= most
    for mine, theirs in zip(state_of(target)[2].items(), kept[2].items(), strict=True):
        assert mine[0] == theirs[0]
        assert torch.equal(mine[1], theirs[1])
    assert all(parameter.requires_grad and parameter.grad is None for parameter in target.parameters())


@pytest.mark.parametrize("name", [name for name in NAMES if RECIPES[name].reference])
def test_reinforcement_goes_on_where_hass_stopped(name):
    target = small_target()
    text = sample(target, prompts(1, columns=6)["input_ids"][0].tolist(), 26)
    network = drafter(target, "hass")
    options = TrainingOptions(max_steps=12, batch_size=1, learning_rate=1e-2, clip=5.0, warmup=0.1)
    train(target, network, [text], RECIPES["hass"], options)
    prompt, options_of_run = text.tokens[: text.num_prompt_tokens], {"steps": 3, "max_new_tokens": 26}
    (before,) = acceptance_lengths(target, network, [prompt], **options_of_run)
    recipe, most = replace(RECIPES[name], num_steps=3), 25 / 7
    assert before < 0.8 * most
    for _ in range(10):  # on-policy refreshes, each from where the last one ended
        rounds = RoundBook(roll_out(target, network, [text], steps=3)) if name == "rcsd-dpo" else None
        train(target, network, [text], recipe, replace(options, max_steps=20, learning_rate=3e-3), rounds=rounds)
        (after,) = acceptance_lengths(target, network, [prompt], **options_of_run)
        if after >= 0.95 * most:
            break
    assert 0.95 * most <= after <= most


@pytest.mark.parametrize("name", NAMES)
def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path, name):
    target, recipe = small_target(), RECIPES[name]
    options = TrainingOptions(max_steps=6, batch_size=3, micro_batch_size=2, learning_rate=1e-3, save_every=2)
    whole = drafter(target, name)
    logs = train(target, whole, some_texts(), recipe, options, rounds=rounds_for(name))

    def stop(log):
        if log.step == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(
            target,
            drafter(target, name),
            some_texts(),
            recipe,
            options,
            out=tmp_path,
            on_step=stop,
            rounds=rounds_for(name),
        )
    resumed = drafter(target, name)
    rest = train(target, resumed, some_texts(), recipe, options, out=tmp_path, resume=True, rounds=rounds_for(name))
    assert [log.loss for log in rest] == [log.loss for log in logs[4:]]
    for one, other in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(one, other)
    with pytest.raises(InvalidConfigError, match="same options"):
        train(
            target,
            resumed,
            some_texts(),
            recipe,
            replace(options, max_steps=7),
            out=tmp_path,
            resume=True,
            rounds=rounds_for(name),
        )
    with pytest.raises(InvalidConfigError, match="other texts"):
        train(target, resumed, some_texts()[::-1], recipe, options, out=tmp_path, resume=True, rounds=rounds_for(name))


@pytest.mark.parametrize("name", NAMES)
def test_forward_passes_of_any_size_give_the_same_steps(name):
    target, finals = small_target(), []
    for micro in (1, 4):
        network = drafter(target, name)
        options = TrainingOptions(max_steps=4, batch_size=4, micro_batch_size=micro, learning_rate=1e-3)
        logs = train(target, network, some_texts(), RECIPES[name], options, rounds=rounds_for(name))
        assert all(log.parts for log in logs)
        finals.append(torch.tensor([[log.loss, *log.parts.values()] for log in logs]))
    torch.testing.assert_close(*finals, rtol=1e-5, atol=1e-5)


def test_bfloat16_keeps_float32_weights():
    target, name = small_target(), "eagle3"
    network = drafter(target, name)
    options = TrainingOptions(max_steps=2, batch_size=2, mixed_precision="bf16")
    reference = train(
        target, drafter(target, name), some_texts(), RECIPES[name], replace(options, mixed_precision="no")
    )
    AcceleratorState._reset_state(True)
    logs = train(target, network, some_texts(), RECIPES[name], options)
    assert network.dtype == torch.float32
    assert logs[0].loss != reference[0].loss
    assert logs[0].loss == pytest.approx(reference[0].loss, rel=0.02)


def test_evaluations_come_when_they_are_due():
    target = small_target()
    options = TrainingOptions(max_steps=5, batch_size=1, eval_every=2)
    logs = train(target, drafter(target, "hass"), some_texts(), RECIPES["hass"], options, evaluate=lambda: {"tau": 1.5})
    assert [log.step for log in logs if log.evaluation == {"tau": 1.5}] == [2, 4, 5]


def test_what_cannot_be_trained_is_refused():
    target = small_target()
    options = TrainingOptions(max_steps=1)
    with pytest.raises(InvalidConfigError, match="no texts"):
        train(target, drafter(target, "hass"), [], RECIPES["hass"], options)
    with pytest.raises(InvalidConfigError, match="float32"):
        train(target, drafter(target, "hass").bfloat16(), some_texts(), RECIPES["hass"], options)
    with pytest.raises(InvalidConfigError, match="max_steps"):
        TrainingOptions(max_steps=0)


def write_checkpoints(folder, step, begun):
    network = torch.nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(network.parameters())
    network(torch.ones(64)).sum().backward()
    optimizer.step()
    begun.set()
    while True:
        step += 1
        with torch.no_grad():
            network.weight.fill_(step)
            optimizer.state[network.weight]["exp_avg"].fill_(step)
        save_checkpoint(folder, step, network, optimizer, {})


def newest(folder):
    return max((int(each.name.rpartition("-")[2]) for each in folder.glob("checkpoint-*")), default=0)


def test_a_killed_run_leaves_whole_checkpoints(tmp_path):
    generator, last = torch.Generator().manual_seed(0), 0
    for _ in range(20):
        begun = FORK.Event()
        writer = FORK.Process(target=write_checkpoints, args=(tmp_path, last, begun))
        writer.start()
        assert begun.wait(30)
        deadline = time.monotonic() + 30
        while newest(tmp_path) <= last and time.monotonic() < deadline:
            time.sleep(0.002)
        time.sleep(0.1 * float(torch.rand((), generator=generator)))
        writer.kill()
        writer.join()
        network = torch.nn.Linear(64, 64)
        optimizer = torch.optim.AdamW(network.parameters())
        for checkpoint in sorted(tmp_path.glob("checkpoint-*")):
            step = load_checkpoint(checkpoint, network, optimizer)["step"]
            assert bool((network.weight == step).all())
            assert bool((optimizer.state[network.weight]["exp_avg"] == step).all())
            last = max(last, step)
    assert last >= 20


SHARED = TrainingOptions(max_steps=5, batch_size=4, learning_rate=1e-3, save_every=2, eval_every=3)


def measured(target, network):
    prompts = [[5, 9, 3], [7, 2, 8, 4]]
    return {"evaluate": lambda: {"tau": sum(acceptance_lengths(target, network, prompts, steps=3, max_new_tokens=8))}}


def shared_run(rank, port, name, results, **more):
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "ACCELERATE_USE_CPU": "true"}
    AcceleratorState._reset_state(True)
    torch.set_num_threads(1)
    target = small_target()
    network = drafter(target, name)
    more |= {"rounds": rounds_for(name), **measured(target, network)}
    logs = train(target, network, some_texts(), RECIPES[name], SHARED, **more)
    weights = [value.tolist() for value in network.parameters()]
    results.put((torch.distributed.get_world_size(), weights, [log.evaluation for log in logs]))
    torch.distributed.destroy_process_group()


def two_processes(name, **more):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    results = FORK.Queue()
    processes = [FORK.Process(target=shared_run, args=(rank, port, name, results), kwargs=more) for rank in range(2)]
    for process in processes:
        process.start()
    found = [results.get(timeout=60) for _ in processes]
    for process in processes:
        process.join()
    return found


def one_process(name, **more):
    target = small_target()
    network = drafter(target, name)
    more |= {"rounds": rounds_for(name), **measured(target, network)}
    logs = train(target, network, some_texts(), RECIPES[name], SHARED, **more)
    return network, [log.evaluation for log in logs]


def assert_equal_runs(found, network, evaluations):
    for world_size, parameters, theirs in found:
        assert world_size == 2
        assert theirs == evaluations
        for mine, expected in zip(parameters, network.parameters(), strict=True):
            torch.testing.assert_close(torch.tensor(mine), expected.detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_two_processes_equal_one(name):
    assert_equal_runs(two_processes(name), *one_process(name))


@pytest.mark.parametrize("name", ["hass", "vat", "rcsd-dpo"])  # one network, a head beside it, a reference beside it
def test_two_processes_that_split_the_weights_equal_one(tmp_path, name):
    network, evaluations = one_process(name, out=tmp_path / "one")
    assert_equal_runs(two_processes(name, shard=True, out=tmp_path / "two"), network, evaluations)
    shutil.rmtree(tmp_path / "two" / "checkpoint-00000005")  # what they saved is gone on with, by one and by two
    shutil.copytree(tmp_path / "two", tmp_path / "three")
    resumed, rest = one_process(name, out=tmp_path / "two", resume=True)
    for mine, expected in zip(resumed.parameters(), network.parameters(), strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-5)
    again = two_processes(name, shard=True, out=tmp_path / "three", resume=True)
    assert_equal_runs(again, network, rest)
