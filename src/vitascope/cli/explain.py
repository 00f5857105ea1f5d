"""`vitascope explain`: where a model looks, what it has learned, and which method to believe."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import tyro

from vitascope.cli.parsing import MaybePath
from vitascope.cli.use import Model
from vitascope.errors import UserError
from vitascope.training.options import MaybeInt, MaybeText

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from vitascope.cli.explaining import Subject

Heatmap = Literal[
    "attention",
    "rollout",
    "gradient-rollout",
    "grad-cam",
    "grad-cam++",
    "hires-cam",
    "layer-cam",
    "integrated-gradients",
    "occlusion",
]
OfPicture = Literal["all", "heads", "patch", "features"]
OfModel = Literal["distance", "positions", "filters"]
OF_MODEL = get_args(OfModel)
Method = Heatmap | OfPicture | OfModel
MaybeMethod = Annotated[
    Method | None,
    tyro.conf.arg(
        metavar=f"{{{','.join((*get_args(Heatmap), *get_args(OfPicture), *OF_MODEL))}}}",
        help_behavior_hint="",
    ),
]
DEFAULT_METHOD: Method = "integrated-gradients"
MaybePatch = Annotated[tuple[int, int] | None, tyro.conf.arg(metavar="ROW COLUMN", help_behavior_hint="")]

ABOUT_TARGET = (
    *("gradient-rollout", "grad-cam", "grad-cam++", "hires-cam", "layer-cam"),
    *("integrated-gradients", "occlusion", "all"),
)
CAMS = ("grad-cam", "grad-cam++", "hires-cam", "layer-cam")
MATTERS_WITH: dict[str, tuple[str, ...]] = {
    "target": ABOUT_TARGET,
    "versus": ABOUT_TARGET,
    "like": ABOUT_TARGET,
    "layer": ("attention", "patch", "features", *CAMS),
    "head": ("attention", "patch"),
    "patch": ("patch",),
    "fusion": ("rollout",),
    "discard": ("rollout",),
    "images": ("distance",),
    "seed": ("distance",),
}
"""Options that belong to some methods, and to which."""
OF_TEST_IMAGES = (*get_args(Heatmap), "features")
"""Methods that draw a grid of the run's test images when no picture is given."""
OF_COMPARE = ("images", "seed")
"""Those of them that --compare reads too."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Explain:
    """Show where a model looks, and measure which method to believe.

    Of a picture: a heatmap, or `all` of them; `heads`, one `patch`, `features`.

    Without a picture: a heatmap, or `features`, of 32 test images of the run.

    Of the model: the `distance` its heads look, `positions`, patch `filters`.
    """

    model: Model
    """A run folder, a model folder or file, or a hub id."""
    data: tyro.conf.Positional[
        Annotated[str | None, tyro.conf.arg(metavar="[PICTURE or DATA]", help_behavior_hint="")]
    ] = None
    """A picture; for `distance` and --compare a folder or any other DATA. Default: a run's test images."""
    method: MaybeMethod = None
    """What to show. Default: integrated-gradients, the most faithful where --compare measured."""
    target: MaybeText = None
    """The class to explain, by name or number. Default: the one that the model predicts."""
    versus: MaybeText = None
    """Explain why the target rather than this class."""
    like: MaybePath = None
    """Explain the likeness to this other picture, by the cosine of the two representations."""
    layer: MaybeInt = None
    """The layer, from 0; -1 is the last. Default: the last, for hires-cam and layer-cam the first."""
    head: MaybeInt = None
    """The head, from 0. Default: the mean of all heads."""
    patch: MaybePatch = None
    """The patch to start from, from 0. Default: the one in the middle."""
    fusion: Annotated[
        Literal["mean", "max", "min"] | None,
        tyro.conf.arg(metavar="{mean,max,min}", help_behavior_hint=""),
    ] = None
    """What rollout makes of the heads. Default: mean."""
    discard: Annotated[float | None, tyro.conf.arg(metavar="FLOAT", help_behavior_hint="")] = None
    """Share of each layer's weights, the smallest, that rollout drops. Default: 0."""
    image_size: MaybeInt = None
    """Show the model its pictures at this side, pixels. Default: its own."""
    compare: tyro.conf.FlagCreatePairsOff[bool] = False
    """Measure the faithfulness of every method on DATA, and print the table."""
    images: MaybeInt = None
    """With --compare and `distance`: how many pictures, drawn by --seed. Default: 50."""
    seed: MaybeInt = None
    """With --compare and `distance`: of the pictures that are drawn, and of random maps. Default: 0."""
    json: tyro.conf.FlagCreatePairsOff[bool] = False
    """With --compare: print JSON."""
    device: str = "auto"
    """`auto`, `cpu`, `cuda`, `mps`."""
    out: MaybePath = None
    """The PNG to write; one that exists is replaced.
    Default: a new <picture or model>-<method>.png in this folder, numbered where there is one."""

    def call(self) -> None:
        """Explain, write the picture, say what was predicted; or compare and print."""
        self._check_options()
        from vitascope.cli import explaining

        subject = explaining.Subject.load(self.model, self.image_size, self.device)
        if self.compare:
            comparison = explaining.compare(subject, self.data, **self._drawn())
            print(json.dumps(comparison.to_dict()) if self.json else comparison.text())
            return
        out = self._checked_out()
        figure, said = self._draw(subject)
        from vitascope.explain.plots import save_figure

        save_figure(figure, out)
        print(f"{said}\n{out}")

    def _check_options(self) -> None:
        """Refuse options that would not be read."""
        self._check_method()
        if self.compare and self.out is not None:
            raise UserError("--compare prints a table and draws nothing: leave out --out")
        if self.json and not self.compare:
            raise UserError("--json is for the table of --compare")
        if self.versus is not None and self.target is None:
            raise UserError("--versus needs the class that is compared with it: add --target")
        if self.like is not None and self.target is not None:
            raise UserError("--like and --target are two questions: give one of them")
        if self.images is not None and self.images < 1:
            raise UserError(f"--images must be at least 1, not {self.images}")
        if self.seed is not None and self.seed < 0:
            raise UserError(f"--seed must not be negative, not {self.seed}")

    def _check_method(self) -> None:
        """Refuse what --compare, or the one method, does not read."""
        given = [name for name in MATTERS_WITH if getattr(self, name) is not None]
        if self.compare:
            given += ["method"] if self.method is not None else []
            for name in given:
                if name not in OF_COMPARE:
                    raise UserError(f"--{name} is for one method's picture; --compare takes all as they are")
            return
        method = self._chosen()
        for name in given:
            if method not in MATTERS_WITH[name]:
                belongs = f"--method {', '.join(MATTERS_WITH[name])}"
                belongs = f"--compare and {belongs}" if name in OF_COMPARE else belongs
                raise UserError(f"--{name} says nothing to {method}; it belongs to {belongs}")
        if self.data is None and method not in (*OF_MODEL, *OF_TEST_IMAGES):
            raise UserError(f"{method} explains a picture: vitascope explain MODEL PICTURE")
        if method in ("positions", "filters"):
            for idle in (self.data, "--image-size" if self.image_size is not None else None):
                if idle is not None:
                    raise UserError(f"{method} are the model's alone: leave out {idle}")

    def _chosen(self) -> Method:
        """The method of the picture."""
        return self.method or DEFAULT_METHOD

    def _drawn(self) -> dict[str, int]:
        """How many pictures are drawn from DATA, and by which seed."""
        return {
            "images": 50 if self.images is None else self.images,
            "seed": 0 if self.seed is None else self.seed,
        }

    def _checked_out(self) -> Path:
        """Where the picture goes: never over the explained one, over another only if it is named."""
        subject = self.model if self.data is None else self.data
        out = self.out or unused(Path(f"{Path(subject).stem or 'model'}-{self._chosen()}.png"))
        if out.suffix.lower() != ".png":
            raise UserError(f"--out {out}: the picture is a PNG, so give a name that ends in .png")
        if self.data is not None and out.exists() and Path(self.data).exists() and out.samefile(self.data):
            raise UserError(f"--out {out} is the picture itself, which would be lost; give another name")
        return out

    def _draw(self, subject: Subject) -> tuple[Figure, str]:
        """The figure, and what to say of it."""
        from vitascope.cli import explaining

        method = self._chosen()
        if method == "positions":
            return explaining.draw_positions(subject)
        if method == "filters":
            return explaining.draw_filters(subject)
        if method == "distance":
            return explaining.draw_distance(subject, self.data, **self._drawn())
        if self.data is None:
            return self._draw_test_images(subject)
        picture = subject.picture(self.data)
        if method == "patch":
            return explaining.draw_patch(subject, picture, self.patch, self.layer, self.head)
        if method == "heads":
            return explaining.draw_heads(subject, picture)
        if method == "features":
            return explaining.draw_features(subject, picture, self.layer)
        target = explaining.as_asked(subject, self.target, self.versus, self.like)
        if method == "all":
            return explaining.draw_all(subject, picture, target)
        return explaining.draw_one(subject, picture, method, target, self._settings())

    def _draw_test_images(self, subject: Subject) -> tuple[Figure, str]:
        """The figure of the run's test images, and what to say of it."""
        from vitascope.cli import explaining

        method = self._chosen()
        if method == "features":
            return explaining.draw_features_of_tests(subject, self.layer)
        target = explaining.as_asked(subject, self.target, self.versus, self.like)
        return explaining.draw_tests(subject, method, target, self._settings())

    def _settings(self) -> dict[str, Any]:
        """The method's own options, as far as they are given."""
        settings = {name: getattr(self, name) for name in ("layer", "head", "fusion", "discard")}
        return {name: value for name, value in settings.items() if value is not None}


def unused(path: Path) -> Path:
    """The path, or the first of `<name>-2.png`, `<name>-3.png`, ... that does not exist."""
    numbered = (path.with_name(f"{path.stem}-{number}{path.suffix}") for number in itertools.count(2))
    return next(each for each in itertools.chain([path], numbered) if not each.exists())
