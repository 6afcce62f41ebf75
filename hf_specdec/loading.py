"""Loading targets and drafters."""

from __future__ import annotations

import os
from typing import Any, Literal

import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedModel

from hf_specdec.errors import InvalidConfigError
from hf_specdec.huge_pages import use_huge_pages
from hf_specdec.linear import PackedLinear, pack_linears
from hf_specdec.networks.auto import AutoDrafter
from hf_specdec.networks.checkpoint import is_draft_checkpoint
from hf_specdec.placement import device_of


__all__ = ["load_assistant", "load_model"]


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
        dtype (`torch.dtype` or `str`): Data type of the weights, `"auto"` for the checkpoint's own.
        device_map: As in `from_pretrained`.
        packed (`bool` or `"auto"`): Whether to pack linear layers for the CPU ([`pack_linears`]). `"auto"` does so for
            models in float32 that are wholly on the CPU, where it pays; `True` packs small layers as well.
        kwargs: Passed on to `from_pretrained`.

    Raises:
        [`InvalidConfigError`]: For the removed `load_in_4bit` / `load_in_8bit` and for unknown values.
    """
    for removed, value in (("load_in_4bit", "4bit"), ("load_in_8bit", "8bit")):
        if removed in kwargs:
            raise InvalidConfigError(f'{removed}= was removed from transformers 5; pass quantization="{value}"')
    if quantization == "4bit":
        compute = torch.bfloat16 if isinstance(dtype, str) else dtype
        quantization = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=compute)
    elif quantization == "8bit":
        quantization = BitsAndBytesConfig(load_in_8bit=True)
    elif quantization is not None and not isinstance(quantization, BitsAndBytesConfig):
        raise InvalidConfigError(f'quantization must be "4bit", "8bit" or a BitsAndBytesConfig, got {quantization!r}')
    if quantization is not None:
        kwargs["quantization_config"] = quantization
    model = AutoModelForCausalLM.from_pretrained(id_or_path, dtype=dtype, device_map=device_map, **kwargs).eval()
    devices = {parameter.device.type for parameter in model.parameters()}
    if packed is True or (packed == "auto" and quantization is None and devices == {"cpu"}):
        report = pack_linears(model, small=packed is True)
        if packed is True and report.num_packed == 0:
            raise InvalidConfigError(
                f"packed=True, but no layer could be packed: {sorted(set(report.skipped.values()))}"
            )
    use_huge_pages(model)
    return model


def load_assistant(id_or_path: str | os.PathLike[str], target: Any) -> PreTrainedModel:
    """What drafts for `target`: a drafter network if the checkpoint holds one, else a causal LM, in the target's dtype.

    A network is packed for the CPU where its target is: a layer of a tree is several rows.
    """
    if is_draft_checkpoint(id_or_path):
        network = AutoDrafter.from_pretrained(id_or_path, target=target)
        if any(isinstance(module, PackedLinear) for module in target.modules()):
            pack_linears(network)
        return network
    return load_model(id_or_path, dtype=target.dtype, device_map={"": device_of(target)})
