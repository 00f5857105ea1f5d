"""`vitascope explain`: every method's picture, the comparison's table, and errors."""

import contextlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from tests.analysis.explain.figures import coarse, num_colours
from tests.cli import SHAPE, SHORT, error_line
from tests.training import undrawn
from vitascope.analysis.explain.figures import VIEWS, draw
from vitascope.analysis.explain.methods import DEFAULT_METHOD, METHODS
from vitascope.cli import main
from vitascope.cli.explain import Explain, labelled_test_images
from vitascope.data.samples import PHOTOS
from vitascope.models.weights.loading import from_pretrained
from vitascope.training.run.run import Run

PICTURE = "data/red/0.png"


@pytest.fixture(autouse=True, scope="module")
def _coarse() -> Iterator[None]:
    with coarse():
        yield


@pytest.fixture(scope="module")
def others(place: SimpleNamespace) -> SimpleNamespace:
    """The tiny run, a ResNet's run, a body without a head, and folders that cannot be explained."""
    with contextlib.chdir(place.root), undrawn():
        cnn = ["--recipe", "cnn", "--model", "resnet29_w32_cifar", "--image-size", "16"]
        assert main(["train", "--data", "data", "--run", "runs/cnn", *cnn, *SHORT[2:]]) == 0
        assert main(["pretrain", "--data", "data", "--run", "runs/body", *SHAPE, *SHORT[2:]]) == 0
        Path("empty").mkdir()
        Path("plain").mkdir()
        for number, path in enumerate(sorted(Path("data").rglob("*.png"))[::5]):
            (Path("plain") / f"{number}.png").write_bytes(path.read_bytes())
    return place


def drawn(out: Path) -> np.ndarray:
    with Image.open(out) as image:
        assert image.format == "PNG"
        return np.asarray(image.convert("RGB"))


def explain(*argv: str, out: Path) -> np.ndarray:
    """The picture that a command draws."""
    assert main(["explain", *argv, "--out", str(out)]) == 0
    return drawn(out)


def test_help_names_every_method(capsys) -> None:
    with pytest.raises(SystemExit):
        main(["explain", "--help"])
    words = set(re.findall(r"[\w+-]+", capsys.readouterr().out))
    assert {*METHODS, *VIEWS} <= words


def test_every_setting_of_a_method_is_an_option_and_unset_by_default() -> None:
    known = [*METHODS.values(), *VIEWS.values()]
    for name in {setting for each in known for setting in each.settings} - {
        "steps",
        "window",
        "layers",
        "masks",
    }:
        assert getattr(Explain(model="m"), name) is None, name


def test_figure_below_a_file_is_one_clear_line(here, tmp_path, capsys) -> None:
    (tmp_path / "file").touch()
    out = tmp_path / "file" / "seen.png"
    assert main(["explain", "runs/tiny", PICTURE, "--out", str(out)]) == 2
    assert f"{out}: the figure cannot be written: File exists" in capsys.readouterr().err


@pytest.mark.parametrize(
    "method",
    [*METHODS, *(name for name, view in VIEWS.items() if view.takes != "nothing" and name != "distance")],
)
def test_every_method_writes_a_picture_and_prints_its_path(here, tmp_path, method: str, capsys) -> None:
    out = tmp_path / "seen.png"
    pixels = explain("runs/tiny", PICTURE, "--method", method, out=out)
    assert num_colours(pixels) > 50
    printed = capsys.readouterr().out
    assert printed.endswith(f"{out}\n")
    if method in (*METHODS, "all"):
        assert printed.startswith(("red (", "blue ("))
    if method in METHODS:
        assert METHODS[method].title in printed


@pytest.mark.parametrize("method", ["distance", "positions", "filters"])
def test_views_of_the_model_need_no_picture(here, tmp_path, method: str) -> None:
    pixels = explain("runs/tiny", "--method", method, out=tmp_path / "seen.png")
    assert num_colours(pixels) > 10


