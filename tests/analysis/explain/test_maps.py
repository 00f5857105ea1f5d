"""Maps of many pictures in a folder: their numbers, and an interrupted call that is repeated."""

import base64
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from tests.analysis.explain.test_inputs import PICTURES, model_with_preprocess
from tests.models import with_preprocess
from vitascope import explain
from vitascope.analysis.explain import maps
from vitascope.analysis.explain.inputs import as_images
from vitascope.analysis.explain.maps import NUMBERS, write_maps
from vitascope.data.reading import Faults
from vitascope.errors import UserError
from vitascope.models.vision_model import VisionModel

NAMED = [(f"deep/{number}", picture, "v1") for number, picture in enumerate(PICTURES)]


def write(
    model: VisionModel, out: Path, pictures: Any = NAMED, about: str = "a", **asked: Any
) -> tuple[str, ...]:
    faults = Faults(len(pictures))
    done = list(
        write_maps(model, pictures, out, **{"method": "layer-cam"} | asked, about=about, faults=faults)
    )
    assert len(done) == len(pictures) - faults.count
    return faults.left_out


def numbers_of(out: Path) -> dict[str, np.ndarray]:
    with np.load(out / NUMBERS) as numbers:
        return dict(numbers)


@pytest.mark.parametrize(("method", "target"), [("layer-cam", None), ("occlusion", 1), ("rollout", None)])
def test_numbers_are_those_of_the_method_and_the_model(tmp_path, method: str, target: int | None) -> None:
    model = model_with_preprocess()
    assert write(model, tmp_path, method=method, target=target) == ()
    numbers = numbers_of(tmp_path)
    assert numbers["names"].tolist() == ["deep/0", "deep/1"]
    probabilities = model(as_images(model, PICTURES)).softmax(dim=1).detach()
    predicted = probabilities.argmax(dim=1)
    targets = predicted if target is None else torch.full((2,), target)
    assert numbers["predicted"].tolist() == predicted.tolist()
    assert numbers["targets"].tolist() == ([-1, -1] if method == "rollout" else targets.tolist())
    np.testing.assert_allclose(
        numbers["probabilities"], probabilities.gather(1, targets[:, None])[:, 0], atol=1e-5
    )
    for heat, picture in zip(numbers["heatmaps"], PICTURES, strict=True):
        np.testing.assert_allclose(
            heat, explain.heatmap(model, picture, method, target)[0].numpy(), atol=1e-6
        )


def test_repeated_call_continues_where_the_first_was_interrupted(tmp_path: Path, monkeypatch) -> None:
    model, asked = model_with_preprocess(), []

    def counted(model: VisionModel, *options: Any, **settings: Any) -> torch.Tensor:
        asked.append(options)
        if len(asked) == 2:
            raise KeyboardInterrupt
        return explain.heatmap(model, *options, **settings)

    monkeypatch.setattr(maps, "heatmap", counted)
    with pytest.raises(KeyboardInterrupt):
        write(model, tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").rglob("*") if path.is_file()] == ["0.png"]
    kept = (tmp_path / "out" / "deep" / "0.png").read_bytes()
    write(model, tmp_path / "out")
    write(model, tmp_path / "out")
    assert len(asked) == 3  # the first picture once, the second twice, nothing for the third call
    assert (tmp_path / "out" / "deep" / "0.png").read_bytes() == kept
    write(model, tmp_path / "whole")
    for name, values in numbers_of(tmp_path / "whole").items():
        np.testing.assert_array_equal(values, numbers_of(tmp_path / "out")[name])


def test_maps_of_another_model_or_picture_and_other_files_are_not_taken(tmp_path: Path) -> None:
    model = model_with_preprocess()
    write(model, tmp_path)
    changed = [(name, picture, "v2") for name, picture, _ in NAMED]
    for asked in ({"about": "b"}, {"pictures": changed}):
        with pytest.raises(UserError, match=r"0\.png exists, and is not a map of this picture by this model"):
            write(model, tmp_path, **asked)
    Image.new("RGB", (8, 8)).save(tmp_path / "own.png")
    with pytest.raises(UserError, match=r"own\.png exists, and is not a map"):
        write(model, tmp_path, [("own", PICTURES[0], "v1")])


def test_sheets_show_every_picture_that_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(maps, "_PER_SHEET", 2)
    named = [(f"{number}", PICTURES[0], "v1") for number in range(3)]
    (reason,) = write(model_with_preprocess(), tmp_path, [("bad", b"text", "v1"), *named])
    assert "not a picture" in reason
    assert sorted(path.name for path in tmp_path.glob("sheet*")) == ["sheet-001.png", "sheet-002.png"]
    assert numbers_of(tmp_path)["names"].tolist() == ["0", "1", "2"]
    with pytest.raises(UserError, match="none of 1 image can be read"):
        write(model_with_preprocess(), tmp_path, [("bad", b"text", "v1")])


def test_model_without_classes_has_heatmaps_alone(tmp_path: Path) -> None:
    model = with_preprocess(model_with_preprocess(head="none"), model_with_preprocess().preprocess)
    write(model, tmp_path, method="rollout")
    assert set(numbers_of(tmp_path)) == {"names", "heatmaps"}


def test_map_with_other_numbers_than_one_can_have_is_not_taken(tmp_path: Path) -> None:
    model, path = model_with_preprocess(), tmp_path / "deep" / "1.png"
    write(model, tmp_path)
    with Image.open(path) as image:
        known = json.loads(image.text[maps._RECORD])  # type: ignore[attr-defined]
    one = base64.b64encode(np.ones(1, np.float32).tobytes()).decode()
    forged: tuple[dict[str, Any], ...] = (
        {"heat": base64.b64encode(np.full(16, np.nan, np.float32).tobytes()).decode()},
        *({"heat": ""}, {"grid": [-1, 4]}, {"grid": None}, {"predicted": 10**30}),
        *({"probability": float("nan")}, {"predicted": 10**6}, {"explained": 10**6}),
        {"grid": (1, 1), "heat": one},
    )
    for text in (*(json.dumps(known | numbers) for numbers in forged), "[" * 200_000):
        record = PngInfo()
        record.add_itxt(maps._RECORD, text, zip=True)
        Image.new("RGB", (8, 8)).save(path, pnginfo=record)
        with pytest.raises(UserError, match=r"1\.png exists, and is not a map"):
            write(model, tmp_path)


def test_named_pipe_in_the_place_of_a_map_is_an_error_at_once(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    os.mkfifo(tmp_path / "deep/0.png")
    with pytest.raises(UserError, match=r"0\.png exists, and is not a map"):
        write(model_with_preprocess(), tmp_path)


def test_name_too_long_for_a_file_leaves_out_one_picture_alone(tmp_path: Path) -> None:
    pictures = [("é" * 125, PICTURES[0], "v1"), NAMED[1]]
    (reason,) = write(model_with_preprocess(), tmp_path, pictures)
    assert "is too long for the name of a map: shorten it" in reason
