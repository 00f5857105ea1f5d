"""`zero_shot`: a classifier for classes that are given by their names, without training."""

import logging
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitascope.arguments import checked
from vitascope.errors import UserError, printable, suggestion
from vitascope.formatting import canonical, listed
from vitascope.models.config import ViTConfig
from vitascope.models.hardware import resolve_device
from vitascope.models.options import ClassOutputs
from vitascope.models.text.text_model import read_text_model
from vitascope.models.vision_model import build
from vitascope.models.vit import VisionTransformer
from vitascope.models.weights.files import CheckpointError, explaining_settings
from vitascope.models.weights.identification import open_source, recognized
from vitascope.models.weights.loading import load_source

log = logging.getLogger(__name__)
ONE = "a photo of {}."
"""The template of `zero_shot`, for names that begin with their article, such as `a cat`."""

PROMPTS: dict[str, tuple[str, ...]] = {
    "name": ("{}",),
    "photo": ("a photo of a {}.",),
    "photos": (
        "a photo of a {}.",
        "a close-up of a {}.",
        "a {} seen from far away.",
        "a bright picture of a {}.",
        "a dark picture of a {}.",
        "a blurred picture of a {}.",
        "a small picture of a {}.",
        "part of a {}.",
        "several pictures of a {}.",
        "a drawing of a {}.",
    ),
}
"""Sets of templates by name."""


class ImagesAndWords:
    """A model of images and a model of texts with one space for both: CLIP or SigLIP.

    Args:
        ref: a folder or a file of transformers' or OpenCLIP's, or a hub id.
        revision: branch, tag or commit of a hub id.
        device: where texts are computed.
    """

    def __init__(
        self, ref: str | os.PathLike[str], revision: str | None = None, device: str = "auto"
    ) -> None:
        source = open_source(ref, revision)
        family = recognized(ref, source)
        with explaining_settings(source.name):
            whole = family.before_reading(source)
        model = load_source(whole, family)
        self.texts = read_text_model(source)
        if not isinstance(model, VisionTransformer):
            raise CheckpointError(f"{source.name}: no ViT, which words are compared with")
        self.model = model
        self.projection = model.head if isinstance(model.head, nn.Linear) else None
        self._device = resolve_device(device)

    def vectors(self, tokens: Tensor) -> Tensor:
        """Unit vectors of texts, from their tokens: int64 (B, T) -> float32 (B, P), on the CPU."""
        return self.texts.vectors(tokens, self._device)


@checked
def zero_shot(
    model: str | os.PathLike[str],
    classes: Sequence[str],
    *,
    prompts: str | Sequence[str] | None = None,
    outputs: ClassOutputs | None = None,
    revision: str | None = None,
    device: str = "auto",
) -> VisionTransformer:
    """A classifier of the classes that are named, without training.

    Its head compares an image with one vector per class: the mean of the unit vectors of the class's prompts,
    of length 1. The result is a model like others, in evaluation mode and on the CPU: `Predictor`,
    `save_pretrained`, `export`, `evaluate` and explanations take it, and need no text.

    Args:
        model: a MODEL with a text model and a tokenizer: CLIP, SigLIP or SigLIP 2, as transformers or
            OpenCLIP writes it.
        classes: their names; or one .txt file of names, one per line.
        prompts: a template in which `{}` stands for the name, or several, whose vectors are averaged; also
            the names of sets: `name`, `photo`, `photos`. None is "a photo of {}."
        outputs: `exclusive`, one class applies (a softmax over the classes), or `independent`, any may (a
            sigmoid for each). None is what the model was trained with: exclusive for CLIP, independent for
            SigLIP.
        revision: branch, tag or commit of a hub id.
        device: where the texts are computed, `auto` or a torch device.

    Raises:
        CheckpointError: no such model, no text model or tokenizer beside it, or one of another vocabulary.
        UserError: no classes, empty names, or names that are the same for this tokenizer; a prompt without
            `{}`; the library that reads the text model is missing.
    """
    (names, words), used = names_and_texts(classes), templates(prompts)
    both = ImagesAndWords(model, revision, device)
    outputs = outputs or ("independent" if both.texts.bias is not None else "exclusive")
    if outputs == "exclusive" and len(names) == 1:
        raise UserError(
            f"one class, {names[0]!r}, of which one applies would always apply: give two or more, or outputs="
            "'independent' (--outputs independent)"
        )
    texts = [template.replace("{}", word) for word in words for template in used]
    tokens = both.texts.tokens(texts)
    _check_distinct(words, tokens.unflatten(0, (len(names), -1)))
    vectors = both.vectors(tokens).unflatten(0, (len(names), -1))  # (K, templates, P)
    return with_classes(both, names, F.normalize(vectors.mean(dim=1), dim=1), outputs)