@pytest.mark.parametrize(
    ("options", "printed"),
    [
        (["--method", "attention", "--layer", "0", "--head", "1"], "attention, layer 0, head 1"),
        (["--method", "rollout", "--fusion", "max", "--discard", "0.5"], "fusion max, discard 0.5"),
        (["--method", "grad-cam", "--target", "blue"], "Grad-CAM of blue"),
        (["--method", "grad-cam", "--target", "1"], "Grad-CAM of red"),
        (["--method", "layer-cam", "--target", "red", "--versus", "blue"], "Layer-CAM of red, not blue"),
        (["--method", "occlusion", "--like", "data/blue/1.png"], "occlusion of the likeness"),
        (["--method", "all", "--target", "blue"], "every method of blue"),
        (
            ["--method", "patch", "--patch", "1", "0", "--head", "1"],
            "patch in row 1, column 0: layer -1, head 1",
        ),
        (["--method", "rollout", "--image-size", "48"], "attention rollout"),
        (["--method", "rollout", "--evidence"], "against 99 random maps"),
        (["--method", "rollout", "--image-size", "16", "48"], "attention rollout"),
    ],
)
def test_options_are_printed(here, tmp_path, options: list[str], printed: str, capsys) -> None:
    explain("runs/tiny", PICTURE, *options, out=tmp_path / "seen.png")
    assert printed in capsys.readouterr().out


def test_picture_is_named_after_the_image_and_the_method(here, tmp_path, monkeypatch) -> None:
    run = shutil.copytree(here.run, tmp_path / "tiny")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    for words in ([str(here.picture), "--method", "attention"], [str(here.picture)], ["--method", "filters"]):
        assert main(["explain", str(run), *words]) == 0
    assert {path.name for path in (run / "explain").iterdir()} == {
        "0-attention.png",
        f"0-{DEFAULT_METHOD}.png",
        "tiny-filters.png",
    }
    assert not list((tmp_path / "elsewhere").iterdir())


def test_default_name_never_replaces_a_file(here, tmp_path, monkeypatch, capsys) -> None:
    """Pictures of the same name in two folders, and one picture explained twice."""
    monkeypatch.chdir(tmp_path)
    run = shutil.copytree(here.run, tmp_path / "tiny")
    pictures = [here.root / "data" / name / "0.png" for name in ("red", "blue", "blue")]
    kept: dict[str, bytes] = {}
    folder = run / "explain"
    for picture, name in zip(pictures, ("0-rollout", "0-rollout-2", "0-rollout-3"), strict=True):
        assert main(["explain", "tiny", str(picture), "--method", "rollout"]) == 0
        assert capsys.readouterr().out.endswith(f"\ntiny/explain/{name}.png\n")
        assert {path.name: path.read_bytes() for path in folder.iterdir() if path.name in kept} == kept
        kept[f"{name}.png"] = (folder / f"{name}.png").read_bytes()
    assert kept["0-rollout.png"] != kept["0-rollout-2.png"]
    explain("tiny", str(pictures[0]), "--method", "rollout", out=folder / "0-rollout-2.png")
    assert (folder / "0-rollout-2.png").read_bytes() == kept["0-rollout.png"]  # --out replaces a file


@pytest.mark.parametrize("method", [DEFAULT_METHOD, "attention", "features"])
def test_without_a_picture_the_test_images_of_the_run_are_shown(here, tmp_path, method: str, capsys) -> None:
    capsys.readouterr()
    pixels = explain("runs/tiny", "--method", method, out=tmp_path / "seen.png")
    assert num_colours(pixels) > 50
    assert "2 test images\n" in capsys.readouterr().out  # a tenth of each class of ten
    if method != "features":
        assert pixels.shape[1] > 1.2 * pixels.shape[0]  # two pictures, each beside its map


