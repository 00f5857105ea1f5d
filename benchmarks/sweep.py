"""Load every ViT of timm and of transformers, compare it with its library in float64, and write it back.

    .venv/bin/python benchmarks/sweep.py --out
    .venv/bin/python benchmarks/sweep.py --only eva02

Each architecture is built small (2 blocks of width 48, 3 heads, 4x3 patches), with every parameter random,
those too that start at zero, and saved by its library. The folder is loaded here. Logits, features, every
block's tokens and attention weights are compared; then the model is written for its library, which loads it
strictly, and compared again. Where a part is in float32 (DINOv3's angles, the sum of a token and its place),
the last digit of that part differs. It takes a minute on 2 cores, and needs timm and transformers.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import json
import logging
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import peers  # noqa: F401  # before the libraries

# isort: split

import timm
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn

from reports import command_line, markdown_table, note, publish
from vitascope.errors import UserError
from vitascope.models.vit import VisionTransformer
from vitascope.models.weights.all_families import FAMILIES
from vitascope.models.weights.identification import identify
from vitascope.models.weights.loading import from_pretrained
from vitascope.models.weights.mapping import to_family
from vitascope.models.weights.preprocess import preprocess_of

EXACT = 1e-10
ROUNDED = 1e-6
"""The limit where a library or we compute a part in float32: rotary angles, sums with a position."""
SINGLE = "float32 "
"""Before the name of an output that the library computes in float32 whatever its dtype."""
MODULES = ("vision_transformer", "vision_transformer_hybrid", "deit", "eva", "beit")
SMALL: dict[str, Any] = {"depth": 2, "embed_dim": 48, "num_heads": 3}
Outputs = dict[str, Tensor]


@dataclasses.dataclass(frozen=True)
class Result:
    """What became of one architecture."""

    group: str
    name: str
    difference: float | None
    """The largest relative difference of all outputs, also after writing; None if it was rejected."""
    reason: str = ""
    """Of the rejection, or of the failure."""
    failed: bool = False

    @property
    def exact(self) -> bool:
        """Whether it loads and all outputs are equal."""
        return self.difference is not None and not self.failed


@dataclasses.dataclass(frozen=True)
class Case:
    """One architecture: how to build and save it, and its outputs."""

    group: str
    name: str
    family: str
    build: Callable[[], Any]
    save: Callable[[Any, Path], None]
    outputs: Callable[[Any, Tensor], Outputs]
    load: Callable[[Path], Any]


def relative(actual: Tensor, expected: Tensor) -> float:
    """The largest difference over the largest magnitude."""
    if actual.shape != expected.shape:
        raise ValueError(f"shapes {tuple(actual.shape)} and {tuple(expected.shape)}")
    return ((actual - expected).abs().max() / expected.abs().max().clamp_min(1e-300)).item()


@torch.no_grad()
def randomize(model: nn.Module) -> nn.Module:
    """Fill every parameter with random numbers: zero or one would hide that it is unused or used twice."""
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape).to(parameter.dtype)
        if parameter.ndim == 1:  # biases around zero, weights of norms around one
            parameter.copy_(0.3 * noise + name.endswith("weight"))
        else:
            parameter.copy_(0.5 * noise if parameter.ndim == 3 else noise / parameter[0].numel() ** 0.5)
    return model


def our_outputs(model: VisionTransformer, images: Tensor) -> Outputs:
    trace = model.trace(images, attention=True)
    names = ["features", "pooled", "logits", *(f"block{index}" for index in range(model.config.depth))]
    attention = {f"attention{index}": weights for index, weights in enumerate(trace.attention)}
    return {name: trace[name] for name in names} | attention


# timm


def small_arguments(name: str) -> Iterator[dict[str, Any]]:
    """Arguments that shrink an architecture, from the smallest on; not every function takes all."""
    patch = timm.get_pretrained_cfg(name)
    size = re.search(r"patch(\d+)|_[sp](\d+)_|_[sp](\d+)$", name)
    side = int(next(part for part in size.groups() if part)) if size and patch else 16
    if "_r26_" in name or "r50_s32" in name:
        side = 32
    height, width = 4 * side, 3 * side
    yield {**SMALL, "img_size": [height, width]}
    yield {**SMALL, "img_size": 4 * side}
    yield {**SMALL, "img_size": 4 * side, "num_kv_heads": 1}
    yield {"depth": 2, "img_size": 4 * side}


def build_timm(name: str) -> Any:
    error: Exception | None = None
    for args in small_arguments(name):
        try:
            peer = timm.create_model(name, **args, num_classes=5)
        except (TypeError, AssertionError, ValueError, RuntimeError) as failure:
            error = failure
            continue
        peer.sweep_args = args
        return peer
    raise RuntimeError(f"{name} cannot be built small: {error}")


def save_timm(peer: Any, folder: Path) -> None:
    timm.models.save_for_hf(peer, folder, safe_serialization=True, model_args=peer.sweep_args)


def load_timm(folder: Path) -> Any:
    return timm.create_model(f"local-dir:{folder}", pretrained=True)


def timm_outputs(peer: Any, images: Tensor) -> Outputs:
    seen: dict[str, list[Tensor]] = collections.defaultdict(list)
    handles = []

    def keep(name: str, _: nn.Module, __: Any, output: Tensor) -> None:
        seen[name].append(output)

    for block in peer.blocks:
        block.attn.fused_attn = False
        for name, part in (("attention", block.attn.attn_drop), ("block", block)):
            handles.append(part.register_forward_hook(functools.partial(keep, name)))
    features = peer.forward_features(images)
    for handle in handles:
        handle.remove()
    found = {f"{name}{index}": value for name, values in seen.items() for index, value in enumerate(values)}
    return {"features": features, "logits": peer(images), **found}


def timm_cases() -> Iterator[Case]:
    for module in MODULES:
        for name in timm.list_models(module=module):
            yield Case(
                group=f"timm {module}.py",
                name=name,
                family="timm",
                build=functools.partial(build_timm, name),
                save=save_timm,
                outputs=timm_outputs,
                load=load_timm,
            )


# transformers

BODY: dict[str, Any] = {
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 96,
}
BODY |= {"image_size": 32, "patch_size": 8, "attn_implementation": "eager"}
BEIT = {"use_relative_position_bias": True}
TYPES: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("ViT", "ViTForImageClassification", {}),
    ("ViT", "ViTModel", {}),
    ("ViT", "ViTForMaskedImageModeling", {"encoder_stride": 8}),
    ("DeiT", "DeiTForImageClassification", {}),
    ("DeiT", "DeiTForImageClassificationWithTeacher", {}),
    ("Dinov2", "Dinov2ForImageClassification", {}),
    ("Dinov2", "Dinov2Model", {}),
    ("Dinov2", "Dinov2Backbone", {}),
    ("Dinov2WithRegisters", "Dinov2WithRegistersForImageClassification", {}),
    ("Dinov2WithRegisters", "Dinov2WithRegistersModel", {}),
    ("DINOv3ViT", "DINOv3ViTModel", {}),
    ("Beit", "BeitForImageClassification", BEIT),
    ("Beit", "BeitModel", {"use_shared_relative_position_bias": True, "use_mean_pooling": False}),
    ("Beit", "BeitModel", {"use_absolute_position_embeddings": True}),
    ("Data2VecVision", "Data2VecVisionForImageClassification", BEIT),
    ("Data2VecVision", "Data2VecVisionModel", {"use_shared_relative_position_bias": True}),
    ("ViTMAE", "ViTMAEModel", {"mask_ratio": 0.0}),
    ("ViTMSN", "ViTMSNForImageClassification", {}),
    ("ViTMSN", "ViTMSNModel", {}),
    ("IJepa", "IJepaForImageClassification", {}),
    ("IJepa", "IJepaModel", {}),
    ("CLIPVision", "CLIPVisionModel", {}),
    ("CLIPVision", "CLIPVisionModelWithProjection", {"projection_dim": 24}),
    ("SiglipVision", "SiglipVisionModel", {}),
    ("MLCDVision", "MLCDVisionModel", {}),
    ("Aimv2Vision", "Aimv2VisionModel", {"use_head": False}),
)


def build_transformers(config_name: str, model_name: str, options: dict[str, Any]) -> Any:
    config = getattr(transformers, f"{config_name}Config")(**{**BODY, **options}, num_labels=5)
    return getattr(transformers, model_name)(config)


def transformers_outputs(peer: Any, images: Tensor) -> Outputs:
    peer.set_attn_implementation("eager")  # which shows the weights, and has a softmax in float32
    # Masked autoencoders sort their patches by noise, also where they keep all.
    order = {"noise": torch.arange(16).expand(len(images), -1)} if peer.config.model_type == "vit_mae" else {}
    attentions = peer(images, output_attentions=True, **order).get("attentions") or ()
    # Data2VecVision shows none once its class is built for another kernel.
    shown = {f"{SINGLE}attention{index}": value for index, value in enumerate(attentions)}
    found = {name: value for name, value in shown.items() if value is not None}
    peer.set_attn_implementation("sdpa")
    result = peer(images, output_hidden_states=True, **order)
    if result.get("hidden_states") is not None:
        found |= {f"block{index}": value for index, value in enumerate(result.hidden_states[1:])}
    # CLIP's last norm is applied to the pooled token alone.
    last = "pooler_output" if peer.config.model_type == "clip_vision_model" else "last_hidden_state"
    pooled = {"pooler_output": "pooled", "last_hidden_state": "features"}
    for ours, theirs in (("logits", "logits"), ("logits", "image_embeds"), (pooled[last], last)):
        if result.get(theirs) is not None:
            found[ours] = result[theirs]
    if "Model" in type(peer).__name__ and "features" in found:  # without a head, ours are pooled features
        found.pop("logits", None)
    return found


def load_transformers(folder: Path) -> Any:
    """The model of a folder's config.json, loaded strictly."""
    (name,) = json.loads((folder / "config.json").read_text())["architectures"]
    kind: Any = getattr(transformers, name)
    pooled = "pooler.dense.weight" in load_file(folder / "model.safetensors")
    bare = {"add_pooling_layer": pooled} if name in ("ViTModel", "DeiTModel") else {}
    peer, found = kind.from_pretrained(folder, output_loading_info=True, **bare)
    if faults := {key: names for key, names in found.items() if names}:
        raise ValueError(f"{name} is not loaded strictly: {faults}")
    return peer