def with_classes(
    both: ImagesAndWords, names: tuple[str, ...], vectors: Tensor, outputs: str
) -> VisionTransformer:
    """The model of images with a cosine head for classes of these vectors (K, P)."""
    projection = both.projection
    config: ViTConfig = both.model.config.replace(
        head="cosine",
        projection=None if projection is None else projection.out_features,
        num_classes=len(names),
        class_names=names,
        outputs=outputs,
    )
    state = {name: value for name, value in both.model.state_dict().items() if not name.startswith("head.")}
    if projection is not None:
        state |= {f"head.projection.{name}": value for name, value in projection.state_dict().items()}
    bias = both.texts.bias
    state |= {
        "head.classes": vectors.clone(),  # no inference tensor: it may be trained
        "head.scale": both.texts.scale,
        "head.bias": torch.zeros(1) if bias is None else bias,
    }
    with torch.device("meta"):
        model = build(config)
    assert isinstance(model, VisionTransformer)
    model.load_state_dict(state, strict=True, assign=True)
    model.preprocess = both.model.preprocess
    return model.eval()


def names_and_texts(classes: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The names of classes, and their texts in prompts: the given ones, or the lines of one .txt file. A name
    that recurs there, such as ImageNet's "crane", gets the number of its class."""
    if isinstance(classes, str) or len(classes) != 1 or not classes[0].lower().endswith(".txt"):
        return (names := check_names(classes)), names
    try:
        lines = Path(classes[0]).read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{classes[0]}: no list of names, one per line: {error}") from error
    texts = tuple(canonical(line.strip()) for line in lines if line.strip())
    first = {text: number for number, text in reversed([*enumerate(texts)])}
    names = tuple(
        text if first[text] == number else f"{text} ({number})" for number, text in enumerate(texts)
    )
    check_names(names)
    if again := [name for name, text in zip(names, texts, strict=True) if name != text]:
        log.warning("names that recur, whose classes always get the same score: %s", listed(again))
    return names, texts


def check_names(classes: Sequence[str]) -> tuple[str, ...]:
    """The names of classes; rejects none, empty ones and duplicates."""
    if isinstance(classes, str):
        raise UserError(f"classes is a list of names, not the text {classes!r}")
    names = tuple(map(canonical, classes))
    if not names:
        raise UserError("no classes given: name them, such as 'a cat' 'a dog'")
    for place, name in enumerate(names):
        if not name.strip():
            raise UserError(f"class {place + 1} of {len(names)} has an empty name")
    twice = next((name for name, count in Counter(names).items() if count > 1), None)
    if twice is not None:
        raise UserError(f"class {printable(twice, 80)!r} is given more than once")
    return names


def _check_distinct(names: Sequence[str], tokens: Tensor) -> None:
    """Reject two classes of the same tokens (K, templates, T), such as `cat` and `Cat`."""
    seen: dict[tuple[int, ...], str] = {}
    for name, row in zip(names, tokens.flatten(1).tolist(), strict=True):
        other = seen.setdefault(tuple(row), name)
        if other != name:
            raise UserError(
                f"classes {printable(other, 80)!r} and {printable(name, 80)!r} are the same text for "
                "this model"
            )


def templates(prompts: str | Sequence[str] | None) -> tuple[str, ...]:
    """One or several templates, or names in `PROMPTS` of several; None is `ONE`.

    Raises:
        UserError: none, or one without exactly one `{}`.
    """
    given = (ONE,) if prompts is None else (prompts,) if isinstance(prompts, str) else tuple(prompts)
    given = tuple(template for one in given for template in PROMPTS.get(one, (one,)))
    if not given:
        raise UserError(f"no prompts: give one or more, such as {ONE!r}")
    for template in given:
        if template.count("{}") != 1:
            hint = suggestion(template, PROMPTS) if "{" not in template else ""
            raise UserError(
                f"prompt {template[:100]!r} has not one {{}} for the name of a class{hint}; sets with a name "
                f"are {', '.join(PROMPTS)}"
            )
    return given
