"""The promises of an option of the model, checked on one example of its values.

It costs what it says, starts as it should, trains a step, is resumed bitwise, runs at other sizes and in
parts, is saved and loaded, is in a page or rejected by its name, and stands in the documentation.
"""

from __future__ import annotations

import copy
import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tests.models import count_parameters, on_meta, random_images, small_config, small_model
from tests.models.weights import assert_same_state
from vitascope.deploy.page.packing import check_held
from vitascope.errors import UserError
from vitascope.models.config import ViTConfig
from vitascope.models.trace import Trace
from vitascope.models.vit import VisionTransformer
from vitascope.models.weights.loading import from_pretrained, save_pretrained
from vitascope.training.checkpoint.state import (
    model_state,
    optimizer_state,
    restore_model,
    restore_optimizer,
)
from vitascope.training.optimizers import optimizer_of
from vitascope.training.options.recipes import TrainConfig

PAGE = (Path(__file__).parents[2] / "docs" / "options.md").read_text(encoding="utf-8")


def check_option(options: dict[str, Any], folder: Path) -> None:
    """Check every promise of a model with these options."""
    model, images = small_model(**options), random_images(3, 3, 32, 32)
    check_cost(model.config.replace(image_size=(32, 48)))
    for init in ("paper", "timm"):
        check_start(options | {"init": init})
    check_step(small_model(**options).train())
    check_resumed(options)
    check_trace(model, images)
    check_independent(model, images)
    check_parts_off(model, images)
    check_saved(model, images, folder)
    check_named(model, options)
    check_size(model)


def check_cost(config: ViTConfig) -> None:
    """Parameters, tokens and operations are those of the built model; the configuration survives JSON."""
    model = on_meta(config).eval()
    images = torch.empty(1, config.in_channels, *config.image_hw, device="meta")
    assert config.num_parameters == count_parameters(model)
    # Not every counter knows the fused kernels; the reference kernel consists of products that it counts.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        trace = model.trace(images)
    assert config.flops == counter.get_total_flops()
    assert trace["features"].shape == (1, config.num_tokens, config.embed_dim)
    assert ViTConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def starts(options: dict[str, Any]) -> Iterator[tuple[str, Tensor, str]]:
    """Every parameter of a fresh model, and its start: zero, one, layer scale or random."""
    torch.manual_seed(0)
    size = {"image_size": 64, "embed_dim": 64, "depth": 2, "num_heads": 4}
    model = VisionTransformer(small_config(**(size | options)))
    paper = options["init"] == "paper"
    zero_head = paper or options.get("head_init") == "zero"
    rules = [  # the first that matches
        (r"scale[12]\.gamma$", "layer scale"),
        (r"resnet\.stages.*\.norm3\.weight$", "zero"),
        (r"norm[123]?(\.[qk])?\.weight$", "one"),
        (r"^head\.(linear\.|distillation\.)?weight$", "zero" if zero_head else "random"),
        (r"^class_token$", "zero" if paper else "random"),
        (r"^distillation_token$", "random"),
        (r"mlp\.fc[12]\.bias$", "random" if paper else "zero"),
        (r"^patch_embedding\.\d\.conv\.bias$", "zero"),
        (r"^patch_embedding\.(projection\.)?bias$", "zero" if paper else "random"),
        (r"bias$", "zero"),
        (r"", "random"),
    ]
    for name, value in model.named_parameters():
        yield name, value, next(start for pattern, start in rules if re.search(pattern, name))


def check_start(options: dict[str, Any]) -> None:
    """Every parameter is initialized, by its rule."""
    torch.use_deterministic_algorithms(True)  # fills memory that nothing has written with NaN
    try:
        parameters = list(starts(options))
    finally:
        torch.use_deterministic_algorithms(False)
    for name, value, start in parameters:
        assert value.isfinite().all(), name
        if start == "random":
            distinct = (
                0.45 if name == "positions.frequencies" else 0.9
            )  # a pair of axes has two numbers in all
            assert value.unique().numel() > distinct * value.numel(), name
        else:
            expected = {"zero": 0.0, "one": 1.0, "layer scale": options.get("layer_scale")}[start]
            assert (value == expected).all(), name


def check_step(model: VisionTransformer) -> None:
    """A loss has a gradient in every parameter, and that of no images is zero."""
    torch.manual_seed(0)
    logits = model(random_images(4, 3, 32, 32))
    nothing = model(random_images(0, 3, 32, 32))
    assert nothing.shape == (0, logits.shape[1])
    nothing.sum().backward()
    assert not any(value.grad.any() for value in model.parameters() if value.grad is not None)
    logits.square().sum().backward()
    unused = [name for name, value in model.named_parameters() if value.grad is None or not value.grad.any()]
    # A softmax of scores does not depend on their bias: its gradient is zero but for rounding.
    assert set(unused) <= {"pool.score.bias"}


