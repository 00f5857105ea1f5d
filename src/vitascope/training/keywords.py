"""The options of `train`, `pretrain` and `resume` as keywords, for type checkers.

A test compares them with `TrainConfig`, whose docstrings say what they do.
"""

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any, Literal, TypedDict

from vitascope.data.frames import DataFrame
from vitascope.data.table_options import TableOptions
from vitascope.training.options import groups


class ResumeKeywords(TypedDict, total=False):
    """The options of `TrainConfig` but `run`, and its groups."""

    data: str | PathLike[str] | DataFrame
    weights: str | PathLike[str] | None
    bodies: Sequence[str]
    seed: int
    folds: int | None
    levels: Sequence[float] | None
    fit: Literal["crop", "pad", "squash"] | None
    streams: int | None
    columns: Sequence[str] | Mapping[str, str]
    images: str | PathLike[str] | None
    labels: Literal["one", "several"] | None
    label_separator: str | None
    blank: Literal["zero", "unknown"]
    audit: str | PathLike[str] | None
    min_images: int
    rare: Literal["reject", "train"]
    model: str | None
    image_size: int | Sequence[int] | None
    patch_size: int | Sequence[int] | None
    embed_dim: int | None
    depth: int | None
    num_heads: int | None
    pool: Literal["cls", "mean", "cls_mean", "map", "sequence"] | None
    dropout: float
    drop_path: float
    model_options: Mapping[str, Any]
    epochs: int | None
    steps: int | None
    minutes: float | None
    progressive: float
    batch_size: int | None
    optimizer: Literal["adamw", "muon", "sgd"]
    lr: float
    lr_batch: int | None
    lr_width: int | None
    schedule: Literal["cosine", "linear", "constant"]
    warmup_epochs: float | None
    warmup_steps: int | None
    lengths: Sequence[Sequence[int]]
    validations: int
    weight_decay: float
    layer_decay: float
    freeze: bool
    lora: int | None
    whiten: Literal["auto", "on", "off"]
    clip_grad: float
    loss: Literal["cross_entropy", "bce", "focal", "asymmetric"] | None
    label_smoothing: float
    ema: float | None
    keep: Literal["best", "last", "auto"]
    patience: int
    flip: float
    repeats: int
    crop_scale: float | None
    shift: float | None
    rotate: float
    color_jitter: float
    three_augment: bool
    randaugment: int | None
    magnitude: float
    operation_probability: float
    erase: float | None
    mixup: float
    cutmix: float
    class_weights: Sequence[str] | Mapping[str, float]
    sampling: Literal["uniform", "balanced"]
    teacher: str | PathLike[str] | None
    distill: Literal["hard", "soft"]
    distill_weight: float
    temperature: float
    target: Literal["mean_color", "downsampled", "pixels", "mae"]
    corrupt: float | None
    decoder_dim: int
    decoder_depth: int
    precision: Literal["auto", "fp32", "bf16", "fp16"]
    device: str
    workers: int | None
    compile: Literal["on", "off"]
    accumulate: int | None
    gradient_checkpointing: bool
    parallel: Literal["ddp", "fsdp"]
    checkpoint_seconds: float
    keep_checkpoints: int
    keep_state: bool
    tracker: Literal["mlflow", "trackio", "wandb"] | None
    table: TableOptions
    architecture: groups.Architecture
    optimization: groups.Optimization
    augmentation: groups.AugmentationOptions
    balance: groups.Balance
    distillation: groups.Distillation
    masking: groups.Masking
    execution: groups.ExecutionOptions


class TrainKeywords(ResumeKeywords, total=False):
    """The options of `TrainConfig`, and its groups."""

    run: str | PathLike[str] | None
