"""`specdec quality`: what a method does to the answers to GSM8K or HumanEval."""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date, timedelta
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hf_specdec.cli import options as opt
from hf_specdec.cli.errors import CommandError, reports_errors
from hf_specdec.cli.models import Models, load_models, quiet
from hf_specdec.cli.output import note, print_json, progress_bar
from hf_specdec.cli.texts import encode_prompt


if TYPE_CHECKING:
    from hf_specdec.bench import Arm
    from hf_specdec.quality import Batch, Evaluation, Item, RowsFile
    from hf_specdec.quality.tasks import Task


__all__ = ["quality"]


class TaskName(StrEnum):
    """What is asked."""

    gsm8k = "gsm8k"
    humaneval = "humaneval"


_ARMS = "plain,exact,easd,easd-plain,random"


@reports_errors
def quality(
    target: opt.Target,
    data: Annotated[Path, typer.Option("--data", "-d", help="GSM8K or HumanEval as published: .jsonl.")],
    assistant: opt.Assistant = None,
    task: Annotated[TaskName, typer.Option("--task", help="Which of the two the data are.")] = TaskName.gsm8k,
    limit: opt.Limit = None,
    chat: opt.Chat = None,
    examples: Annotated[
        int | None,
        typer.Option(
            "--examples",
            min=0,
            max=2,
            help="Worked examples before each question; 0 puts an instruction after it. By default 2 with a chat template.",
        ),
    ] = None,
    arms: Annotated[
        str,
        typer.Option(
            "--arms",
            help="Comma-separated: plain, exact, easd, easd-plain, easd-THRESHOLD, random, random-RATE, model-N, ngram-N, "
            "hybrid-N; every other acceptance rule as RULE or RULE-VALUE; rsd-checks, rsd-likelihood. random rejects at the "
            "rate at which easd changes tokens.",
        ),
    ] = _ARMS,
    threshold: Annotated[float, typer.Option("--threshold", help="Entropy threshold of easd and easd-plain.")] = 2.0,
    memory: Annotated[Path | None, typer.Option("--memory", help="Correction memory of the arm csd.")] = None,
    policy: Annotated[Path | None, typer.Option("--policy", help="Policy of the arm cospec.")] = None,
    tv: Annotated[
        bool, typer.Option("--tv", help="Decode relaxed arms once more, off the clock, to measure their distance.")
    ] = False,
    test_seconds: Annotated[int, typer.Option("--test-seconds", min=1, help="Longest run of a program's tests.")] = 10,
    test_megabytes: Annotated[int, typer.Option("--test-megabytes", min=1, help="Its memory.")] = 1024,
    length: Annotated[int, typer.Option("--length", min=1, help="Tokens to draft per round.")] = 5,
    temperature: Annotated[float, typer.Option("--temperature", min=0.0, help="0 decodes greedily.")] = 0.0,
    seeds: Annotated[
        str, typer.Option("--seeds", help="Comma-separated; greedy arms that throw no dice use the first only.")
    ] = "0",
    batch_size: opt.BatchSize = 32,
    max_new_tokens: opt.MaxNewTokens = 220,
    dtype: opt.DType = opt.DTypeName.float32,
    device_map: opt.DeviceMap = None,
    quantization: opt.Quantization = None,
    packed: Annotated[bool, typer.Option("--packed/--no-packed", help="Pack float32 linears on the CPU.")] = True,
    notes: Annotated[
        list[str] | None,
        typer.Option("--note", help="KEY=VALUE for the report's list of what it was measured with; may be repeated."),
    ] = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="Writes OUT.json, OUT.md and OUT.png.")] = Path("quality"),
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with OUT.rows.jsonl; arms and seeds may have been added.")
    ] = False,
    report_only: Annotated[
        bool,
        typer.Option("--report-only", help="Decode nothing: report what is finished, of an interrupted run as well."),
    ] = False,
    as_json: opt.Json = False,
    debug: opt.Debug = False,
) -> None:
    """Answer the questions with every arm, in batches, and compare accuracies with paired bootstrap intervals.

    Every finished batch is kept in OUT.rows.jsonl at once. Ctrl-C keeps what is done; --resume goes on, --report-only
    reports what there is.
    """
    from hf_specdec.quality import Learnt, RowsFile, parse_quality_arms

    tested = _task(task, test_seconds, test_megabytes)
    learnt = Learnt(memory, policy)
    chosen = parse_quality_arms([name.strip() for name in arms.split(",")], threshold, length, learnt)
    remarks, dice = _remarks(notes or []), _seeds(seeds)
    questions = tested.read(data, limit)
    settings = {
        "data": data.stem,
        "questions": len(questions),
        "fingerprint": _fingerprint(questions),
        "target": Path(target).name,
        "assistant": None if assistant is None else Path(assistant).name,
        "dtype": str(dtype),
        "quantization": None if quantization is None else str(quantization),
        "chat": chat,
        "examples": examples,
        "threshold": threshold,
        "length": length,
        "temperature": temperature,
        "batch_size": batch_size,
        "max_new_tokens": max_new_tokens,
        **_asked_task(task, test_seconds, test_megabytes),
        **({"tv": True} if tv else {}),
        **({} if packed else {"packed": False}),
        **learnt.fingerprints(),
    }
    path = out.with_name(out.name + ".rows.jsonl")
    if report_only:
        batches, environment = _finished(path, settings, {arm.name for arm in chosen}, dice)
    else:
        if path.exists():  # what cannot be continued is refused before the models are loaded
            RowsFile.start(path, settings, {}, resume=resume)
        models = load_models(
            target, assistant, dtype=dtype, device_map=device_map, quantization=quantization, packed=packed and "auto"
        )
        asked = _Asked(task, tested, questions, tuple(chosen), dice)
        file, prompts = _start(models, asked, path, settings, _environment(models, packed), resume)
        environment = file.environment
        batches = _run(asked.evaluation(models, prompts, file, settings))
    _report(out, batches, settings, environment | remarks, as_json)


