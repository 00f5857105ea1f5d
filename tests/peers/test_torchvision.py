"""torchvision's checkpoints against torchvision itself, both ways."""

import argparse
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.model import random_images, randomize, small_config
from tests.peers.comparison import relative_error
from tests.uninitialized import uninitialized
from vitascope.data.preprocess import Preprocess
from vitascope.model.sizes import named_config
from vitascope.model.vit import VisionTransformer
from vitascope.weights.families.torchvision import Torchvision
from vitascope.weights.files import CheckpointError, read_weights
from vitascope.weights.imagenet import imagenet_classes
from vitascope.weights.loading import from_pretrained
from vitascope.weights.mapping import Source, changes, from_family, to_family

torchvision = pytest.importorskip("torchvision", reason="torchvision is not installed (vitascope[peers])")

FAMILY = Torchvision()
SMALL = {
    "image_size": 64,
    "patch_size": 16,
    "num_layers": 2,
    "num_heads": 2,
    "hidden_dim": 128,
    "mlp_dim": 192,
}
PEERS: dict[str, dict[str, Any]] = {
    "plain": SMALL | {"num_classes": 7},
    "representation": SMALL | {"num_classes": 7, "representation_size": 128},
    "patch 4 at 32": SMALL | {"image_size": 32, "patch_size": 4, "num_heads": 1, "hidden_dim": 64},
    "width of h_14": SMALL
    | {"image_size": 28, "patch_size": 14, "num_layers": 1, "num_heads": 16, "hidden_dim": 1280},
}
PUBLISHED = [
    weights
    for name in ("b_16", "b_32", "l_16", "l_32", "h_14")
    for weights in torchvision.models.get_model_weights(f"vit_{name}")
]


def peer(**arguments: Any) -> nn.Module:
    """torchvision's model, every parameter random."""
    with uninitialized():
        model = torchvision.models.VisionTransformer(**arguments)
    return randomize(model).eval()


def opened(path: Path) -> Source:
    source = Source(name=str(path), file=path.name, tensors=read_weights(path).tensors)
    assert FAMILY.recognizes(source)
    return FAMILY.before_reading(source)


def loaded(source: Source) -> VisionTransformer:
    config = FAMILY.read_config(source)
    state = from_family(FAMILY, source, config)
    with torch.device("meta"):
        model = VisionTransformer(config)
    model.load_state_dict(state, assign=True)
    return model.eval()


def saved(model: nn.Module, folder: Path) -> Source:
    torch.save(model.state_dict(), folder / "theirs.pth")
    return opened(folder / "theirs.pth")


def plain_preprocess(model: VisionTransformer) -> Preprocess:
    return FAMILY.read_preprocess(Source(name="", tensors={}), model.config)


def attention(model: nn.Module, images: Tensor) -> list[Tensor]:
    """The attention weights of each layer of torchvision's model."""
    seen: list[Tensor] = []
    for layer in model.encoder.layers:
        layer.ln_1.register_forward_hook(lambda module, args, output: seen.append(output))
    model(images)
    layers = zip(model.encoder.layers, seen, strict=True)
    return [
        layer.self_attention(x, x, x, need_weights=True, average_attn_weights=False)[1] for layer, x in layers
    ]


@pytest.mark.parametrize("arguments", PEERS.values(), ids=PEERS)
@torch.no_grad()
def test_outputs_and_attention_equal_torchvision_both_ways(arguments: dict[str, Any], tmp_path: Path) -> None:
    theirs, images = peer(**arguments), random_images(2, 3, *[arguments["image_size"]] * 2)
    ours = loaded(saved(theirs, tmp_path))
    logits, trace = theirs(images), ours.trace(images, attention=True)
    assert relative_error(ours(images), logits) < 1e-5
    for found, expected in zip(trace.attention or [], attention(theirs, images), strict=True):
        assert relative_error(found, expected) < 1e-5

    [file] = to_family(FAMILY, ours, plain_preprocess(ours), tmp_path / "written")
    again = peer(**arguments)
    again.load_state_dict(torch.load(file, weights_only=True), strict=True)
    assert relative_error(again(images), logits) < 1e-5
    for name, tensor in loaded(opened(file)).state_dict().items():
        assert torch.equal(tensor, ours.state_dict()[name]), name


