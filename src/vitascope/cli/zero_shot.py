"""`vitascope zero-shot`, and the options of classes that are named."""

import dataclasses
from pathlib import Path
from typing import Annotated

import tyro

from vitascope.cli.parsing import Device, Folder, Model
from vitascope.models.options import ClassOutputs

Classes = Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME ...")]
Prompts = Annotated[
    tuple[str, ...],
    tyro.conf.arg(
        metavar="PROMPT ...",
        help="Texts with {} for the name, whose vectors are averaged, or the sets `name`, `photo` (a photo "
        'of a {}.) and `photos`, ten texts. Default: "a photo of {}."',
    ),
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ZeroShot:
    """Write a classifier of classes that are named, without training.

    Needs an extra: pip install 'vitascope[text]'.
    """

    model: Model
    """A CLIP or SigLIP with its text model and tokenizer: a folder, or a hub id."""
    out: Folder
    """The new model folder, which every command takes."""
    classes: Classes
    """The names of the classes, such as "a cat" "a dog"; or a .txt file of names, one per line."""
    prompts: Prompts = ()
    outputs: ClassOutputs | None = None
    """One class applies, or any may. Default: exclusive for CLIP, independent for SigLIP."""
    device: Device = "auto"

    def call(self) -> None:
        """Make the classifier and write it."""
        from vitascope.models.text.zero_shot import zero_shot
        from vitascope.models.weights.loading import save_pretrained

        model = zero_shot(
            self.model, self.classes, prompts=self.prompts or None, outputs=self.outputs, device=self.device
        )
        folder: Path = save_pretrained(model, self.out)
        count = model.config.num_classes
        print(f"{count:,} {'class' if count == 1 else 'classes'}, {model.config.outputs}: {folder}")
