"""Chooses the shape of the demo target: measures candidate models and replays the cost model.

Every time is measured here, on random weights, in fp32 at batch 1. The predicted speed-ups are
arithmetic on those times, for acceptance rates that are assumed, not measured.
"""

import argparse
import json
from dataclasses import asdict, dataclass
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from .costs import predictions
from .times import head_time, pass_times


VOCAB_SIZE = 4096
ROWS = (1, 2, 4, 6)


@dataclass(frozen=True)
class Shape:
    """Depth and width of a candidate; `heads` x 32 need not equal the width."""

    layers: int
    width: int
    heads: int = 4
    kv_heads: int = 2
    mlp: int = 320

    @property
    def name(self) -> str:
        return f"{self.layers}x{self.width}"

    def config(self, layers: int | None = None, vocab_size: int = VOCAB_SIZE, **extra: Any) -> LlamaConfig:
        """The `LlamaConfig` of this shape, `layers` deep when given (as a draft is)."""
        return LlamaConfig(
            vocab_size=vocab_size,
            hidden_size=self.width,
            intermediate_size=self.mlp,
            num_hidden_layers=layers or self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=32,
            max_position_embeddings=1024,
            tie_word_embeddings=True,
            **extra,
        )


CANDIDATES = (
    Shape(16, 160, heads=5, kv_heads=1, mlp=400),
    Shape(24, 128),
    Shape(28, 128, mlp=256),
    Shape(32, 112, mlp=280),
)
CHOSEN = CANDIDATES[2]
DRAFT_LAYERS = 2


def measure(shape: Shape, repeats: int = 30) -> dict:
    """Measures one candidate and adds the predicted speed-ups.

    The time of a layer is the slope between the full model and its half-depth twin.
    """
    torch.manual_seed(0)
    half = shape.layers // 2
    models = {n: LlamaForCausalLM(shape.config(n)).eval() for n in (1, 2, half, shape.layers)}
    full = models.pop(shape.layers)
    passes = pass_times(full, ROWS, repeats)
    steps = {n: pass_times(model, (1,), repeats)[1] for n, model in models.items()}
    layer = (passes[1] - steps[half]) / (shape.layers - half)
    head = head_time(full, repeats)
    drafts = {"draft_1": steps[1], "draft_2": steps[2]}
    return {
        "shape": shape.name,
        "parameters": full.num_parameters(),
        "pair_megabytes": 2 * (full.num_parameters() + models[DRAFT_LAYERS].num_parameters()) / 1e6,
        "layer_ms": layer,
        "head_ms": head,
        **{f"{name}_ms": value for name, value in drafts.items()},
        "pass_ms": passes,
        "predicted": predictions(shape.layers, passes, layer, head, drafts),
        "config": asdict(shape),
    }


def markdown_table(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def as_markdown(results: list[dict]) -> str:
    """The measurements and the predictions as two Markdown tables."""
    header = ["shape", "params", "pair MB", "layer ms", "head ms", "draft 1 ms", "draft 2 ms"]
    measured = []
    for r in results:
        times = [r["layer_ms"], r["head_ms"], r["draft_1_ms"], r["draft_2_ms"], *r["pass_ms"].values()]
        sizes = [f"{r['parameters'] / 1e6:.2f} M", f"{r['pair_megabytes']:.1f}"]
        measured.append([r["shape"], *sizes, *(f"{time:.2f}" for time in times)])
    names = list(results[0]["predicted"][0])[2:]
    predicted = [
        [r["shape"], str(p["acceptance"]), str(p["length"]), *(f"{p[name]:.2f}" for name in names)]
        for r in results
        for p in r["predicted"]
    ]
    tables = (
        markdown_table([*header, *(f"{rows} rows ms" for rows in ROWS)], measured),
        markdown_table(["shape", "acceptance", "length", *names], predicted),
    )
    return "\n\n".join(tables)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--json", action="store_true", help="print the measurements as JSON")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    results = [measure(shape, arguments.repeats) for shape in CANDIDATES]
    print(json.dumps(results, indent=1) if arguments.json else as_markdown(results))


if __name__ == "__main__":
    main()
