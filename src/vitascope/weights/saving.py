"""`save_pretrained`: a model as a folder of any family."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from vitascope.arguments import checked
from vitascope.model.config import ViTConfig
from vitascope.model.vision_model import VisionModel
from vitascope.weights.identification import FAMILIES, check_format
from vitascope.weights.mapping import run_there, to_family
from vitascope.weights.preprocess import preprocess_of

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
    family, config = FAMILIES[format], model.config
    if isinstance(config, ViTConfig) and run_there(family, config).outputs != config.outputs:
        log.warning("%s files cannot say that classes are independent: apply the sigmoid yourself", format)
    to_family(family, model, preprocess_of(model), Path(folder))
    return Path(folder)
