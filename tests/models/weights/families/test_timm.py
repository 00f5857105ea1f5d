import json
from pathlib import Path

import pytest
import torch

import vitascope as vs
from tests.models import small_model
from tests.models.weights import edit, edit_config
from vitascope.models.vit import VisionTransformer
from vitascope.models.weights.files import CheckpointError

DINOV3 = {"positions": "rotary", "norm_eps": 1e-5, "layer_scale": 1e-5, "qkv_bias": "none"}
CLIP = {"embedding_norm": True, "patch_bias": False, "norm_eps": 1e-5, "num_classes": 12}


def without_outputs(folder: Path) -> Path:
    """A folder whose settings do not say what the outputs mean."""
    config = folder / "config.json"
    config.write_text(json.dumps({k: v for k, v in json.loads(config.read_text()).items() if k != "outputs"}))
    return folder


def loaded(folder: Path) -> VisionTransformer:
    model = vs.from_pretrained(folder)
    assert isinstance(model, VisionTransformer)
    return model


@pytest.mark.parametrize("outputs", ["exclusive", "independent", "embedding"])
def test_meaning_of_the_outputs_survives_other_formats(tmp_path: Path, outputs: str) -> None:
    model = small_model(**CLIP, outputs=outputs)
    torch.nn.init.zeros_(model.head.bias)
    vs.save_pretrained(model, tmp_path / "timm", format="timm")
    vs.convert(tmp_path / "timm", tmp_path / "ours")
    assert [loaded(tmp_path / name).config.outputs for name in ("timm", "ours")] == [outputs] * 2


@pytest.mark.parametrize("format", ["huggingface", "torchvision", "jax", "deit"])
def test_library_of_classifiers_takes_no_embedding(tmp_path: Path, format: str) -> None:
    with pytest.raises(CheckpointError, match="outputs 'embedding'"):
        vs.save_pretrained(small_model(outputs="embedding"), tmp_path / "model", format=format)


def test_classifier_starts_from_an_embedding_with_a_new_head(tmp_path: Path) -> None:
    folder = tmp_path / "clip"
    vs.save_pretrained(small_model(num_classes=12, outputs="embedding"), folder)
    sizes = {"patch_size": 8, "embed_dim": 16, "depth": 3, "num_heads": 2, "image_size": 32}
    started = vs.create_model("vit_ti16", weights=folder, num_classes=12, **sizes)
    assert started.config.gives_classes
    assert not torch.equal(started.head.weight, loaded(folder).head.weight)


def test_config_of_earlier_versions_has_exclusive_classes(tmp_path: Path) -> None:
    vs.save_pretrained(small_model(), tmp_path)
    assert loaded(without_outputs(tmp_path)).config.outputs == "exclusive"


@pytest.mark.parametrize(
    ("missing", "options", "architecture"),
    [
        ("norm.weight", {}, "vit_base_patch16_224"),
        ("reg_token", {"num_registers": 4}, "vit_base_patch16_reg4_gap_256"),
        ("reg_token", {"num_registers": 4, **DINOV3}, "vit_small_patch16_dinov3"),
    ],
)
def test_file_without_tensors_of_its_architecture_is_rejected(
    tmp_path: Path, missing: str, options: dict[str, object], architecture: str
) -> None:
    folder = vs.save_pretrained(small_model(**options), tmp_path / "model", format="timm")
    edit_config(folder, architecture=architecture)
    assert loaded(folder)
    edit(
        folder, lambda tensors: [tensors.pop(name) for name in list(tensors) if name.startswith(missing[:9])]
    )
    with pytest.raises(CheckpointError, match=missing):
        vs.from_pretrained(folder)
