import re

import pytest

from vitascope.errors import UserError
from vitascope.models.config import OPTIONS, ViTConfig
from vitascope.models.resnet_config import ResNetConfig
from vitascope.models.sizes import NAMED_SIZES, architecture_of, list_models, named_config

SMALL = ("cct_mini", "cct_1_3x6", "cct_2_3x6")
RESNETS = [name for name in list_models() if NAMED_SIZES[name].kind is ResNetConfig]


@pytest.mark.parametrize("name", list_models())
def test_every_named_size_names_its_source_and_sets_existing_options(name: str) -> None:
    size = NAMED_SIZES[name]
    assert size.source
    assert set(size.options) <= set(OPTIONS if size.kind is ViTConfig else ResNetConfig.groups())


@pytest.mark.parametrize("name", [name for name in NAMED_SIZES if name not in (*SMALL, *RESNETS)])
def test_a_name_says_the_patch_and_its_source_the_image_the_head_and_the_registers(name: str) -> None:
    config = named_config(name)
    patch = int(re.search(r"_(?:r\d+_)?\d*[a-z]+(\d+)", name)[1])  # 32 in vit_r26_s32, 16 in dinov3_7b16
    assert config.patch_hw == (patch, patch)
    assert config.image_hw == ((518, 518) if name.startswith("dinov2") else (224, 224))
    assert config.num_classes == 1000
    assert (config.readout.head == "none") == name.startswith("dinov")
    wider = {"vit_h14": 80, "dinov3_7b16": 128}
    assert config.embed_dim / config.num_heads == wider.get(name, 64)
    if name.startswith("dinov2"):
        assert config.readout.num_registers == 4 * name.endswith("_reg")
        assert config.embedding.position_prefix != name.endswith("_reg")


@pytest.mark.parametrize("name", [name for name in list_models() if name.endswith("_distilled")])
def test_distilled_sizes_are_the_plain_ones_with_one_more_token_and_head(name: str) -> None:
    config = named_config(name)
    assert config.replace(distillation_token=False) == named_config(name.removesuffix("_distilled"))
    assert config.num_tokens == 1 + 1 + 14 * 14


@pytest.mark.parametrize("name", SMALL)
def test_small_sizes_are_for_small_images_and_have_a_tokenizer(name: str) -> None:
    config = named_config(name, num_classes=10)
    assert (config.image_hw, config.patch_hw, config.grid) == ((32, 32), (4, 4), (8, 8))
    assert (config.embedding.stem, config.readout.pool) == ("tokenizer", "mean")
    assert config.num_parameters < 1_000_000


def test_classes_give_a_size_without_head_a_linear_head() -> None:
    config = named_config("dinov2_s14_reg", num_classes=5)
    assert (config.readout.head, config.num_classes, config.gives_classes) == ("linear", 5, True)
    assert named_config("dinov2_s14_reg", num_classes=5, head="mlp").readout.head == "mlp"
    assert not named_config("dinov2_s14_reg").gives_classes


def test_architecture_is_the_first_size_of_that_shape() -> None:
    first = {"deit_ti16": "vit_ti16", "deit_s16": "vit_s16", "deit_b16": "vit_b16"}
    for name in list_models():
        assert architecture_of(named_config(name)) == first.get(name, name)
        tuned = named_config(name, num_classes=3, class_names=("a", "b", "c"), image_size=224)
        assert architecture_of(tuned) == first.get(name, name)
    assert architecture_of(named_config("vit_b16", drop_path=0.1, norm_eps=1e-5, head="mlp")) == "vit_b16"


def test_architecture_of_an_unnamed_size_is_its_summary() -> None:
    other = named_config("vit_b16", mlp="swiglu")
    assert architecture_of(other) == other.summary


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("vit_b61", "; nearest: vit_b16"), ("dino_v3_7b16", "; nearest: dinov3_7b16"), ("qqq", "")],
)
def test_an_unknown_model_is_rejected_with_the_nearest(name: str, nearest: str) -> None:
    with pytest.raises(
        UserError, match=f"unknown model '{name}'{nearest}; `vitascope models` lists all names"
    ):
        named_config(name)


@pytest.mark.parametrize("name", RESNETS)
def test_the_numbers_in_the_name_of_a_resnet_are_those_of_its_config(name: str) -> None:
    found = re.fullmatch(r"resnet(\d+)(?:_w(\d+))?(_cifar)?", name)
    config = named_config(name)
    assert 3 * sum(config.layers) + 2 == int(found[1])
    assert config.width == int(found[2] or 64)
    assert config.root == ("cifar" if found[3] else "imagenet")
    assert config.image_hw == ((32, 32) if found[3] else (224, 224))
    assert config.num_classes == 1000


@pytest.mark.parametrize(
    ("name", "options", "millions"),
    [
        ("resnet50", {}, 25.557),  # as torchvision counts them
        ("resnet101", {}, 44.549),
        ("resnet164_w16_cifar", {"num_classes": 10}, 1.7),  # He et al. 2016, Identity Mappings, table 4
    ],
)
def test_resnets_have_the_published_number_of_parameters(
    name: str, options: dict[str, int], millions: float
) -> None:
    assert named_config(name, **options).num_parameters == pytest.approx(millions * 1e6, rel=3e-3)


def test_a_named_resnet_accepts_only_its_own_options() -> None:
    config = named_config("resnet26", image_size=32, num_classes=10, root="cifar")
    assert (config.layers, config.image_hw, config.grid) == ((2, 2, 2, 2), (32, 32), (4, 4))
    with pytest.raises(UserError, match="unknown option of a ResNet 'depth'"):
        named_config("resnet26", depth=3)
    with pytest.raises(UserError, match="unknown model option 'layers'"):
        named_config("vit_b16", layers=(1,))
