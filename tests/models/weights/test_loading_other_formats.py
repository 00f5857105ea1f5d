"""Weights of other kinds: the error names the kind and the remedy; wrapped weights are read."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.models import small_model
from vitascope.models.weights.files import CheckpointError
from vitascope.models.weights.loading import from_pretrained, save_pretrained

OPTIONS = {"embed_dim": 128, "num_heads": 2}


def load_error(ref: Path | str) -> str:
    with pytest.raises(CheckpointError) as caught:
        from_pretrained(ref)
    assert str(ref).rpartition(":")[2] in str(caught.value)
    return str(caught.value)


def assert_same(ref: object) -> None:
    found, expected = from_pretrained(ref).state_dict(), small_model(**OPTIONS).state_dict()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        (["adapter_config.json", "adapter_model.safetensors", "rng_state.pth"], r"LoRA.*merge_and_unload"),
        (["config.json", "tf_model.h5"], r"tf_model\.h5 is weights of TensorFlow alone.*from_tf=True"),
        (["config.json", "flax_model.msgpack"], r"msgpack is weights of Flax alone.*from_flax=True"),
        (["checkpoint-90/x", "checkpoint-500/x", "runs/x"], "Trainer left 2 in it.*: checkpoint-500$"),
        (
            ["config.json", "rng_state.pth", "optimizer.pt"],
            "optimizer.pt is a state of transformers' Trainer",
        ),
        (["model.onnx"], "an ONNX graph"),
    ],
)
def test_the_kind_of_other_weights_in_a_folder_is_named(
    tmp_path: Path, files: list[str], reason: str
) -> None:
    for name in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text('{"model_type": "vit"}')
    assert re.search(reason, load_error(tmp_path))


def test_the_tensors_of_an_adapter_are_recognized_by_name(tmp_path: Path) -> None:
    layer = "base_model.model.vit.encoder.layer.0.attention.attention.query"
    tensors = {f"{layer}.lora_{part}.weight": torch.zeros(2, 2) for part in "AB"}
    save_file(tensors, tmp_path / "mine.safetensors")
    assert "a LoRA adapter of PEFT, not a complete model" in load_error(tmp_path / "mine.safetensors")


@pytest.mark.parametrize("prefix", ["model.", "net.", "model.module._orig_mod.backbone."])
def test_the_prefix_of_a_wrapper_is_removed(tmp_path: Path, prefix: str) -> None:
    """Lightning saves a module with the model in an attribute in this way."""
    save_pretrained(small_model(**OPTIONS), tmp_path / "deit", format="torchvision")
    state = torch.load(tmp_path / "deit" / "model.pth")
    state = {f"{prefix}{name}": tensor for name, tensor in state.items()}
    file = tmp_path / "epoch=1.ckpt"
    torch.save({"state_dict": state, "pytorch-lightning_version": "2.5", "hyper_parameters": {"lr": 1}}, file)
    assert_same(file)


@pytest.mark.parametrize("family", ["", "torchvision:"])
def test_tensors_beside_a_wrapped_model_are_named_with_advice_that_works(tmp_path: Path, family: str) -> None:
    save_pretrained(small_model(**OPTIONS), tmp_path / "torchvision", format="torchvision")
    state = torch.load(tmp_path / "torchvision" / "model.pth")
    state = {f"model.{name}": tensor for name, tensor in state.items()} | {"loss.weight": torch.ones(3)}
    torch.save({"state_dict": state}, tmp_path / "last.ckpt")
    advice = re.search(
        r"'model\.' are a ViT's, .*'loss\.weight'.*: (\{.*\})$",
        load_error(f"{family}{tmp_path / 'last.ckpt'}"),
    )
    assert advice
    torch.save(eval(advice[1], {"state": state}), tmp_path / "model.pth")  # noqa: S307 - as above
    assert_same(tmp_path / "model.pth")


@pytest.mark.parametrize(
    ("ref", "others"),
    [
        (".", []),
        ("model.fp16.safetensors", []),
        ("model.fp16.safetensors", ["model.bf16.safetensors", "model.safetensors"]),
    ],
)
def test_a_variant_is_read_with_the_settings_beside_it(tmp_path: Path, ref: str, others: list[str]) -> None:
    save_pretrained(small_model(**OPTIONS), tmp_path, format="huggingface")
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    save_file({name: tensor.half() for name, tensor in tensors.items()}, tmp_path / "model.fp16.safetensors")
    for name in others:
        save_file({"other": torch.ones(1)}, tmp_path / name)
    found, expected = from_pretrained(tmp_path / ref).state_dict(), small_model(**OPTIONS).state_dict()
    for name, value in expected.items():
        assert torch.equal(found[name], value.half().float()), name


def test_several_variants_are_listed(tmp_path: Path) -> None:
    for name in ("model.fp16.safetensors", "model.bf16.safetensors"):
        save_file({"x": torch.ones(1)}, tmp_path / name)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "vit"}))
    assert "several weights: model.bf16.safetensors, model.fp16.safetensors; give the path" in load_error(
        tmp_path
    )
