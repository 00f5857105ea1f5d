"""Heatmaps of any number of pictures in a folder, which a repeated call continues.

Each map is a PNG, whole or absent, that also contains its numbers, so the folder needs no other state.
"""

import base64
import dataclasses
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Self

import numpy as np
import torch
from PIL import Image
from PIL.PngImagePlugin import PngImageFile, PngInfo
from torch import Tensor

from vitascope.analysis.explain.inputs import normalized, pooled_and_logits, seen_hw
from vitascope.analysis.explain.lettering import short
from vitascope.analysis.explain.methods import METHODS, heatmap
from vitascope.analysis.explain.pictures import FloatArray, Picture, Uint8Array, overlay
from vitascope.analysis.explain.plots import COMPRESSION, Caption, draw_grid, save_figure
from vitascope.analysis.explain.targets import TargetLike, class_index
from vitascope.arguments import Range, check_fields
from vitascope.data.reading import Faults, readable
from vitascope.errors import UserError, printable
from vitascope.models.decoding import ImageError
from vitascope.models.heads import predicted, scores
from vitascope.models.preprocess import Framed
from vitascope.models.vision_model import VisionModel
from vitascope.models.weights.preprocess import preprocess_of
from vitascope.storage import explaining_failure, make_folder, replacing

NUMBERS = "heatmaps.npz"
_RECORD = "vitascope"
"""The name of the PNG's text that has the numbers."""
_OTHER_PNG = (OSError, ValueError, KeyError, TypeError, RecursionError, Image.DecompressionBombError)
"""What a file raises that is no map."""
_LONGEST = 255 - len(f".{2**22}.")
"""Bytes of a file's name, beside what it begins with while it is written."""
_PER_SHEET, _THUMBNAIL = 64, 192
"""Pictures of a contact sheet, and the longer side of each in pixels."""


@dataclasses.dataclass(frozen=True)
class _Map:
    """The numbers of a map, as its PNG has them."""

    key: tuple[str, ...]
    """What the map depends on."""
    heat: str
    """float32 (gh, gw), in base64."""
    grid: Annotated[tuple[int, int], Range(ge=1)]
    predicted: Annotated[int, Range(ge=-1, lt=2**31)] = -1
    explained: Annotated[int, Range(ge=-1, lt=2**31)] = -1
    """The explained class; -1 for a method, or a target, that is about no class."""
    probability: float = -1.0
    """Of the explained class, else of the predicted one."""

    def __post_init__(self) -> None:
        """Check the values, which may be of any PNG."""
        check_fields(self)
        if not np.isfinite(self.heatmap()).all():
            raise ValueError("a heatmap that is not finite")

    def heatmap(self) -> FloatArray:
        """float32 (gh, gw)."""
        return np.frombuffer(base64.b64decode(self.heat), np.float32).reshape(self.grid)

    @classmethod
    def read(cls, path: Path) -> Self | None:
        """The numbers of an existing map; None for anything else."""
        if path.is_file():  # to open a named pipe would wait for its writer
            with suppress(*_OTHER_PNG), Image.open(path) as image:
                return cls(**json.loads(image.text[_RECORD])) if isinstance(image, PngImageFile) else None
        return None

    def suits(self, model: VisionModel, others: "list[_Map]") -> bool:
        """Whether the classes are the model's, and the grid is equal to the one of its other maps."""
        grids = {tuple(other.grid) for other in [*others[:1], self]}
        return max(self.predicted, self.explained) < model.config.num_classes and len(grids) == 1


