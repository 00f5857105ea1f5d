"""The families of checkpoints that are read and written."""

from vitascope.models.weights.families.facebook import Deit, Dinov2, Dinov3
from vitascope.models.weights.families.facebook_pretraining import Dino, IJepaEncoder, Mae, Msn
from vitascope.models.weights.families.huggingface.family import HuggingFace
from vitascope.models.weights.families.jax import Jax
from vitascope.models.weights.families.library import Library
from vitascope.models.weights.families.openclip import OpenClip
from vitascope.models.weights.families.own import Vitascope
from vitascope.models.weights.families.timm import Timm
from vitascope.models.weights.families.timm_beit import TimmBeit
from vitascope.models.weights.families.timm_eva import TimmEva
from vitascope.models.weights.families.torchvision import Torchvision
from vitascope.models.weights.mapping import Family

TIMM = Library("timm", (Timm(), TimmEva(), TimmBeit()))
FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        *(Vitascope(), TIMM, HuggingFace(), OpenClip(), Torchvision(), Jax()),
        *(Mae(), Msn(), IJepaEncoder(), Dinov3(), Dinov2(), Dino(), Deit()),
    )
}
"""By name, in the order in which `identify` tries them."""
