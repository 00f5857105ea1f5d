"""The model folder: saved and loaded completely, or rejected with every reason."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from tests.models import random_images, small_model, small_resnet, with_preprocess
from tests.models.weights import assert_same_state, edit, edit_config
from vitascope.deploy.export.pruning import merge_tokens
from vitascope.errors import UserError
from vitascope.models.preprocess import Preprocess
from vitascope.models.vision_model import VisionModel
from vitascope.models.vit import VisionTransformer
from vitascope.models.weights.files import CheckpointError
from vitascope.models.weights.identification import pretrained_config
from vitascope.models.weights.loading import from_pretrained, save_pretrained
from vitascope.models.weights.transfer import create_model
from vitascope.storage import WriteError, settle

NAMES = ("ant", "bee", "cat", "dog", "eel")
TINY = {"embed_dim": 16, "depth": 3, "num_heads": 2, "patch_size": 8, "image_size": 32}


def named_model(**overrides: object) -> VisionTransformer:
    return small_model(class_names=NAMES, **overrides)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_pretrained(named_model(), tmp_path / "model")


@pytest.mark.parametrize(
    ("build", "options"),
    [
        (small_model, {}),
        (small_model, {"pool": "mean", "head": "mlp", "stem": "overlap", "init": "timm", "norm_eps": 1e-5}),
        (small_model, {"image_size": (32, 48), "patch_size": (8, 16), "in_channels": 1, "drop_path": 0.2}),
        (small_model, {"head": "none", "dropout": 0.1}),
        (small_resnet, {}),
        (small_resnet, {"root": "cifar", "in_channels": 1, "image_size": (16, 24)}),
        (small_resnet, {"layers": ()}),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_saving_and_loading_preserve_the_model(
    tmp_path: Path, build: Callable[..., VisionModel], options: dict[str, object], dtype: torch.dtype
) -> None:
    model = build(class_names=NAMES, **options).to(dtype)
    loaded = from_pretrained(save_pretrained(model, tmp_path / "model"))
    assert type(loaded) is type(model)
    assert loaded.config == model.config == pretrained_config(tmp_path / "model")
    assert loaded.config.class_names == NAMES
    model = model.float()  # bf16 weights are loaded as the same numbers in float32
    assert_same_state(loaded, model)
    assert not loaded.training
    images = random_images(2, model.config.in_channels, *model.config.image_hw)
    assert torch.equal(loaded(images), model(images))


def test_loaded_weights_lie_where_torch_would_allocate_them(folder: Path) -> None:
    # Elsewhere some CPUs round products otherwise than for the same model in memory.
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        mapped = [file.get_tensor(name).data_ptr() % 64 for name in file.keys()]  # noqa: SIM118
    assert any(mapped)
    assert not any(tensor.data_ptr() % 64 for tensor in from_pretrained(folder).state_dict().values())


def test_a_loaded_model_does_not_change_with_its_file(folder: Path) -> None:
    loaded, weights = from_pretrained(folder), folder / "model.safetensors"
    size = weights.stat().st_size
    with weights.open("r+b") as file:  # in place, so that a mapping sees it
        file.write(b"\1" * size)
    assert_same_state(loaded, named_model())


FIT = Preprocess(image_size=(32, 32), resize="squash", mean=(0.1, 0.2, 0.3), std=(0.4, 0.5, 0.6))


@pytest.fixture
def fitted(tmp_path: Path) -> Path:
    """A model folder with another preprocessing than the default."""
    return save_pretrained(with_preprocess(named_model(), FIT), tmp_path / "fitted")


def test_a_resized_and_a_compressed_model_keep_their_preprocessing(fitted: Path) -> None:
    model = from_pretrained(fitted)
    assert merge_tokens(model, 2).preprocess == FIT
    model.resize(64)
    assert model.preprocess == FIT.at_size((64, 64))


@pytest.mark.parametrize(
    "values",
    [
        {"image_size": [20_000, 20_000]},
        {"resize_to": [20_000, 20_000]},
        {"image_size": [32, 513], "resize": "squash"},
    ],
)
def test_pictures_far_larger_than_the_model_are_rejected_with_both_sizes(
    folder: Path, values: dict[str, object]
) -> None:
    path = folder / "preprocessor_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))
    with pytest.raises(
        CheckpointError, match=r"makes pictures of \d+x(20000|513) pixels .* of 32x32, .* 512"
    ):
        from_pretrained(folder)


def test_saving_again_replaces_the_three_files_and_leaves_no_others(folder: Path) -> None:
    other = small_model(seed=5, class_names=NAMES)
    save_pretrained(other, folder)
    assert_same_state(from_pretrained(folder), other)
    names = {path.name for path in folder.iterdir()}
    assert names == {"config.json", "model.safetensors", "preprocessor_config.json"}


@pytest.mark.parametrize("format", ["vitascope", "huggingface", "torchvision"])
def test_blocks_that_share_their_weights_are_saved(tmp_path: Path, format: str) -> None:
    model = small_model(embed_dim=128, num_heads=2)
    model.encoder.blocks[1] = model.encoder.blocks[0]
    assert_same_state(from_pretrained(save_pretrained(model, tmp_path, format=format)), model)


@pytest.mark.parametrize(("format", "moved"), [("vitascope", 0), ("vitascope", 1), ("huggingface", 1)])
def test_an_interrupted_save_leaves_the_old_model_or_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, format: str, moved: int
) -> None:
    options = {"embed_dim": 128, "num_heads": 2}
    save_pretrained(small_model(class_names=NAMES, **options), tmp_path, format=format)
    done: list[Path] = []

    def interrupted(path: Path, target: Path) -> Path:
        if len(done) == moved:
            raise KeyboardInterrupt
        done.append(target)
        return settle(path, target)

    monkeypatch.setattr("vitascope.models.weights.mapping.settle", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save_pretrained(small_model(seed=5, class_names=NAMES[::-1], **options), tmp_path, format=format)
    with pytest.raises(CheckpointError):
        from_pretrained(tmp_path)
    assert not list(tmp_path.glob(".*"))
    monkeypatch.undo()
    save_pretrained(small_model(seed=5, class_names=NAMES[::-1], **options), tmp_path, format=format)
    assert_same_state(from_pretrained(tmp_path), small_model(seed=5, **options))


def test_an_interrupted_save_of_new_weights_of_the_same_model_leaves_a_complete_model(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training saves its best weights in this way, so there is always a model to load."""

    def interrupted(path: Path, target: Path) -> Path:
        if target == folder / "config.json":
            raise KeyboardInterrupt
        return settle(path, target)

    monkeypatch.setattr("vitascope.models.weights.mapping.settle", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save_pretrained(small_model(seed=5, class_names=NAMES), folder)
    assert_same_state(from_pretrained(folder), small_model(seed=5, class_names=NAMES))


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(state: object, path: Path, metadata: object) -> None:
        path.write_bytes(b"a part")
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("vitascope.models.weights.files.save_file", full)
    with pytest.raises(WriteError) as raised:
        save_pretrained(named_model(), tmp_path)
    assert str(raised.value) == f"{tmp_path}/model.safetensors: cannot be written: No space left on device"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_existing_weights_that_would_hide_the_saved_ones_are_named(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"older")
    model = small_model(embed_dim=128, num_heads=2)
    with pytest.raises(CheckpointError, match=f"has {name}, which would be read instead of model.pth"):
        save_pretrained(model, tmp_path, format="torchvision")
    assert [path.name for path in tmp_path.iterdir()] == [name]
    # model.safetensors has precedence
    assert_same_state(from_pretrained(save_pretrained(model, tmp_path)), model)


@pytest.mark.parametrize("ref", ["run", "run/model", "run/model/model.safetensors"])
def test_a_run_folder_a_model_folder_and_a_file_load_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ref: str
) -> None:
    save_pretrained(named_model(), tmp_path / "run" / "model")
    (tmp_path / "run" / "config.yaml").write_text("data: digits\n")
    assert_same_state(from_pretrained(tmp_path / ref), named_model())
    monkeypatch.chdir(tmp_path)
    assert_same_state(from_pretrained(ref), named_model())  # as text, relative
    assert from_pretrained(ref).preprocess.image_size == (32, 32)


