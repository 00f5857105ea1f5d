"""The family of a checkpoint, and the architecture that it describes."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable
from typing import Any

from vitascope.errors import UserError, check_choice
from vitascope.model.sizes import ModelConfig
from vitascope.weights.families.deit import Deit
from vitascope.weights.families.dinov2 import Dinov2
from vitascope.weights.families.dinov3 import Dinov3
from vitascope.weights.families.huggingface import HuggingFace
from vitascope.weights.families.huggingface_config import readable_instead
from vitascope.weights.families.jax import Jax
from vitascope.weights.families.own import Vitascope
from vitascope.weights.families.timm import Timm
from vitascope.weights.families.torchvision import Torchvision
from vitascope.weights.files import CheckpointError, refusal
from vitascope.weights.mapping import Family, Source, check_claims
from vitascope.weights.sources import exists, open_source

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (Vitascope(), Timm(), HuggingFace(), Torchvision(), Jax(), Dinov3(), Dinov2(), Deit())
}
"""By name, in the order in which `identify` asks them."""
UNTOLD: dict[str, Callable[[str], Any]] = {"num_heads": int, "mlp": str, "norm_eps": float}
"""Options that no tensor shows. They can be named between a family and its file."""


def identify(
    ref: str | os.PathLike[str], revision: str | None = None, family: str | None = None
) -> tuple[Source, Family]:
    """Open the checkpoint of a MODEL argument and find its family; errors as `from_pretrained`."""
    options: dict[str, Any] = {}
    if family is None and not exists(ref):
        family, options, ref = split_ref(os.fspath(ref))
    if family is not None:
        check_choice("family", family, FAMILIES)  # before anything is fetched
        kind = FAMILIES[family]
        source = dataclasses.replace(open_source(ref, revision), options=options)
        return kind.arriving(source), kind
    source = open_source(ref, revision)
    for kind in FAMILIES.values():
        if kind.recognizes(source):
            return kind.arriving(source), kind
    raise _unknown(ref, source)


def split_ref(ref: str) -> tuple[str | None, dict[str, Any], str]:
    """Split `timm:FILE` or `timm:num_heads=16,mlp=gelu_tanh:FILE` into family, options and file."""
    family, _, rest = ref.partition(":")
    if family not in FAMILIES:
        return None, {}, ref
    options: dict[str, Any] = {}
    told = re.fullmatch(r"(\w+=[^,:=]*(?:,\w+=[^,:=]*)*):(.+)", rest)
    for name, _, value in (text.partition("=") for text in told[1].split(",")) if told else ():
        check_choice("option before a file", name, UNTOLD)
        try:
            options[name] = UNTOLD[name](value)
        except ValueError as error:
            raise UserError(f"{ref}: {name} is a number, not {value!r}") from error
    return family, options, told[2] if told else rest


def read_config(source: Source, family: Family) -> ModelConfig:
    """The architecture of an identified checkpoint."""
    config = family.read_config(source)
    config = config.replace(**source.options) if source.options else config
    check_claims(source, config)
    return config


def pretrained_config(ref: str | os.PathLike[str]) -> ModelConfig:
    """The architecture of a MODEL argument, without building the model; errors as `from_pretrained`."""
    return read_config(*identify(ref))


def _unknown(ref: str | os.PathLike[str], source: Source) -> CheckpointError:
    """The error for a checkpoint that no family recognizes."""
    if model_type := source.config.get("model_type"):
        return CheckpointError(
            f"{ref}: its model_type is {model_type!r}; {readable_instead(str(model_type))}"
        )
    if source.has("blocks.0.attn.qkv.weight"):
        return CheckpointError(
            f"{ref}: timm's tensor names without timm's config.json, so the preprocessing is unknown; name "
            f"the family: timm:{ref} (mean and std of 0.5) or deit:{ref} (ImageNet's)"
        )
    for prefix in sorted({name.partition(".")[0] + "." for name in source.tensors}):
        part = {k.removeprefix(prefix): v for k, v in source.tensors.items() if k.startswith(prefix)}
        if _has_body(dataclasses.replace(source, tensors=part)):
            other = next(name for name in sorted(source.tensors) if not name.startswith(prefix))
            return refusal(
                ref,
                f"the tensors under {prefix!r} are a ViT's, but there are others, such as {other!r}; save "
                f"only the former, without the prefix: {{k[{len(prefix)}:]: v for k, v in state.items() "
                f"if k.startswith({prefix!r})}}",
            )
    some = ", ".join(sorted(source.tensors)[:3])
    return refusal(ref, f"not a ViT of a known family; its first tensors are {some}")


def _has_body(source: Source) -> bool:
    """Whether some tensors are those of a ViT of some family."""
    return source.has("blocks.0.attn.qkv.weight") or any(
        kind.recognizes(source) for kind in FAMILIES.values()
    )