def write_maps(
    model: VisionModel,
    pictures: Iterable[tuple[str, Any, str]],
    out: Path,
    method: str,
    target: TargetLike = None,
    *,
    about: str,
    faults: Faults,
    **settings: Any,
) -> Iterator[None]:
    """Write each picture under its heatmap as `NAME.png`; yields after each, and adds others to `faults`.

    At the end, `sheet-001.png`, ... show all maps, and `heatmaps.npz` has their numbers: `names` (n,),
    `heatmaps` float32 (n, gh, gw) and, of a model with classes, `predicted`, `targets` int64 (n,) and
    `probabilities` float64 (n,). A target is -1 where a method, or a target, is about no class; the
    probability is then that of the predicted class. An existing map is not computed again.

    Args:
        pictures: a name (a relative path), the picture, and a text that changes with its content.
        out: the folder.
        method, target, settings: as for `heatmap`.
        about: a text that changes with the model, its preprocessing, the method, target and settings.
        faults: of all pictures.

    Raises:
        UserError: an existing file that is no map of this picture, model and method; as `heatmap`; nothing
            that can be read; a failure to write.
    """
    preprocess = preprocess_of(model)
    seen = seen_hw(model, preprocess.image_size)
    names, maps, shown = list[str](), list[_Map](), list[Uint8Array]()

    def opened(picture: tuple[str, Any, str]) -> tuple[str, str, Framed | _Map | None]:
        """A name and a version, with the picture or, if its file exists, the map in it."""
        name, source, version = picture
        path = out / f"{name}.png"
        if len(os.fsencode(path.name)) > _LONGEST:
            raise ImageError(
                f"{printable(name)}: {path.name[:20]}... is too long for the name of a map: shorten it"
            )
        exists = os.path.lexists(path)
        return name, version, _Map.read(path) if exists else preprocess.framed(source).top_left(*seen)

    with explaining_failure(out, "the maps", "finished maps are kept: make room and repeat the command"):
        for _, (name, version, record) in readable(opened, pictures, faults):
            path, key = out / f"{name}.png", (about, version)
            if isinstance(record, Framed):
                framed = record
                image = normalized(model, torch.from_numpy(framed.pixels)[None])  # (1, C, H, W)
                record = _map_of(model, image, key, method, target, settings)
                _write_map(path, Picture.of_channels(framed.picture, framed.box), record)
            elif record is None or record.key != key or not record.suits(model, maps):
                raise UserError(
                    f"{path} exists, and is not a map of this picture by this model and these options: name "
                    "another folder"
                )
            names.append(name)
            maps.append(record)
            with Image.open(path) as drawn:
                drawn.thumbnail((_THUMBNAIL, _THUMBNAIL))
                shown.append(np.asarray(drawn))
            if len(shown) == _PER_SHEET:
                _write_sheet(model, out, names, maps, shown)
            yield None
        faults.check_some()
        if shown:
            _write_sheet(model, out, names, maps, shown)
        numbers: dict[str, Any] = {"heatmaps": np.stack([record.heatmap() for record in maps])}
        if model.config.gives_classes:
            fields = {"predicted": "predicted", "targets": "explained", "probabilities": "probability"}
            for name, field in fields.items():
                numbers[name] = np.array([getattr(record, field) for record in maps])
        with replacing(out / NUMBERS) as aside:
            np.savez_compressed(aside, names=np.array(names), **numbers)


def _map_of(
    model: VisionModel,
    image: Tensor,
    key: tuple[str, ...],
    method: str,
    target: TargetLike,
    settings: dict[str, Any],
) -> _Map:
    """The numbers of an image (1, C, H, W)."""
    heat = heatmap(model, image, method, target, **settings)[0].cpu().numpy()
    classes: dict[str, Any] = {}
    if model.config.gives_classes:
        logits = pooled_and_logits(model, image)[1]
        guess = int(predicted(logits))
        explained = -1
        if METHODS[method].has_target and (target is None or isinstance(target, int | str)):
            explained = guess if target is None else class_index(target, model.config)
        probabilities = scores(logits.float(), model.config.outputs)[0]  # (K,)
        probability = float(probabilities[guess if explained < 0 else explained])
        classes = {"predicted": guess, "explained": explained, "probability": probability}
    return _Map(key, base64.b64encode(heat.tobytes()).decode(), heat.shape, **classes)


def _write_map(path: Path, picture: Picture, record: _Map) -> None:
    text = PngInfo()
    text.add_itxt(_RECORD, json.dumps(dataclasses.asdict(record)), zip=True)
    make_folder(path.parent)
    with replacing(path) as aside:
        drawn = Image.fromarray(overlay(picture.enlarged(), record.heatmap()))
        drawn.save(aside, "PNG", pnginfo=text, compress_level=COMPRESSION)


def _caption(model: VisionModel, record: _Map, name: str) -> Caption:
    """The explained class, else the predicted one, with its probability, and the picture's name."""
    note = short(name, 20) if record.heatmap().any() else "no evidence"
    index = record.predicted if record.explained < 0 else record.explained
    if index < 0:
        return Caption(note=note)
    label = model.config.class_names[index] if model.config.class_names else str(index)
    return Caption(printable(label, 80), record.probability, note=note)


def _write_sheet(
    model: VisionModel, out: Path, names: list[str], maps: list[_Map], shown: list[Uint8Array]
) -> None:
    """Draw a contact sheet of the last pictures, and forget them."""
    last = slice(-len(shown), None)
    captions = [_caption(model, *pair) for pair in zip(maps[last], names[last], strict=True)]
    with replacing(out / f"sheet-{-(-len(names) // _PER_SHEET):03}.png") as aside:
        save_figure(draw_grid(shown, captions, ""), aside)
    shown.clear()
