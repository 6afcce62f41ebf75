"""`specdec train cospec` and `specdec calibrate cospec`: a policy that arbitrates between draft and target token."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hf_specdec.cli import options as opt
from hf_specdec.cli.calibrating import about_pair
from hf_specdec.cli.errors import CommandError, reports_errors
from hf_specdec.cli.models import Models, load_models, quiet
from hf_specdec.cli.output import note, print_json, progress_bar
from hf_specdec.cli.texts import encode_prompt


if TYPE_CHECKING:
    from hf_specdec.cospec import CoSpecResult, LabelFile, ReinforceStep, Rollouts
    from hf_specdec.quality import Question


__all__ = ["calibrate_cospec", "train_cospec"]

_Questions = Annotated[
    Path,
    typer.Option(
        "--data", "-d", help="Questions with answers, as GSM8K: .jsonl with question and answer.", show_default=False
    ),
]
_Out = Annotated[Path, typer.Option("--out", "-o", help="Folder to write to.", show_default=False)]
_Flips = Annotated[int, typer.Option("--flips", min=1, help="Labelled mismatches per question; each costs one answer.")]
_WarmSteps = Annotated[int, typer.Option("--warm-steps", min=0, help="Steps of the fit to the labels.")]
_HeldOut = Annotated[float, typer.Option("--held-out", help="Share of the questions that measure.")]
_Length = Annotated[int, typer.Option("--length", min=1, help="Tokens to draft per round.")]
_Examples = Annotated[
    int | None,
    typer.Option(
        "--examples", min=0, max=2, help="Worked examples before each question. By default 2 with a chat template."
    ),
]

_Resume = Annotated[bool, typer.Option("--resume", help="Go on with the labels that a killed run left in the folder.")]


@reports_errors
def train_cospec(
    target: opt.Target,
    draft: opt.Draft,
    data: _Questions,
    out: _Out,
    limit: opt.Limit = None,
    chat: opt.Chat = None,
    examples: _Examples = None,
    max_new_tokens: opt.MaxNewTokens = 220,
    length: _Length = 5,
    flips: _Flips = 8,
    warm_steps: _WarmSteps = 500,
    steps: Annotated[int, typer.Option("--steps", min=0, help="Steps of reinforcement.")] = 100,
    groups: Annotated[int, typer.Option("--groups", min=1, help="Questions per step.")] = 4,
    group_size: Annotated[int, typer.Option("--group-size", min=2, help="Answers per question and step.")] = 8,
    learning_rate: Annotated[float, typer.Option("--learning-rate", help="Of the reinforcement.")] = 3e-3,
    speed_weight: Annotated[
        float, typer.Option("--speed-weight", help="Reward for one more token per round; a right answer is worth 1.")
    ] = 0.05,
    kl_weight: Annotated[float, typer.Option("--kl-weight", help="Holds the policy near the fit to the labels.")] = 0.0,
    held_out: _HeldOut = 0.2,
    batch_size: opt.BatchSize = 8,
    seed: Annotated[int, typer.Option("--seed", help="Decides weights, choices and dice.")] = 0,
    resume: _Resume = False,
    dtype: opt.DType = opt.DTypeName.auto,
    as_json: opt.Json = False,
    debug: opt.Debug = False,
) -> None:
    """Train CoSpec's policy: labels from flipped mismatches, then reinforcement with correct answers as reward.

    Questions that a hash of their text holds out measure how often the policy decides as the label says.
    """
    from hf_specdec.cospec import CoSpecOptions, ReinforceOptions

    reinforcement = ReinforceOptions(steps, groups, group_size, learning_rate, kl_weight=kl_weight, seed=seed)
    options = CoSpecOptions(
        flips_per_prompt=flips, warm_steps=warm_steps, reinforcement=reinforcement, batch_size=batch_size, seed=seed
    )
    settings = {"max_new_tokens": max_new_tokens, "length": length, "speed_weight": speed_weight, "seed": seed}
    _run(target, draft, data, out, limit, chat, examples, dtype, held_out, options, settings, resume, as_json)


@reports_errors
def calibrate_cospec(
    target: opt.Target,
    draft: opt.Draft,
    data: _Questions,
    out: Annotated[Path, typer.Option("--save", help="Folder to write to.", show_default=False)],
    limit: opt.Limit = None,
    chat: opt.Chat = None,
    examples: _Examples = None,
    max_new_tokens: opt.MaxNewTokens = 220,
    length: _Length = 5,
    flips: _Flips = 8,
    warm_steps: _WarmSteps = 500,
    held_out: _HeldOut = 0.2,
    batch_size: opt.BatchSize = 8,
    seed: Annotated[int, typer.Option("--seed", help="Decides weights and choices.")] = 0,
    resume: _Resume = False,
    dtype: opt.DType = opt.DTypeName.auto,
    as_json: opt.Json = False,
    debug: opt.Debug = False,
) -> None:
    """Fit CoSpec's policy to labels from flipped mismatches, without reinforcement: `specdec train cospec` adds that."""
    from hf_specdec.cospec import CoSpecOptions, ReinforceOptions

    options = CoSpecOptions(
        flips_per_prompt=flips,
        warm_steps=warm_steps,
        reinforcement=ReinforceOptions(num_steps=0),
        batch_size=batch_size,
        seed=seed,
    )
    settings = {"max_new_tokens": max_new_tokens, "length": length, "seed": seed}
    _run(target, draft, data, out, limit, chat, examples, dtype, held_out, options, settings, resume, as_json)


