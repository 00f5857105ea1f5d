import json
from pathlib import Path

import huggingface_hub.constants
import pytest
import torch
from safetensors.torch import save_file

from tests.models import small_model
from vitascope.errors import UserError
from vitascope.models.weights.files import CheckpointError
from vitascope.models.weights.hub import TORCHVISION_FILES
from vitascope.models.weights.identification import identify, is_model, open_source
from vitascope.models.weights.loading import from_pretrained, save_pretrained

TENSORS = {"a": torch.arange(3.0)}
WEIGHTS = "vit_b_16.IMAGENET1K_V1"


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The hub's cache, offline, with one model of ours in two revisions."""
    cache = tmp_path / "hub"
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    repository = cache / "models--owner--birds"
    for number, (branch, seed) in enumerate({"main": 0, "old": 1}.items()):
        commit = f"{number}" * 40
        save_pretrained(small_model(seed=seed), repository / "snapshots" / commit)
        (repository / "refs").mkdir(exist_ok=True)
        (repository / "refs" / branch).write_text(commit)
    return cache


def state(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([value.flatten() for value in model.state_dict().values()])


def test_a_folder_is_read_with_its_weights_and_settings(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"model_type": "x"}')
    for ref in (tmp_path, tmp_path / "model.safetensors", str(tmp_path)):
        source = open_source(ref)
        assert source.config == {"model_type": "x"}
        assert source.preprocessor == {}
        assert source.file == "model.safetensors"
        assert torch.equal(source.tensors["a"], TENSORS["a"])
        assert source.name == str(ref)


def test_a_file_does_not_take_the_settings_of_its_neighbour(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    torch.save(TENSORS, tmp_path / "other.pth")
    (tmp_path / "config.json").write_text('{"model_type": "x"}')
    assert open_source(tmp_path / "other.pth").config == {}
    torch.save(TENSORS, tmp_path / "another.pth")
    (tmp_path / "model.safetensors").unlink()
    assert open_source(tmp_path / "other.pth").config == {}
    with pytest.raises(CheckpointError, match=r"another\.pth.*other\.pth"):
        open_source(tmp_path)


def test_a_single_file_of_any_name_has_the_settings_beside_it(tmp_path: Path) -> None:
    torch.save(TENSORS, tmp_path / "weights.pth")
    (tmp_path / "config.json").write_text('{"architecture": "y"}')
    assert open_source(tmp_path / "weights.pth").config == {"architecture": "y"}
    assert open_source(tmp_path).config == {"architecture": "y"}


def test_the_requested_revision_is_read(hub_cache: Path) -> None:
    expected = state(small_model(seed=1))
    assert torch.equal(state(from_pretrained("owner/birds", revision="old")), expected)
    assert torch.equal(state(from_pretrained("owner/birds@old")), expected)
    with pytest.raises(CheckpointError, match=r"owner/birds: .*'new'"):
        from_pretrained("owner/birds", revision="new")


def test_a_revision_is_never_ignored(hub_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CheckpointError, match="'main' contradicts"):
        open_source("owner/birds@old", "main")
    assert open_source("owner/birds@old", "old").name == "owner/birds@old"
    monkeypatch.setattr("vitascope.models.weights.hub.fetch_torchvision", lambda file: pytest.fail(file))
    with pytest.raises(CheckpointError, match="revision 'v1' has no meaning"):
        open_source("torchvision/vit_b_16", "v1")


def test_an_unknown_family_is_rejected_before_fetching(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "vitascope.models.weights.identification.open_source", lambda *args: pytest.fail("fetched")
    )
    with pytest.raises(UserError, match="nearest: huggingface"):
        from_pretrained("owner/birds", family="hugingface")


@pytest.mark.parametrize("ref", ["torchvision/vit_b_16", "ViT_B_16_Weights.IMAGENET1K_V1"])
def test_a_torchvision_name_is_read_from_the_cache_of_torch_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ref: str
) -> None:
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    model = small_model(embed_dim=128, num_heads=2)
    save_pretrained(model, tmp_path / "checkpoints", format="torchvision")
    (tmp_path / "checkpoints" / "model.pth").rename(tmp_path / "checkpoints" / TORCHVISION_FILES[WEIGHTS])
    loaded = from_pretrained(ref)
    assert identify(ref)[1].name == "torchvision"
    assert torch.equal(state(loaded), state(model))
    assert loaded.preprocess.interpolation == "bilinear"


def test_a_mistyped_path_is_not_looked_up_on_the_hub(
    tmp_path: Path, hub_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_pretrained(small_model(), tmp_path / "runs" / "photos")
    monkeypatch.chdir(tmp_path)
    for typed in ("runs/photo", "run/photos"):
        with pytest.raises(
            CheckpointError, match=f"{typed}: no such model; nearest: runs/photos; give a run"
        ):
            from_pretrained(typed)
    with pytest.raises(CheckpointError, match=r"runs/zebra: no such model; .*hf-hub:runs/zebra for the hub"):
        from_pretrained("runs/zebra")


def test_the_family_of_a_file_can_be_named_before_it(tmp_path: Path) -> None:
    model = small_model(embed_dim=128, num_heads=2)
    save_pretrained(model, tmp_path / "timm", format="timm")
    bare = tmp_path / "bare.safetensors"
    (tmp_path / "timm" / "model.safetensors").rename(bare)
    with pytest.raises(CheckpointError, match=f"timm:{bare}.*deit:{bare}"):
        identify(bare)
    for name, mean in (("timm", 0.5), ("deit", 0.485)):
        assert identify(f"{name}:{bare}")[1].name == name
        for loaded in (from_pretrained(f"{name}:{bare}"), from_pretrained(bare, family=name)):
            assert loaded.preprocess.mean[0] == mean
            assert torch.equal(state(loaded), state(model))


def test_options_that_tensors_do_not_determine_can_be_named_before_a_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = small_model(embed_dim=128, num_heads=2)
    save_pretrained(model, tmp_path, format="torchvision")
    caplog.clear()
    file = tmp_path / "model.pth"
    found = from_pretrained(f"torchvision:num_heads=4,mlp=gelu_tanh,norm_eps=1e-5:{file}").config
    assert found == model.config.replace(num_heads=4, mlp="gelu_tanh", norm_eps=1e-5, resample="torchvision")
    assert caplog.messages == []
    with pytest.raises(UserError, match=r"option before a file 'depth'; .*num_heads, mlp, norm_eps"):
        from_pretrained(f"torchvision:depth=4:{file}")
    with pytest.raises(UserError, match="num_heads is a number, not 'two'"):
        from_pretrained(f"torchvision:num_heads=two:{file}")
    with pytest.raises(UserError, match="'tanh'"):
        from_pretrained(f"torchvision:mlp=tanh:{file}")


def test_a_path_that_begins_like_a_family_is_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_pretrained(small_model(), tmp_path / "timm:mine @1")
    monkeypatch.chdir(tmp_path)
    assert identify("timm:mine @1")[1].name == "vitascope"


def test_a_given_architecture_has_precedence(tmp_path: Path) -> None:
    model = small_model(embed_dim=128, num_heads=4)  # the shapes do not determine the number of heads
    save_pretrained(model, tmp_path / "timm", format="timm")
    (tmp_path / "timm" / "config.json").unlink()
    images = torch.randn(1, 3, *model.config.image_hw)
    loaded = from_pretrained(tmp_path / "timm", family="timm", config=model.config)
    assert loaded.config == model.config
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
    # Not bitwise: the rounding of kernels depends on the address of the weights.
    torch.testing.assert_close(loaded(images), model(images), rtol=0, atol=1e-5)


def test_settings_that_are_no_json_object_are_rejected_by_name(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    (tmp_path / "preprocessor_config.json").write_text(json.dumps([1]))
    with pytest.raises(CheckpointError, match=r"preprocessor_config\.json: .*: a list, not an object"):
        open_source(tmp_path)


def test_models_are_told_from_other_files_by_their_names(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("")
    save_pretrained(small_model(), tmp_path / "model")
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "a.png").write_bytes(b"")
    (tmp_path / "labels.jsonl").write_text("")
    models = [tmp_path / "run", tmp_path / "model", tmp_path / "model" / "model.safetensors"]
    others = [tmp_path / "photos", tmp_path / "labels.jsonl", tmp_path / "missing.safetensors", "owner/name"]
    assert [is_model(path) for path in models] == [True] * 3
    assert [is_model(path) for path in others] == [False] * 4