def test_grid_shows_32_test_images_with_their_predictions(here, monkeypatch) -> None:
    from vitascope.data.datasets import open_for_evaluation

    everything = open_for_evaluation("data", ("blue", "red"))
    forty = everything.subset("test", np.arange(40) % 20)
    monkeypatch.setattr(Run, "test_images", lambda run: forty)
    chosen = labelled_test_images("runs/tiny")
    figure = draw(from_pretrained("runs/tiny"), method="attention", layer=0, **chosen)
    assert figure.get_label() == "attention, layer 0 over 32 test images"
    (axes,) = figure.axes
    titles = [text.get_text() for text in axes.texts]
    assert len(titles) == len(axes.images) == 32
    for title, (truth,) in zip(titles, chosen["truths"], strict=True):
        assert title.startswith(("red ", "blue "))
        assert (f"is {truth}" in title) != title.startswith(f"{truth} ")


def test_folder_gets_a_map_of_each_picture_and_names_those_that_cannot_be_read(
    others: SimpleNamespace, tmp_path, monkeypatch, capsys
) -> None:
    monkeypatch.chdir(others.root)
    pictures, out = tmp_path / "pictures", tmp_path / "maps"
    shutil.copytree("plain", pictures / "deep")
    (pictures / "text.png").write_text("text")
    argv = ["explain", "runs/tiny", str(pictures), "--method", "attention", "--out", str(out)]
    with pytest.raises(SystemExit, match="1"):
        main(argv)
    printed = capsys.readouterr()
    assert printed.out == f"4 maps in {out}\n"
    assert "1 of 5 images could not be read" in printed.err
    assert "text.png: not a picture" in printed.err
    names = [f"deep/{number}.png" for number in range(4)]
    with np.load(out / "heatmaps.npz") as numbers:
        assert numbers["names"].tolist() == names
    assert all((out / f"{name}.png").is_file() for name in names)
    first, second = (str(pictures / "deep" / f"{number}.png") for number in range(2))
    again = [*argv[:2], first, second, first, *argv[3:]]
    assert main([*again[:-1], str(tmp_path / "two")]) == 0
    assert capsys.readouterr().out == f"2 maps in {tmp_path / 'two'}\n"
    assert sorted(path.name for path in (tmp_path / "two").glob("*.png.png")) == ["0.png.png", "1.png.png"]
    other = error_line([*argv[:3], "--method", "rollout", *argv[5:]], capsys)
    assert "0.png.png exists, and is not a map of this picture by this model and these options" in other


