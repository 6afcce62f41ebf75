"""Two processes that hold a target in shards, run by `test_tensor_parallel.py`: `python -m tests.tensor_parallel FOLDER`.

The folder holds the target. Each process writes there what it found, `0.json` and `1.json`.
"""

import json
import multiprocessing
import os
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from hf_specdec import (
    AutoDrafter,
    DraftVocabulary,
    ExactConfig,
    GoodputLength,
    InvalidConfigError,
    RCSDConfig,
    SelfDraftConfig,
    SpeculativeConfig,
    TreeShape,
    UnsupportedModelError,
    pack_linears,
)
from tests.toys import noisy_copy, prompts


TOKENS, SIZE = 6, 2
NETWORK = RCSDConfig(steps=2, on_drafter_error="raise")
METHODS = {
    "causal LM": (lambda whole, model: noisy_copy(whole), ExactConfig(length=2, on_drafter_error="raise")),
    "itself": (lambda whole, model: model, ExactConfig(on_drafter_error="raise")),
    "prompt lookup": (lambda whole, model: None, SpeculativeConfig(drafting="ngram", on_drafter_error="raise")),
    "self-draft": (
        lambda whole, model: None,
        SelfDraftConfig(exit_layers=[2, 4], confidence_threshold=0.0, length=2, on_drafter_error="raise"),
    ),
    "eagle": (lambda whole, model: AutoDrafter.from_target(model, "eagle"), NETWORK),
    "eagle3": (lambda whole, model: AutoDrafter.from_target(model, "eagle3"), NETWORK),
    "tree": (
        lambda whole, model: AutoDrafter.from_target(model, "eagle3"),
        RCSDConfig(tree=TreeShape(2, 2, 4), on_drafter_error="raise"),
    ),
}
REFUSED = {
    "timed lengths": (InvalidConfigError, ExactConfig(length=GoodputLength())),
    "reduced heads": (
        UnsupportedModelError,
        ExactConfig(drafting="model", draft_vocabulary=DraftVocabulary((1, 2, 3), 64)),
    ),
}


def decode(model, assistant, config, **options):
    torch.manual_seed(0)
    return model.generate(
        **prompts(2), max_new_tokens=TOKENS, pad_token_id=0, assistant_model=assistant, speculative_config=config,
        return_dict_in_generate=True, **{"do_sample": False} | options,
    )  # fmt: skip


def compare(whole, model):
    """For each method, what differs between a target in one piece and one in shards."""
    plain = whole.generate(**prompts(2), max_new_tokens=TOKENS, pad_token_id=0, do_sample=False)
    found = {}
    for name, (make, config) in METHODS.items():
        outs = []
        for target in (whole, model):
            torch.manual_seed(1)
            outs.append(decode(target, make(whole, target), config))
        stats = [out.speculative_stats for out in outs]
        found[name] = {
            "text": torch.equal(outs[1].sequences, plain),
            "drafted": [each.num_draft_tokens for each in stats],
            "accepted": [each.num_accepted_tokens for each in stats],
        }
    found["sampled"] = [
        decode(each, noisy_copy(whole), ExactConfig(length=2), do_sample=True).sequences.tolist()
        for each in (whole, model)
    ]
    return found


def refusals(whole, model):
    messages = {}
    for name, (error, config) in REFUSED.items():
        try:
            decode(model, model if name == "reduced heads" else noisy_copy(whole), config)
        except error as caught:
            messages[name] = str(caught)
    return messages


def work(rank, folder):
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(SIZE)}
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=SIZE)
    whole = AutoModelForCausalLM.from_pretrained(folder).eval()
    parts = DistributedConfig(tp_plan="auto")
    model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=parts).eval()
    found = {
        "methods": compare(whole, model),
        "refused": refusals(whole, model),
        "packed": pack_linears(model).num_packed,
    }
    found["first shard"] = list(model.model.layers[0].self_attn.q_proj.weight.to_local().shape)
    (folder / f"{rank}.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


def main():
    torch.set_num_threads(1)
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=work, args=(rank, Path(sys.argv[1]))) for rank in range(SIZE)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    sys.exit(max(abs(process.exitcode) for process in processes))


if __name__ == "__main__":
    main()
