"""The entrants of a contest: steps of training and inference, ours and the peers'.

Each is a context manager that builds a step in the entrant's process. It checks that the models of one
configuration have the same number of parameters. Without given weights, each has random ones of its own,
which do not change the time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from contest import DTYPES, Entrant, Step
from vitascope.models.config import ViTConfig
from vitascope.models.engines.engine import Engine, TorchEngine
from vitascope.models.engines.runtimes import open_engine
from vitascope.models.hardware import resolve_precision, reuse_freed_memory, suitable_threads
from vitascope.models.vit import VisionTransformer
from vitascope.models.weights.loading import save_pretrained
from vitascope.models.weights.preprocess import default_preprocess
from vitascope.training.optimizers import optimizer_of
from vitascope.training.options.groups import Optimization

CPU = torch.device("cpu")


def inference_entrants(
    config: ViTConfig, batch_size: int, precisions: tuple[str, ...], model: str | None = None
) -> list[Entrant]:
    """Our prediction in each of the precisions, with the weights of a MODEL or random ones."""
    return [
        Entrant(
            name="vitascope",
            precision=precision,
            dtype=resolve_precision(precision, config, CPU, batch_size, training=False),
            prepare=functools.partial(our_inference, config, batch_size, precision, model),
            images=batch_size,
            flops=config.flops * batch_size,
        )
        for precision in precisions
    ]


def peer_inference_entrant(
    library: str,
    config: ViTConfig,
    batch_size: int,
    precision: str,
    *,
    our_allocator: bool = False,
    weights: Path | None = None,
) -> Entrant:
    """A peer's inference, which computes logits, optionally with our allocator setting.

    `weights` is a file of `write_peer_weights`; None leaves them random.
    """
    dtype = DTYPES[precision]
    return Entrant(
        name=f"{library} + our allocator setting" if our_allocator else library,
        precision=precision,
        dtype=dtype,
        prepare=functools.partial(peer_inference, library, config, batch_size, dtype, our_allocator, weights),
        images=batch_size,
        flops=config.flops * batch_size,
    )


@contextmanager
def our_training(config: ViTConfig, batch_size: int, dtype: torch.dtype) -> Iterator[Step]:
    """A step of `vitascope train`, with its allocator setting, threads and fused AdamW."""
    reuse_freed_memory()
    model = VisionTransformer(config)
    with suitable_threads(config, CPU, batch_size):
        yield training_step(model, optimizer_of(model, Optimization()), config, batch_size, dtype)


def training_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    config: ViTConfig,
    batch_size: int,
    dtype: torch.dtype,
) -> Step:
    """Forward, loss, backward and update, always on the same random batch."""
    model.train()
    images = torch.randn(batch_size, config.in_channels, *config.image_hw)
    labels = torch.randint(config.num_classes, (batch_size,))

    def step() -> None:
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            loss = F.cross_entropy(logits(model(images)).float(), labels, label_smoothing=0.1)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


@contextmanager
def our_inference(config: ViTConfig, batch_size: int, precision: str, model: str | None) -> Iterator[Step]:
    """Pixels to probabilities as in `vitascope predict`; the time includes normalization and softmax."""
    reuse_freed_memory()
    if model is None:
        built = VisionTransformer(config)
        built.preprocess = default_preprocess(config)
        engine: Engine = TorchEngine(built, precision=precision, device="cpu")
    else:
        engine = open_engine(model, precision=precision, device="cpu")
    yield functools.partial(engine.probabilities, random_pixels(config, batch_size))


def random_pixels(config: ViTConfig, batch_size: int) -> Tensor:
    """A batch of bytes: uint8 (B, C, H, W)."""
    return torch.randint(256, (batch_size, config.in_channels, *config.image_hw), dtype=torch.uint8)


@contextmanager
def peer_inference(
    library: str,
    config: ViTConfig,
    batch_size: int,
    dtype: torch.dtype,
    our_allocator: bool,
    weights: Path | None,
) -> Iterator[Step]:
    """Images, already normalized and in the dtype, to logits."""
    if our_allocator:
        reuse_freed_memory()
    model = peer_model(library, config)
    if weights is not None:
        model = with_weights(model, weights)
    model = model.to(dtype).eval()
    images = torch.randn(batch_size, config.in_channels, *config.image_hw, dtype=dtype)
    with torch.inference_mode():
        yield functools.partial(model, images)


def peer_model(library: str, config: ViTConfig) -> nn.Module:
    """Build a peer's model of our configuration through its public interface.

    Raises:
        ValueError: it has another number of parameters, so the two cannot be compared.
    """
    import peers  # noqa: F401  # before the libraries

    builders: dict[str, Callable[[ViTConfig], nn.Module]] = {
        "timm": timm_model,
        "transformers": transformers_model,
        "torchvision": torchvision_model,
    }
    model = builders[library](config)
    count = sum(parameter.numel() for parameter in model.parameters())
    if count != config.num_parameters:
        raise ValueError(f"{library}'s model has {count:,} parameters, ours {config.num_parameters:,}")
    return model


def write_peer_weights(model: VisionTransformer, library: str, folder: Path) -> Path:
    """Write our model's weights in a peer's format; returns the file."""
    form = {"transformers": "huggingface"}.get(library, library)
    save_pretrained(model, folder / form, format=form)
    return next(file for file in (folder / form).iterdir() if file.stem == "model")


def with_weights(model: Any, file: Path) -> nn.Module:
    """Load a file of `write_peer_weights` into a peer's model; transformers finds it by its folder."""
    if hasattr(model, "from_pretrained"):
        return model.from_pretrained(file.parent)
    if file.suffix == ".safetensors":
        model.load_state_dict(load_file(file), strict=True)
    else:
        model.load_state_dict(torch.load(file, weights_only=True), strict=True)
    return model


def timm_model(config: ViTConfig) -> nn.Module:
    from timm.models import VisionTransformer as TimmVisionTransformer

    return TimmVisionTransformer(
        img_size=config.image_hw,
        patch_size=config.patch_hw,
        num_classes=config.num_classes,
        embed_dim=config.embed_dim,
        depth=config.depth,
        num_heads=config.num_heads,
    )


def transformers_model(config: ViTConfig) -> nn.Module:
    import transformers

    return transformers.ViTForImageClassification(
        transformers.ViTConfig(
            image_size=config.image_hw[0],
            patch_size=config.patch_hw[0],
            num_labels=config.num_classes,
            hidden_size=config.embed_dim,
            num_hidden_layers=config.depth,
            num_attention_heads=config.num_heads,
            intermediate_size=config.mlp_dim,
        )
    )


def torchvision_model(config: ViTConfig) -> nn.Module:
    import torchvision

    return torchvision.models.VisionTransformer(
        image_size=config.image_hw[0],
        patch_size=config.patch_hw[0],
        num_layers=config.depth,
        num_heads=config.num_heads,
        hidden_dim=config.embed_dim,
        mlp_dim=config.mlp_dim,
        num_classes=config.num_classes,
    )


def logits(output: Any) -> Tensor:
    """The logits in a model's output, which transformers wraps in an object."""
    return output if isinstance(output, Tensor) else output.logits
