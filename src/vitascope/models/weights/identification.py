"""Finds the checkpoint of a MODEL argument, its family, and the architecture that it describes."""

import contextlib
import dataclasses
import os
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vitascope import layout
from vitascope.errors import UserError, check_choice, nearest_path, suggestion
from vitascope.models.config import ViTConfig
from vitascope.models.sizes import ModelConfig
from vitascope.models.weights import builtin, hub
from vitascope.models.weights.families.own import Vitascope
from vitascope.models.weights.files import (
    CheckpointError,
    explaining_settings,
    other_form,
    read_json,
    read_weights,
    rejection,
)
from vitascope.models.weights.hub import CONFIG, PREPROCESSOR, weights_name
from vitascope.models.weights.mapping import Family, Source, check_claims, misfit
from vitascope.models.weights.stored_model import local_model

OWN = Vitascope()


def families() -> dict[str, Family]:
    """Every family by name, in the order in which `identify` tries them; loaded for checkpoints of others."""
    from vitascope.models.weights.all_families import FAMILIES

    return FAMILIES


# Options that no tensor shows. They can be named between a family and its file.
FILE_OPTIONS: dict[str, Callable[[str], Any]] = {"num_heads": int, "mlp": str, "norm_eps": float}


def identify(
    ref: str | os.PathLike[str], revision: str | None = None, family: str | None = None
) -> tuple[Source, Family]:
    """Open the checkpoint of a MODEL argument and find its family; errors as `from_pretrained`."""
    options: dict[str, Any] = {}
    if family is None and not is_path(ref):
        family, options, ref = split_ref(os.fspath(ref))
    if family is not None:
        named = family_named(family)  # before anything is fetched
        source = dataclasses.replace(open_source(ref, revision), options=options)
        with explaining_settings(source.name):
            kind = named.of(source)
            if not named.recognizes(source) and (fault := _prefix_fault(ref, source)):
                raise fault
            return kind.before_reading(source), kind
    source = open_source(ref, revision)
    with explaining_settings(source.name):
        kind = recognized(ref, source)
        return kind.before_reading(source), kind


def recognized(ref: str | os.PathLike[str], source: Source) -> Family:
    """The family of an opened checkpoint; a CheckpointError names what is known."""
    if OWN.recognizes(source):
        return OWN
    for kind in families().values():
        if kind.recognizes(source):
            return kind.of(source)
    raise _unknown(ref, source)


def family_named(name: str, what: str = "family") -> Family:
    """The family with a name, as its format has; UserError for an unknown one, with the nearest."""
    if name == OWN.name:
        return OWN
    check_choice(what, name, families())
    return families()[name]


def check_format(format: str, config: ModelConfig) -> None:
    """Reject a format whose library cannot run a model exactly; the error names the ways that there are."""
    reason = misfit(family_named(format, "format"), config)
    if not reason:
        return
    able, plain = (
        ", ".join(name for name, family in families().items() if not misfit(family, each))
        for each in (config, ViTConfig())
    )
    raise CheckpointError(
        f"{reason}; the formats of this model: {able}. `vitascope export` writes it as ONNX or OpenVINO, for "
        f"programs without vitascope. Models of `vitascope train --recipe base` have the formats {plain}"
    )


def split_ref(ref: str) -> tuple[str | None, dict[str, Any], str]:
    """Split `timm:FILE` or `timm:num_heads=16,mlp=gelu_tanh:FILE` into family, options and file."""
    family, colon, rest = ref.partition(":")
    if not colon or family not in families():
        return None, {}, ref
    options: dict[str, Any] = {}
    match = re.fullmatch(r"(\w+=[^,:=]*(?:,\w+=[^,:=]*)*):(.+)", rest)
    for name, _, value in (text.partition("=") for text in match[1].split(",")) if match else ():
        check_choice("option before a file", name, FILE_OPTIONS)
        try:
            options[name] = FILE_OPTIONS[name](value)
        except ValueError as error:
            raise UserError(f"{ref}: {name} is a number, not {value!r}") from error
    return family, options, match[2] if match else rest


def read_config(source: Source, family: Family) -> ModelConfig:
    """The architecture of an identified checkpoint."""
    with explaining_settings(source.name):
        config = family.read_config(source)
    config = config.replace(**source.options) if source.options else config
    check_claims(source, config)
    return config


def pretrained_config(ref: str | os.PathLike[str]) -> ModelConfig:
    """The architecture of a MODEL argument, without building the model; errors as `from_pretrained`."""
    return read_config(*identify(ref))


def open_source(ref: str | os.PathLike[str], revision: str | None = None) -> Source:
    """Open the checkpoint of a MODEL argument; arguments and errors as `from_pretrained`."""
    path = locate(os.fspath(ref), revision)
    names = [child.name for child in (path if path.is_dir() else path.parent).iterdir()]
    if path.is_dir():
        file = weights_name(ref, names)
        if file is None:
            expected = f"not a model: expected a run folder, or {CONFIG} and model.safetensors in a folder"
            raise rejection(ref, other_form(names) or expected)
        path = path / file
    belong = path.name in hub.WEIGHTS or hub.VARIANT.fullmatch(path.name) is not None  # the settings
    with contextlib.suppress(CheckpointError):  # several weights: the settings belong to none
        belong = belong or weights_name(path.name, names) == path.name
    settings = {}
    if belong:
        config = hub.OPEN_CLIP_CONFIG if path.name in hub.OPEN_CLIP else CONFIG
        for key, name in (("config", config), ("preprocessor", PREPROCESSOR)):
            settings[key] = read_json(path.with_name(name)) if name in names else {}
        if config in names and not settings["config"]:
            raise rejection(path.with_name(config), "an empty object; it should describe the architecture")
    weights = read_weights(path)
    return Source(
        name=str(ref),
        file=path.name,
        folder=path.parent,
        tensors=weights.tensors,
        training=weights.training,
        **settings | weights.settings,
    )


