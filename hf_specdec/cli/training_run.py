"""What `specdec train` does once its options are read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, final

import torch
from accelerate import Accelerator, PartialState  # type: ignore[import-untyped]
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers  # type: ignore[import-untyped]
from accelerate.utils import LoggerType, gather_object, parse_flag_from_env  # type: ignore[import-untyped]

from hf_specdec.cli.errors import CommandError
from hf_specdec.cli.output import note, progress_bar
from hf_specdec.drafters import DraftVocabulary
from hf_specdec.files import write_at_once
from hf_specdec.networks import AutoDrafter, DraftNetwork
from hf_specdec.networks.export import export_drafter
from hf_specdec.networks.target import weights_fingerprint
from hf_specdec.training.acceptance import acceptance_lengths
from hf_specdec.training.answers import answer_prompts, is_held_out
from hf_specdec.training.continual import ContinualTraining, cut_recordings, train_continually
from hf_specdec.training.curve import CURVE, DrafterCurve, read_curve
from hf_specdec.training.curve_plot import plot_curve
from hf_specdec.training.feature_shards import FeatureShards
from hf_specdec.training.identity import check_identity, write_identity
from hf_specdec.training.options import TrainingOptions
from hf_specdec.training.rcsd import Recording
from hf_specdec.training.recipes import Recipe, followed_by
from hf_specdec.training.stages import check_run, train_in_stages
from hf_specdec.training.texts import Text, cut_texts, observe
from hf_specdec.training.trainer import Observe, StepLog


__all__ = ["LiveUse", "TrainingRun", "check_trackers", "live_use", "own_device"]

_IDENTITY = "run.json"  # in the folder of a run: what it was begun with


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


def own_device() -> str | None:
    """Where one of several processes keeps its target; None leaves the choice to the loader."""
    state = PartialState(cpu=parse_flag_from_env("ACCELERATE_USE_CPU"))  # as Accelerator would make it
    return None if state.num_processes == 1 or state.device.type == "cpu" else str(state.device)


@final
@dataclass(frozen=True)
class TrainingRun:
    """One run.

    Args:
        target (`PreTrainedModel`), tokenizer (`PreTrainedTokenizerBase`): The target.
        trained, held_out (`list[list[int]]`): Prompts to train on and to evaluate with, as token ids.
        recipe (`str`): The name of what it does, which the drafter's config then says.
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
        answer_batch_size (`int`): Prompts that are answered at once.
        features (`Path`, *optional*): Folder that the target's features are written to, and read from at each step.
        shard (`bool`): Whether several processes split weights and moments (FSDP).
        answer_temperature (`float`), answer_seed (`int`): How the target answers; 0 is greedy.
    """

    target: Any
    tokenizer: Any
    trained: list[list[int]]
    held_out: list[list[int]]
    recipe: str
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
    answer_batch_size: int = 1
    features: Path | None = None
    shard: bool = False
    answer_temperature: float = 0.0
    answer_seed: int = 0

    def __call__(self) -> dict[str, Any] | None:
        """Trains, writes the drafter, and returns what the command prints, in one of several processes."""
        accelerator = Accelerator(
            mixed_precision=self.options.mixed_precision, log_with=list(self.trackers) or None, project_dir=self.out
        )
        started = self._started()
        check_run(self.stages, self.options, accelerator.num_processes, started)
        self._keep_identity(started, accelerator)
        texts = self._texts(accelerator, started)
        network = self._fresh(texts) if started is None else started
        if self.trackers:
            accelerator.init_trackers("specdec-train", asdict(self.options))
        try:
            logs = self._train(network, texts, accelerator)
        finally:
            if self.trackers:
                accelerator.end_training()
        found = logs[-1].evaluation if logs else self._evaluate(network, accelerator)
        if not accelerator.is_main_process:
            return None
        network.config.recipe = followed_by(network.config.recipe, self.recipe)
        export_drafter(network, self.out)
        if points := read_curve(self.out / CURVE):
            write_at_once(self.out / "curve.png", plot_curve(points, self.steps))
        return {
            "num_texts": len(texts),
            **({} if self.live is None else {"num_recorded": len(self.live.recordings)}),
            "steps": self.steps,
            "loss": logs[-1].loss if logs else None,
            **found,
        }

    def _texts(self, accelerator: Accelerator, drafter: DraftNetwork | None) -> list[Text]:
        with _bar("Answers of the target", accelerator) as show:
            texts = answer_prompts(
                self.target,
                self.trained,
                self.out / "answers.jsonl",
                max_new_tokens=self.max_new_tokens,
                batch_size=self.answer_batch_size,
                temperature=self.answer_temperature,
                seed=self.answer_seed,
                drafter=drafter,
                accelerator=accelerator,
                on_answer=show,
            )
        return texts if self.max_tokens is None else cut_texts(texts, self.max_tokens)

    def _started(self) -> DraftNetwork | None:
        if self.start is None:
            return None
        return AutoDrafter.from_pretrained(
            self.start, target=self.target, tokenizer=self.tokenizer, dtype=torch.float32
        )

    def _keep_identity(self, started: DraftNetwork | None, accelerator: Accelerator) -> None:
        """A checkpoint has the weights that it needs, but what they are compared with is the drafter of the start."""
        identity = {"start": None if started is None else weights_fingerprint(started)}
        if self.resume:
            check_identity(self.out / _IDENTITY, identity, "a run")
        accelerator.wait_for_everyone()  # all have read before one writes
        if accelerator.is_main_process:
            write_identity(self.out / _IDENTITY, identity)

    def _fresh(self, texts: Sequence[Text]) -> DraftNetwork:
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

    def _observer(self, network: DraftNetwork, texts: Sequence[Text], accelerator: Accelerator) -> Observe:
        """What gives the target's features; where they are to be kept on the disk, they are written first."""
        if self.features is None:
            return observe
        read = [*texts, *(() if self.live is None else (each.text for each in self.live.recordings))]
        shards = FeatureShards(self.features, self.target, network)
        size = shards.size_of(read)
        if accelerator.is_main_process:
            note(
                f"features of {size.num_texts} texts take {size.num_bytes / 1e9:.3f} GB in {self.features}, where "
                f"{size.free_bytes / 1e9:.1f} GB are free"
            )
        with _bar("Features", accelerator) as show:
            shards.write(self.target, network, read, accelerator=accelerator, on_text=show)
        return shards

    def _train(self, network: DraftNetwork, texts: Sequence[Text], accelerator: Accelerator) -> list[StepLog]:
        observer = self._observer(network, texts, accelerator)
        ends = [self.options.max_steps * (number + 1) // len(self.stages) for number in range(len(self.stages))]
        curve = DrafterCurve(self.out, ends, resume=self.resume) if accelerator.is_main_process else None
        with _bar("Training", accelerator) as show:
            run: dict[str, Any] = {
                "out": self.out,
                "resume": self.resume,
                "accelerator": accelerator,
                "observer": observer,
                "shard": self.shard,
                "evaluate": lambda: self._evaluate(network, accelerator),
                "on_step": None if curve is None else _follow(show, self.options.max_steps, curve),
            }
            if self.live is None:
                return train_in_stages(self.target, network, texts, self.stages, self.options, on_recorded=show, **run)
            recordings, continual = self.live.recordings, self.live.continual
            return train_continually(
                self.target, network, recordings, texts, self.stages[0], self.options, continual, **run
            )

    def _evaluate(self, network: DraftNetwork, accelerator: Accelerator) -> dict[str, float]:
        """`tau` on the held-out prompts, and `tau_recorded` on those of live use."""
        sides: dict[str, Sequence[Sequence[int]]] = {"tau": self.held_out}
        if self.live is not None:
            sides["tau_recorded"] = self.live.held_out
        return {name: self._tau(network, prompts, accelerator) for name, prompts in sides.items()}

    def _tau(self, network: DraftNetwork, prompts: Sequence[Sequence[int]], accelerator: Accelerator) -> float:
        """Each process measures its share of the prompts."""
        own = prompts[accelerator.process_index :: accelerator.num_processes]
        found = acceptance_lengths(self.target, network, own, steps=self.steps, max_new_tokens=self.max_new_tokens)
        lengths = gather_object(found)
        return float(sum(lengths) / max(len(lengths), 1))


def _bar(label: str, accelerator: Accelerator) -> AbstractContextManager[Callable[..., None]]:
    """A progress bar, in one of several processes."""
    return progress_bar(label) if accelerator.is_main_process else nullcontext(lambda *done: None)


def _follow(show: Callable[..., None], max_steps: int, curve: DrafterCurve) -> Callable[[StepLog], None]:
    """Shows each step on the progress bar, and writes a line for each evaluation, on the screen and to the curve."""

    def on_step(log: StepLog) -> None:
        curve.add(log)
        rates = ", ".join(f"{rate:.2f}" for rate in log.acceptance)
        parts = ", ".join(f"{name} {value:.4f}" for name, value in log.parts.items() if not name.startswith("step_"))
        loss = f"loss {log.loss:.4f} ({parts})" if parts else f"loss {log.loss:.4f}"
        about = f"{loss}, agreement by position {rates}, {log.tokens_per_second:.0f} tokens/s"
        show(log.step, max_steps, about)
        if log.evaluation:
            measured = ", ".join(f"{name} {value:.3f}" for name, value in log.evaluation.items())
            note(f"step {log.step}: {about}, {measured}")

    return on_step


def _prompt(recording: Recording) -> tuple[int, ...]:
    return recording.text.tokens[: recording.text.num_prompt_tokens]


def _frequent(target: Any, texts: Sequence[Text], size: int) -> torch.Tensor:
    """The ids of the answers' most frequent tokens."""
    counts = Counter(token for text in texts for token in text.tokens[text.num_prompt_tokens :])
    vocab_size = target.config.get_text_config(decoder=True).vocab_size
    return torch.tensor(DraftVocabulary.from_counts(counts, size, vocab_size=vocab_size).token_ids)