def transformers_cases() -> Iterator[Case]:
    for config_name, model_name, options in TYPES:
        told = "".join(f" {name}" for name in options)
        yield Case(
            group="transformers",
            name=model_name + told,
            family="huggingface",
            build=functools.partial(build_transformers, config_name, model_name, options),
            save=lambda peer, folder: peer.save_pretrained(folder),
            outputs=transformers_outputs,
            load=load_transformers,
        )


# The sweep


def worst(ours: Outputs, theirs: Outputs) -> float:
    """The largest difference of the outputs that the library shows."""
    known = {name: relative(ours[name.removeprefix(SINGLE)], value) for name, value in theirs.items()}
    if any(value > ROUNDED for name, value in known.items() if name.startswith(SINGLE)):
        raise ValueError(f"attention differs by {max(known.values()):.1e}")
    return max(value for name, value in known.items() if not name.startswith(SINGLE))


@torch.no_grad()
def run(case: Case) -> Result:
    """Load, compare, write, compare; a rejection has its reason, and anything else is a failure."""
    torch.manual_seed(0)
    try:
        peer = randomize(case.build()).eval()
        with tempfile.TemporaryDirectory() as folder:
            theirs, written = Path(folder) / "theirs", Path(folder) / "ours"
            case.save(peer, theirs)
            try:
                ours = from_pretrained(theirs)
                assert isinstance(ours, VisionTransformer)
            except UserError as error:
                return Result(case.group, case.name, None, str(error).replace(str(theirs), "").lstrip(": "))
            images = torch.randn(2, ours.config.in_channels, *ours.config.image_hw, dtype=torch.float64)
            expected = case.outputs(peer.double(), images)
            difference = worst(our_outputs(ours.double(), images), expected)
            to_family(FAMILIES[case.family], ours.float(), preprocess_of(ours), written)
            again = from_pretrained(written)
            assert isinstance(again, VisionTransformer)
            difference = max(difference, worst(our_outputs(again.double(), images), expected))
            there = case.outputs(case.load(written).eval().double(), images)
            difference = max(difference, worst(our_outputs(again.double(), images), there))
            single = ours.config.readout.num_registers > 0 or ours.config.norms.norm_type == "rms"
            single = case.family == "huggingface" and single  # sums and norms in float32 there
            limit = ROUNDED if ours.config.embedding.positions == "rotary" or single else EXACT
            wrong = f"differs by {difference:.1e}" if not difference <= limit else ""
            assert identify(written)[1].name == case.family
    except Exception as error:  # noqa: BLE001  # the table shows what failed, and the exit status that something did
        return Result(case.group, case.name, None, f"{type(error).__name__}: {error}".splitlines()[0], True)
    return Result(case.group, case.name, difference, wrong, bool(wrong))


