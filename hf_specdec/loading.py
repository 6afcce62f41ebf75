"""Loading targets and drafters."""

from __future__ import annotations

import logging
import os
from typing import Any, Literal, cast

import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedModel

from hf_specdec.errors import InvalidConfigError
from hf_specdec.huge_pages import use_huge_pages
from hf_specdec.linear import PackedLinear, pack_linears, packing_problem
from hf_specdec.networks.auto import AutoDrafter
from hf_specdec.networks.checkpoint import is_draft_checkpoint, is_exit_heads
from hf_specdec.networks.exit_heads import ExitHeads
from hf_specdec.placement import device_of


__all__ = ["load_assistant", "load_exit_heads", "load_model"]

logger = logging.getLogger(__name__)


def load_model(
    id_or_path: str | os.PathLike[str],
    *,
    quantization: Literal["4bit", "8bit"] | BitsAndBytesConfig | None = None,
    dtype: torch.dtype | str = "auto",
    device_map: Any = None,
    packed: bool | Literal["auto"] = "auto",
    **kwargs: Any,
) -> PreTrainedModel:
    """A causal LM from a folder or the Hub, in evaluation mode.

    Weights on the CPU are put in huge pages of memory where the system has them; a pass then looks up fewer addresses.

    Args:
        id_or_path (`str` or path): Folder or Hub id.
        quantization (`str` or `BitsAndBytesConfig`, *optional*): `"4bit"` (NF4, computing in `dtype`), `"8bit"`, or a
            configuration of your own. Quantised weights stay where `device_map` puts them; the model is never moved.
        dtype (`torch.dtype` or `str`): Data type of the weights, such as `torch.float16` or `"float16"`; `"auto"` for the
            checkpoint's own (4-bit weights then compute in bfloat16).
        device_map: As in `from_pretrained`.
        packed (`bool` or `"auto"`): Whether to pack linear layers for the CPU ([`pack_linears`]). `"auto"` does so for
            models in float32 that are wholly on the CPU, where it pays, and says why where PyTorch cannot; `True` packs small
            layers as well.
        kwargs: Passed on to `from_pretrained`.

    Raises:
        [`InvalidConfigError`]: For the removed `load_in_4bit` / `load_in_8bit`, for unknown values, for weights that were saved
            quantised otherwise, and for the checkpoint of a drafter network, which would load as a one-layer Llama with random
            parts.
    """
    for removed, value in (("load_in_4bit", "4bit"), ("load_in_8bit", "8bit")):
        if removed in kwargs:
            raise InvalidConfigError(f'{removed}= was removed from transformers 5; pass quantization="{value}"')
    dtype = _dtype(dtype)
    if quantization == "4bit":
        compute = torch.bfloat16 if dtype == "auto" else dtype
        quantization = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=compute)
    elif quantization == "8bit":
        quantization = BitsAndBytesConfig(load_in_8bit=True)
    elif quantization is not None and not isinstance(quantization, BitsAndBytesConfig):
        raise InvalidConfigError(f'quantization must be "4bit", "8bit" or a BitsAndBytesConfig, got {quantization!r}')
    if packed not in (True, False, "auto"):
        raise InvalidConfigError(f'packed must be True, False or "auto", got {packed!r}')
    if is_draft_checkpoint(id_or_path):
        raise InvalidConfigError(
            f"{id_or_path} holds a drafter network and no causal LM: load it with AutoDrafter.from_pretrained(..., "
            "target=model), or name it as assistant_model"
        )
    if quantization is not None:
        kwargs["quantization_config"] = quantization
    model = AutoModelForCausalLM.from_pretrained(id_or_path, dtype=dtype, device_map=device_map, **kwargs).eval()
    if quantization is not None:
        _refuse_other_bits(model, quantization, id_or_path)
    devices = {parameter.device.type for parameter in model.parameters()}
    if packed is True or (packed == "auto" and quantization is None and devices == {"cpu"}):
        report = pack_linears(model, small=packed is True)
        if packed == "auto" and model.dtype == torch.float32 and (problem := packing_problem()):
            logger.warning("The linear layers of %s stay dense: %s.", id_or_path, problem)
        if packed is True and report.num_packed == 0:
            raise InvalidConfigError(
                f"packed=True, but no layer could be packed: {sorted(set(report.skipped.values()))}"
            )
    use_huge_pages(model)
    return model


def _dtype(named: torch.dtype | str) -> torch.dtype | str:
    """A dtype by its name; `"auto"` is left to transformers."""
    found = (
        named
        if named == "auto" or isinstance(named, torch.dtype)
        else getattr(torch, named.removeprefix("torch."), None)
    )
    if found != "auto" and not (isinstance(found, torch.dtype) and found.is_floating_point):
        raise InvalidConfigError(
            f'dtype must be "auto" or a floating dtype such as torch.float16 or "float16", got {named!r}'
        )
    return found


def _refuse_other_bits(model: Any, asked: BitsAndBytesConfig, id_or_path: str | os.PathLike[str]) -> None:
    """Weights that were saved quantised stay as they were saved, whatever is asked for; transformers only warns."""
    saved = getattr(model.config, "quantization_config", None)
    if isinstance(saved, BitsAndBytesConfig) and saved.load_in_4bit != asked.load_in_4bit:
        bits = {True: "4bit", False: "8bit"}
        raise InvalidConfigError(
            f"the weights of {id_or_path} were saved as {bits[saved.load_in_4bit]} and cannot be loaded as "
            f"{bits[asked.load_in_4bit]}: drop quantization=..., or load the checkpoint that they were made from"
        )


def load_assistant(id_or_path: str | os.PathLike[str], target: Any) -> PreTrainedModel:
    """What drafts for `target`: a drafter network or exit heads if the checkpoint holds them, else a causal LM, in the target's
    dtype.

    A network or heads are packed for the CPU where their target is (a layer of a tree is several rows, and so is what an
    adapter reads after a draft), and put in huge pages as well.
    """
    if is_draft_checkpoint(id_or_path):
        return _beside(target, AutoDrafter.from_pretrained(id_or_path, target=target))
    if is_exit_heads(id_or_path):
        return load_exit_heads(id_or_path, target)
    return load_model(id_or_path, dtype=target.dtype, device_map={"": device_of(target)})


def load_exit_heads(id_or_path: str | os.PathLike[str], target: Any) -> ExitHeads:
    """Exit heads that serve `target`: in its dtype, on its device, and packed where it is."""
    heads: Any = ExitHeads.from_pretrained(id_or_path, dtype=target.dtype, use_safetensors=True)
    return cast(ExitHeads, _beside(target, heads.to(device_of(target)).eval()))


def _beside(target: Any, loaded: PreTrainedModel) -> PreTrainedModel:
    """What drafts for a target, laid out in memory as the target is."""
    if any(isinstance(module, PackedLinear) for module in target.modules()):
        pack_linears(loaded)
    use_huge_pages(loaded)
    return loaded
