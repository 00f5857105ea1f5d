"""ResNets in our own format; tests/models/weights/test_loading.py saves and loads them."""

from pathlib import Path

import pytest

from tests.models import small_model, small_resnet
from tests.models.weights import edit_config
from vitascope.errors import UserError
from vitascope.models.resnet import ResNet
from vitascope.models.weights.all_families import FAMILIES
from vitascope.models.weights.files import CheckpointError
from vitascope.models.weights.loading import from_pretrained, save_pretrained
from vitascope.models.weights.transfer import create_model

NAMES = ("ant", "bee", "cat", "dog", "eel")


def named_resnet(**overrides: object) -> ResNet:
    return small_resnet(class_names=NAMES, **overrides)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_pretrained(named_resnet(), tmp_path / "resnet")


@pytest.fixture
def vit(tmp_path: Path) -> Path:
    return save_pretrained(small_model(), tmp_path / "vit")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architecture": "resnt"}, "unknown architecture 'resnt'; nearest: resnet; it is one of vit"),
        ({"architecture": ["resnet"]}, r"unknown architecture \['resnet'\]"),
        ({"widht": 4}, "unknown option of a ResNet 'widht'; nearest: width"),
        ({"width": "4"}, "width must be a whole number, not '4'"),
        ({"layers": [2, 2]}, "missing features"),
        ({"architecture": "vit"}, "unknown model option"),
    ],
)
def test_an_invalid_configuration_is_rejected(folder: Path, changes: dict[str, object], message: str) -> None:
    edit_config(folder, **changes)
    with pytest.raises(UserError, match=message):
        from_pretrained(folder)


@pytest.mark.parametrize("format", [name for name in FAMILIES if name != "vitascope"])
def test_another_format_is_rejected_and_leaves_nothing(tmp_path: Path, folder: Path, format: str) -> None:
    with pytest.raises(
        CheckpointError,
        match=f"^{format} has no model like this one, a ResNet; the formats of this model: vitascope\\.",
    ):
        save_pretrained(named_resnet(), tmp_path / "other", format=format)
    assert not (tmp_path / "other").exists()
    with pytest.raises(UserError) as caught:
        from_pretrained(f"{format}:{folder}")
    assert "\n" not in str(caught.value)


def test_a_vit_does_not_start_from_a_resnet_nor_a_resnet_from_a_vit(folder: Path, vit: Path) -> None:
    with pytest.raises(CheckpointError, match="is a ResNet, and vit_ti16 is a Vision Transformer"):
        create_model("vit_ti16", weights=folder, num_classes=5)
    with pytest.raises(CheckpointError, match="is a Vision Transformer, and resnet26 is a ResNet"):
        create_model("resnet26", weights=vit, num_classes=5)


@pytest.mark.parametrize("model", ["folder", "vit"])
def test_an_option_of_a_newer_version_is_named_with_its_file(
    model: str, request: pytest.FixtureRequest
) -> None:
    place: Path = request.getfixturevalue(model)
    edit_config(place, future=1)
    with pytest.raises(
        UserError, match=rf"{place}/config\.json: unknown .*option.* 'future'.*a newer version"
    ) as raised:
        from_pretrained(place)
    assert "\n" not in str(raised.value)
