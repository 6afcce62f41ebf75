"""The bundled drafters: `python -m hf_specdec.quality.drafters.bundle --run FOLDER`.

FOLDER is what [`reproduction`] wrote, finished or not: HASS and the drafters that went on from it, beside the texts that they
were trained on. An EAGLE-3 drafter is trained on the same texts first. Then every finished drafter of one seed is written in
bfloat16 to where `specdec demo` finds it. A killed run continues when started again with the same arguments. With `--docs`,
prompts of held-out documents are written too, for `specdec bench`.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from hf_specdec.demo import corpus, tokenizer
from hf_specdec.demo.pair import load_pair
from hf_specdec.drafters import DraftVocabulary
from hf_specdec.files import write_at_once
from hf_specdec.networks import AutoDrafter
from hf_specdec.networks.export import export_drafter
from hf_specdec.quality.drafters.reproduction import Plan
from hf_specdec.quality.drafters.workshop import step_logger, windows
from hf_specdec.training.options import TrainingOptions
from hf_specdec.training.recipes import RECIPES
from hf_specdec.training.texts import Text
from hf_specdec.training.trainer import train


__all__ = ["TARGET_NAME", "bundle", "finished_drafters", "train_eagle3", "write_prompts"]

TARGET_NAME = "hf_specdec/demo-target"
BUNDLED = Path(__file__).parents[2] / "demo" / "weights" / "drafters"
PROMPTS = 24
_BUNDLED = ("hass", "rcsd-dpo", "rcsd-grpo", "eagle3")
_CHAINS = {name: f"hass+{name}" for name in ("rcsd-dpo", "rcsd-grpo")}


def train_eagle3(
    target: Any, texts: Sequence[Text], folder: Path, options: TrainingOptions, *, draft_vocab_size: int
) -> Path:
    """Trains EAGLE-3 by its published recipe, unless the folder holds a finished drafter.

    Args:
        target (`PreTrainedModel`): The target.
        texts (`Sequence[Text]`): Texts that it wrote greedily.
        folder (`Path`): Receives checkpoints, `log.jsonl` and the drafter.
        options ([`TrainingOptions`]): Length and pace.
        draft_vocab_size (`int`): Size of the draft vocabulary, the texts' most frequent tokens.
    """
    if (folder / "config.json").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    counts = Counter(token for text in texts for token in text.tokens[text.num_prompt_tokens :])
    known = DraftVocabulary.from_counts(counts, draft_vocab_size, vocab_size=target.config.vocab_size)
    with torch.random.fork_rng():
        torch.manual_seed(options.seed)
        network = AutoDrafter.from_target(
            target, "eagle3", draft_token_ids=torch.tensor(known.token_ids), dtype=torch.float32
        )
    log = step_logger(folder / "log.jsonl")
    train(target, network, texts, RECIPES["eagle3"], options, out=folder, resume=True, on_step=log)
    return export_drafter(network, folder)


def finished_drafters(run: Path, seed: int) -> dict[str, Path]:
    """The finished drafters of a run by name, such as `hass` and `rcsd-dpo`: of each that has seeds this one; no controls, and
    no other readings of RCSD.

    Args:
        run (`Path`): Folder of folders, named `NAME` or `NAME-SEED`.
        seed (`int`): The seed.
    """
    found = {}
    for config in sorted(run.glob("*/config.json")):
        name, _, own_seed = re.fullmatch(r"(.*?)(-(\d+))?", config.parent.name).groups()  # type: ignore[union-attr]
        if name in _BUNDLED and own_seed in (None, str(seed)):
            found[name] = config.parent
    return found


def bundle(target: Any, drafters: dict[str, Path], out: Path) -> list[Path]:
    """Writes drafters in bfloat16, without the parts that they share with their target.

    Args:
        target (`PreTrainedModel`): The target that they were trained for, which is checked.
        drafters (`dict[str, Path]`): Folders by name.
        out (`Path`): Receives a folder for each; one that is there already is replaced.
    """
    written = []
    for name, folder in drafters.items():
        network = AutoDrafter.from_pretrained(folder, target=target, dtype=torch.bfloat16)
        network.config.target_name = TARGET_NAME
        network.config.recipe = _CHAINS.get(name, name if name in RECIPES else network.config.recipe)
        shutil.rmtree(out / name, ignore_errors=True)
        written.append(export_drafter(network, out / name))
        (out / name / "model.safetensors").chmod(0o644)
    return written


def write_prompts(docs: Path, out: Path, tokenizer_: Any, *, library: Path | None = None) -> None:
    """Writes evenly spread beginnings of held-out text, one JSON object with the field `prompt` a line.

    Args:
        docs (`Path`): JSON lines with the fields `id` and `text`, as for `hf_specdec.demo.build`.
        out (`Path`): The file.
        tokenizer_ (`PreTrainedTokenizerBase`): The tokenizer of the demo pair.
        library (`Path`, *optional*): Folder whose docstrings are read; the standard library by default.
    """
    _, held_out = corpus.load(docs, library)
    prompts = windows(tokenizer.encode_all(tokenizer_, held_out), PROMPTS, Plan().prompt_tokens)
    texts = (tokenizer_.decode(ids, skip_special_tokens=True) for ids in prompts)
    write_at_once(out, "".join(json.dumps({"prompt": text}) + "\n" for text in texts).encode())


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, required=True, help="folder of the reproduction")
    parser.add_argument("--out", type=Path, default=BUNDLED, help="folder of the bundled drafters")
    parser.add_argument(
        "--docs", type=Path, help="JSON lines with the fields id and text; their held-out part gives prompts"
    )
    parser.add_argument("--prompts", type=Path, default=Path("model_cards/pydocs.jsonl"), help="file for these prompts")
    parser.add_argument("--seed", type=int, default=0, help="which of the drafters that have seeds")
    parser.add_argument("--eagle3-steps", type=int, default=450)
    parser.add_argument("--eagle3-rate", type=float, default=2e-3)
    parser.add_argument("--draft-vocab-size", type=int, default=2048)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    pair, run = load_pair(), given.run
    options = TrainingOptions(
        max_steps=given.eagle3_steps,
        batch_size=given.batch_size,
        micro_batch_size=given.batch_size,
        learning_rate=given.eagle3_rate,
        warmup=0.03,
        save_every=100,
        seed=given.seed,
    )
    rows = [tuple(json.loads(line)) for line in (run / "texts.jsonl").read_text().splitlines()]
    texts = [Text(row, Plan().prompt_tokens) for row in rows]
    train_eagle3(pair.target, texts, run / "eagle3", options, draft_vocab_size=given.draft_vocab_size)
    for folder in bundle(pair.target, finished_drafters(run, given.seed), given.out):
        print(folder)  # noqa: T201
    if given.docs is not None:
        write_prompts(given.docs, given.prompts, pair.tokenizer)


if __name__ == "__main__":
    _main()
