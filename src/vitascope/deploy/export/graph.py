"""`WholeModel`: the exported graph, from raw pixels to probabilities."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vitascope.data.preprocess import Preprocess
from vitascope.deploy.export.resampling import Resize
from vitascope.deploy.predict.exported_model import InputMode
from vitascope.errors import UserError
from vitascope.model.classifier import Classifier
from vitascope.model.config import ViTConfig


class WholeModel(nn.Module):
    """uint8 (B, H, W, C), as NumPy has pictures, to probabilities and logits, both (B, K) float32.

    Args:
        model: a classifier (its head is not "none").
        preprocess: its preprocessing.
        input: `pictures` of any size, which the graph crops and resizes, or `tensors` of the model's size.

    Raises:
        UserError: a model without a head.
    """

    pixel_mean: Tensor  # ONNX has one namespace, and exporters name intermediate values `mean`
    pixel_std: Tensor

    def __init__(self, model: Classifier, preprocess: Preprocess, input: InputMode) -> None:
        super().__init__()
        if not model.config.gives_classes:
            raise UserError("this model has no head: it gives features, not classes, and is not exported")
        self.input = input
        self.model = model
        self.resize: nn.Module = Resize(preprocess) if input == "pictures" else nn.Identity()
        for name, numbers in (("pixel_mean", preprocess.mean), ("pixel_std", preprocess.std)):
            self.register_buffer(name, torch.tensor(numbers).view(-1, 1, 1), persistent=False)

    @property
    def patch(self) -> tuple[int, int]:
        """Pixels from one patch to the next, down and across: the steps in which the input size may grow."""
        config = self.model.config
        return config.patch_stride if isinstance(config, ViTConfig) else (1, 1)

    def forward(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """Crop, resize, normalize, classify."""
        pictures = pixels.permute(0, 3, 1, 2).float()  # (B, C, H, W), in [0, 255]
        images = (self.resize(pictures) / 255 - self.pixel_mean) / self.pixel_std
        logits = self.model(images)  # (B, K)
        return logits.softmax(dim=1), logits