def test_folder_or_file_that_is_no_model_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="not a model"):
        from_pretrained(tmp_path)
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(CheckpointError, match=r"notes\.txt: not a checkpoint"):
        from_pretrained(tmp_path / "notes.txt")


def test_the_error_for_an_unfinished_run_names_the_command(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("data: digits\n")
    with pytest.raises(CheckpointError, match=r"no finished model.*--resume [^,]*$"):
        from_pretrained(tmp_path)


def test_the_error_for_an_unfinished_run_names_its_best_model_which_loads(tmp_path: Path) -> None:
    run = tmp_path / "my run"
    run.mkdir()
    (run / "config.yaml").write_text("data: digits\n")
    save_pretrained(small_model(), run / "checkpoints" / "best")
    with pytest.raises(
        CheckpointError, match=r"--resume '.*my run'`, or take its best model so far"
    ) as raised:
        from_pretrained(run)
    from_pretrained(str(raised.value).rpartition(", ")[2])


def test_a_missing_file_and_tensors_that_are_no_floats_are_rejected_by_name(folder: Path) -> None:
    for name in ("preprocessor_config.json", "model.safetensors"):
        content = (folder / name).read_bytes()
        (folder / name).unlink()
        with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
            from_pretrained(folder)
        (folder / name).write_bytes(content)
    for dtype in (torch.int8, torch.bool, torch.complex64):
        edit(folder, lambda tensors, to=dtype: tensors.update({"norm.bias": tensors["norm.bias"].to(to)}))
        with pytest.raises(CheckpointError, match=f"norm.bias in {dtype}, not floating-point numbers"):
            from_pretrained(folder)


@pytest.mark.parametrize(
    ("kind", "claim"),
    [
        ("ViT", {"depth": 10**9}),
        ("ViT", {"num_registers": 10**19}),
        ("ViT", {"mlp_ratio": 1e300}),
        ("ViT", {"image_size": 8 * 10**9, "positions": "none"}),
        ("ViT", {"stem": "resnet", "resnet_layers": [10**9], "patch_size": 4}),
        ("ResNet", {"layers": [2000]}),
        ("ResNet", {"width": 2**25}),
        ("ResNet", {"image_size": 10**8}),
        ("ResNet", {"in_channels": 10**15}),
    ],
)
def test_an_absurdly_large_configuration_is_rejected_before_it_is_built(
    tmp_path: Path, kind: str, claim: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    save_pretrained(small_model() if kind == "ViT" else small_resnet(), tmp_path)
    for module in ("loading", "mapping"):
        monkeypatch.setattr(f"vitascope.models.weights.{module}.build", lambda config: pytest.fail("built"))
    edit_config(tmp_path, **claim)
    with pytest.raises(CheckpointError, match=f"claims more than any {kind} has: over 1000 blocks"):
        from_pretrained(tmp_path)


def test_tensors_of_no_known_family_are_shown(tmp_path: Path) -> None:
    tensors = {"layer1.conv.weight": torch.zeros(3), "conv.bias": torch.zeros(3)}
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"not a ViT of a known family.*layer1\.conv\.weight"):
        from_pretrained(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "preprocessor_config.json"])