@dataclass(frozen=True)
class _Asked:
    """What is asked of whom."""

    name: TaskName
    task: Task
    questions: Sequence[Item]
    arms: tuple[Arm, ...]
    seeds: tuple[int, ...]

    def evaluation(
        self, models: Models, prompts: list[list[int]], file: RowsFile, settings: dict[str, Any]
    ) -> Evaluation:
        from hf_specdec.quality import Evaluation

        shared = ("batch_size", "max_new_tokens", "temperature", "length")
        return Evaluation(
            models.target,
            models.assistant,
            models.tokenizer,
            self.questions,
            prompts,
            list(self.arms),
            file,
            **{name: settings[name] for name in shared},
            seeds=self.seeds,
            judge=self.task.judge,
            measures_tv=settings.get("tv", False),
        )


def _start(
    models: Models, asked: _Asked, path: Path, settings: dict[str, Any], environment: dict[str, Any], resume: bool
) -> tuple[RowsFile, list[list[int]]]:
    """The file of rows, which says how the questions are put, and the questions as prompts."""
    from hf_specdec.quality import RowsFile

    chat, wanted = settings["chat"], settings["examples"]
    template = models.tokenizer.chat_template is not None and chat is not False
    shown = asked.task.examples[: len(asked.task.examples) * template if wanted is None else wanted]
    wording = _wording(shown, asked.task.instruction)
    file = RowsFile.start(path, settings, environment | wording, resume=resume)
    told = _is_told(asked.name, template, shown)
    messages = [asked.task.prompt(each, instructed=told) for each in asked.questions]
    return file, [encode_prompt(models.tokenizer, message, chat, examples=shown) for message in messages]


