"""A tiny pair of the demonstration's kind, and a console that is read afterwards."""

import io

import torch
from rich.console import Console

from hf_specdec.demo.models import new_model
from hf_specdec.demo.pair import Pair
from hf_specdec.demo.shape import Shape
from hf_specdec.demo.tokenizer import train


__all__ = ["console_of", "tiny_pair_of"]


def tiny_pair_of(layers: int = 12) -> Pair:
    """A pair with random weights, deep enough for the bundled exits, and a tokenizer that knows one sentence."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        shape = Shape(layers=layers, width=32, heads=2, kv_heads=1, mlp=64)
        tokenizer = train(["The json module reads and writes JSON.\n"] * 4, 300)
        return Pair(new_model(shape, layers, 300).eval(), new_model(shape, 1, 300).eval(), tokenizer)


def console_of(width: int = 100, height: int = 50, terminal: bool = False) -> Console:
    """A console that writes into `console.file`."""
    return Console(file=io.StringIO(), width=width, height=height, force_terminal=terminal)
