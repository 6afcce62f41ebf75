"""How the bundled drafters are made, at its smallest: EAGLE-3 trains and resumes, and a run's folders become bf16 ones."""

import json
import re
import zlib

import torch
from safetensors.torch import load_file

from hf_specdec.demo.corpus import HELD_OUT_EVERY
from hf_specdec.demo.pair import load_pair
from hf_specdec.networks import AutoDrafter
from hf_specdec.networks.export import export_drafter
from hf_specdec.quality.drafters.bundle import TARGET_NAME, bundle, finished_drafters, train_eagle3, write_prompts
from hf_specdec.training.options import TrainingOptions
from hf_specdec.training.texts import Text
from tests.networks import drafter_for, small_target


TEXTS = [Text(tuple(range(start, start + 12)), 4) for start in range(1, 25, 6)]


def options_of(steps: int) -> TrainingOptions:
    return TrainingOptions(max_steps=steps, batch_size=2, micro_batch_size=2, learning_rate=1e-2, save_every=1)


def test_eagle3_is_trained_once_on_the_frequent_tokens(tmp_path):
    target = small_target()
    folder = train_eagle3(target, TEXTS, tmp_path / "eagle3", options_of(3), draft_vocab_size=8)
    network = AutoDrafter.from_pretrained(folder, target=target)
    assert network.draft_vocab_size == 8
    assert set(network.target_ids.tolist()) <= {token for text in TEXTS for token in text.tokens[4:]}
    assert [json.loads(line)["step"] for line in (folder / "log.jsonl").read_text().splitlines()] == [1, 2, 3]
    written = (folder / "model.safetensors").read_bytes()
    assert train_eagle3(target, TEXTS, folder, options_of(5), draft_vocab_size=8) == folder
    assert (folder / "model.safetensors").read_bytes() == written


def test_a_killed_training_continues_to_the_same_weights(tmp_path):
    target = small_target()
    whole = train_eagle3(target, TEXTS, tmp_path / "whole", options_of(3), draft_vocab_size=8)
    (tmp_path / "killed").mkdir()
    (whole / "checkpoint-00000002").rename(tmp_path / "killed" / "checkpoint-00000002")
    killed = train_eagle3(target, TEXTS, tmp_path / "killed", options_of(3), draft_vocab_size=8)
    assert [json.loads(line)["step"] for line in (killed / "log.jsonl").read_text().splitlines()] == [3]
    ours, theirs = load_file(killed / "model.safetensors"), load_file(whole / "model.safetensors")
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


def test_one_seed_of_every_finished_drafter_is_bundled(tmp_path):
    target = small_target()
    for name, kind in {
        "hass": "eagle",
        "eagle3": "eagle3-reduced",
        "rcsd-dpo-0": "eagle",
        "rcsd-dpo-1": "eagle",
    }.items():
        export_drafter(drafter_for(target, kind), tmp_path / name)
    (tmp_path / "control-0").mkdir()
    (tmp_path / "control-0" / "config.json").write_text("{}")
    (tmp_path / "rcsd-grpo-0").mkdir()  # not finished
    found = finished_drafters(tmp_path, seed=0)
    assert {name: folder.name for name, folder in found.items()} == {
        "eagle3": "eagle3",
        "hass": "hass",
        "rcsd-dpo": "rcsd-dpo-0",
    }
    assert finished_drafters(tmp_path, seed=1)["rcsd-dpo"].name == "rcsd-dpo-1"
    out = tmp_path / "bundled"
    (out / "hass").mkdir(parents=True)
    (out / "hass" / "old").write_text("of an earlier run")
    assert bundle(target, found, out) == [out / name for name in found]
    assert sorted(path.name for path in (out / "hass").iterdir()) == ["config.json", "model.safetensors"]
    for name, folder in found.items():
        network = AutoDrafter.from_pretrained(out / name, target=target)
        before = AutoDrafter.from_pretrained(folder, target=target).state_dict()
        stored = load_file(out / name / "model.safetensors")
        assert network.config.target_name == TARGET_NAME
        assert network.config.recipe == {"rcsd-dpo": "hass+rcsd-dpo"}.get(name, name)
        assert stored.keys() == before.keys()
        assert {value.dtype for value in stored.values() if value.is_floating_point()} == {torch.bfloat16}
        assert all(torch.equal(value, before[key].to(value.dtype)) for key, value in stored.items())


def test_prompts_come_from_held_out_text(tmp_path):
    docs, library = tmp_path / "docs.jsonl", tmp_path / "library"
    library.mkdir()
    pages = [{"id": f"page{number}", "text": f"Page {number} is about lists and tuples. " * 8} for number in range(120)]
    docs.write_text("".join(json.dumps(page) + "\n" for page in pages))
    write_prompts(docs, tmp_path / "new" / "prompts.jsonl", load_pair().tokenizer, library=library)
    prompts = [json.loads(line)["prompt"] for line in (tmp_path / "new" / "prompts.jsonl").read_text().splitlines()]
    assert len(prompts) == 24
    shown = {int(number) for prompt in prompts for number in re.findall(r"Page (\d+) is", prompt)}
    assert shown == {number for number in range(120) if zlib.crc32(f"page{number}".encode()) % HELD_OUT_EVERY == 0}