def is_model(ref: str | os.PathLike[str]) -> bool:
    """Whether a path is a run folder, a model folder or a file of weights, by the names of its files."""
    path = Path(ref).expanduser()
    if not os.path.isdir(path):
        return os.path.isfile(path) and path.name.endswith(hub.FILE_ENDINGS) and path.suffix != ".json"
    return (
        layout.is_run(path) or layout.has_model(path) or any((path / name).exists() for name in hub.WEIGHTS)
    )


def reject_model(data: object, order: str) -> None:
    """Reject a model that stands where data belong; `order` says what comes where."""
    if isinstance(data, str | os.PathLike) and is_model(data):
        raise UserError(f"{os.fspath(data)} is a model, and no images: {order}")


def is_path(ref: str | os.PathLike[str]) -> bool:
    """Whether there is such a path; a path that the system rejects (too long, for example) is an error."""
    try:
        return Path(ref).exists()
    except OSError as error:
        raise rejection(ref, f"no such model: {error.strerror}") from error


def locate(ref: str, revision: str | None = None) -> Path:
    """The folder or file of a MODEL argument, downloaded if necessary."""
    ref = os.fspath(local_model(ref))
    try:
        path = Path(ref).expanduser()
    except RuntimeError as error:  # there is no such user
        raise rejection(ref, f"no such model: {error}") from error
    own = builtin.built_in(ref)
    place = "built in" if own else "a local path" if is_path(path) else ""
    place = place or ("torchvision's" if hub.torchvision_file(ref) else "")
    if place and revision is not None:
        raise CheckpointError(f"{ref} is {place}; revision {revision!r} has no meaning for it")
    if own is not None:
        return own
    if is_path(path):
        if path.is_file() or (path / CONFIG).is_file():  # a model folder, whatever else lies in it
            return path
        if layout.is_run(path) and not layout.is_finished(path):
            best = path / layout.BEST
            instead = f", or take its best model so far, {best}" if layout.has_model(best) else ""
            raise CheckpointError(
                f"{path}: this run has no finished model; finish it with `vitascope train --resume "
                f"{shlex.quote(str(path))}`{instead}"
            )
        return path / layout.MODEL if layout.is_finished(path) else path
    if (file := hub.torchvision_file(ref)) is not None:
        return hub.fetch_torchvision(file)
    mistyped = nearest_path(str(path))
    name, _, wanted = ref.partition("@")
    local = bool(mistyped) or (len(path.parts) > 1 and path.parent.is_dir())  # more likely than an owner
    if hub.is_hub_id(name) and not local:
        if revision and wanted and revision != wanted:
            raise CheckpointError(f"{ref}: revision {revision!r} contradicts the one in the name")
        return hub.fetch_hub(name, revision or wanted or None)
    hub_id = f"hf-hub:{name} for the hub's" if hub.is_hub_id(name) else "a hub id (owner/name)"
    close = mistyped or suggestion(ref, builtin.NAMES)
    raise CheckpointError(
        f"{ref}: no such model{close}; give a run folder, a model folder or file, the built-in "
        f"{' or '.join(builtin.NAMES)}, {hub_id}, or a name like torchvision/vit_b_16"
    )


def _unknown(ref: str | os.PathLike[str], source: Source) -> CheckpointError:
    if model_type := source.config.get("model_type"):
        from vitascope.models.weights.families.huggingface.family import readable_instead

        return CheckpointError(
            f"{ref}: its model_type is {model_type!r}; {readable_instead(str(model_type))}"
        )
    if source.has("blocks.0.attn.qkv.weight"):
        return CheckpointError(
            f"{ref}: timm's tensor names without timm's config.json, so the preprocessing is unknown; name "
            f"the family: timm:{ref} (mean and std of 0.5) or deit:{ref} (ImageNet's, as dino, ijepa and mae)"
        )
    if fault := _prefix_fault(ref, source):
        return fault
    some = ", ".join(sorted(source.tensors)[:3])
    return rejection(ref, f"not a ViT of a known family; its first tensors are {some}")


def _prefix_fault(ref: str | os.PathLike[str], source: Source) -> CheckpointError | None:
    """The error for a file of a ViT under a prefix that other tensors do not have; None for other files."""
    if source.has("blocks.0.attn.qkv.weight"):
        return None
    for prefix in sorted({name.partition(".")[0] + "." for name in source.tensors}):
        part = {k.removeprefix(prefix): v for k, v in source.tensors.items() if k.startswith(prefix)}
        body = dataclasses.replace(source, tensors=part)
        if body.has("blocks.0.attn.qkv.weight") or any(it.recognizes(body) for it in families().values()):
            other = next(name for name in sorted(source.tensors) if not name.startswith(prefix))
            return rejection(
                ref,
                f"the tensors under {prefix!r} are a ViT's, but there are others, such as {other!r}; save "
                f"only the former, without the prefix: {{k[{len(prefix)}:]: v for k, v in state.items() "
                f"if k.startswith({prefix!r})}}",
            )
    return None
