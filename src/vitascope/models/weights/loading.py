"""`from_pretrained` and `save_pretrained`: models in checkpoints of any family."""

import logging
import os
from pathlib import Path
from typing import cast

import torch

from vitascope.arguments import checked
from vitascope.errors import UserError
from vitascope.models.config import ViTConfig
from vitascope.models.hardware import resolve_device
from vitascope.models.sizes import ModelConfig
from vitascope.models.vision_model import VisionModel, build
from vitascope.models.weights.files import explaining_settings
from vitascope.models.weights.identification import check_format, family_named, identify, read_config
from vitascope.models.weights.mapping import Family, Source, from_family, run_there, to_family
from vitascope.models.weights.preprocess import changed_settings, check_preprocess, preprocess_of

log = logging.getLogger(__name__)


@checked
def from_pretrained(
    ref: str | os.PathLike[str],
    revision: str | None = None,
    *,
    family: str | None = None,
    config: ViTConfig | None = None,
    dtype: torch.dtype | None = None,
    device: str | torch.device | None = None,
) -> VisionModel:
    """Load the model of a MODEL argument, in evaluation mode, with its preprocessing (`model.preprocess`).

    Args:
        ref: a run folder, a model folder of any family, a weights file, a hub id, `cifar10` (built in; a
            model of that name in the working directory comes first), or a name of torchvision
            (`torchvision/vit_b_16`). `timm:FILE` names the family of a file that does not show it, and
            `timm:num_heads=16:FILE` also options that no tensor shows; otherwise they are assumed, with a
            warning.
        revision: branch, tag or commit of a hub id; `owner/name@revision` means the same.
        family: a name of `FAMILIES`; None finds it from the tensors' names and the configuration.
        config: the architecture, if the checkpoint does not contain it; None reads it.
        dtype: of the parameters; None is float32, whatever the checkpoint has.
        device: `auto` or a torch device; None is the CPU.

    Raises:
        CheckpointError: no such checkpoint, a broken file, an unknown family, or tensors that are missing,
            left over or of another shape (listed).
        UserError: a `dtype` of integers, or a device that this machine lacks.
    """
    if dtype is not None and not dtype.is_floating_point:
        raise UserError(f"dtype is {dtype}; a model has torch.float32, torch.bfloat16 or torch.float16")
    where = None if device is None else resolve_device(str(device))
    source, kind = identify(ref, revision, family)
    return load_source(source, kind, config).to(where, dtype)


def load_source(source: Source, family: Family, config: ModelConfig | None = None) -> VisionModel:
    """Build the model of an identified checkpoint; without `config`, with the described architecture."""
    found = read_config(source, family) if config is None else config
    if config is None and isinstance(found, ViTConfig) and (assumed := family.guessed(source, found)):
        log.warning(
            "%s: assuming %s, which the file does not contain; if that is wrong, name it with the file "
            "(%s:num_heads=N:FILE) or give config=ViTConfig(...)", source.name, assumed, family.name,
        )  # fmt: skip
    state = from_family(family, source, found)
    with torch.device("meta"):
        model = build(found)
    model.load_state_dict(state, strict=True, assign=True)
    with explaining_settings(source.name):
        model.preprocess = family.read_preprocess(source, cast("ViTConfig", found))
        model.trust = family.read_trust(source, found)
    check_preprocess(model.preprocess, source.name, found.image_hw)
    return model.eval().float()


log = logging.getLogger(__name__)


@checked
def save_pretrained(model: VisionModel, folder: str | os.PathLike[str], *, format: str = "vitascope") -> Path:
    """Write a model folder, in our own format or as another library loads it; returns the folder.

    Files of the same names are replaced. An interruption leaves the old files, the new ones, or a folder that
    is rejected, never a mixture. Parameters keep their dtype; an `.npz` has no bfloat16 and stores float32.

    Args:
        model: the model with its preprocessing, `model.preprocess`.
        folder: the folder to write, created if absent.
        format: a name of `FAMILIES`. The preprocessing is written as closely as the other library can express
            it; `convert` measures the difference.

    Raises:
        UserError: an unknown format, a model without preprocessing or that the other library does not have,
            files that cannot be written, or a folder with other weights that would be read instead.
    """
    check_format(format, model.config)
    family, config = family_named(format), model.config
    if isinstance(config, ViTConfig) and run_there(family, config).outputs != config.outputs:
        log.warning("%s files cannot say that classes are independent: apply the sigmoid yourself", format)
    if model.trust is not None and not family.write_trust(model.trust):
        log.warning("%s files hold no sets of classes and no familiarity", format)
    to_family(family, model, preprocess_of(model), Path(folder))
    written, kind = identify(folder, family=format)
    theirs = kind.read_preprocess(written, cast("ViTConfig", config))
    if differing := changed_settings(preprocess_of(model), theirs):
        log.warning(
            "%s prepares pictures differently: %s; `convert` measures the effect on outputs",
            format,
            differing,
        )
    return Path(folder)