def test_numbers_that_are_not_finite_are_rejected(folder: Path, name: str) -> None:
    path, whole = folder / name, (folder / name).read_text()
    for number in ("Infinity", "-Infinity", "NaN", "1e999"):
        path.write_text(whole.replace("{", f'{{"more": [{number}],', 1))
        with pytest.raises(CheckpointError, match=rf"{name}: not readable as JSON: {number} is not a fin"):
            from_pretrained(folder)


def test_layer_scale_may_be_an_integer(folder: Path) -> None:
    save_pretrained(named_model(layer_scale=1e-5), folder)
    for start in (0, 1, 10**30):
        edit_config(folder, layer_scale=start)
        assert from_pretrained(folder).config.block.layer_scale == start


def test_a_byte_order_mark_is_ignored(folder: Path) -> None:
    for path in folder.glob("*.json"):
        path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert_same_state(from_pretrained(folder), named_model())
    (folder / "config.json").write_text("{}", encoding="utf-16")
    with pytest.raises(CheckpointError, match=r"config\.json: not readable as JSON"):
        from_pretrained(folder)


def test_an_object_that_is_no_model_is_not_saved(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"model must be VisionTransformer or ResNet or Ensemble, not Linear"):
        save_pretrained(torch.nn.Linear(2, 2), tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("place", ["file", "file/below", "long" * 1250])
@pytest.mark.parametrize("kind", ["vit", "resnet"])
def test_a_target_that_cannot_be_a_folder_is_rejected(tmp_path: Path, place: str, kind: str) -> None:
    (tmp_path / "file").write_text("precious")
    model = named_model() if kind == "vit" else create_model("resnet50", layers=(1,), width=4, num_classes=2)
    with pytest.raises(WriteError, match=r"cannot write there: .*; name a new folder"):
        save_pretrained(model, tmp_path / place)
    assert (tmp_path / "file").read_text() == "precious"


@pytest.mark.parametrize("format", ["huggingface", "timm"])
def test_problem_type_says_whether_classes_are_exclusive(tmp_path: Path, format: str) -> None:
    save_pretrained(small_model(embed_dim=128, num_heads=2), tmp_path, format=format)
    for problem, outputs in (("single_label", "exclusive"), ("multi_label", "independent")):
        problem = f"{problem}_classification"
        edit_config(tmp_path, problem_type=problem)
        assert from_pretrained(tmp_path).config.outputs == outputs
    edit_config(tmp_path, problem_type="regression")
    with pytest.raises(CheckpointError, match=r"problem_type 'regression' is not supported.*AutoModel"):
        from_pretrained(tmp_path)


@pytest.mark.parametrize(
    "classes",
    [
        {"num_classes": 3, "class_names": ("x", "y", "z")},
        {"num_classes": 5, "class_names": ("ant", "bee", "cat", "dog", "fly")},
        {"num_classes": 5, "class_names": NAMES[::-1]},
    ],
)
def test_other_classes_get_a_new_head_on_the_same_body(
    folder: Path, classes: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    model = create_model("vit_ti16", weights=folder, **classes, **TINY)
    logged = caplog.messages[-1]
    body = sum(not name.startswith("head.") for name in model.state_dict())
    assert f"{body} tensors of the body loaded" in logged
    assert "left out the head for 5 classes" in logged
    assert f"initialized one for {classes['num_classes']}" in logged
    trained = named_model().state_dict()
    assert model.config.class_names == classes["class_names"]
    for name, value in model.state_dict().items():
        if name.startswith("head."):
            assert not torch.equal(value, trained[name])
        else:
            assert torch.equal(value, trained[name]), name
    assert torch.equal(model.head.weight, torch.zeros_like(model.head.weight))  # as the paper starts a head


def test_as_many_classes_without_names_keep_the_head(folder: Path, tmp_path: Path) -> None:
    unnamed = save_pretrained(small_model(), tmp_path / "unnamed")
    assert_same_state(
        create_model("vit_ti16", weights=unnamed, class_names=NAMES, num_classes=5, **TINY), small_model()
    )
    assert_same_state(create_model("vit_ti16", weights=folder, num_classes=5, **TINY), named_model())


@pytest.mark.parametrize("image_size", [48, (32, 64)])
def test_other_image_size_interpolates_the_positions(
    folder: Path, image_size: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    expected = named_model()
    expected.resize(image_size)
    options = {**TINY, "image_size": image_size}
    model = create_model("vit_ti16", weights=folder, num_classes=5, class_names=NAMES, **options)
    (gh, gw), (new_gh, new_gw) = named_model().config.grid, model.config.grid
    assert f"positions interpolated from {gh}x{gw} to {new_gh}x{new_gw}" in caplog.messages[-1]
    assert model.positions.grid == expected.positions.grid
    assert_same_state(model, expected)
    images = random_images(1, 3, *model.config.image_hw)
    torch.testing.assert_close(model.eval()(images), named_model()(images))  # the old model interpolates, too


def test_another_body_is_rejected(folder: Path) -> None:
    reason, classes = "has another body: |does not fit", {"num_classes": 5, "class_names": NAMES}
    for change in ({"embed_dim": 32}, {"depth": 2}, {"patch_size": 16}, {"pool": "mean"}):
        with pytest.raises(CheckpointError, match=reason):
            create_model("vit_ti16", weights=folder, **classes, **{**TINY, **change})


def test_options_not_set_by_the_name_follow_the_weights(tmp_path: Path) -> None:
    options = {"norm_eps": 1e-3, "mlp": "gelu_tanh", "layer_scale": 0.1, "resample": "jax"}
    save_pretrained(small_model(**options), tmp_path)
    config = create_model("vit_ti16", weights=tmp_path, num_classes=7, **TINY).config
    assert {name: config.option(name) for name in options} == options


@pytest.mark.parametrize("head", ["none", "pre_logits", "mlp"])
def test_a_head_without_classes_is_replaced_by_a_linear_one(tmp_path: Path, head: str) -> None:
    save_pretrained(small_model(head=head), tmp_path)
    model = create_model("vit_ti16", weights=tmp_path, num_classes=7, **TINY)
    assert model(random_images(1, 3, 32, 32)).shape == (1, 7)
    assert not model.head.weight.any()
    features = create_model("vit_ti16", weights=tmp_path, **TINY)  # without classes the head is kept
    assert features.config.readout.head == head


def test_dtype_and_device_are_used(folder: Path) -> None:
    model = from_pretrained(folder, dtype=torch.bfloat16, device="cpu")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert model.preprocess == from_pretrained(folder).preprocess
    with pytest.raises(UserError, match=r"dtype is torch\.int8"):
        from_pretrained(folder, dtype=torch.int8)
    with pytest.raises(UserError, match="device 'gpu' cannot be used"):
        from_pretrained(folder, device="gpu")


def test_the_weights_can_be_read_by_those_who_can_read_other_files(tmp_path: Path) -> None:
    folder = save_pretrained(small_model(), tmp_path / "model")
    (tmp_path / "other").touch()
    modes = {path.name: path.stat().st_mode & 0o777 for path in folder.iterdir()}
    assert set(modes.values()) == {(tmp_path / "other").stat().st_mode & 0o777}, modes
