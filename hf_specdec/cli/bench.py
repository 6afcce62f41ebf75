"""`specdec bench`: several ways of decoding the same prompts, side by side."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hf_specdec.cli import options as opt
from hf_specdec.cli.errors import CommandError, reports_errors
from hf_specdec.cli.models import Models, load_models, quiet
from hf_specdec.cli.output import note, print_json, progress_bar
from hf_specdec.cli.texts import encode_prompt, guess_field, read_texts


if TYPE_CHECKING:
    from hf_specdec.bench import Arm, Benchmark, Row
    from hf_specdec.drafters import DraftVocabulary


__all__ = ["bench"]

_ARMS = "plain,stock-assistant-5,stock-lookup-5,default,model-5,easd"
_FIELDS = ("prompt", "question", "problem", "instruction", "text")


@reports_errors
def bench(
    target: opt.Target,
    data: Annotated[list[Path], typer.Option("--data", "-d", help="Prompts: .txt or .jsonl; may be repeated.")],
    assistant: opt.Assistant = None,
    arms: Annotated[
        str,
        typer.Option(
            "--arms",
            help="Comma-separated: plain, stock-assistant[-N], stock-lookup-N, stock-early-exit-N, economize-model-N, "
            "economize-lookup-N (where that package is installed), default, model[-N], ngram[-N], hybrid[-N], "
            "default-reduced, model-reduced[-N], hybrid-reduced[-N], self-draft, tree[-NODES], easd[-THRESHOLD], "
            "easd-plain; NAME=CONFIG for any preset or saved config, under a name of yours.",
        ),
    ] = _ARMS,
    draft_vocabulary: Annotated[
        Path | None,
        typer.Option("--draft-vocabulary", help="For the -reduced arms; see `specdec calibrate vocabulary`."),
    ] = None,
    field: Annotated[
        str | None,
        typer.Option("--field", help="Field of a .jsonl file; by default prompt, question, problem or text."),
    ] = None,
    limit: opt.Limit = None,
    chat: opt.Chat = None,
    batch_size: opt.BatchSize = 1,
    max_new_tokens: opt.MaxNewTokens = 128,
    temperature: Annotated[
        float, typer.Option("--temperature", min=0.0, help="Sample at this temperature; 0 decodes greedily.")
    ] = 0.0,
    seed: Annotated[int, typer.Option("--seed", help="When sampling, each prompt's dice start from it.")] = 0,
    dtype: opt.DType = opt.DTypeName.float32,
    device_map: opt.DeviceMap = None,
    quantization: opt.Quantization = None,
    packed: Annotated[bool, typer.Option("--packed/--no-packed", help="Pack float32 linears on the CPU.")] = True,
    out: Annotated[Path, typer.Option("--out", "-o", help="Writes OUT.json, OUT.md and OUT.png.")] = Path("results"),
    keep_rows: Annotated[
        bool, typer.Option("--rows/--no-rows", help="Keep the tokens and rounds of every call in OUT.json.")
    ] = True,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Go on with an interrupted run of the same command; a prompt that lacks an arm is decoded anew.",
        ),
    ] = False,
    as_json: opt.Json = False,
    debug: opt.Debug = False,
) -> None:
    """Decode each prompt with every arm, in alternating order, and compare speeds and texts.

    Speeds are those of the decode phase; the prompts' forward passes are not in them. Costs of isolated forward passes are
    measured before each prompt and give the predicted speed-up. Ctrl-C keeps what is done; --resume goes on. Exits with 1 if a
    greedy text of an exact arm of this package is not plain decoding's, and rounding does not explain it.
    """
    from hf_specdec.bench import CostLog, CostMeter, check_arms, parse_arm, widest_pass, write_report
    from hf_specdec.drafters import DraftVocabulary
    from hf_specdec.networks.checkpoint import is_exit_heads
    from hf_specdec.reduced_head import reduce_head

    chosen = [parse_arm(name.strip(), draft_vocabulary) for name in arms.split(",")]
    check_arms(chosen, has_draft=assistant is not None, batch_size=batch_size)
    vocabulary = None
    if draft_vocabulary is not None and any(arm.reduced for arm in chosen):
        vocabulary = DraftVocabulary.load(draft_vocabulary)
    if assistant is not None and is_exit_heads(assistant):
        raise CommandError(
            f"{assistant} is exit heads: name them in a saved SelfDraftConfig, and measure that with --arms plain,NAME=CONFIG"
        )
    texts = _read(data, field, limit)
    settings = {
        "target": Path(target).name,
        "assistant": None if assistant is None else Path(assistant).name,
        "models": [target, assistant],
        "arms": arms,
        "configs": {arm.name: arm.config.to_dict() for arm in chosen if arm.config is not None},
        "data": [path.name for path in data],
        "field": field,
        "limit": limit,
        "chat": chat,
        "batch_size": batch_size,
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "seed": seed,
        "dtype": str(dtype),
        "device_map": device_map,
        "quantization": None if quantization is None else str(quantization),
        "packed": packed,
        "draft_vocabulary": None if draft_vocabulary is None else draft_vocabulary.name,
    }
    checkpoints = {name: _Checkpoint(out, name, settings, each) for name, each in texts.items()}
    if resume:
        for checkpoint in checkpoints.values():
            checkpoint.refuse_another_run()
    models = load_models(
        target,
        assistant,
        dtype=dtype,
        device_map=device_map,
        quantization=quantization,
        packed=packed and "auto",
        networks=True,
    )
    with quiet():
        benchmarks = {
            name: _benchmark(models, each, chosen, checkpoints[name].rows, settings) for name, each in texts.items()
        }
        reduced = None if vocabulary is None else reduce_head(models.assistant, vocabulary.token_ids)
        meter = CostMeter(
            models.target,
            models.assistant,
            reduced_draft=reduced,
            batch_size=batch_size,
            widest=max(9, widest_pass(chosen)),
        )
        rows = {}
        for checkpoint in checkpoints.values():
            checkpoint.begin(resume)
        for name, benchmark in benchmarks.items():
            benchmark.costs = CostLog(meter, checkpoints[name].costs)
            with progress_bar(name) as show:
                rows[name] = _run(benchmark, show)
        summary = {name: _figures(benchmark, rows[name]) for name, benchmark in benchmarks.items()}
    environment = _environment(models, list(benchmarks.values()), settings, vocabulary)
    paths = write_report(out, summary, rows if keep_rows else {}, environment)
    if as_json:
        print_json({"summary": summary, "environment": environment})
    else:
        _print(summary)
        note("Written: " + ", ".join(str(path) for path in paths))
    if faulty := _faulty(summary, chosen):
        note(f"Not plain decoding's text, although exact: {', '.join(faulty)}")
        raise typer.Exit(1)


@dataclass(frozen=True)
class _Checkpoint:
    """Where an interrupted run of one data set goes on, and of which command it is.

    Args:
        out (`Path`): The command's output.
        name (`str`): The data set.
        settings (`dict`): What the command was given.
        texts (`list[str]`): The prompts.
    """

    out: Path
    name: str
    settings: dict[str, Any]
    texts: list[str]

    @property
    def rows(self) -> Path:
        return self.out.with_name(f"{self.out.name}.{self.name}.rows.jsonl")

    @property
    def costs(self) -> Path:
        return self.out.with_name(f"{self.out.name}.{self.name}.costs.jsonl")

    @property
    def kept(self) -> Path:
        return self.rows.with_suffix(".settings.json")

    def begin(self, resume: bool) -> None:
        """Says whose rows will be here, and forgets those of another run."""
        if not resume:
            for old in (self.rows, self.costs):
                old.unlink(missing_ok=True)
        self.rows.parent.mkdir(parents=True, exist_ok=True)
        self.kept.write_text(json.dumps(self._all()), encoding="utf-8")

    def refuse_another_run(self) -> None:
        """An old checkpoint is continued only by the same command; settings that it does not name are not compared."""
        if not self.kept.exists():
            return
        before = json.loads(self.kept.read_text(encoding="utf-8"))
        now = json.loads(json.dumps(self._all()))
        if other := [name for name, value in now.items() if before.get(name, value) != value]:
            raise CommandError(f"{self.rows.name} belongs to a run with other {', '.join(other)}: run without --resume")

    def _all(self) -> dict[str, Any]:
        return self.settings | {"prompts": hashlib.sha256(json.dumps(self.texts).encode()).hexdigest()}


def _read(data: list[Path], field: str | None, limit: int | None) -> dict[str, list[str]]:
    """The prompts by data set."""
    texts: dict[str, list[str]] = {}
    for path in data:
        name = _name_of(path)
        if name in texts:
            raise CommandError(f"two files of --data would both be called {name}: rename one, or run them apart")
        texts[name] = read_texts(path, field or guess_field(path, _FIELDS), limit)
    return texts


def _faulty(summary: dict[str, Any], arms: list[Arm]) -> list[str]:
    """Exact arms of this package with a text that plain decoding would not have written."""
    ours = {arm.name for arm in arms if arm.config is not None}
    return [
        f"{arm} on {name}"
        for name, figures in summary.items()
        for arm, each in figures.items()
        if arm in ours and any(divergence["kind"] == "fault" for divergence in each.get("divergences", ()))
    ]


def _benchmark(
    models: Models, texts: list[str], arms: list[Arm], checkpoint: Path, settings: dict[str, Any]
) -> Benchmark:
    """What cannot be run together is found out here, before anything is measured."""
    from hf_specdec.bench import Benchmark

    return Benchmark(
        models.target,
        models.assistant,
        models.tokenizer,
        [encode_prompt(models.tokenizer, text, settings["chat"]) for text in texts],
        arms,
        settings["max_new_tokens"],
        checkpoint,
        temperature=settings["temperature"] or None,
        seed=settings["seed"],
        batch_size=settings["batch_size"],
    )


def _figures(benchmark: Benchmark, rows: list[Row]) -> dict[str, dict[str, Any]]:
    from hf_specdec.bench import divergences, summarize

    sampled = benchmark.temperature is not None
    unpriced = [arm.name for arm in benchmark.arms if arm.config is not None and not arm.is_priced]
    figures = summarize(rows, benchmark.costs, sampled=sampled, unpriced=unpriced)
    if not sampled:
        for arm, parted in divergences(benchmark, rows).items():
            figures[arm]["divergences"] = parted
    return figures


def _run(benchmark: Benchmark, show: Any) -> list[Row]:
    total = len(benchmark.batches) * len(benchmark.arms)
    done = [len(benchmark.finished())]

    def progress(row: Row) -> None:
        done[0] += 1
        show(done[0], total)

    show(done[0], total)
    return benchmark.run(progress)


def _name_of(path: Path) -> str:
    """The data set's name: that of the file, or of its folder where the file is named after its split."""
    named_after_split = path.stem.lower() in ("train", "test", "validation", "dev") and path.absolute().parent.name
    return (path.absolute().parent.name if named_after_split else path.stem).lower()


