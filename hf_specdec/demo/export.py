"""Saves a trained pair as two bf16 folders that transformers loads."""

import copy
import json
from pathlib import Path

import torch
from transformers import GenerationConfig, LlamaForCausalLM, PreTrainedTokenizerFast


FIGURES = "figures.json"


def save_pair(
    target: LlamaForCausalLM,
    draft: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    out: Path,
    figures: dict,
) -> None:
    """Writes `out/target` (with the only copy of the tokenizer), `out/draft` and `out/figures.json`."""
    for name, model in (("target", target), ("draft", draft)):
        half = copy.deepcopy(model).to(torch.bfloat16)
        half.generation_config = GenerationConfig(bos_token_id=0, eos_token_id=0, pad_token_id=1)
        half.save_pretrained(out / name)
        (out / name / "model.safetensors").chmod(0o644)
    tokenizer.save_pretrained(out / "target")
    (out / FIGURES).write_text(json.dumps(figures, indent=1) + "\n")


def size_in_bytes(folder: Path) -> int:
    """Size of every file below `folder`."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
