import argparse
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.contracts.family import Answer, Example, Library, check_family, check_misshapen, load
from tests.models import random_images, randomize
from tests.peers.comparison import relative_error
from tests.uninitialized import uninitialized
from vitascope.models.sizes import named_config
from vitascope.models.vit import VisionTransformer
from vitascope.models.weights.families.torchvision import Torchvision
from vitascope.models.weights.files import CheckpointError
from vitascope.models.weights.imagenet import imagenet_classes
from vitascope.models.weights.loading import from_pretrained
from vitascope.models.weights.mapping import Source

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


class TorchvisionLibrary(Library):
    family = "torchvision"

    def __init__(self, arguments: dict[str, Any]) -> None:
        self.arguments = arguments

    def save(self, peer: nn.Module, folder: Path) -> Path:
        torch.save(peer.state_dict(), folder / "theirs.pth")
        return folder / "theirs.pth"

    def load(self, folder: Path, ours: VisionTransformer, peer: Any) -> nn.Module:
        again = torchvision.models.VisionTransformer(**self.arguments).eval()
        again.load_state_dict(torch.load(folder / "model.pth", weights_only=True), strict=True)
        return again

    def answer(self, peer: nn.Module, images: Tensor, ours: VisionTransformer) -> Answer:
        seen: list[Tensor] = []
        layers = peer.double().encoder.layers
        hooks = [layer.ln_1.register_forward_hook(lambda *given: seen.append(given[-1])) for layer in layers]
        outputs = peer(images)
        for hook in hooks:
            hook.remove()
        asked = {"need_weights": True, "average_attn_weights": False}
        attention = [layer.self_attention(x, x, x, **asked)[1] for layer, x in zip(layers, seen, strict=True)]
        return Answer(outputs=outputs, attention=attention)


def with_old_names(peer: nn.Module, source: Source) -> Source:
    """The names of the MLP in files of older versions."""
    pairs = (("mlp.0.", "mlp.linear_1."), ("mlp.3.", "mlp.linear_2."))
    state = peer.float().state_dict()
    for new, old in pairs:
        state = {name.replace(new, old): tensor for name, tensor in state.items()}
    return Source(name="old", tensors=state)


@pytest.mark.parametrize("arguments", PEERS.values(), ids=PEERS)
def test_family(arguments: dict[str, Any], tmp_path: Path) -> None:
    options = {"num_heads": arguments["num_heads"], "patch_size": (arguments["patch_size"],) * 2}
    check_family(
        Example(
            library=TorchvisionLibrary(arguments),
            build=lambda: peer(**arguments),
            options={**options, "head": "mlp" if "representation_size" in arguments else "linear"},
            others={"older names": with_old_names},
        ),
        tmp_path,
    )


def test_misshapen_tensors_are_rejected(tmp_path: Path) -> None:
    path = TorchvisionLibrary({}).save(peer(**PEERS["representation"]), tmp_path)
    check_misshapen(path, "torchvision")


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


def test_unsupported_models_are_rejected_with_the_reason(tmp_path: Path) -> None:
    stem = torchvision.models.vision_transformer.ConvStemConfig(8, 3, 16)
    width, library = PEERS["representation"] | {"representation_size": 32}, TorchvisionLibrary({})
    for model, reason in (
        (peer(**PEERS["plain"], conv_stem_configs=[stem]), "conv_stem_configs"),
        (peer(**width), r"heads\.pre_logits\.weight[^;]*\(32, 128\)"),
    ):
        with pytest.raises(CheckpointError, match=reason):
            load(library.save(model, tmp_path))
    state = peer(**PEERS["plain"]).state_dict() | {"encoder.pos_embedding": torch.zeros(1, 1 + 15, 128)}
    bare = {name: tensor for name, tensor in state.items() if "ln_1" not in name}
    with pytest.raises(CheckpointError, match=r"^oblong: depth must be at least 1"):
        FAMILY.read_config(
            Source(name="oblong", tensors=bare | {"encoder.pos_embedding": torch.zeros(1, 17, 128)})
        )
    with pytest.raises(CheckpointError, match=r"16 positions.*not a square.*config=ViTConfig"):
        FAMILY.read_config(Source(name="oblong", tensors=state))


@pytest.mark.parametrize("name", ["b_16", "b_32", "l_16", "l_32"])
def test_parameters_and_operations_equal_torchvisions_published_numbers(name: str) -> None:
    published = torchvision.models.get_model_weights(f"vit_{name}").IMAGENET1K_V1.meta
    config = named_config(f"vit_{name.replace('_', '')}")
    assert config.num_parameters == published["num_params"]
    # Theirs are billions of multiply-adds, ours are single operations.
    assert round(config.flops / 2e9, 3) == pytest.approx(published["_ops"], abs=0.001)
