"""The heatmap methods by name."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from vitascope.analysis.explain.attention import attention
from vitascope.analysis.explain.gradcam import grad_cam
from vitascope.analysis.explain.heatmaps import to_unit
from vitascope.analysis.explain.inputs import Images, as_images, pooled_and_logits
from vitascope.analysis.explain.integrated_gradients import integrated_gradients
from vitascope.analysis.explain.libra import libra
from vitascope.analysis.explain.occlusion import occlusion
from vitascope.analysis.explain.patching import patching
from vitascope.analysis.explain.rollout import gradient_rollout, rollout
from vitascope.analysis.explain.targets import FeatureCosine, TargetLike
from vitascope.arguments import checked
from vitascope.errors import UserError, check_choice
from vitascope.models.ensemble import Ensemble
from vitascope.models.heads import predicted
from vitascope.models.resnet import ResNet
from vitascope.models.vision_model import VisionModel


@dataclasses.dataclass(frozen=True)
class Method:
    """A heatmap method."""

    compute: Callable[..., Tensor]
    """(model, images) or, where it explains a target, (model, images, target) -> (B, gh, gw)."""
    title: str
    """Its name in figures."""
    settings: tuple[str, ...] = ()
    """Its own keyword arguments."""
    has_target: bool = True
    """Whether it explains a class or another target; attention is the same for all."""
    attends: bool = False
    """Whether it reads attention, which a ResNet does not have."""
    many_passes: bool = False
    """Whether it runs the model many times, on `batch_size` images at once."""
    runs_blocks: bool = False
    """Whether it runs single blocks, which token merging does not allow."""
    in_browser: bool = False
    """Whether `deploy/page/web/answers.js` computes it too, for pages."""

    def __call__(
        self,
        model: VisionModel,
        images: Images,
        target: TargetLike = None,
        *,
        batch_size: int | None = None,
        scaled: bool = True,
        **settings: Any,
    ) -> Tensor:
        """Heatmaps as of `heatmap`; a method without a target ignores `target`. Of an ensemble, the mean of
        its members' maps, for what all of them predict together."""
        if isinstance(model, Ensemble):
            images = as_images(model, images)
            if self.has_target and target is None:
                target = predicted(pooled_and_logits(model, images)[1])
            maps = [
                self(member, images, part, batch_size=batch_size, scaled=scaled, **settings)
                for member, part in zip(model.members, _of_members(target, model), strict=True)
            ]
            return to_unit(torch.stack(maps).mean(dim=0), scaled)
        settings["scaled"] = scaled
        if not self.has_target:
            return self.compute(model, images, **settings)
        if self.many_passes and batch_size is not None:
            settings["batch_size"] = batch_size
        return self.compute(model, images, target, **settings)

    def lacking(self, model: VisionModel, target: TargetLike = None) -> str:
        """What the method needs and a model does not have, in words; empty if it suits the model."""
        if isinstance(model, Ensemble):
            return self.lacking(model.members[0], target)
        if self.attends and isinstance(model, ResNet):
            return "attention"
        if self.has_target and target is None and not model.config.gives_classes:
            return "a head"
        if isinstance(model, ResNet):
            return ""
        if self.runs_blocks and model.config.block.token_merging:
            return "blocks that run alone (token_merging=0)"
        return ""


def _of_members(target: TargetLike, model: Ensemble) -> list[TargetLike]:
    """A target for each member; features (B, M D) are side by side."""
    count = len(model.members)
    if isinstance(target, FeatureCosine):
        return [FeatureCosine(part) for part in target.features.chunk(count, dim=1)]
    return [target] * count


METHODS: dict[str, Method] = {
    "attention": Method(
        attention, "attention", ("layer", "head"), has_target=False, attends=True, runs_blocks=True
    ),
    "rollout": Method(rollout, "attention rollout", ("fusion", "discard"), has_target=False, attends=True),
    "gradient-rollout": Method(gradient_rollout, "gradient rollout", attends=True, runs_blocks=True),
    "grad-cam": Method(grad_cam, "Grad-CAM", ("layer",), runs_blocks=True, in_browser=True),
    "layer-cam": Method(partial(grad_cam, variant="layer-cam"), "Layer-CAM", ("layer",)),
    "libra": Method(libra, "Libra input x gradient"),
    "integrated-gradients": Method(
        integrated_gradients, "integrated gradients", ("steps",), many_passes=True
    ),
    "occlusion": Method(occlusion, "occlusion", ("window",), many_passes=True, in_browser=True),
    "patching": Method(
        patching, "activation patching", ("layers",), attends=True, many_passes=True, runs_blocks=True
    ),
}
"""By name; of those that cost the same, the older first."""

DEFAULT_METHOD = "integrated-gradients"
"""Of the library, the command and the server: the most faithful in `benchmarks/faithfulness.py`."""


@checked
def heatmap(
    model: VisionModel,
    images: Images,
    method: str = DEFAULT_METHOD,
    target: TargetLike = None,
    *,
    batch_size: int | None = None,
    scaled: bool = True,
    **settings: Any,
) -> Tensor:
    """Heatmaps by a method's name.

    Args:
        method: one of `METHODS`.
        target: see `vitascope.explain`; only None for methods that show the same for every class.
        batch_size: images at once, for methods that run the model many times; None is the method's default.
        scaled: False returns numbers that are comparable between images, negative ones too.
        settings: the method's own, such as `layer`.

    Raises:
        UserError: no such method, or none for this model; a setting or a target that does not apply to it.
    """
    check_settings(method, [*settings, *["target"] * (target is not None)])
    return METHODS[method](model, images, target, batch_size=batch_size, scaled=scaled, **settings)


def check_settings(
    method: str, settings: Iterable[str], others: Mapping[str, Sequence[str]] | None = None
) -> None:
    """Reject an unknown method, and settings or "target" that do not apply; `others` extend `METHODS`."""
    accepted = {name: (*one.settings, *["target"] * one.has_target) for name, one in METHODS.items()}
    accepted |= {name: tuple(names) for name, names in (others or {}).items()}
    check_choice("method", method, accepted)
    for setting in settings:
        if setting not in accepted[method]:
            takers = ", ".join(name for name, names in accepted.items() if setting in names)
            only = f", only to {takers}" if takers else ""
            raise UserError(f"{setting} does not apply to {method}{only}")


def methods_for(model: VisionModel, target: TargetLike = None) -> dict[str, Method]:
    """The methods that suit a model and a target, None for the predicted class; there always are some."""
    return {name: method for name, method in METHODS.items() if not method.lacking(model, target)}
