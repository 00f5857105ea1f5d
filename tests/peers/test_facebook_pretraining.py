"""MAE's, MSN's, I-JEPA's and DINO's own files against timm and transformers.

Their code is not a package. Its files are made from timm's random models, whose names they have, and
transformers' models are filled with the same weights by the renaming that its conversion scripts document.
"""

import argparse
import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import vitascope as vs
from tests.contracts.family import Answer, Example, check_family
from tests.models import random_images
from tests.peers.comparison import relative_error
from tests.peers.test_facebook import InTimm, random_like, timm_model, transformers_names
from vitascope.models.vit import VisionTransformer
from vitascope.models.weights.files import CheckpointError
from vitascope.models.weights.identification import identify, is_model
from vitascope.models.weights.mapping import State

timm = pytest.importorskip("timm", reason="timm is not installed (vitascope[peers])")
transformers = pytest.importorskip("transformers", reason="transformers is not installed (vitascope[peers])")

SIZES = {"img_size": 48, "patch_size": 8, "embed_dim": 128, "num_heads": 2}
TUNED = {"num_classes": 5, "global_pool": "avg", "fc_norm": True}
SHAPE = {"image_size": 48, "patch_size": 8, "hidden_size": 128, "num_attention_heads": 2}
SHAPE |= {"num_hidden_layers": 2, "intermediate_size": 512, "layer_norm_eps": 1e-6}
TO_TRANSFORMERS = {
    r"^cls_token": "embeddings.cls_token",
    r"^pos_embed": "embeddings.position_embeddings",
    r"^patch_embed\.proj": "embeddings.patch_embeddings.projection",
    r"^blocks\.": "layers.",
    r"\.norm1\.": ".layernorm_before.",
    r"\.norm2\.": ".layernorm_after.",
    r"\.attn\.proj": ".attention.o_proj",
    r"\.attn\.": ".attention.",
    r"^norm\.": "layernorm.",
}


def mae_positions() -> Tensor:
    """Sines and cosines of a grid of 6x6, as transformers' ViT-MAE starts with them: (1, 1 + 36, 128)."""
    module = transformers.models.vit_mae.modeling_vit_mae
    embeddings = module.ViTMAEEmbeddings(transformers.ViTMAEConfig(**SHAPE))
    embeddings.initialize_weights()
    return embeddings.position_embeddings.detach()


def prefixed(prefix: str, state: State) -> State:
    return {prefix + name: tensor for name, tensor in state.items()}


def others(state: State) -> State:
    return {name: random_like(tensor, seed=9) for name, tensor in state.items()}


def mae(state: State) -> Any:
    return {"model": state}


def mae_in_training(state: State) -> Any:
    decoder = {"decoder_embed.weight": torch.ones(4, 128), "decoder_pos_embed": torch.ones(1, 37, 4)}
    decoder |= {"mask_token": torch.ones(1, 1, 4), "decoder_blocks.0.norm1.weight": torch.ones(4)}
    arguments = argparse.Namespace(model="mae_vit_base_patch16", mask_ratio=0.75)
    return {"model": state | decoder, "optimizer": {"state": {}}, "epoch": 3, "args": arguments}


def msn(state: State) -> Any:
    head = {"fc.fc1.weight": torch.ones(4, 128), "fc.bn1.running_mean": torch.ones(4)}
    target = prefixed("module.", state | head)
    whole = {"encoder": others(target), "target_encoder": target, "prototypes": torch.ones(2, 4)}
    return whole | {"opt": {"state": {}}, "loss": 1.5, "lr": 0.1}


def ijepa(state: State) -> Any:
    predictor = {"module.predictor_embed.weight": torch.ones(4, 128)}
    target = prefixed("module.", state)
    return {"encoder": others(target), "predictor": predictor, "target_encoder": target, "scaler": None}


def dino_in_training(state: State) -> Any:
    teacher = prefixed("backbone.", state) | {"head.mlp.0.weight": torch.ones(4, 128)}
    student = prefixed("module.", others(teacher))
    arguments = argparse.Namespace(arch="vit_small", momentum_teacher=0.996)
    losses = {"center": torch.ones(1, 4)}
    return {"student": student, "teacher": teacher, "args": arguments, "dino_loss": losses}


# The model, the content and the name of the file, the family, and a class of transformers.
FILES: dict[str, tuple[dict[str, Any], Any, str, str, str]] = {
    "MAE": ({}, mae, "pretrained.pth", "mae", "ViTMAE"),
    "MAE in training": ({}, mae_in_training, "checkpoint-3.pth", "mae", "ViTMAE"),
    "MAE fine-tuned": (TUNED, mae, "mae_finetuned_vit_base.pth", "mae", ""),
    "MSN": ({}, msn, "vitb8_300ep.pth.tar", "msn", "ViTMSN"),
    "I-JEPA": (
        {"class_token": False, "global_pool": "avg", "fc_norm": False},
        ijepa,
        "IN1K.pth.tar",
        "ijepa",
        "IJepa",
    ),
    "DINO": ({}, dict, "dino_deitsmall8_pretrain.pth", "dino", "ViT"),
    "DINO in training": ({}, dino_in_training, "checkpoint.pth", "dino", "ViT"),
}


def timm_peer(case: str) -> nn.Module:
    options, _, _, family, _ = FILES[case]
    peer = timm_model("vit_tiny_patch16_224", **SIZES, **{"num_classes": 0, **options})
    if family in ("mae", "ijepa") and "fine-tuned" not in case:
        peer.pos_embed.data = mae_positions()[:, 0 if family == "mae" else 1 :]
    return peer


def saved_file(case: str, peer: nn.Module, folder: Path) -> Path:
    _, content, name, _, _ = FILES[case]
    torch.save(content(peer.state_dict()), folder / name)
    return folder / name


