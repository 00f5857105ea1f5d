"""facebook's self-supervised ViTs, as their own code saved them: MAE, MSN, I-JEPA and DINO.

Facts: facebookresearch/mae, `models_mae.py`, `models_vit.py`, `util/datasets.py`; facebookresearch/msn,
`src/deit.py`, `logistic_eval.py`; facebookresearch/ijepa, `src/models/vision_transformer.py`;
facebookresearch/dino, `vision_transformer.py`, `eval_linear.py`. Their tensors have timm's names, and so have
DeiT's: MAE and I-JEPA are recognized by their positions, which are no parameters, MSN by the layers behind
its class token, DINO by the name of the file or the arguments of its training.
"""

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from vitascope.models.config import ViTConfig
from vitascope.models.positions import sincos_table
from vitascope.models.preprocess import Preprocess
from vitascope.models.weights.families import pth
from vitascope.models.weights.families.timm_body import BODY, body_options
from vitascope.models.weights.mapping import Source, Table, checked_config

_WIDTHS = (192, 384, 768, 1024, 1280, 1408)  # of the models in their code, whose heads are known
_ROUNDING = 2**-8  # of a sine in bfloat16


class Pretrained(pth.PthFamily):
    """A ViT of theirs, which is read only: its tensors are timm's and DeiT's."""

    supports: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    read_only = True
    rule: ClassVar[str] = "huggingface"
    """Its interpolation of positions: bicubic."""
    prefix: ClassVar[int] = 1
    """Positions that are not of patches."""

    def table(self, config: ViTConfig) -> Table:
        return BODY

    def read_config(self, source: Source) -> ViTConfig:
        options = body_options(source)
        options |= pth.grid_options(source, options, self.prefix) | self.readout(source)
        return checked_config(source, {**options, "norm_eps": 1e-6, "resample": self.rule})

    def readout(self, source: Source) -> dict[str, Any]:
        """The options of pooling; by default the class token is read."""
        return {}

    def guessed(self, source: Source, config: ViTConfig) -> str:
        return "" if config.embed_dim in _WIDTHS else super().guessed(source, config)


class Mae(Pretrained):
    """MAE: the encoder, also beside its decoder, and the models that were fine-tuned from it."""

    name = "mae"
    ignored = ("decoder_*", "mask_token")

    def recognizes(self, source: Source) -> bool:
        tuned = self.is_named(source)  # which trains the positions
        return _has_body(source, "cls_token") and (tuned or _has_fixed_positions(source, self.prefix))

    def readout(self, source: Source) -> dict[str, Any]:
        """Fine-tuned models have the mean of the patches, then a norm (`--global_pool`)."""
        return {"pool": "mean", "pool_norm": "after"} if source.has("fc_norm.weight") else {}

    def read_preprocess(self, source: Source, config: ViTConfig) -> Preprocess:
        """Of `main_finetune.py`: a crop of 224 of 256, and no crop above 224 pixels."""
        share = 224 / 256 if max(config.image_hw) <= 224 else 1.0
        side = int(max(config.image_hw) / share)
        return pth.imagenet(config, resize_to=(side, side))


class Msn(Pretrained):
    """MSN: the target encoder, without the layers that only training needs."""

    name = "msn"
    ignored = ("fc.*", "pred.*")

    def recognizes(self, source: Source) -> bool:
        return pth.has_timms_body(source) and _has_body(source) and source.has("fc.fc1.weight")

    def read_preprocess(self, source: Source, config: ViTConfig) -> Preprocess:
        """Of `logistic_eval.py`, for any size: a bilinear resize, and a crop of 224 of 256."""
        resized = pth.shorter_side(config.image_hw, 224 / 256)
        return pth.imagenet(config, resize_to=resized, interpolation="bilinear")


class IJepaEncoder(Pretrained):
    """I-JEPA: the target encoder, which has no class token; its output is the mean of the patches."""

    name = "ijepa"
    prefix = 0

    def recognizes(self, source: Source) -> bool:
        own = _has_body(source, "norm.weight") and not source.has("cls_token")
        return own and _has_fixed_positions(source, self.prefix)

    def readout(self, source: Source) -> dict[str, Any]:
        return {"pool": "mean"}

    def read_preprocess(self, source: Source, config: ViTConfig) -> Preprocess:
        """Its code has no evaluation; as the others', for any size."""
        return pth.imagenet(config, resize_to=pth.shorter_side(config.image_hw, 224 / 256))


class Dino(Pretrained):
    """DINO (the first): its ViTs, and the teacher of a training checkpoint."""

    name = "dino"
    rule = "dinov2"  # which has it from here

    def recognizes(self, source: Source) -> bool:
        own = self.is_named(source) or "momentum_teacher" in source.training
        return pth.has_timms_body(source) and _has_body(source) and own

    def read_preprocess(self, source: Source, config: ViTConfig) -> Preprocess:
        return pth.dino_evaluation(config)


def _has_body(source: Source, *names: str) -> bool:
    """Whether the tensors are a ViT's with positions and some more, by timm's names without its settings."""
    wanted = ("patch_embed.proj.weight", "pos_embed", *names)
    return not source.config and all(map(source.has, wanted)) and source.has_any("blocks.0.")


def _has_fixed_positions(source: Source, prefix: int) -> bool:
    """Whether the positions are MAE's sines and cosines, after zeros for the prefix."""
    places = source.tensors["pos_embed"]
    if places.ndim != 3 or places.shape[0] != 1 or places.shape[2] % 4:
        return False
    _, length, D = places.shape
    side = math.isqrt(max(0, length - prefix))
    if side == 0 or side * side != length - prefix or places[:, :prefix].any():
        return False
    table = sincos_table("sincos_2d", (side, side), D)
    return torch.allclose(places[:, prefix:].float(), table, rtol=0, atol=_ROUNDING)