def check_resumed(options: dict[str, Any]) -> None:
    """A step after the weights and the optimizer's state were written and read is bitwise that without."""

    def step(model: VisionTransformer, optimizer: torch.optim.Optimizer, seed: int) -> None:
        torch.manual_seed(seed)
        model(random_images(4, 3, 32, 32)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    values = TrainConfig.from_recipe("small-data").optimization  # Muon and AdamW
    models = [small_model(**options).train() for _ in range(2)]
    whole, resumed = ((model, optimizer_of(model, values)) for model in models)
    for optimizer in (whole[1], resumed[1]):
        for group in optimizer.param_groups:
            group["lr"] = 0.01
    step(*whole, seed=0)
    state = io.BytesIO()
    torch.save([model_state(whole[0]), optimizer_state(*whole)], state)
    state.seek(0)
    weights, moments = torch.load(state, weights_only=True)
    restore_model(resumed[0], weights)
    restore_optimizer(*resumed, moments)
    for model, optimizer in (whole, resumed):
        step(model, optimizer, seed=1)
    assert_same_state(*models)


def check_trace(model: VisionTransformer, images: Tensor) -> None:
    """A trace has the values of the forward pass, whose head pools and classifies the features."""
    config, count = model.config, len(images)
    close = {"rtol": 1e-4, "atol": 1e-5}
    first, last = model.forward_intermediates(images, [0, -1])
    (plain,) = model.forward_intermediates(images, [0], norm=False)
    features, logits, of_head = model.forward_features(images), model(images), Trace()
    for attention in (False, True):
        trace = model.trace(images, attention=attention)
        for name, expected in (
            ("patch_embeddings", model.patch_embedding(images)),
            ("embeddings", model.prepare_tokens(images)),
            ("block0", plain),
            ("features", features),
            ("pooled", model.embed(images)),
            ("logits", logits),
        ):
            torch.testing.assert_close(trace[name], expected, **close, msg=name)
        torch.testing.assert_close(first, model.norm(trace["block0"]), **close)
        torch.testing.assert_close(last, trace["features"], **close)
    assert trace["features"].shape == (count, config.num_tokens, config.embed_dim)
    assert trace["pooled"].shape == (count, config.embed_dim * config.readout.num_pooled)
    assert len(trace.attention) == config.depth
    for weights in trace.attention:
        assert weights.shape == (count, config.num_heads, config.num_tokens, config.num_tokens)
        assert weights.min() >= 0
        torch.testing.assert_close(weights.sum(-1), torch.ones(weights.shape[:3]))
    torch.testing.assert_close(model.pool_features(features), model.embed(images))
    torch.testing.assert_close(model.forward_head(features, of_head), logits)
    assert list(of_head.values) == ["pooled", "logits"]
    of_read = model.forward_head(model.forward_features(images, queries=model.pool.queries))
    torch.testing.assert_close(of_read, logits)


def check_independent(model: VisionTransformer, images: Tensor) -> None:
    """Each image has the logits that it has alone."""
    alone = torch.cat([model(image[None]) for image in images])
    torch.testing.assert_close(model(images), alone, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def check_parts_off(model: VisionTransformer, images: Tensor) -> None:
    """Branches that are off are as zero weights, and patches that are off as if they did not exist."""
    other, config = copy.deepcopy(model), model.config
    with model.intervene(attention=[0], mlps=[1]):
        off = model(images)
    for index, (part, norm) in enumerate((("attention.proj", "norm1"), ("mlp.fc2", "norm2"))):
        last = other.encoder.blocks[index].get_submodule(norm if config.block.norm == "branch" else part)
        for value in last.parameters():
            value.zero_()
    torch.testing.assert_close(off, other(images))
    if config.block.token_merging or config.block.attention != "global":
        return
    wide, images = copy.deepcopy(model).double(), images.double()
    N = wide.patch_embedding(images).shape[1]
    with wide.intervene(patches=[0, N - 1]):
        off = wide(images)
    if config.embedding.relative:  # whose biases `visible` does not select
        assert not torch.allclose(off, wide(images))
        return
    visible = torch.arange(1, N - 1).expand(len(images), -1)
    tokens = wide.encode(wide.prepare_tokens(images), wide.grid_of(images), visible=visible)
    torch.testing.assert_close(off, wide.forward_head(wide.norm(tokens)))


def check_saved(model: VisionTransformer, images: Tensor, folder: Path) -> None:
    """A folder has all of the model; nothing but parameters is stored."""
    assert set(model.state_dict()) == {name for name, _ in model.named_parameters()}
    loaded = from_pretrained(save_pretrained(model, folder))
    assert loaded.config == model.config
    assert_same_state(loaded, model)
    assert torch.equal(loaded(images), model(images))


def check_named(model: VisionTransformer, options: dict[str, Any]) -> None:
    """A page has the model, or the error names an option of it; the documentation has each."""
    missing = [name for name in options if f"`{name}`" not in PAGE and f"`{name}=" not in PAGE]
    assert not missing
    reason = ""
    try:
        check_held(model)
    except UserError as error:
        reason = str(error)
    named = re.findall(r"not of (\w+)", reason)
    assert ("vitascope serve" in reason) == bool(named) == bool(reason)
    assert set(named) <= options.keys()


def check_size(model: VisionTransformer) -> None:
    """Another size is accepted on the fly, with the outputs of a model that is resized to it."""
    images, config = random_images(2, 3, 48, 32), model.config.replace(image_size=(48, 32))
    assert config.grid == model.config.grid_of((48, 32)) != model.config.grid
    assert model.forward_features(images).shape == (2, config.num_tokens, config.embed_dim)
    on_the_fly = model(images)
    assert on_the_fly.isfinite().all()
    model.resize((48, 32))
    assert model.config == config
    torch.testing.assert_close(model(images), on_the_fly, rtol=1e-4, atol=1e-5)