def report(results: Sequence[Result]) -> str:
    """The counts by group, the failures, and the reason of every rejection."""
    rows = []
    for group in dict.fromkeys(result.group for result in results):
        of = [result for result in results if result.group == group]
        exact = [result.difference for result in of if result.exact and result.difference is not None]
        rejected, failed = sum(not r.exact and not r.failed for r in of), sum(r.failed for r in of)
        largest = f"{max(exact):.0e}" if exact else "-"
        share = f"{100 * len(exact) / len(of):.0f}%"
        rows.append((group, *map(str, (len(of), len(exact), rejected, failed)), share, largest))
    header = ("models", "all", "exact", "rejected", "failed", "share", "largest difference")
    lines = ["# Every ViT of timm and transformers, in float64", "", markdown_table(header, rows)]
    lines += [
        "",
        f"timm {timm.__version__}, transformers {transformers.__version__}, torch {torch.__version__}",
    ]
    for title, chosen in (
        ("Failed", [result for result in results if result.failed]),
        ("Rejected", [result for result in results if not result.exact and not result.failed]),
    ):
        reasons: dict[str, list[str]] = collections.defaultdict(list)
        for result in chosen:
            reason = result.reason.replace(result.name, "it").partition("; nearest")[0]
            reasons[reason.partition("; vitascope reads")[0]].append(result.name)
        lines += ["", f"## {title}", ""] if chosen else []
        lines += [f"- {reason}: {', '.join(names)}" for reason, names in reasons.items()]
    return "\n".join(lines)


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--only", default="", help="only the architectures whose name contains this")
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    results = []
    for case in (*timm_cases(), *transformers_cases()):
        if arguments.only in case.name:
            results.append(run(case))
            last = results[-1]
            found = f"{last.difference:.0e}" if last.difference is not None else last.reason[:100]
            note(f"{case.name}: {found}")
    publish("sweep", report(results), arguments)
    sys.exit(any(result.failed for result in results))


if __name__ == "__main__":
    main()