@pytest.mark.parametrize("replaced", ["pictures/0.png", "like.png"])
def test_maps_of_a_picture_or_likeness_replaced_with_its_time_kept_are_not_taken(
    replaced: str, others: SimpleNamespace, tmp_path, monkeypatch, capsys
) -> None:
    shutil.copytree(others.root / "plain", tmp_path / "pictures")
    shutil.copy(tmp_path / "pictures/1.png", tmp_path / "like.png")
    run = str(others.root / "runs/tiny")
    monkeypatch.chdir(tmp_path)
    argv = ["explain", run, "pictures", "--method", "grad-cam", "--like", "like.png", "--out", "maps"]
    assert main(argv) == main(argv) == 0
    status, picture = os.stat(replaced), Image.open(replaced).convert("RGB")
    picture.transpose(Image.Transpose.ROTATE_180).save(replaced)
    os.utime(replaced, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert "is not a map of this picture by this model and these options" in error_line(argv, capsys)


def test_comparison_prints_a_row_for_every_method_and_the_random_baseline(here, capsys) -> None:
    capsys.readouterr()
    assert main(["explain", "runs/tiny", "data", "--compare", "--images", "3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[0] == "method"
    assert {line.split()[0] for line in lines[1 : 2 + len(METHODS)]} == {*METHODS, "random"}
    assert "3 images" in "\n".join(lines)


def test_comparison_as_json_has_the_numbers_of_each_image(
    others: SimpleNamespace, monkeypatch, capsys
) -> None:
    monkeypatch.chdir(others.root)
    capsys.readouterr()
    argv = ["explain", "runs/tiny", "plain", "--compare", "--images", "2", "--json"]
    assert main(argv) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["images"] == 2
    assert {row["method"] for row in found["methods"]} == {*METHODS, "random"}
    assert all(len(scores["deletion"]) == 2 for scores in found["scores"].values())
    assert main(argv) == 0
    again = json.loads(capsys.readouterr().out)
    for name, scores in found["scores"].items():
        assert scores["insertion"] == again["scores"][name]["insertion"]


def test_comparison_of_a_run_uses_its_own_test_images(here, capsys) -> None:
    capsys.readouterr()
    assert main(["explain", "runs/tiny", "--compare", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["images"] == 2  # a tenth of each class of ten


def test_resnet_is_compared_and_explained_without_attention(
    others: SimpleNamespace, tmp_path, monkeypatch, capsys
) -> None:
    monkeypatch.chdir(others.root)
    capsys.readouterr()
    assert main(["explain", "runs/cnn", "data", "--compare", "--images", "1", "--json"]) == 0
    measured = {row["method"] for row in json.loads(capsys.readouterr().out)["methods"]}
    assert measured == {name for name, method in METHODS.items() if not method.attends} | {"random"}
    explain("runs/cnn", PICTURE, "--method", "all", out=tmp_path / "all.png")


def test_body_without_a_head_is_explained_by_attention_and_likeness(
    others: SimpleNamespace, tmp_path, monkeypatch
) -> None:
    monkeypatch.chdir(others.root)
    asked = (["rollout"], ["all"], ["grad-cam", "--like", "data/blue/1.png"], ["features"])
    for options in asked:
        pixels = explain("runs/body", PICTURE, "--method", *options, out=tmp_path / f"{options[0]}.png")
        assert num_colours(pixels) > 50


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["runs/tiny", "broken.jpg"], "broken.jpg: not a picture"),
        (["runs/tiny", "nowhere.png"], "nowhere.png: no such file"),
        (["runs/tiny", "--method", "heads"], "explains a picture: vitascope explain MODEL PICTURE"),
        (["runs/tiny/model"], "is not a run folder, so it has no test images: give a PICTURE"),
        (["runs/body"], "has no head for classes, so there is no class to explain"),
        (["runs/tiny", "data"], "data is a folder: name a picture in it, or add --out FOLDER"),
        (["runs/tiny", "data", "--out", "maps.png"], "add --out FOLDER for a heatmap of each"),
        (["runs/tiny", PICTURE, PICTURE], "several pictures: add --out FOLDER"),
        (
            ["runs/tiny", "data", "--method", "heads", "--out", "maps"],
            "add --out FOLDER for a heatmap of each",
        ),
        (["runs/tiny", "data", "--out", "data/maps"], "--out data/maps is in data, whose pictures are"),
        (["runs/tiny", "empty", "--out", "maps"], "none of 0 images can be read"),
        (["runs/tiny", "data", "--target", "rde", "--out", "maps"], "no class 'rde'; nearest: red"),
        (["runs/tiny", PICTURE, "--layer", "99", "--method", "attention"], "no layer 99: the model has 1"),
        (["runs/tiny", PICTURE, "--head", "2", "--method", "attention"], "no head 2: each layer has 2"),
        (["runs/tiny", PICTURE, "--patch", "0", "2", "--method", "patch"], "2"),
        (["runs/tiny", PICTURE, "--method", "occlusion", "--target", "rde"], "no class 'rde'; nearest: red"),
        (["runs/tiny", PICTURE, "--method", "occlusion", "--target", "2"], "no class '2'; the model has 2"),
        (
            ["runs/tiny", PICTURE, "--method", "rollout", "--head", "1"],
            "head does not apply to rollout, only",
        ),
        (
            ["runs/tiny", PICTURE, "--method", "rollout", "--target", "red"],
            "target does not apply to rollout",
        ),
        (["runs/tiny", PICTURE, "--method", "rollout", "--discard", "1"], "discard must be in [0, 1), not 1"),
        (["runs/tiny", PICTURE, "--method", "grad-cam", "--versus", "red"], "add target"),
        (
            ["runs/tiny", PICTURE, "--method", "occlusion", "--target", "red", "--like", PICTURE],
            "give one of them",
        ),
        (["runs/tiny", PICTURE, "--method", "filters"], "leave out data/red/0.png"),
        (["runs/tiny", PICTURE, "--method", "rollout", "--image-size", "0"], "must be at least 1, not 0"),
        (["runs/tiny", PICTURE, "--method", "rollout", "--image-size", "17"], "not a multiple of patch 8"),
        (["runs/tiny", PICTURE, "--json"], "--json needs --compare"),
        (["runs/tiny", PICTURE, "--out", "map.xyz"], "has to end in .png"),
        (["runs/tiny", PICTURE, "--out", "data"], "has to end in .png"),
        (["runs/tiny", PICTURE, "--out", PICTURE], "is the explained picture"),
        (["runs/tiny", "empty", "--compare"], "empty: no images in this folder"),
        (["runs/tiny", "nowhere", "--compare"], "nowhere: no such folder"),
        (["runs/tiny", "data", "--compare", "--images", "0"], "images must be at least 1, not 0"),
        (["runs/tiny", "data", "--compare", "--out", "a.png"], "--out is for one method's figure"),
        (["runs/tiny", "data", "--compare", "--evidence"], "--evidence is for one method's figure"),
        (["runs/tiny", "--evidence"], "with evidence is of one picture: not 2"),
        (
            ["runs/tiny", PICTURE, "--method", "occlusion", "--like", PICTURE, "--evidence"],
            "give one class per image by number or name",
        ),
        (["runs/tiny", "data", "--compare", "--head", "1"], "--head is for one method's figure"),
        (["runs/tiny", "data", "--compare", "--method", "rollout"], "--method is for one method's figure"),
        (["runs/tiny", "data", "--compare", "--seed", "-1"], "seed must be at least 0, not -1"),
        (["runs/tiny", PICTURE, "--images", "50"], "--images is for --compare and"),
        (
            ["runs/tiny", PICTURE, "--method", "all", "--seed", "0"],
            "--seed is for --compare and --method dist",
        ),
        (["runs/tiny", "--method", "positions", "--image-size", "32"], "leave out --image-size"),
        (["runs/tiny/model", "--compare"], "is not a run folder"),
        (["runs/cnn", PICTURE, "--method", "rollout"], "a ResNet has no attention and no tokens"),
        (["runs/cnn", "--method", "positions"], "a ResNet has no attention and no tokens"),
        (["runs/body", PICTURE, "--method", "grad-cam"], "no head"),
        (["runs/body", PICTURE, "--method", "grad-cam", "--target", "red"], "no head"),
        (["runs/body", "data", "--compare"], "no head"),
    ],
    ids=lambda value: " ".join(value)[:60] if isinstance(value, list) else "",
)
def test_invalid_request_is_rejected_in_one_line_and_leaves_nothing(
    others: SimpleNamespace, argv: list[str], message: str, monkeypatch, capsys
) -> None:
    monkeypatch.chdir(others.root)
    before = sorted(others.root.rglob("*"))
    assert message in error_line(["explain", *argv], capsys)
    assert sorted(others.root.rglob("*")) == before


@pytest.mark.parametrize("words", [[], ["cifar10"]])
def test_without_a_picture_the_built_in_model_explains_the_samples(
    words: list[str], tmp_path, monkeypatch, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["explain", *words, "--method", "rollout"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "model  cifar10 (built in)",
        f"attention rollout over {len(PHOTOS)} samples",
        "cifar10-rollout.png",
    ]
    assert Path("cifar10-rollout.png").is_file()


def test_picture_alone_is_explained_by_the_built_in_model(here, tmp_path, capsys) -> None:
    alone = explain(PICTURE, "--method", "rollout", out=tmp_path / "alone.png")
    assert "model  cifar10 (built in)\n" in capsys.readouterr().out
    named = explain("cifar10", PICTURE, "--method", "rollout", out=tmp_path / "named.png")
    assert np.array_equal(alone, named)
    assert "none.jpg" in error_line(["explain", "none.jpg"], capsys)
