"""timm's `config.json`: preprocessing, class names, and our folders in timm."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from PIL import Image

from tests.data import noise
from tests.models import law, random_images, small_config, small_model
from tests.peers.comparison import relative_error
from tests.peers.timm_models import SMALL, TIMM, in_timm, loaded, opened, peer_model, saved
from vitascope.errors import UserError
from vitascope.models.config import ViTConfig
from vitascope.models.preprocess import Preprocess
from vitascope.models.weights.families.timm_settings import settings
from vitascope.models.weights.files import CheckpointError, explaining_settings
from vitascope.models.weights.mapping import Source, to_family
from vitascope.models.weights.preprocess import default_preprocess

timm = pytest.importorskip("timm", reason="timm is not installed (vitascope[peers])")


@pytest.mark.parametrize(
    "preprocess",
    [
        Preprocess(image_size=(32, 32), resize_to=(36, 36), interpolation="bilinear"),
        Preprocess(image_size=(32, 32), resize_to=(33, 33), mean=(0.1, 0.2, 0.3), std=(0.4, 0.5, 0.6)),
        Preprocess(image_size=(32, 32), resize="squash", resize_to=(35, 35), side_rounding="down"),
        Preprocess(image_size=(32, 32), resize="squash"),
        Preprocess(image_size=(48, 64), resize_to=(50, 67), side_rounding="nearest"),
        Preprocess(image_size=(32, 32), resize="border", resize_to=(32, 32), side_rounding="nearest"),
        Preprocess(image_size=(32, 32), resize_to=(32, 32), channels=1, mean=(0.25,), std=(0.75,)),
    ],
)
def test_preprocessing_equals_timm(preprocess: Preprocess, tmp_path: Path) -> None:
    ours = small_model(in_channels=preprocess.channels)
    to_family(TIMM, ours, preprocess, tmp_path)
    peer = timm.create_model(f"local-dir:{tmp_path}", pretrained=True)
    data_config = timm.data.resolve_data_config(model=peer)
    assert agrees(preprocess, data_config)
    assert_same_pixels(preprocess, timm.data.create_transform(**data_config))
    assert TIMM.read_preprocess(opened(tmp_path), ours.config) == preprocess
    assert TIMM.read_preprocess(saved(peer, tmp_path / "again"), ours.config) == preprocess


def assert_same_pixels(preprocess: Preprocess, transform: Any) -> None:
    """Check that a picture with odd sides becomes the same normalized tensor."""
    picture = Image.fromarray(noise(75, 107, preprocess.channels))
    ours = preprocess.normalize(torch.from_numpy(preprocess.pixels(picture)))
    torch.testing.assert_close(ours, transform(picture), atol=1e-5, rtol=0)


def agrees(preprocess: Preprocess, data_config: dict[str, Any]) -> bool:
    """Whether these timm settings mean this preprocessing, with timm's own rounding."""
    sides = tuple(math.floor(side / data_config["crop_pct"]) for side in preprocess.image_size)
    is_whole = preprocess.resize == "squash" and sides == preprocess.image_size
    found = {
        "input_size": (preprocess.channels, *preprocess.image_size),
        "mean": preprocess.mean,
        "std": preprocess.std,
        "crop_pct": data_config["crop_pct"],
        "interpolation": preprocess.interpolation,
        "crop_mode": {"crop": "center", "squash": "squash", "border": "border"}[preprocess.resize],
    }
    return preprocess.resize_to == (None if is_whole else sides) and found == {
        name: tuple(value) if isinstance(value, list | tuple) else value
        for name, value in data_config.items()
    }


def published() -> dict[str, dict[str, Any]]:
    """The `pretrained_cfg` of every tag of timm's plain ViTs."""
    names = [
        name
        for module in ("vision_transformer", "vision_transformer_hybrid", "deit")
        for name in timm.list_models(module=module, pretrained=True, include_tags=True)
    ]
    return {name: timm.get_pretrained_cfg(name).to_dict() for name in names}


def test_the_preprocessing_of_every_published_checkpoint_is_read() -> None:
    wrong = []
    for name, told in published().items():
        config = ViTConfig(image_size=told["input_size"][1:], patch_size=told["input_size"][1:])
        source = Source(name=name, tensors={}, config={"architecture": name, "pretrained_cfg": told})
        if not agrees(
            TIMM.read_preprocess(source, config), timm.data.resolve_data_config(pretrained_cfg=told)
        ):
            wrong.append(name)
    assert wrong == []


@law
@given(st.sets(st.sampled_from(["mean", "std", "crop_pct", "crop_mode", "interpolation"])), st.booleans())
def test_missing_settings_have_timms_defaults(unsaid: set[str], is_old: bool) -> None:
    told = timm.get_pretrained_cfg("vit_large_patch14_clip_336.openai_ft_in12k_in1k").to_dict()
    told = {name: value for name, value in told.items() if name not in unsaid}
    config = {"architecture": "vit_large_patch14_clip_336"}
    config |= told if is_old else {"pretrained_cfg": told}  # old files have everything in one place
    read = TIMM.read_preprocess(
        Source(name="", tensors={}, config=config), ViTConfig(image_size=336, patch_size=14)
    )
    assert agrees(read, timm.data.resolve_data_config(pretrained_cfg=told))