def _run(
    target: str,
    draft: str,
    data: Path,
    out: Path,
    limit: int | None,
    chat: bool | None,
    examples: int | None,
    dtype: str,
    held_out: float,
    options: Any,
    settings: dict[str, Any],
    resume: bool,
    as_json: bool,
) -> None:
    from hf_specdec.cospec import train_cospec as train
    from hf_specdec.quality import read_questions
    from hf_specdec.training.answers import is_held_out

    questions = read_questions(data, limit)
    sides = [[each for each in questions if is_held_out(each.text, held_out) == side] for side in (False, True)]
    if not all(sides):
        raise CommandError(
            f"of {len(questions)} questions {len(sides[1])} are held out: pass more questions or another --held-out"
        )
    models = load_models(target, draft, dtype=dtype)
    own, other = (_rollouts(models, side, chat, examples, settings) for side in sides)
    files = _label_files(out, resume, options, settings | {"dtype": str(dtype)}, own, other)
    with quiet(), progress_bar("Labelling") as progress:
        result = train(own, other, options, files=files, on_label=progress, on_step=_tell)
    about = about_pair(target, draft, data, result.policy.fingerprint)
    _save(out, result, settings["length"], about)
    if as_json:
        print_json({**about, "out": str(out), **result.to_dict()})
        return
    typer.echo(result.summary())
    note(f'wrote {out}: use it with --config {out}, or CoSpecConfig(policy="{out}")')


def _label_files(
    out: Path, resume: bool, options: Any, settings: dict[str, Any], *sides: Rollouts
) -> tuple[LabelFile, LabelFile]:
    from hf_specdec.acceptance import pair_fingerprint
    from hf_specdec.cospec import LabelFile

    asked = (options.flips_per_prompt, options.seed, settings["max_new_tokens"], settings["length"], settings["dtype"])
    files = []
    for name, side in zip(("training", "held_out"), sides, strict=True):
        pair = pair_fingerprint(side.target.config, side.draft.config)
        about = hashlib.sha256(repr((asked, pair, [list(each) for each in side.prompts])).encode()).hexdigest()[:32]
        path = out / "labels" / f"{name}.safetensors"
        if not resume:
            path.unlink(missing_ok=True)
        files.append(LabelFile(path, about))
    return files[0], files[1]


def _rollouts(
    models: Models, questions: list[Question], chat: bool | None, examples: int | None, settings: dict[str, Any]
) -> Rollouts:
    from hf_specdec.cospec import Rollouts
    from hf_specdec.quality import is_correct, prompt_for
    from hf_specdec.quality.gsm8k import EXAMPLES

    template = models.tokenizer.chat_template is not None and chat is not False
    shown = EXAMPLES[: len(EXAMPLES) * template if examples is None else examples]

    def judge(index: int, tokens: list[int]) -> bool:
        return is_correct(models.tokenizer.decode(tokens, skip_special_tokens=True), questions[index])

    prompts = [
        encode_prompt(models.tokenizer, prompt_for(each, instructed=not shown), chat, examples=shown)
        for each in questions
    ]
    return Rollouts(models.target, models.assistant, prompts, judge, **settings)


def _save(out: Path, result: CoSpecResult, length: int, about: dict[str, str]) -> None:
    from hf_specdec.acceptance.policy import POLICY_NAME
    from hf_specdec.configs import CoSpecConfig
    from hf_specdec.hub.artefact import write_artefact

    out.mkdir(parents=True, exist_ok=True)
    result.policy.save(out / POLICY_NAME)
    config = CoSpecConfig(policy=str(out / POLICY_NAME), length=length)
    write_artefact(out, "Arbitration policy of CoSpec", result.summary(), config, about, result.to_dict())


def _tell(step: ReinforceStep) -> None:
    note(f"step {step.step}: reward {step.reward:.3f}, took {step.taken:.1%} of {step.num_decisions} mismatches")
