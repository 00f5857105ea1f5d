import pytest

from vitascope.errors import UserError
from vitascope.models.sizes import architecture_of
from vitascope.models.weights.families.timm_settings import TIMM_NAMES
from vitascope.models.weights.transfer import create_model

TINY = {"depth": 1, "num_classes": 2}


@pytest.mark.parametrize(
    ("name", "ours", "image_size"),
    [
        ("vit_tiny_patch16_224", "vit_ti16", 224),
        ("vit_small_patch32_384.augreg_in21k_ft_in1k", "vit_s32", 384),
        ("deit_tiny_patch16_224.fb_in1k", "deit_ti16", 224),
        ("deit_small_distilled_patch16_224", "deit_s16_distilled", 224),
        ("vit_small_patch14_dinov2", "dinov2_s14", 518),
        ("vit_small_patch14_reg4_dinov2.lvd142m", "dinov2_s14_reg", 518),
        ("vit_small_plus_patch16_dinov3", "dinov3_s16_plus", 256),
        ("vit_small_r26_s32_224", "vit_r26_s32", 224),
    ],
)
def test_a_timm_name_creates_the_model_and_logs_our_name(
    name: str, ours: str, image_size: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    model = create_model(name, **TINY)
    assert model.config.image_hw == (image_size, image_size)
    assert f"{name} is {ours} here" in caplog.messages[-1]
    expected = create_model(ours, image_size=image_size, **TINY)
    own = {"resample": "timm", "resnet_dialect": model.config.embedding.resnet_dialect}
    assert model.config == expected.config.replace(**own if "dinov3" not in ours else {})


def test_every_known_timm_name_is_a_named_size() -> None:
    for name, ours in TIMM_NAMES.items():
        assert name.startswith(("vit_", "deit_"))
        config = create_model(name, depth=1, embed_dim=64, num_heads=1, mlp_ratio=1).config
        assert config.patch_hw == create_model(ours, depth=1, embed_dim=64, num_heads=1).config.patch_hw
    assert architecture_of(create_model("vit_tiny_patch16_224").config) == "vit_ti16"


def test_an_unknown_timm_name_suggests_the_nearest_and_its_weights() -> None:
    with pytest.raises(
        UserError, match=r"nearest: vit_base_patch16; .*from_pretrained\('timm/vit_base_patch16"
    ):
        create_model("vit_base_patch16_clip_224")
    with pytest.raises(UserError, match="nearest: vit_b16"):
        create_model("vit_b61")