def test_statistics_of_other_channel_counts_equal_timm(tmp_path: Path) -> None:
    peer = timm.create_model("vit_base_patch16_clip_224", in_chans=1, **SMALL)
    source = saved(peer, tmp_path)
    expected = source.config["pretrained_cfg"]
    untouched = dataclasses.replace(
        source,
        config={
            **source.config,
            "pretrained_cfg": timm.get_pretrained_cfg("vit_base_patch16_clip_224").to_dict(),
        },
    )
    for found in (source, untouched):
        preprocess = TIMM.read_preprocess(found, TIMM.read_config(found))
        assert preprocess.mean == pytest.approx(expected["mean"])
        assert preprocess.std == pytest.approx(expected["std"])


@pytest.mark.parametrize(
    ("told", "reason"),
    [
        ({"crop_mode": "corner"}, "x: crop_mode 'corner' is none of center, squash, border"),
        ({"crop_pct": -1}, "x: crop_pct -1 is not a valid share"),
        ({"crop_pct": 1e-320}, "x: crop_pct 1e-320 is not a valid share"),
    ],
)
def test_crops_that_timm_lacks_are_rejected(told: dict[str, Any], reason: str) -> None:
    source = Source(name="x", tensors={}, config={"pretrained_cfg": told})
    with pytest.raises(CheckpointError, match=reason):
        TIMM.read_preprocess(source, small_config())


NAMES = ("cat", "dog", "bird", "fish", "worm")


@pytest.mark.parametrize(
    "names", [list(NAMES), dict(enumerate(NAMES)), {i: NAMES[i] for i in (2, 4, 0, 1, 3)}]
)
def test_class_names_are_read_and_written(names: Any, tmp_path: Path) -> None:
    source = saved(peer_model("ViT"), tmp_path / "theirs", model_config={"label_names": names})
    ours = loaded(source)
    assert ours.config.class_names == NAMES
    peer = in_timm(ours, tmp_path / "ours")
    assert peer.pretrained_cfg["label_names"] == list(NAMES)
    assert TIMM.read_config(saved(peer, tmp_path / "again")).class_names == NAMES


@pytest.mark.parametrize("names", [["cat", "dog"], {0: "cat", 1: "dog", 2: "bird", 3: "fish", 5: "worm"}])
def test_names_of_a_different_number_of_classes_are_ignored(names: Any, tmp_path: Path) -> None:
    source = saved(peer_model("ViT"), tmp_path, model_config={"label_names": names})
    assert TIMM.read_config(source).class_names == ()


@pytest.mark.parametrize(
    "options", [{}, {"distillation_token": True}, {"stem": "resnet", "resnet_layers": ()}]
)
def test_model_with_another_input_size_keeps_it_in_timm(options: dict[str, Any], tmp_path: Path) -> None:
    ours = small_model(resnet_dialect="timm", **options)
    preprocess = Preprocess(image_size=(48, 24), resize_to=(48, 24), side_rounding="nearest")
    to_family(TIMM, ours, preprocess, tmp_path)
    peer = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    data_config = timm.data.resolve_data_config(model=peer)
    assert agrees(preprocess, data_config)
    images = random_images(2, *data_config["input_size"]).double()
    with torch.no_grad():
        assert relative_error(peer.double()(images), ours.double()(images)) < 1e-6  # positions are float32
    again = opened(tmp_path)
    assert TIMM.read_config(again).image_hw == ours.config.image_hw
    assert TIMM.read_preprocess(again, ours.config) == preprocess


@law
@example(49, 1, "gelu")  # 49 * (1 / 49) is less than 1
@given(st.integers(1, 5000), st.integers(1, 20000), st.sampled_from(["gelu", "swiglu"]))
def test_timm_computes_our_mlp_width_from_the_ratio(embed_dim: int, mlp_dim: int, mlp: str) -> None:
    """`int(dim * mlp_ratio)`, as in timm's Block; half of it is SwiGLU's gate."""
    config = ViTConfig.from_dict(
        {"embed_dim": embed_dim, "num_heads": 1, "mlp": mlp, "mlp_ratio": mlp_dim / embed_dim}
    )
    ratio = settings(config, default_preprocess(config))["model_args"]["mlp_ratio"]
    assert int(embed_dim * ratio) == mlp_dim * (2 if mlp == "swiglu" else 1)


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 300) | st.floats(-1, 2) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)
PLACES = [
    ("architecture",),
    ("global_pool",),
    ("label_names",),
    *(("model_args", name) for name in ("", "num_heads", "img_size", "act_layer", "global_pool", "depth")),
    *(("pretrained_cfg", name) for name in ("", "input_size", "mean", "std", "crop_mode", "interpolation")),
]


@pytest.fixture(scope="module")
def a_source(tmp_path_factory: pytest.TempPathFactory) -> Source:
    return saved(peer_model("ViT"), tmp_path_factory.mktemp("timm"))


@law
@given(st.sampled_from(PLACES), JUNK)
def test_invalid_settings_are_rejected_with_a_message(
    a_source: Source, place: tuple[str, ...], junk: Any
) -> None:
    config = dict(a_source.config)
    config[place[0]] = {**config[place[0]], place[1]: junk} if place[1:] and place[1] else junk
    source = dataclasses.replace(a_source, config=config)
    try:
        with explaining_settings("timm"):  # as identify and load_source do
            TIMM.read_preprocess(source, TIMM.read_config(source))
    except UserError as error:
        assert str(error)  # noqa: PT017 - most junk is rejected, some happens to be valid
