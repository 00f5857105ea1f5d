"""Images with pixels that fill no patch: rejected, or cut as a checkpoint's convolution does."""

import pytest
import torch

from tests.data import noise
from tests.models import random_images, small_config, small_model
from vitascope.analysis.explain.inputs import seen_hw
from vitascope.deploy.predict.predictor import Predictor
from vitascope.errors import UserError
from vitascope.models.config import ViTConfig
from vitascope.models.preprocess import Preprocess
from vitascope.models.vit import VisionTransformer
from vitascope.models.weights.transfer import adapted

CUT = {"image_size": (38, 45), "patch_size": (7, 8), "remainder": "cut"}


@pytest.fixture(scope="module")
def cutting() -> VisionTransformer:
    model = small_model(**CUT, head="linear", head_init="init")
    model.preprocess = Preprocess(image_size=(38, 45), resize="squash")
    return model


def test_the_grid_counts_whole_patches() -> None:
    config = small_config(**CUT)
    assert config.grid == (5, 5)
    assert config.tiled_hw((38, 45)) == (35, 40)
    assert small_config(**{**CUT, "stem": "overlap", "stride": (3, 4)}).grid == (11, 10)
    assert ViTConfig(image_size=384, patch_size=14, remainder="cut").grid == (27, 27)


def test_cut_pixels_change_nothing(cutting: VisionTransformer) -> None:
    images = random_images(2, 3, 38, 45)
    expected = cutting(images)
    images[:, :, 35:], images[:, :, :, 40:] = 9, 9
    assert torch.equal(cutting(images), expected)
    torch.testing.assert_close(cutting(images[:, :, :35, :40]), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("options", [{}, {"stem": "overlap", "patch_size": 16}])
def test_new_models_reject_a_remainder(options: dict[str, object]) -> None:
    with pytest.raises(UserError, match="nearest"):
        small_config(image_size=37, **options)


@pytest.mark.parametrize("stem", ["resnet", "tokenizer"])
def test_only_a_convolution_cuts(stem: str) -> None:
    with pytest.raises(UserError, match=f'remainder "cut".*{stem}'):
        small_config(stem=stem, remainder="cut")


def test_patches_tile_a_size_that_is_chosen() -> None:
    config = small_config(**CUT)
    assert config.at_size((38, 45)) == adapted(config, None, "x", {"image_size": (38, 45)}) == config
    assert adapted(config, None, "x", {"image_size": (35, 40)}).remainder == "rejected"
    for at_size in (config.at_size, lambda size: adapted(config, None, "x", {"image_size": size})):
        with pytest.raises(UserError, match="36x40 is not a multiple of patch 7x8; nearest: 35x40"):
            at_size((36, 40))


def test_resized_to_what_it_sees_a_model_is_the_same() -> None:
    model = small_model(**CUT)
    images = random_images(2, 3, 38, 45)
    expected = model(images)
    model.resize((35, 40))
    assert model.config.remainder == "rejected"
    torch.testing.assert_close(model(images[:, :, :35, :40]), expected, rtol=1e-5, atol=1e-5)
    with pytest.raises(UserError, match="38x45"):
        model(images)


def test_pictures_show_the_heatmap_over_what_the_patches_tile(cutting: VisionTransformer) -> None:
    assert seen_hw(cutting, (38, 45)) == (35, 40)
    picture = noise(3 * 38, 2 * 45)  # squashed to 38x45
    assert Predictor(cutting).explain(picture).box == pytest.approx((0, 0, 2 * 40, 3 * 35))
