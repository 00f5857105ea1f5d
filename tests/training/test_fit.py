import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.cli import SHAPE
from vitascope.cli import main
from vitascope.deploy.predict.predictor import Predictor
from vitascope.models.preprocess import Fit, Preprocess
from vitascope.models.weights.loading import from_pretrained
from vitascope.models.weights.preprocess import preprocess_of

SQUARE = Preprocess(image_size=(16, 16))
SMALL = [*SHAPE, "--recipe", "base"]


@pytest.fixture(scope="module")
def strips(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two classes of pictures of 16 x 64 pixels, of which the left end is white or black."""
    root = tmp_path_factory.mktemp("data") / "strips"
    random = np.random.default_rng(0)
    for name, value in (("white", 255), ("black", 0)):
        (root / name).mkdir(parents=True)
        for number in range(12):
            pixels = random.integers(80, 170, (16, 64, 3), dtype=np.uint8)
            pixels[:, :12] = value
            Image.fromarray(pixels).save(root / name / f"{number:02}.png")
    return root


@pytest.mark.parametrize(("fit", "share"), [("crop", 0.25), ("pad", 1.0), ("squash", 1.0)])
def test_a_fit_shows_a_part_or_all_of_a_picture(fit: Fit, share: float) -> None:
    fitted = SQUARE.fitted(fit)
    assert fitted.share_seen(64, 16) == pytest.approx(share)
    assert fitted.share_seen(16, 64) == pytest.approx(share)
    assert fitted.share_seen(40, 40) == pytest.approx(1)


def test_padding_keeps_the_proportions_and_squashing_does_not() -> None:
    picture = Image.new("RGB", (64, 16), "white")
    padded = SQUARE.fitted("pad").pixels(picture)
    assert (padded == 255).all(axis=0).sum() == 16 * 4  # in a grey square
    assert (padded[:, 0] == 128).all()
    assert (SQUARE.fitted("squash").pixels(picture) == 255).all()


def test_a_fit_replaces_the_rule_of_weights() -> None:
    theirs = Preprocess(image_size=(16, 16), resize_to=(18, 18), side_rounding="nearest")
    assert theirs.fitted("squash") == SQUARE.fitted("squash")
    assert theirs.fitted("crop") == SQUARE


@pytest.mark.usefixtures("without_figures")
@pytest.mark.parametrize("fit", ["pad", "squash"])
def test_a_model_keeps_its_fit_in_exported_files(
    fit: str, strips: Path, tmp_path: Path, capsys, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    train = ["train", "--data", str(strips), "--run", "run", "--steps", "2", *SMALL]
    assert main([*train, "--fit", fit]) == 0
    assert "the model sees" not in capsys.readouterr().out
    ours = preprocess_of(from_pretrained("run"))
    assert ours == ours.fitted(fit)  # type: ignore[arg-type]
    assert main(["export", "run", "--out", "a.onnx"]) == 0
    pictures = sorted(strips.rglob("*.png"))
    wanted, found = (
        [answer[0].score for answer in Predictor(model, precision="fp32")(pictures)]
        for model in ("run", "a.onnx")
    )
    np.testing.assert_allclose(found, wanted, atol=1e-4)


@pytest.mark.usefixtures("without_figures")
def test_the_start_says_how_much_a_crop_shows_and_what_shows_more(
    strips: Path, tmp_path: Path, capsys
) -> None:
    train = ["train", "--data", str(strips), "--steps", "1", *SMALL]
    assert main([*train, "--run", str(tmp_path / "run")]) == 0
    line = "fit    the model sees 25% of a picture of 16x64 pixels, its centre"
    assert f"{line}: fit=pad or fit=squash shows it the whole picture" in capsys.readouterr().out
    assert main([*train, "--run", str(tmp_path / "crop"), "--fit", "crop"]) == 0
    assert f"{line}\n" in capsys.readouterr().out


@pytest.mark.usefixtures("without_figures")
def test_the_start_says_how_sizes_spread_and_what_is_cut_off_of_the_longest(tmp_path: Path, capsys) -> None:
    for name in ("a", "b"):
        (tmp_path / "data" / name).mkdir(parents=True)
        for number in range(20):
            size = (320, 320) if number % 2 else (32, 32)
            Image.new("L", (3000, 20) if number == 7 else size, 9 * number + (name == "a")).save(
                tmp_path / "data" / name / f"{number:02}.png"
            )
    train = ["train", "--data", str(tmp_path / "data"), "--steps", "1", *SMALL]
    assert main([*train, "--run", str(tmp_path / "run")]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    sides = r"images of about \d+x\d+ pixels, with sides from 20 to 3,000"
    assert re.search(sides, printed)
    least = r"; of [12] of 3\d less than 75%, down to 1% of 20x3000 pixels"
    assert re.search(least + ": fit=pad or fit=squash shows it the whole picture", printed)
