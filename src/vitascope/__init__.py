"""Train, look inside and ship Vision Transformers.

The names below are imported when they are first used, so that `import vitascope` is instant.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from vitascope._version import __version__ as __version__

if TYPE_CHECKING:
    from vitascope import explain
    from vitascope.auditing.audit import audit
    from vitascope.data.preprocess import Preprocess
    from vitascope.data.table_options import TableOptions
    from vitascope.deploy.export.compress import compress
    from vitascope.deploy.export.export import export
    from vitascope.deploy.export.quantize import quantize
    from vitascope.deploy.model_card import push_to_hub
    from vitascope.deploy.page.page import page
    from vitascope.errors import UserError
    from vitascope.evaluation.calibrate import calibrate
    from vitascope.evaluation.evaluate import evaluate
    from vitascope.model.config import ViTConfig
    from vitascope.model.resnet import ResNet
    from vitascope.model.resnet_config import ResNetConfig
    from vitascope.model.sizes import list_models
    from vitascope.model.trace import Trace
    from vitascope.model.vit import VisionTransformer
    from vitascope.options.recipes import TrainConfig
    from vitascope.predict.compute import Compute
    from vitascope.predict.embed import Embeddings, embed
    from vitascope.predict.predictor import Prediction, Predictor
    from vitascope.predict.similar import SimilarPictures, similar
    from vitascope.probing.probe import ProbeResult, probe
    from vitascope.report.comparison_figure import compare
    from vitascope.run.run import Run
    from vitascope.text.zero_shot import zero_shot
    from vitascope.training.train import pretrain, resume, train
    from vitascope.weights.convert import convert
    from vitascope.weights.loading import from_pretrained, save_pretrained
    from vitascope.weights.transfer import create_model

_HOMES = {
    "Compute": "predict.compute",
    "Embeddings": "predict.embed",
    "Prediction": "predict.predictor",
    "Predictor": "predict.predictor",
    "Preprocess": "data.preprocess",
    "ProbeResult": "probing.probe",
    "ResNet": "model.resnet",
    "ResNetConfig": "model.resnet_config",
    "Run": "run.run",
    "SimilarPictures": "predict.similar",
    "TableOptions": "data.table_options",
    "Trace": "model.trace",
    "TrainConfig": "options.recipes",
    "UserError": "errors",
    "ViTConfig": "model.config",
    "VisionTransformer": "model.vit",
    "audit": "auditing.audit",
    "calibrate": "evaluation.calibrate",
    "compare": "report.comparison_figure",
    "compress": "deploy.export.compress",
    "convert": "weights.convert",
    "create_model": "weights.transfer",
    "embed": "predict.embed",
    "evaluate": "evaluation.evaluate",
    "export": "deploy.export.export",
    "from_pretrained": "weights.loading",
    "list_models": "model.sizes",
    "page": "deploy.page.page",
    "pretrain": "training.train",
    "probe": "probing.probe",
    "push_to_hub": "deploy.model_card",
    "quantize": "deploy.export.quantize",
    "resume": "training.train",
    "save_pretrained": "weights.loading",
    "similar": "predict.similar",
    "train": "training.train",
    "zero_shot": "text.zero_shot",
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
