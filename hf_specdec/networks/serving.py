"""How an exported drafter is served: the launch lines of vLLM and SGLang (read off their options, not run)."""

from __future__ import annotations

import json
import shlex


__all__ = ["launch_lines", "serving_page"]

_ENGINES = {"eagle3": ("vLLM", "SGLang"), "vllm": ("vLLM",), "sglang": ("SGLang",), "speculators": ("vLLM",), "hf": ()}


def serving_page(format: str, target: str | None, method: str, steps: int) -> str | None:
    """The text of `serve.md`, or None for a format that no engine reads.

    Args:
        format (`str`): The checkpoint's format.
        target (`str`, *optional*): Hub id or folder of the target; `TARGET` stands for one that is not known.
        method (`str`): `"eagle"` or `"eagle3"`.
        steps (`int`): Tokens that are drafted per round.
    """
    if not _ENGINES[format]:
        return None
    parts = ["# Serving this drafter", "", "From within this folder:"]
    for engine, line in launch_lines(format, target, method, steps).items():
        parts += ["", f"## {engine}", "", "```bash", line, "```"]
    if target is None:
        parts += ["", "The checkpoint does not name its target: put its Hub id or folder in the place of `TARGET`."]
    return "\n".join([*parts, ""])


def launch_lines(format: str, target: str | None, method: str, steps: int) -> dict[str, str]:
    """The line that starts each engine that reads the format, by the engine's name, from within the exported folder.

    Args:
        format, target, method, steps: As for [`serving_page`].
    """
    name = shlex.quote(target or "TARGET")
    lines = {"vLLM": _vllm(format, name, method, steps), "SGLang": _sglang(name, method, steps)}
    return {engine: lines[engine] for engine in _ENGINES[format]}


def _vllm(format: str, target: str, method: str, steps: int) -> str:
    if format == "speculators" and target != "TARGET":
        return "vllm serve ."  # its config names the target and the number of tokens
    options = {"method": method, "model": ".", "num_speculative_tokens": steps}
    return f"vllm serve {target} --speculative-config {shlex.quote(json.dumps(options))}"


def _sglang(target: str, method: str, steps: int) -> str:
    return (
        f"python -m sglang.launch_server --model-path {target} --speculative-algorithm {method.upper()} "
        f"--speculative-draft-model-path . --speculative-num-steps {steps} --speculative-eagle-topk 1 "
        f"--speculative-num-draft-tokens {steps + 1}"
    )