@torch.no_grad()
def test_number_of_heads_is_assumed_with_a_note_and_can_be_given(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    theirs, images = peer(**SMALL | {"num_heads": 4, "num_classes": 7}), random_images(2, 3, 64, 64)
    file = tmp_path / "mine.pth"
    torch.save(theirs.state_dict(), file)
    assert relative_error(from_pretrained(file)(images), theirs(images)) > 0.01
    [line] = caplog.messages
    assert line.startswith(f"{file}: assuming num_heads 2, which the file does not contain; ")
    assert "torchvision:num_heads=N:FILE" in line
    caplog.clear()
    found = from_pretrained(f"torchvision:num_heads=4:{file}")
    assert relative_error(found(images), theirs(images)) < 1e-5
    config = found.config
    assert relative_error(from_pretrained(file, config=config)(images), theirs(images)) < 1e-5
    torch.save({"model": theirs.state_dict(), "args": argparse.Namespace(model="vit_b_16")}, file)
    from_pretrained(file)
    assert caplog.messages == []


@torch.no_grad()
def test_old_mlp_names_are_read_as_in_torchvision(tmp_path: Path) -> None:
    theirs, images = peer(**PEERS["plain"]), random_images(2, 3, 64, 64)
    old = {
        name.replace("mlp.0.", "mlp.linear_1.").replace("mlp.3.", "mlp.linear_2."): tensor
        for name, tensor in theirs.state_dict().items()
    }
    torch.save(old, tmp_path / "old.pth")
    again = torchvision.models.VisionTransformer(**PEERS["plain"]).eval()
    again.load_state_dict(torch.load(tmp_path / "old.pth"))
    assert relative_error(loaded(opened(tmp_path / "old.pth"))(images), again(images)) < 1e-5


@pytest.mark.parametrize("weights", PUBLISHED, ids=str)
def test_published_files_have_torchvisions_models_and_preprocessing(weights: Any) -> None:
    name, size = str(weights).split("_Weights")[0].lower(), weights.meta["min_size"][0]
    with torch.device("meta"):
        model = torchvision.models.get_model(name, weights=None, image_size=size)
    file = weights.url.rsplit("/")[-1]
    source = FAMILY.before_reading(Source(name=f"torchvision/{name}", file=file, tensors=model.state_dict()))
    config = FAMILY.read_config(source)
    ours = "vit_" + name.removeprefix("vit_").replace("_", "")
    assert config.class_names == tuple(weights.meta["categories"]) == imagenet_classes()
    assert config == named_config(
        ours, image_size=size, resample="torchvision", class_names=config.class_names
    )
    assert config.num_heads == model.encoder.layers[0].self_attention.num_heads
    assert config.norms.norm_eps == model.encoder.ln.eps

    published, found = weights.transforms(), FAMILY.read_preprocess(source, config)
    assert [size, size] == [*found.image_size] == published.crop_size * 2
    assert found.resize_to == tuple(published.resize_size * 2)
    assert found.interpolation == published.interpolation.value
    assert (found.mean, found.std, found.resize) == (tuple(published.mean), tuple(published.std), "crop")


def test_file_of_another_name_has_the_default_preprocessing() -> None:
    config = small_config(image_size=320, patch_size=16)
    found = FAMILY.read_preprocess(Source(name="mine/vit_l_16-mine.pth", tensors={}), config)
    assert (found.image_size, found.resize_to, found.interpolation) == ((320, 320), (366, 366), "bilinear")


def test_other_epsilons_and_resampling_rules_are_replaced_and_reported() -> None:
    config = small_config(norm_eps=1e-5, resample="jax", embed_dim=64, num_heads=1)
    told = " ".join(changes(FAMILY, config))
    assert "norm_eps 1e-05 becomes 1e-06" in told
    assert "resample 'jax' becomes 'torchvision'" in told
    assert not changes(FAMILY, FAMILY.fixed_there(config))


def test_unsupported_models_are_rejected_with_the_reason(tmp_path: Path) -> None:
    stem = torchvision.models.vision_transformer.ConvStemConfig(8, 3, 16)
    source = saved(peer(**PEERS["plain"], conv_stem_configs=[stem]), tmp_path)
    with pytest.raises(CheckpointError, match="conv_stem_configs"):
        FAMILY.read_config(source)
    source = saved(peer(**PEERS["representation"] | {"representation_size": 32}), tmp_path)
    with pytest.raises(CheckpointError, match=r"heads\.pre_logits\.weight[^;]*\(32, 128\)"):
        loaded(source)
    source.tensors["encoder.pos_embedding"] = torch.zeros(1, 1 + 15, 128)
    with pytest.raises(CheckpointError, match=r"16 positions.*not a square.*config=ViTConfig"):
        FAMILY.read_config(source)


@pytest.mark.parametrize("name", ["b_16", "b_32", "l_16", "l_32"])
def test_parameters_and_operations_equal_torchvisions_published_numbers(name: str) -> None:
    published = torchvision.models.get_model_weights(f"vit_{name}").IMAGENET1K_V1.meta
    config = named_config(f"vit_{name.replace('_', '')}")
    assert config.num_parameters == published["num_params"]
    # Theirs are billions of multiply-adds, ours are single operations.
    assert round(config.flops / 2e9, 3) == pytest.approx(published["_ops"], abs=0.001)
