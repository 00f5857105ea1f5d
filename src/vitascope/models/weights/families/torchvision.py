"""torchvision's `vit_*`: the `.pth` files of its server, and the state of any of its VisionTransformers.

Facts: torchvision 0.28, `models/vision_transformer.py`. A file is written so that

    model = torchvision.models.VisionTransformer(
        image_size, patch_size, num_layers, num_heads, hidden_dim, mlp_dim, num_classes=num_classes
    )  # and representation_size=hidden_dim for a head "mlp"
    model.load_state_dict(torch.load("model.pth"))

loads it. It has no place for class names and preprocessing.
"""

import re

from vitascope.models.config import ViTConfig
from vitascope.models.preprocess import Preprocess
from vitascope.models.weights.families import pth
from vitascope.models.weights.families.timm_body import guessed_heads, heads
from vitascope.models.weights.files import CheckpointError
from vitascope.models.weights.hub import TORCHVISION_FILES
from vitascope.models.weights.imagenet import imagenet_classes
from vitascope.models.weights.mapping import PLAIN_VIT, Source, Table, checked_config, respelled

_LAYER = "encoder.layers.encoder_layer_{i}."
TABLE: Table = {
    "patch_embedding.*": "conv_proj.*",
    "class_token": "class_token",
    "positions.weight": "encoder.pos_embedding",
    "encoder.blocks.{i}.norm1.*": _LAYER + "ln_1.*",
    "encoder.blocks.{i}.attention.qkv.*": _LAYER + "self_attention.in_proj_*",
    "encoder.blocks.{i}.attention.proj.*": _LAYER + "self_attention.out_proj.*",
    "encoder.blocks.{i}.norm2.*": _LAYER + "ln_2.*",
    "encoder.blocks.{i}.mlp.fc1.*": _LAYER + "mlp.0.*",
    "encoder.blocks.{i}.mlp.fc2.*": _LAYER + "mlp.3.*",
    "norm.*": "encoder.ln.*",
    "head.pre_logits.*": "heads.pre_logits.*",
    "head.linear.*": "heads.head.*",
    "head.*": "heads.head.*",
}

# How the published weights were evaluated, by their file: the share of the resized picture that the crop
# keeps, and the filter. All others: 224 of 256 pixels, bilinear.
_PLAIN = (224 / 256, "bilinear")
_WHOLE = (1.0, "bicubic")
_PUBLISHED = {file[:-4]: _WHOLE for file in TORCHVISION_FILES.values() if "_swag-" in file}
_PUBLISHED["vit_l_16-852ce7e3"] = (224 / 242, "bilinear")


class Torchvision(pth.PthFamily):
    """torchvision's VisionTransformer, in its first and its SWAG weights."""

    name = "torchvision"
    supports = PLAIN_VIT | {"head": ("linear", "mlp")}

    def fixed_there(self, config: ViTConfig) -> ViTConfig:
        return config.replace(norm_eps=1e-6, resample="torchvision")

    def conflicts(self, config: ViTConfig) -> list[str]:
        reasons = pth.not_square(config, "image_size", "patch_size")
        reasons += [f"in_channels {config.in_channels}"] if config.in_channels != 3 else []
        return reasons or pth.hidden_options(config)

    def recognizes(self, source: Source) -> bool:
        return source.has("encoder.pos_embedding") and source.has_any("encoder.layers.encoder_layer_0.")

    def before_reading(self, source: Source) -> Source:
        """The MLP under its present names; those before torchvision 0.14 are `linear_1` and `linear_2`."""
        old = r"^(encoder\.layers\.encoder_layer_\d+\.mlp)\.linear_"
        return source.renamed(lambda name: respelled(name, [(f"{old}1", r"\1.0"), (f"{old}2", r"\1.3")]))

    def table(self, config: ViTConfig) -> Table:
        return TABLE

    def read_config(self, source: Source) -> ViTConfig:
        if source.has_any("conv_proj.conv_"):
            raise CheckpointError(
                f"{source.name}: a stem of several convolutions (conv_stem_configs); vitascope has none"
            )
        D, channels, ph, pw = source.shape("conv_proj.weight", 4)
        hidden = source.shape(_LAYER.format(i=0) + "mlp.0.weight", 2)[0]
        options = {
            "image_size": pth.square_size(source, "encoder.pos_embedding", 1, (ph, pw)),
            "patch_size": (ph, pw),
            "in_channels": channels,
            "num_classes": source.shape("heads.head.weight", 2)[0],
            "embed_dim": D,
            "depth": source.count(_LAYER + "ln_1.weight"),
            "num_heads": heads(source, D),
            "resample": "torchvision",
            "mlp_ratio": hidden / D,
            "head": "mlp" if source.has("heads.pre_logits.weight") else "linear",
        }
        # The published names have digits of the content, and every one of them is of ImageNet-1k.
        if source.file in TORCHVISION_FILES.values() and options["num_classes"] == 1000:
            options["class_names"] = imagenet_classes()
        return checked_config(source, options)

    def guessed(self, source: Source, config: ViTConfig) -> str:
        named = re.fullmatch(r"vit_(b|l|h)_(14|16|32)", str(source.training.get("arch", "")))
        return "" if source.file in TORCHVISION_FILES.values() or named else guessed_heads(source, config)

    def read_preprocess(self, source: Source, config: ViTConfig) -> Preprocess:
        """The preprocessing of the published file of this name, or that of the plain weights."""
        file = f"{source.name} {source.file}"
        share, interpolation = next((how for stem, how in _PUBLISHED.items() if stem in file), _PLAIN)
        return pth.imagenet(
            config, resize_to=pth.shorter_side(config.image_hw, share), interpolation=interpolation
        )