def _run(evaluation: Evaluation) -> list[Batch]:
    """Runs with a bar on a terminal, else with a line for each batch."""
    with quiet(), progress_bar("quality") as show:
        started, before = time.monotonic(), [0]

        def progress(done: int, total: int, batch: Batch | None) -> None:
            show(done, total)
            if batch is None:
                before[0] = done
                return
            left = (time.monotonic() - started) / (done - before[0]) * (total - done)
            if not sys.stderr.isatty():
                note(
                    f"{done}/{total} {batch.arm}, seed {batch.seed}, batch {batch.number}: {batch.seconds:.0f} s, "
                    f"{sum(row.correct for row in batch.rows)} of {len(batch.rows)} right; "
                    f"{timedelta(seconds=round(left))} left"
                )

        return evaluation.run(progress)


def _finished(
    path: Path, settings: dict[str, Any], arms: set[str], seeds: tuple[int, ...]
) -> tuple[list[Batch], dict[str, Any]]:
    """What is there of these arms and seeds, and what it was measured with."""
    from hf_specdec.quality import RowsFile

    if not path.exists():
        raise CommandError(f"there is no {path.name}: run without --report-only first")
    file = RowsFile.read(path)
    file.check(settings)
    batches = [batch for batch in file.batches.values() if batch.arm in arms and batch.seed in seeds]
    return batches, file.environment


def _report(
    out: Path, batches: list[Batch], settings: dict[str, Any], environment: dict[str, Any], as_json: bool
) -> None:
    from hf_specdec.quality import summarize, write_report
    from hf_specdec.quality.report import tables

    summary = summarize(batches, greedy=settings["temperature"] == 0)
    if not summary:
        raise CommandError("no question has been answered by every arm yet: go on with --resume, or name fewer --arms")
    paths = write_report(out, summary, batches, environment, settings)
    if as_json:
        print_json({"summary": summary, "settings": settings, "environment": environment})
        return
    typer.echo(tables(summary))  # as it is: the tables are wider than most terminals
    note("Written: " + ", ".join(str(path) for path in paths))


def _environment(models: Models, packed: bool) -> dict[str, Any]:
    import torch

    from hf_specdec.bench.report import versions
    from hf_specdec.placement import device_of

    return {
        "device": str(device_of(models.target)),
        "threads": torch.get_num_threads(),
        "linears": "packed where they are float32 on the CPU" if packed else "torch's own",
        "date": date.today().isoformat(),
        "versions": versions(),
    }


def _task(task: TaskName, max_seconds: int, max_megabytes: int) -> Task:
    from hf_specdec.quality.tasks import gsm8k, humaneval

    return gsm8k() if task is TaskName.gsm8k else humaneval(max_seconds=max_seconds, max_megabytes=max_megabytes)


def _asked_task(task: TaskName, max_seconds: int, max_megabytes: int) -> dict[str, Any]:
    """What the verdicts depend on, for the report and `--resume`."""
    if task is TaskName.gsm8k:
        return {}
    return {"task": task.value, "test_seconds": max_seconds, "test_megabytes": max_megabytes}


def _is_told(task: TaskName, template: bool, shown: Sequence[tuple[str, str]]) -> bool:
    """Whether the question comes with an instruction: code without a chat template is completed as it stands."""
    return not shown if task is TaskName.gsm8k else template


def _wording(examples: Sequence[tuple[str, str]], instruction: str) -> dict[str, str]:
    """How the questions were put."""
    if not examples:
        return {"instruction": instruction}
    return {f"example {place}": " / ".join(each).replace("\n", " ") for place, each in enumerate(examples, start=1)}


def _fingerprint(questions: Sequence[Item]) -> str:
    return hashlib.sha256("\n".join(f"{each.text} {each.answer}" for each in questions).encode()).hexdigest()[:16]


def _seeds(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(each) for each in text.split(","))
    except ValueError:
        raise CommandError(f"--seeds takes comma-separated numbers, got {text!r}") from None


def _remarks(notes: list[str]) -> dict[str, str]:
    pairs = [each.partition("=") for each in notes]
    if wrong := [key for key, equals, _ in pairs if not (key and equals)]:
        raise CommandError(f"--note takes KEY=VALUE, got {wrong[0]!r}")
    return {key: value for key, _, value in pairs}