class ReadOnly(InTimm):
    """A file of a case, whose peer is timm's model, and transformers' with the same weights."""

    def __init__(self, case: str) -> None:
        self.case = case
        super().__init__(FILES[case][3], "", {}, FILES[case][1])

    def build(self) -> nn.Module:
        return timm_peer(self.case)

    def save(self, peer: nn.Module, folder: Path) -> Path:
        return saved_file(self.case, peer, folder)

    def answer(self, peer: nn.Module, images: Tensor, ours: VisionTransformer) -> Answer:
        if kind := FILES[self.case][4]:
            config = getattr(transformers, f"{kind}Config")(**SHAPE, mask_ratio=0.0)
            bare = {"add_pooling_layer": False} if kind == "ViT" else {}
            theirs = getattr(transformers, f"{kind}Model")(config, **bare).double().eval()
            names = transformers_names(peer.double().state_dict(), TO_TRANSFORMERS)
            theirs.load_state_dict(names, strict=True)
            keeps = {"noise": torch.arange(36.0).expand(2, -1)} if kind == "ViTMAE" else {}  # their order
            tokens = theirs(images, **keeps).last_hidden_state
            assert relative_error(ours.forward_features(images), tokens) < 1e-10
        found = super().answer(peer, images, ours)
        tuned = "fine-tuned" in self.case  # timm has the norm after the mean
        return dataclasses.replace(found, outputs=peer(images), features=None if tuned else found.features)

    def preprocess(self, peer: nn.Module) -> dict[str, Any]:
        imagenet = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225), "image_size": (48, 48)}
        rules: dict[str, dict[str, Any]] = {
            "mae": {"resize_to": (54, 54)},
            "msn": {"resize_to": (55, 55), "interpolation": "bilinear"},
            "ijepa": {"resize_to": (55, 55)},
            "dino": {"image_size": (224, 224), "resize_to": (256, 256)},
        }
        return imagenet | {"interpolation": "bicubic", "resize": "crop"} | rules[self.family]


@pytest.mark.parametrize("case", FILES)
def test_family(case: str, tmp_path: Path) -> None:
    library = ReadOnly(case)
    check_family(Example(library=library, build=library.build, options={"norm_eps": 1e-6}), tmp_path)


def test_folder_of_such_a_file_is_no_model(tmp_path: Path) -> None:
    file = saved_file("DINO", timm_peer("DINO"), tmp_path)
    assert is_model(file)
    assert not is_model(tmp_path)


@pytest.mark.parametrize("case", ["MAE", "DINO"])
@torch.no_grad()
def test_positions_at_another_size_are_interpolated_as_in_their_code(case: str, tmp_path: Path) -> None:
    peer = timm_peer(case)
    places = peer.pos_embed
    ours = vs.from_pretrained(saved_file(case, peer, tmp_path))
    # DINO's `interpolate_pos_encoding` and MAE's `util/pos_embed.py`.
    how: dict[str, Any] = {"scale_factor": (7.1 / 6, 5.1 / 6)} if case == "DINO" else {"size": (7, 5)}
    grid = places[:, 1:].unflatten(1, (6, 6)).permute(0, 3, 1, 2)
    scaled = nn.functional.interpolate(grid, mode="bicubic", **how).flatten(2).mT
    assert relative_error(ours.positions.table((7, 5)), torch.cat([places[:, :1], scaled], dim=1)) < 1e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_fixed_positions_are_recognized_in_any_precision(dtype: torch.dtype, tmp_path: Path) -> None:
    for case in ("MAE", "I-JEPA"):
        file = saved_file(case, timm_peer(case).to(dtype), tmp_path)
        assert identify(file)[1].name == FILES[case][3]


@pytest.mark.parametrize("case", ["MAE", "MAE fine-tuned", "DINO", "I-JEPA"])
def test_files_that_do_not_show_their_family_are_rejected_and_load_with_its_name(
    case: str, tmp_path: Path
) -> None:
    peer, family = timm_peer(case), FILES[case][3]
    peer.pos_embed.data = random_like(peer.pos_embed, seed=3)
    torch.save({"model": peer.state_dict()}, tmp_path / "unnamed.pth")
    with pytest.raises(CheckpointError, match="name the family: timm:"):
        identify(tmp_path / "unnamed.pth")
    images = random_images(2, 3, 48, 48)
    ours = vs.from_pretrained(f"{family}:{tmp_path / 'unnamed.pth'}")
    with torch.no_grad():
        assert relative_error(ours(images), peer(images)) < 1e-5


def test_heads_are_assumed_with_a_warning_for_widths_that_their_code_does_not_have(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    vs.from_pretrained(saved_file("MAE", timm_peer("MAE"), tmp_path))
    assert "assuming num_heads 2" in caplog.text
    caplog.clear()
    published = timm_model(
        "vit_tiny_patch16_224", **SIZES | {"embed_dim": 192, "num_heads": 3}, num_classes=0
    )
    state = published.state_dict() | {"fc.fc1.weight": torch.ones(4, 192)}
    torch.save({"target_encoder": state}, tmp_path / "other.pth")
    assert vs.from_pretrained(tmp_path / "other.pth").config.num_heads == 3
    assert not caplog.text


def test_incomplete_files_are_rejected_with_what_is_missing(tmp_path: Path) -> None:
    state = timm_peer("MSN").state_dict() | {"surprise": torch.ones(2)}
    del state["blocks.1.norm2.bias"]
    torch.save(msn(state), tmp_path / "broken.pth")
    with pytest.raises(CheckpointError, match=r"missing blocks.1.norm2.bias.*extra surprise \(2,\)"):
        vs.from_pretrained(tmp_path / "broken.pth")
