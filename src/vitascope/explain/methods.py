"""The methods that say where a model looks, by name: what a command offers and a comparison compares."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial

from torch import Tensor

from vitascope.errors import UserError
from vitascope.explain.attention import attention
from vitascope.explain.gradcam import grad_cam
from vitascope.explain.gradient_rollout import gradient_rollout
from vitascope.explain.integrated_gradients import integrated_gradients
from vitascope.explain.occlusion import occlusion
from vitascope.explain.rollout import rollout
from vitascope.explain.targets import TargetLike
from vitascope.model.classifier import Classifier
from vitascope.model.resnet import ResNet


@dataclasses.dataclass(frozen=True)
class Method:
    """A way to a heatmap."""

    compute: Callable[..., Tensor]
    """(model, images) or, where it explains a target, (model, images, target) -> (B, gh, gw)."""
    title: str
    """What a figure calls it."""
    has_target: bool = True
    """Whether it explains a class or another target; attention is the same for all."""
    attends: bool = False
    """Whether it reads attention, which a ResNet has not."""
    many_passes: bool = False
    """Whether it runs the model many times, on as many images at once as it is told."""

    def __call__(
        self, model: Classifier, images: Tensor, target: TargetLike = None, *, batch_size: int | None = None
    ) -> Tensor:
        """Heatmaps (B, gh, gw) of images (B, C, H, W); a method without a target gives the same for all.

        Args:
            model: what is explained.
            images: normalized floats (B, C, H, W).
            target: what to explain.
            batch_size: images at once, for methods of many passes; None takes the method's own number.
        """
        if not self.has_target:
            return self.compute(model, images)
        if self.many_passes and batch_size is not None:
            return self.compute(model, images, target, batch_size=batch_size)
        return self.compute(model, images, target)


METHODS: dict[str, Method] = {
    "attention": Method(attention, "attention", has_target=False, attends=True),
    "rollout": Method(rollout, "attention rollout", has_target=False, attends=True),
    "gradient-rollout": Method(gradient_rollout, "gradient rollout", attends=True),
    "grad-cam": Method(grad_cam, "Grad-CAM"),
    "grad-cam++": Method(partial(grad_cam, variant="grad-cam++"), "Grad-CAM++"),
    "hires-cam": Method(partial(grad_cam, variant="hires-cam"), "HiResCAM"),
    "layer-cam": Method(partial(grad_cam, variant="layer-cam"), "Layer-CAM"),
    "integrated-gradients": Method(integrated_gradients, "integrated gradients", many_passes=True),
    "occlusion": Method(occlusion, "occlusion", many_passes=True),
}
"""By name; of those that cost the same, the older first."""

DEFAULT_METHOD = "integrated-gradients"
"""Of the library, the command and the server: the most faithful in `benchmarks/faithfulness.py`."""


def methods_for(model: Classifier, target: TargetLike = None) -> dict[str, Method]:
    """The methods that can explain a model, about a target; None is the class that it predicts.

    Raises:
        UserError: there is none: a ResNet has no attention, and without a head there is no class to explain.
    """
    about_something = target is not None or model.config.gives_classes
    fitting = {
        name: method
        for name, method in METHODS.items()
        if (about_something or not method.has_target) and not (method.attends and isinstance(model, ResNet))
    }
    if not fitting:
        raise UserError("a ResNet without a head has neither attention nor classes to explain")
    return fitting
