"""Train, look inside and ship Vision Transformers.

The names below are imported when they are first used, so that `import vitascope` is instant.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from vitascope._version import __version__ as __version__

if TYPE_CHECKING:
    from vitascope import explain
    from vitascope.analysis.auditing.audit import audit
    from vitascope.analysis.evaluate import evaluate
    from vitascope.analysis.probing.probe import ProbeResult, probe
    from vitascope.analysis.report.comparison_figure import compare
    from vitascope.analysis.similar import SimilarPictures, similar
    from vitascope.data.features.embed import Embeddings, embed
    from vitascope.data.table_options import TableOptions
    from vitascope.deploy.export.compress import compress
    from vitascope.deploy.export.export import export
    from vitascope.deploy.export.quantize import quantize
    from vitascope.deploy.model_card import push_to_hub
    from vitascope.deploy.page.page import page
    from vitascope.deploy.predict.predictor import Prediction, Predictor
    from vitascope.errors import UserError
    from vitascope.models.config import ViTConfig
    from vitascope.models.engines.compute import Compute
    from vitascope.models.preprocess import Preprocess
    from vitascope.models.resnet import ResNet
    from vitascope.models.resnet_config import ResNetConfig
    from vitascope.models.sizes import list_models
    from vitascope.models.text.zero_shot import zero_shot
    from vitascope.models.trace import Trace
    from vitascope.models.vit import VisionTransformer
    from vitascope.models.weights.convert import convert
    from vitascope.models.weights.loading import from_pretrained, save_pretrained
    from vitascope.models.weights.transfer import create_model
    from vitascope.runs import pretrain, resume, train
    from vitascope.training.evaluation.calibrate import calibrate
    from vitascope.training.options.recipes import TrainConfig
    from vitascope.training.run.run import Run

_HOMES = {
    "Compute": "models.engines.compute",
    "Embeddings": "data.features.embed",
    "Prediction": "deploy.predict.predictor",
    "Predictor": "deploy.predict.predictor",
    "Preprocess": "models.preprocess",
    "ProbeResult": "analysis.probing.probe",
    "ResNet": "models.resnet",
    "ResNetConfig": "models.resnet_config",
    "Run": "training.run.run",
    "SimilarPictures": "analysis.similar",
    "TableOptions": "data.table_options",
    "Trace": "models.trace",
    "TrainConfig": "training.options.recipes",
    "UserError": "errors",
    "ViTConfig": "models.config",
    "VisionTransformer": "models.vit",
    "audit": "analysis.auditing.audit",
    "calibrate": "training.evaluation.calibrate",
    "compare": "analysis.report.comparison_figure",
    "compress": "deploy.export.compress",
    "convert": "models.weights.convert",
    "create_model": "models.weights.transfer",
    "embed": "data.features.embed",
    "evaluate": "analysis.evaluate",
    "export": "deploy.export.export",
    "from_pretrained": "models.weights.loading",
    "list_models": "models.sizes",
    "page": "deploy.page.page",
    "pretrain": "runs",
    "probe": "analysis.probing.probe",
    "push_to_hub": "deploy.model_card",
    "quantize": "deploy.export.quantize",
    "resume": "runs",
    "save_pretrained": "models.weights.loading",
    "similar": "analysis.similar",
    "train": "runs",
    "zero_shot": "models.text.zero_shot",
}

__all__ = [
    "Compute",
    "Embeddings",
    "Prediction",
    "Predictor",
    "Preprocess",
    "ProbeResult",
    "ResNet",
    "ResNetConfig",
    "Run",
    "SimilarPictures",
    "TableOptions",
    "Trace",
    "TrainConfig",
    "UserError",
    "ViTConfig",
    "VisionTransformer",
    "audit",
    "calibrate",
    "compare",
    "compress",
    "convert",
    "create_model",
    "embed",
    "evaluate",
    "explain",
    "export",
    "from_pretrained",
    "list_models",
    "page",
    "pretrain",
    "probe",
    "push_to_hub",
    "quantize",
    "resume",
    "save_pretrained",
    "similar",
    "train",
    "zero_shot",
]


def __getattr__(name: str) -> Any:
    """Import a public name on first use (PEP 562)."""
    if name == "explain":
        return import_module("vitascope.explain")
    if name not in _HOMES:
        raise AttributeError(f"module 'vitascope' has no attribute {name!r}")
    return getattr(import_module(f"vitascope.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