def _law(settings: dict[str, Any]) -> str:
    if not settings["temperature"]:
        return "greedy"
    return f"sampled at temperature {settings['temperature']:g}, seed {settings['seed']}"


def _environment(
    models: Models, benchmarks: list[Benchmark], settings: dict[str, Any], vocabulary: DraftVocabulary | None
) -> dict[str, Any]:
    import torch

    from hf_specdec.bench.cost_log import typical_costs
    from hf_specdec.bench.report import versions
    from hf_specdec.hub.results import DRAFTER_WEIGHTS
    from hf_specdec.networks.base import DraftNetwork
    from hf_specdec.networks.target import weights_fingerprint
    from hf_specdec.placement import device_of

    is_network = isinstance(models.assistant, DraftNetwork)
    costs = typical_costs([each.costs for each in benchmarks if each.costs is not None])
    return {
        **_named("target", settings["target"], models.target),
        **_named("assistant", settings["assistant"], models.assistant),
        **({DRAFTER_WEIGHTS: weights_fingerprint(models.assistant)} if is_network else {}),
        "dtype": str(models.target.dtype).removeprefix("torch."),
        **({"quantization": settings["quantization"]} if settings["quantization"] else {}),
        "device": str(device_of(models.target)),
        "threads": torch.get_num_threads(),
        "baseline": "eager, packed linears" if _is_packed(models.target) else "eager",
        "decoding": f"{_law(settings)}, {settings['max_new_tokens']} new tokens at most, EOS on",
        "prompts": settings["limit"] or "all",
        "batch_size": settings["batch_size"],
        **(
            {"draft_vocabulary": f"{settings['draft_vocabulary']}, {len(vocabulary.token_ids)} ids"}
            if vocabulary
            else {}
        ),
        "date": date.today().isoformat(),
        "versions": versions(),
        "predicted from": f"passes over {', '.join(map(str, costs.target))} tokens; straight lines between and beyond them",
        "costs": costs.to_dict(),
    }


def _named(role: str, name: str | None, model: Any) -> dict[str, Any]:
    """A model by its name, and by its revision where it was loaded from the Hub."""
    revision = getattr(getattr(model, "config", None), "_commit_hash", None)
    return {role: name} | ({f"{role}_revision": revision} if revision else {})


def _is_packed(model: Any) -> bool:
    from hf_specdec.linear import PackedLinear, SharedLinear

    return any(isinstance(module, PackedLinear | SharedLinear) for module in model.modules())


def _print(summary: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.markdown import Markdown

    from hf_specdec.bench.report import table

    for name, arms in summary.items():
        Console().print(Markdown(f"**{name}**\n\n{table(arms)}"))
