"""ResNets in our own format: saved and loaded completely, or rejected with every reason."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.model import random_images, small_model, small_resnet, with_preprocess
from tests.weights import assert_same_state, edit, edit_config
from vitascope.data.preprocess import Preprocess
from vitascope.errors import UserError
from vitascope.model.resnet import ResNet
from vitascope.weights.files import CheckpointError
from vitascope.weights.identification import FAMILIES, identify, pretrained_config
from vitascope.weights.loading import from_pretrained, save_pretrained
from vitascope.weights.transfer import create_model

NAMES = ("ant", "bee", "cat", "dog", "eel")
SHAPE = {"layers": (1, 2), "width": 4, "image_size": 32}


def named_resnet(**overrides: object) -> ResNet:
    return small_resnet(class_names=NAMES, **overrides)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_pretrained(named_resnet(), tmp_path / "resnet")


@pytest.fixture
def vit(tmp_path: Path) -> Path:
    return save_pretrained(small_model(), tmp_path / "vit")


# --- round trip


@pytest.mark.parametrize(
    "overrides", [{}, {"root": "cifar", "in_channels": 1, "image_size": (16, 24)}, {"layers": ()}]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_saving_and_loading_preserve_the_model(
    tmp_path: Path, overrides: dict[str, object], dtype: torch.dtype
) -> None:
    model = named_resnet(**overrides).to(dtype)
    loaded = from_pretrained(save_pretrained(model, tmp_path / "resnet"))
    assert isinstance(loaded, ResNet)
    assert loaded.config == model.config == pretrained_config(tmp_path / "resnet")
    assert not loaded.training
    model = model.float()  # bf16 weights are loaded as the same numbers in float32
    assert_same_state(loaded, model)
    images = random_images(2, model.config.in_channels, *model.config.image_hw)
    assert torch.equal(loaded(images), model(images))


def test_preprocessing_is_saved_with_the_model(tmp_path: Path) -> None:
    preprocess = Preprocess(image_size=(32, 32), resize="squash", mean=(0.1, 0.2, 0.3), crop_pct=0.9)
    save_pretrained(with_preprocess(named_resnet(), preprocess), tmp_path)
    assert from_pretrained(tmp_path).preprocess == preprocess
    assert identify(tmp_path)[1].name == "vitascope"


def test_the_preprocessing_of_the_model_size_is_saved(tmp_path: Path) -> None:
    save_pretrained(named_resnet(image_size=(32, 48), in_channels=1), tmp_path)
    found = from_pretrained(tmp_path).preprocess
    assert (found.image_size, found.channels, found.mean) == ((32, 48), 1, (0.5,))


def test_a_loaded_model_trains_every_weight(folder: Path) -> None:
    model = from_pretrained(folder).train()
    model(random_images(2, 3, 32, 32)).square().sum().backward()
    assert all(value.grad is not None and value.grad.any() for value in model.parameters())


def test_saving_again_replaces_the_three_files_and_leaves_no_others(folder: Path, vit: Path) -> None:
    other = small_resnet(seed=5, class_names=NAMES)
    save_pretrained(other, folder)
    assert_same_state(from_pretrained(folder), other)
    save_pretrained(other, vit)
    assert_same_state(from_pretrained(vit), other)
    for path in (folder, vit):
        names = {file.name for file in path.iterdir()}
        assert names == {"config.json", "model.safetensors", "preprocessor_config.json"}


def test_the_architecture_of_a_vit_is_optional(folder: Path, vit: Path) -> None:
    assert json.loads((folder / "config.json").read_text())["architecture"] == "resnet"
    assert "architecture" not in json.loads((vit / "config.json").read_text())
    edit_config(vit, architecture="vit")
    assert_same_state(from_pretrained(vit), small_model())


# --- errors


def test_missing_extra_misshapen_and_quantized_tensors_are_all_listed(folder: Path) -> None:
    def damage(tensors: dict[str, Tensor]) -> None:
        del tensors["features.root.norm.bias"]
        tensors["features.root.norm.gamma"] = torch.zeros(7)
        tensors["head.weight"] = torch.zeros(6, 32)
        tensors["head.bias"] = torch.zeros(5, dtype=torch.int8)

    edit(folder, damage)
    with pytest.raises(CheckpointError) as caught:
        from_pretrained(folder)
    message = str(caught.value)
    assert message.startswith(f"{folder}: ")
    assert "missing features.root.norm.bias" in message
    assert "extra features.root.norm.gamma (7,)" in message
    assert "head.weight is (6, 32), the model's head.weight (5, 32)" in message
    assert "head.bias in torch.int8, not floating-point numbers" in message


@pytest.mark.parametrize("name", ["model.safetensors", "preprocessor_config.json"])
def test_a_folder_with_a_missing_file_is_rejected_by_name(folder: Path, name: str) -> None:
    (folder / name).unlink()
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        from_pretrained(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architecture": "resnt"},
            "unknown architecture 'resnt'; nearest: resnet; it is one of vit, resnet",
        ),
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


@pytest.mark.parametrize(
    "claim", [{"layers": [2000]}, {"width": 2**25}, {"image_size": 10**8}, {"in_channels": 10**15}]
)
def test_an_absurdly_large_configuration_is_rejected_before_it_is_built(
    folder: Path, claim: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("loading", "mapping"):
        monkeypatch.setattr(f"vitascope.weights.{module}.build", lambda config: pytest.fail("built"))
    edit_config(folder, **claim)
    with pytest.raises(CheckpointError, match="claims more than any ResNet has: over 1000 blocks"):
        from_pretrained(folder)


@pytest.mark.parametrize("format", [name for name in FAMILIES if name != "vitascope"])
def test_another_format_is_rejected_and_leaves_nothing(tmp_path: Path, folder: Path, format: str) -> None:
    with pytest.raises(
        CheckpointError,
        match=f"^{format} has no ResNet like this one; the formats of this model: vitascope\\.",
    ):
        save_pretrained(named_resnet(), tmp_path / "other", format=format)
    assert not (tmp_path / "other").exists()
    with pytest.raises(UserError) as caught:
        from_pretrained(f"{format}:{folder}")
    assert "\n" not in str(caught.value)


# --- starting from weights


def test_options_of_a_named_resnet_can_be_changed() -> None:
    model = create_model("resnet29_w32_cifar", num_classes=10, layers=(1, 1), width=2, image_size=16)
    assert isinstance(model, ResNet)
    assert (model.config.root, model.config.grid) == ("cifar", (8, 8))
    assert model(random_images(2, 3, 16, 16)).shape == (2, 10)


def test_other_classes_get_a_new_head_on_the_same_body(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    model = create_model("resnet26", weights=folder, num_classes=7, **{**SHAPE, "image_size": 64})
    assert (model.config.num_classes, model.config.class_names, model.config.image_hw) == (7, (), (64, 64))
    logged = caplog.messages[-1]
    assert "left out the head for 5 classes; initialized one for 7" in logged
    assert "interpolated" not in logged
    trained = named_resnet().state_dict()
    for name, value in model.state_dict().items():
        assert not value.any() if name.startswith("head.") else torch.equal(value, trained[name]), name


def test_the_same_classes_keep_the_head(folder: Path) -> None:
    model = create_model("resnet26", weights=folder, num_classes=5, class_names=NAMES, **SHAPE)
    assert_same_state(model, named_resnet())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers": (1, 1)}, r"layers is \(1, 2\), not \(1, 1\)"),
        ({"width": 8}, "width is 4, not 8"),
        ({"root": "cifar"}, "root is 'imagenet', not 'cifar'"),
        ({"in_channels": 1}, "in_channels is 3, not 1"),
    ],
)
def test_another_body_is_rejected(folder: Path, change: dict[str, object], message: str) -> None:
    with pytest.raises(CheckpointError, match=f"does not fit resnet26: {message}"):
        create_model("resnet26", weights=folder, num_classes=5, **{**SHAPE, **change})


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
