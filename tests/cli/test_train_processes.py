"""`specdec train` under a launcher: several processes share one run."""

import json
import multiprocessing
import os
import socket

import pytest
import torch
from accelerate.state import AcceleratorState
from typer.testing import CliRunner

from hf_specdec import AutoDrafter
from hf_specdec.cli import app


FORK = multiprocessing.get_context("fork")
PROMPTS = [f"w{index} w{index + 3} w{index + 1}" for index in range(12)]


pytestmark = pytest.mark.usefixtures("fresh_accelerate")


def launched(rank, port, arguments, results):
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "ACCELERATE_USE_CPU": "true"}
    AcceleratorState._reset_state(True)
    torch.set_num_threads(1)
    result = CliRunner().invoke(app, arguments)
    results.put((rank, result.exit_code, result.stdout, result.stderr + repr(result.exception)))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def launch(*arguments):
    """What each of two processes printed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    results, words = FORK.Queue(), [str(each) for each in arguments]
    processes = [FORK.Process(target=launched, args=(rank, port, words, results)) for rank in range(2)]
    for process in processes:
        process.start()
    found = {rank: rest for rank, *rest in (results.get(timeout=120) for _ in processes)}
    for process in processes:
        process.join()
    assert [code for code, _, _ in found.values()] == [0, 0], found
    return [found[rank][1] for rank in range(2)]


@pytest.mark.parametrize("split", [[], ["--fsdp"]], ids=["ddp", "fsdp"])
def test_two_processes_share_answers_rounds_and_steps(pair, run_json, tmp_path, split):
    (tmp_path / "prompts.txt").write_text("\n".join(PROMPTS))
    options = ["train", "--target", pair.target, "--data", tmp_path / "prompts.txt", "--max-new-tokens", 8]
    options += ["--batch-size", 2, "--held-out", 0.3, "--save-every", 2, "--dtype", "float32"]
    run_json(*options, "--recipe", "hass", "--max-steps", 2, "--out", tmp_path / "hass")
    options += ["--recipe", "rcsd-dpo", "--start", tmp_path / "hass", "--max-steps", 4]
    expected = run_json(*options, "--out", tmp_path / "one")
    printed = launch(*options, *split, "--out", tmp_path / "two", "--json")
    assert printed[1] == ""
    found = json.loads(printed[0])
    assert found["num_texts"] == expected["num_texts"]
    assert found["tau"] == pytest.approx(expected["tau"])
    shares = [len((tmp_path / "two" / f"answers-{rank}.jsonl").read_text().splitlines()) for rank in range(2)]
    assert sum(shares) == found["num_texts"]
    assert abs(shares[0] - shares[1]) <= 1
    one, two = (AutoDrafter.from_pretrained(tmp_path / name, target=pair.model) for name in ("one", "two"))
    for mine, theirs in zip(one.parameters(), two.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
