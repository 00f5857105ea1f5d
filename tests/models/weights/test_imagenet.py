"""ImageNet's class names, only for checkpoints that are known to be trained on ImageNet-1k."""

import json
from pathlib import Path

import pytest
import torch

from tests.models import small_model
from vitascope.models.weights.hub import TORCHVISION_FILES
from vitascope.models.weights.imagenet import imagenet_classes, is_imagenet
from vitascope.models.weights.loading import from_pretrained, save_pretrained


def test_there_are_a_thousand_different_names() -> None:
    names = imagenet_classes()
    assert len(names) == len(set(names)) == 1000
    assert (names[0], names[207], names[999]) == ("tench", "golden retriever", "toilet tissue")
    assert (names[134], names[517]) == ("crane bird", "crane")
    assert all(name == name.strip() and name.isprintable() for name in names)


@pytest.mark.parametrize("tag", ["in1k", "augreg_in21k_ft_in1k", "fb_in1k", "300ep_in1k"])
def test_tags_of_imagenet_are_recognized(tag: str) -> None:
    assert is_imagenet(tag)


@pytest.mark.parametrize("tag", ["", None, "in21k", "in1k_ijepa", "plain1k", "sbb_in12k", 1])
def test_other_tags_are_not_imagenet(tag: object) -> None:
    assert not is_imagenet(tag)


@pytest.mark.parametrize(
    ("num_classes", "tag", "names"),
    [(1000, "augreg_in1k", True), (1000, "in21k", False), (999, "augreg_in1k", False), (1000, None, False)],
)
def test_a_timm_model_has_imagenet_names_by_its_tag(
    tmp_path: Path, num_classes: int, tag: str | None, names: bool
) -> None:
    model = small_model(embed_dim=64, num_heads=1, num_classes=num_classes)
    save_pretrained(model, tmp_path, format="timm")
    settings = json.loads((tmp_path / "config.json").read_text())
    settings["pretrained_cfg"]["tag"] = tag
    (tmp_path / "config.json").write_text(json.dumps(settings))
    expected = imagenet_classes() if names else ()
    assert from_pretrained(tmp_path).config.class_names == expected
    (tmp_path / "config.json").unlink()
    file = (tmp_path / "model.safetensors").rename(tmp_path / f"vit_tiny_patch8_32.{tag}.safetensors")
    assert from_pretrained(f"timm:{file}").config.class_names == expected


def test_torchvisions_published_files_have_imagenet_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    save_pretrained(
        small_model(embed_dim=64, num_heads=1, num_classes=1000),
        tmp_path / "checkpoints",
        format="torchvision",
    )
    file = tmp_path / "checkpoints" / "model.pth"
    assert from_pretrained(file).config.class_names == ()
    file.rename(file.with_name(TORCHVISION_FILES["vit_b_16.IMAGENET1K_V1"]))
    assert from_pretrained("torchvision/vit_b_16").config.class_names == imagenet_classes()
