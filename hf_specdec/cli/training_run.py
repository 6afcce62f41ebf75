"""What `specdec train` does once its options are read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, final

import torch
from accelerate import Accelerator  # type: ignore[import-untyped]
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers  # type: ignore[import-untyped]
from accelerate.utils import LoggerType  # type: ignore[import-untyped]

from hf_specdec.cli.errors import CommandError
from hf_specdec.cli.output import note, progress_bar
from hf_specdec.drafters import DraftVocabulary
from hf_specdec.networks import AutoDrafter, DraftNetwork
from hf_specdec.networks.export import export_drafter
from hf_specdec.training.acceptance import acceptance_lengths
from hf_specdec.training.answers import answer_prompts, is_held_out
from hf_specdec.training.continual import ContinualTraining, cut_recordings, train_continually
from hf_specdec.training.options import TrainingOptions
from hf_specdec.training.rcsd import Recording
from hf_specdec.training.recipes import Recipe
from hf_specdec.training.stages import train_in_stages
from hf_specdec.training.texts import Text, cut_texts
from hf_specdec.training.trainer import StepLog


__all__ = ["LiveUse", "TrainingRun", "check_trackers", "live_use"]


@dataclass(frozen=True)
class LiveUse:
    """Recorded rounds.

    Args:
        recordings (`Sequence[Recording]`): Those that are trained on.
        held_out (`Sequence[Sequence[int]]`): Prompts, as token ids, of the others.
        continual ([`ContinualTraining`]): What keeps the drafter from forgetting.
    """

    recordings: Sequence[Recording]
    held_out: Sequence[Sequence[int]]
    continual: ContinualTraining


def live_use(
    recordings: Sequence[Recording], share: float, max_tokens: int | None, continual: ContinualTraining
) -> LiveUse:
    """Holds out recorded texts by a hash of their prompt's token ids.

    Raises:
        [`CommandError`]: If all are on one side.
    """
    sides: dict[bool, list[Recording]] = {True: [], False: []}
    for each in recordings:
        sides[is_held_out(" ".join(map(str, _prompt(each))), share)].append(each)
    if not sides[False] or not sides[True]:
        raise CommandError(
            f"of {len(recordings)} recorded texts, {len(sides[True])} are held out: record more or pass another --held-out"
        )
    kept = sides[False] if max_tokens is None else cut_recordings(sides[False], max_tokens)
    return LiveUse(kept, list(dict.fromkeys(_prompt(each) for each in sides[True])), continual)


def check_trackers(names: Sequence[str]) -> None:
    """Raises a [`CommandError`] if a tracker is not installed or known; accelerate would leave it out."""
    registered = {str(name) for name in LOGGER_TYPE_TO_CLASS} - set(LoggerType.list())
    found = {str(each) for each in get_available_trackers()} | registered
    if missing := [name for name in names if name not in found]:
        raise CommandError(
            f"--trackers needs installed packages that accelerate knows, got {', '.join(missing)}; installed are "
            f"{', '.join(sorted(found)) or 'none'}: install the package, or leave it out"
        )


@final
@dataclass(frozen=True)
class TrainingRun:
    """One run.

    Args:
        target (`PreTrainedModel`), tokenizer (`PreTrainedTokenizerBase`): The target.
        trained, held_out (`list[list[int]]`): Prompts to train on and to evaluate with, as token ids.
        stages (`list[Recipe]`): Its stages; one where rounds of live use are trained on.
        options ([`TrainingOptions`]): Length and pace.
        out (`Path`): Folder of answers, checkpoints and the drafter.
        max_new_tokens (`int`), steps (`int`): Length of answers, and drafts per round in evaluations.
        resume (`bool`): Whether to go on from the newest checkpoint.
        start (`Path`, *optional*): The drafter to go on from.
        draft_vocab_size (`int`, *optional*): Tokens that a new drafter knows.
        max_tokens (`int`, *optional*): Longest text.
        live ([`LiveUse`], *optional*): Recorded rounds to learn, with the prompts' answers as what is replayed.
        trackers (`Sequence[str]`): Names of trackers.
    """

    target: Any
    tokenizer: Any
    trained: list[list[int]]
    held_out: list[list[int]]
    stages: list[Recipe]
    options: TrainingOptions
    out: Path
    max_new_tokens: int
    steps: int
    resume: bool
    start: Path | None
    draft_vocab_size: int | None
    max_tokens: int | None
    live: LiveUse | None
    trackers: Sequence[str]

    def __call__(self) -> dict[str, Any]:
        """Trains, writes the drafter, and returns what the command prints."""
        texts = self._texts()
        network = self._network(texts)
        accelerator = Accelerator(
            mixed_precision=self.options.mixed_precision, log_with=list(self.trackers) or None, project_dir=self.out
        )
        if self.trackers:
            accelerator.init_trackers("specdec-train", asdict(self.options))
        try:
            logs = self._train(network, texts, accelerator)
        finally:
            if self.trackers:
                accelerator.end_training()
        export_drafter(network, self.out)
        return {
            "num_texts": len(texts),
            **({} if self.live is None else {"num_recorded": len(self.live.recordings)}),
            "steps": self.steps,
            "loss": logs[-1].loss if logs else None,
            **(logs[-1].evaluation if logs else self._evaluate(network)),
        }

    def _texts(self) -> list[Text]:
        with progress_bar("Answers of the target") as show:
            file = self.out / "answers.jsonl"
            texts = answer_prompts(self.target, self.trained, file, max_new_tokens=self.max_new_tokens, on_answer=show)
        return texts if self.max_tokens is None else cut_texts(texts, self.max_tokens)

    def _network(self, texts: Sequence[Text]) -> DraftNetwork:
        if self.start is not None:
            return AutoDrafter.from_pretrained(
                self.start, target=self.target, tokenizer=self.tokenizer, dtype=torch.float32
            )
        size = self.draft_vocab_size
        with torch.random.fork_rng():
            torch.manual_seed(self.options.seed)
            return AutoDrafter.from_target(
                self.target,
                self.stages[0].family,
                draft_token_ids=None if size is None else _frequent(self.target, texts, size),
                tokenizer=self.tokenizer,
                dtype=torch.float32,
            )

    def _train(self, network: DraftNetwork, texts: Sequence[Text], accelerator: Accelerator) -> list[StepLog]:
        with progress_bar("Training") as show:
            run: dict[str, Any] = {
                "out": self.out,
                "resume": self.resume,
                "accelerator": accelerator,
                "evaluate": lambda: self._evaluate(network),
                "on_step": _follow(show, self.options.max_steps),
            }
            if self.live is None:
                return train_in_stages(self.target, network, texts, self.stages, self.options, on_recorded=show, **run)
            recordings, continual = self.live.recordings, self.live.continual
            return train_continually(
                self.target, network, recordings, texts, self.stages[0], self.options, continual, **run
            )

    def _evaluate(self, network: DraftNetwork) -> dict[str, float]:
        """`tau` on the held-out prompts, and `tau_recorded` on those of live use."""
        found = {"tau": self._tau(network, self.held_out)}
        return found if self.live is None else found | {"tau_recorded": self._tau(network, self.live.held_out)}

    def _tau(self, network: DraftNetwork, prompts: Sequence[Sequence[int]]) -> float:
        found = acceptance_lengths(self.target, network, prompts, steps=self.steps, max_new_tokens=self.max_new_tokens)
        return sum(found) / max(len(found), 1)


def _follow(show: Callable[[int, int], None], max_steps: int) -> Callable[[StepLog], None]:
    """Moves the progress bar, and writes a line for each evaluation."""

    def on_step(log: StepLog) -> None:
        show(log.step, max_steps)
        if log.evaluation:
            first = ", ".join(f"{rate:.2f}" for rate in log.acceptance)
            measured = ", ".join(f"{name} {value:.3f}" for name, value in log.evaluation.items())
            note(
                f"step {log.step}: loss {log.loss:.4f}, agreement by position {first}, "
                f"{log.tokens_per_second:.0f} tokens/s, {measured}"
            )

    return on_step


def _prompt(recording: Recording) -> tuple[int, ...]:
    return recording.text.tokens[: recording.text.num_prompt_tokens]


def _frequent(target: Any, texts: Sequence[Text], size: int) -> torch.Tensor:
    """The ids of the answers' most frequent tokens."""
    counts = Counter(token for text in texts for token in text.tokens[text.num_prompt_tokens :])
    vocab_size = target.config.get_text_config(decoder=True).vocab_size
    return torch.tensor(DraftVocabulary.from_counts(counts, size, vocab_size=vocab_size).token_ids)
