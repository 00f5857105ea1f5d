"""The command line: parse, call the library, print. Nothing heavy is imported before it is needed."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import itertools
import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import tyro

from vitascope import __version__
from vitascope.errors import Interrupted, UserError, nearest
from vitascope.model.config import list_models, named_config
from vitascope.training.recipes import MaybeInt, MaybePath, MaybeText, TrainConfig, default_recipe

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

DESCRIPTION = "Train, look inside and ship Vision Transformers."

T = TypeVar("T", bound="DataclassInstance")
Model = tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="MODEL")]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Train(TrainConfig):
    """Train a classifier; without options, on the embedded digits, in about half a minute.

    Everything goes into a new run folder: the model, its metrics, checkpoints to resume from, and figures.
    Ctrl-C saves before it stops.
    """

    recipe: MaybeText = None
    """Named starting point, which the options change: `digits`, `small-data` or `finetune`. Default: `digits`
    for digits, `finetune` with --weights, else `small-data`."""
    config: MaybePath = None
    """A run's config.yaml to start from instead of a recipe: runs the same again."""
    resume: MaybePath = None
    """A stopped run folder to continue; takes no other option."""

    def __post_init__(self) -> None:
        """Check nothing yet: `call` makes a `TrainConfig`, whose refusals are then one clear line."""

    def call(self) -> None:
        """Train or resume, and say what came out."""
        from vitascope.training import loop

        if self.resume is not None:
            changed = [f.name for f in dataclasses.fields(self) if getattr(self, f.name) != f.default]
            changed.remove("resume")
            if changed:
                raise UserError(
                    f"--resume takes everything from {self.resume / 'config.yaml'}; "
                    f"leave out {', '.join('--' + name.replace('_', '-') for name in changed)}"
                )
            result = loop.resume(self.resume)
        else:
            names = [field.name for field in dataclasses.fields(TrainConfig)]
            result = loop.train(TrainConfig(**{name: getattr(self, name) for name in names}))
        evaluation, run = result.evaluation, result.run
        right = round(evaluation.accuracy * len(evaluation.labels))
        print(
            f"{evaluation.split:<6} {evaluation.accuracy:.2%} right: {right} of {len(evaluation.labels)} "
            f"images, after {result.seconds:.1f} s of training"
        )
        if evaluation.split == "test" and self.data == "digits":
            from vitascope.data.datasets import digits_baseline

            print(f"       {digits_baseline():.2%} scikit-learn's SVC() on the same split")
        print(f"model  {run / 'model'}")
        for path in result.figures.values():
            print(f"figure {path}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluate:
    """Measure a model: on its run's own test images, or on others."""

    model: Model
    """A run folder or a model folder."""
    data: MaybeText = None
    """`digits`, or a folder with test/<class>/, val/<class>/ or <class>/. Default: the test part of what the
    run was trained on."""
    batch_size: int = 128
    """Images at a time."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """`auto` takes bf16 where this machine is faster with it."""
    device: str = "auto"
    """`auto`, `cpu`, `cuda`, `mps`."""
    json: tyro.conf.FlagCreatePairsOff[bool] = False
    """Print JSON."""

    def call(self) -> None:
        """Measure and print."""
        from vitascope.model.hardware import reuse_freed_memory
        from vitascope.training.evaluate import evaluate_pretrained

        reuse_freed_memory()
        evaluation = evaluate_pretrained(
            self.model,
            self.data,
            batch_size=self.batch_size,
            precision=self.precision,
            device=self.device,
        )
        summary = evaluation.summary()
        confusion, names = evaluation.confusion, evaluation.class_names
        if self.json:
            summary["classes"] = list(names)
            summary["confusion"] = confusion.tolist()
            print(json.dumps(summary))
            return
        for reason in evaluation.unreadable.values():
            print(f"left out: {reason}")
        print(
            f"{evaluation.split}: {evaluation.accuracy:.2%} right, {summary['correct']} of "
            f"{summary['images']} images; loss {evaluation.loss:.3f}"
        )
        width = max(map(len, names))
        for row, name in enumerate(names):
            total = int(confusion[row].sum())
            if not total:
                continue
            others = confusion[row].copy()
            others[row] = 0
            worst = int(others.argmax())
            text = f"  {name:<{width}}  {confusion[row, row] / total:>7.2%} of {total}"
            print(
                text + (f", most often taken for {names[worst]} ({others[worst]})" if others[worst] else "")
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Predict:
    """Say what is in pictures."""

    model: Model
    """A run folder or a model folder."""
    images: tyro.conf.Positional[
        Annotated[tuple[str, ...], tyro.conf.arg(metavar="PICTURE ...", help_behavior_hint="")]
    ]
    """Picture files, of any kind and size."""
    top_k: int = 5
    """Classes a picture."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """`auto` takes bf16 where this machine is faster with it."""
    device: str = "auto"
    """`auto`, `cpu`, `cuda`, `mps`."""
    json: tyro.conf.FlagCreatePairsOff[bool] = False
    """Print JSON."""

    def call(self) -> None:
        """Predict and print."""
        if not self.images:
            raise UserError("no pictures given: vitascope predict MODEL PICTURE [PICTURE ...]")
        from vitascope.deploy.predictor import Predictor
        from vitascope.model.hardware import reuse_freed_memory

        reuse_freed_memory()
        predictor = Predictor.from_pretrained(self.model, precision=self.precision, device=self.device)
        answers = predictor(self.images, top_k=self.top_k)
        if self.json:
            rows = [
                {"image": image, "predictions": [dataclasses.asdict(guess) for guess in answer]}
                for image, answer in zip(self.images, answers, strict=True)
            ]
            print(json.dumps(rows, ensure_ascii=False))
            return
        width = max(len(guess.label) for answer in answers for guess in answer)
        for image, answer in zip(self.images, answers, strict=True):
            print(image)
            for guess in answer:
                print(
                    f"  {guess.label:<{width}} {guess.score:>7.2%}  {'█' * round(24 * guess.score)}".rstrip()
                )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Explain:
    """Show where a model looks in a picture: the picture beside itself under a heatmap."""

    model: Model
    """A run folder or a model folder."""
    image: tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="PICTURE")]]
    """A picture file."""
    method: Literal["rollout", "attention"] = "rollout"
    """Attention through all layers, or that of one layer."""
    layer: int = -1
    """With `attention`: the layer, from 0; -1 is the last."""
    head: MaybeInt = None
    """With `attention`: the head, from 0. Default: the mean of all heads."""
    out: MaybePath = None
    """The PNG to write. Default: <picture>-<method>.png in this folder."""

    def call(self) -> None:
        """Explain, write the picture, say what was predicted."""
        if self.method == "rollout" and (self.layer != -1 or self.head is not None):
            raise UserError("--layer and --head choose one attention map: add --method attention")
        import torch

        from vitascope import explain
        from vitascope.explain import plots
        from vitascope.report.figures import to_picture
        from vitascope.weights.store import from_pretrained, read_preprocess

        model, preprocess = from_pretrained(self.model), read_preprocess(self.model)
        pixels = preprocess.pixels(self.image)  # (C, H, W)
        images = preprocess.normalize(torch.from_numpy(pixels)[None])  # (1, C, H, W)
        if self.method == "rollout":
            heat, what = explain.rollout(model, images), "attention rollout"
        else:
            heat = explain.attention(model, images, self.layer, self.head)
            heads = "mean of all heads" if self.head is None else f"head {self.head}"
            what = f"attention of layer {self.layer % model.config.depth}, {heads}"
        title = f"{what} over {Path(self.image).name}"
        if model.config.head != "none":
            with torch.inference_mode():
                score, index = model(images)[0].softmax(dim=0).max(dim=0)
            names = model.config.class_names or [str(number) for number in range(model.config.num_classes)]
            title = f"{names[int(index)]} ({score:.0%}): {what}"
        out = self.out or Path(f"{Path(self.image).stem}-{self.method}.png")
        plots.save_figure(plots.draw_explanation(to_picture(pixels), heat[0].numpy(), title), out)
        print(f"{title}\n{out}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Models:
    """List the named models: size, parameters, cost of one image."""

    image_size: int = 224
    """Count for this side, pixels."""
    num_classes: int = 1000
    """Count with this many classes."""
    json: tyro.conf.FlagCreatePairsOff[bool] = False
    """Print JSON."""

    def call(self) -> None:
        """Count from the shapes and print."""
        size = self.image_size
        configs = {
            name: named_config(name, image_size=size, num_classes=self.num_classes) for name in list_models()
        }
        if self.json:
            rows = {
                name: {**config.to_dict(), "parameters": config.num_parameters, "flops": config.flops}
                for name, config in configs.items()
            }
            print(json.dumps(rows))
            return
        print("name       width  depth  heads  tokens  parameters  GFLOPs")
        for name, config in configs.items():
            print(
                f"{name:<9} {config.embed_dim:>6} {config.depth:>6} {config.num_heads:>6} "
                f"{config.num_tokens:>7} {config.num_parameters / 1e6:>9.2f} M {config.flops / 1e9:>7.1f}"
            )
        print(f"\nAt {size}x{size} pixels and {self.num_classes} classes; a multiply-add counts as 2 FLOPs.")


COMMANDS: dict[str, type[Any]] = {
    "train": Train,
    "evaluate": Evaluate,
    "predict": Predict,
    "explain": Explain,
    "models": Models,
}


def main(argv: Sequence[str] | None = None) -> int:
    """The `vitascope` program; returns its exit status.

    0 is success; 2, a request that cannot be met, with one line on standard error that says why; 130 and
    143, stopped by Ctrl-C or SIGTERM, with everything saved.
    """
    args = list(sys.argv[1:] if argv is None else argv)
    try:
        if not args or args[0] in ("-h", "--help"):
            print(overview())
            return 0
        if args[0] == "--version":
            print(f"vitascope {__version__}")
            return 0
        if args[0] not in COMMANDS:
            raise UserError(
                f"unknown command {args[0]!r}{nearest(args[0], COMMANDS)}; see `vitascope --help`"
            )
        command = parse_train(args[1:]) if args[0] == "train" else parse(COMMANDS[args[0]], args[0], args[1:])
        command.call()
        return 0
    except UserError as error:
        print(f"vitascope: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("vitascope: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # whoever read our output, `head` say, has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:  # a full disk, a folder that may not be written to: the system says it best
        print(f"vitascope: error: {error}", file=sys.stderr)
        return 2
    except Interrupted as stop:
        print(f"vitascope: {stop}; continue with: vitascope train --resume {stop.run}", file=sys.stderr)
        return 128 + stop.signum


def overview() -> str:
    """What `vitascope --help` prints."""
    lines = [f"usage: vitascope COMMAND ...\n\n{DESCRIPTION}\n"]
    for name, command in COMMANDS.items():
        summary = (command.__doc__ or "").splitlines()[0]
        lines.append(f"  {name:<9} {summary}")
    lines.append("\nA MODEL is a run folder or a model folder; DATA is `digits` or a folder of images.")
    lines.append("`vitascope COMMAND --help` lists a command's options; `vitascope --version` the version.")
    return "\n".join(lines)


def parse(command: type[T], name: str, args: Sequence[str], default: Any = None) -> T:
    """Options to a command's dataclass.

    Raises:
        UserError: an unknown option, naming the nearest; a value that is missing or of the wrong kind.
    """
    options: dict[str, Any] = {} if default is None else {"default": default}
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            parsed, unknown = tyro.cli(
                command, prog=f"vitascope {name}", args=list(args), return_unknown_args=True, **options
            )
    except SystemExit as stop:
        if not stop.code:
            raise  # the help was asked for, and is printed
        raise UserError(f"{unboxed(complaint.getvalue())}; see `vitascope {name} --help`") from None
    if unknown:
        known = [f"--{field.name.replace('_', '-')}" for field in dataclasses.fields(command)]
        word = next((word for word in unknown if word.startswith("-")), unknown[0])
        raise UserError(
            f"unknown option {word!r}{nearest(word.split('=')[0], known)}; see `vitascope {name} --help`"
        )
    return parsed


def unboxed(complaint: str) -> str:
    """What tyro says under a title, in a box or between rules of dashes, on one line."""
    plain = re.sub(r"\x1b\[[\d;]*m", "", complaint)
    lines = [line.strip("│╭╮╰╯─ ") for line in plain.splitlines()[1:]]
    lines = ["" if set(line) == {"-"} else line for line in lines]  # a rule where the output is no UTF-8
    text = itertools.takewhile(bool, itertools.dropwhile(lambda line: not line, lines))
    return " ".join(" ".join(text).split()).rstrip(" .")


def parse_train(args: Sequence[str]) -> Train:
    """Options of `train`: a recipe or a file decides the defaults, so it is read before the rest."""
    first = parse(Train, "train", args)
    if first.resume is not None:
        return first
    if first.config is not None:
        if first.recipe is not None:
            raise UserError("--config holds every option already; leave out --recipe")
        base = TrainConfig.from_yaml(first.config)
    else:
        base = TrainConfig.from_recipe(
            first.recipe or default_recipe(first.data, first.weights),
            data=first.data,
            weights=first.weights,
        )
    default = Train(**dataclasses.asdict(base), recipe=first.recipe, config=first.config)
    return parse(Train, "train", args, default)


if __name__ == "__main__":
    sys.exit(main())
