import re
from pathlib import Path

import pytest

from tests.models import small_model
from vitascope.cli import main
from vitascope.models.weights.loading import from_pretrained, save_pretrained


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder with the classes of digits."""
    folder = tmp_path_factory.mktemp("model") / "digits"
    names = tuple("0123456789")
    model = small_model(image_size=8, patch_size=2, in_channels=1, num_classes=10, class_names=names)
    return save_pretrained(model, folder)


def test_compress_writes_a_model_and_prints_a_comparison(digits: Path, tmp_path, capsys) -> None:
    out = tmp_path / "small"
    asked = ["--merge", "2", "--heads", "1", "--mlp-ratio", "2", "--data", "digits", "--images", "40"]
    assert main(["compress", str(digits), str(out), *asked]) == 0
    printed = capsys.readouterr().out
    before, after = from_pretrained(digits).config, from_pretrained(out).config
    assert (after.num_heads, after.option("mlp_ratio"), after.option("token_merging")) == (1, 2, 2)
    assert printed.splitlines()[1].split() == [
        "parameters",
        f"{before.num_parameters:,}",
        f"{after.num_parameters:,}",
    ]
    assert re.search(
        r"accuracy, 502 test and val images +[\d.]+% +[\d.]+%\n95% interval +[\d.]+% to ", printed
    )
    assert re.search(
        r"^loses -?[\d.]+% of the accuracy, 95% interval -?[\d.]+% to [\d.]+%$", printed, re.MULTILINE
    )
    assert "images/s, batch 8" in printed


def test_compress_merges_without_data(digits: Path, tmp_path, capsys) -> None:
    assert main(["compress", str(digits), str(tmp_path / "merged"), "--merge", "3"]) == 0
    assert "accuracy" not in capsys.readouterr().out
    assert main(["compress", str(tmp_path / "merged"), str(tmp_path / "unmerged"), "--merge", "0"]) == 0
    assert from_pretrained(tmp_path / "unmerged").config == from_pretrained(digits).config


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ([], "nothing to compress: give merge, heads or mlp_ratio"),
        (["--heads", "1"], "the model is not a run, whose images could be used: give data"),
        (["--heads", "9", "--data", "digits"], "the model has 2 heads, so 9 cannot be kept"),
        (["--heads", "1", "--data", "digits", "--images", "0"], "num_images must be at least 1, not 0"),
        (["--merge", "-1"], "token_merging must be at least 0, not -1"),
        (["--merge", "2", "--data", "nowhere"], "nowhere: no such folder"),
    ],
)
def test_compress_rejects_invalid_options_and_leaves_nothing(
    digits: Path, tmp_path, capsys, options: list[str], complaint: str
) -> None:
    assert main(["compress", str(digits), str(tmp_path / "out"), *options]) == 2
    assert complaint in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
