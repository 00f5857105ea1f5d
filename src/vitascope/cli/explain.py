"""`vitascope explain`: where a model looks, what it has learned, and which heatmap to believe."""

import dataclasses
import itertools
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from vitascope.cli.parsing import Device, Flag, Json, MaybeModel, check_picture
from vitascope.data.table_options import is_table
from vitascope.errors import UserError
from vitascope.formatting import counted
from vitascope.models.config import ViTConfig
from vitascope.models.options import pair
from vitascope.models.weights.builtin import DEFAULT, built_in, model_in_words
from vitascope.storage import explaining_failure

if TYPE_CHECKING:
    from vitascope.analysis.explain.targets import TargetLike
    from vitascope.data.splits import ImageSet
    from vitascope.models.vision_model import VisionModel

MaybePatch = Annotated[tuple[int, int] | None, tyro.conf.arg(metavar="ROW COLUMN")]
SAMPLED = 50
"""Pictures for --compare and `distance`, by default."""
SHOWN = 32
"""Test images in a grid."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Explain:
    """Show where a model looks, and measure which heatmap to believe.

    Of a picture: a heatmap, `all` heatmaps, all `heads`, a `patch`, `features`.

    Of a folder, or several pictures, with --out FOLDER: a heatmap of each.

    Without a picture: a heatmap, or `features`, of 32 test images of the run.

    The built-in cifar10 has no run, but five sample photographs.

    Of the model: attention `distance`, `positions`, patch `filters`.
    """

    model: MaybeModel = DEFAULT
    """A run folder, a model folder or file, or a hub id.
    Default, also before a PICTURE: the built-in cifar10."""
    data: tyro.conf.Positional[
        Annotated[tuple[str, ...], tyro.conf.arg(metavar="[PICTURE or DATA ...]")]
    ] = ()
    """A picture; several, or folders, with --out FOLDER.
    For `distance` and --compare a folder or any other DATA. Default: a run's test images."""
    method: str | None = None
    """What to show: one of the above, or a heatmap.
    By attention: attention, rollout, gradient-rollout.
    By gradients: libra, integrated-gradients, grad-cam, layer-cam.
    By hiding or moving patches: occlusion, patching.
    Default: integrated-gradients, the most faithful in docs/gallery.md."""
    target: str | None = None
    """The class to explain, by name or number. Default: the most probable class."""
    versus: str | None = None
    """Explain why the target rather than this class."""
    like: Path | None = None
    """Explain the similarity to this other picture, by the cosine of the two representations."""
    layer: int | None = None
    """The layer, from 0; -1 is the last. Default: the last; for layer-cam the first."""
    head: int | None = None
    """The head, from 0. Default: the mean of all heads."""
    patch: MaybePatch = None
    """The patch whose attention is shown, from 0. Default: the one in the middle."""
    fusion: Literal["mean", "max", "min"] | None = None
    """How rollout fuses the heads. Default: mean."""
    discard: float | None = None
    """Share of each layer's weights, the smallest, that rollout drops. Default: 0."""
    image_size: Annotated[int | tuple[int, int] | None, tyro.conf.arg(metavar="INT | HEIGHT WIDTH")] = None
    """Resize pictures to this side, or this height and width, in pixels. Default: the model's own size."""
    evidence: Flag = False
    """Beside a heatmap: the deletion curve, and the p-value of a test against 99 random maps."""
    compare: Flag = False
    """Measure how faithful every method is on DATA, and print the table."""
    images: int | None = None
    """With --compare and `distance`: the number of pictures, drawn by --seed. Default: 50."""
    seed: int | None = None
    """With --compare and `distance`: the seed of the sample, and of the random maps. Default: 0."""
    json: Json = False
    device: Device = "auto"
    out: Path | None = None
    """The PNG to write; an existing file is replaced.
    Default: a new file <picture or model>-<method>.png in the run's folder `explain`, else in this folder.
    Of several pictures the folder; repeat an interrupted command to continue it."""

    def call(self) -> dict[str, object]:
        """Draw and write a figure, or compare all methods and print the table."""
        if is_picture(self.model) and all(map(is_picture, self.data)):
            built_in_one = dataclasses.replace(self, model=DEFAULT, data=(self.model, *self.data))
            return vars(built_in_one) | built_in_one.call()
        settings = self._settings()
        self._check(settings)
        from vitascope import explain
        from vitascope.analysis.explain.plots import save_figure
        from vitascope.analysis.explain.targets import question
        from vitascope.models.weights.loading import from_pretrained
        from vitascope.models.weights.preprocess import preprocess_of

        out = None if self.compare else self._checked_out()
        model = from_pretrained(self.model, device=self.device)
        if self.image_size is not None:
            size = pair(self.image_size)
            if isinstance(model.config, ViTConfig):
                model.config.at_size(size)  # rejects a size that patches do not tile
            model.preprocess = preprocess_of(model).at_size(size)
        if out is None:
            return {"best": self._compare(model)}
        target = question(model, self.target, versus=self.versus, like=self.like)
        if self._many:
            return self._write_maps(model, out, target, settings)
        settings |= self._pictures() | {"target": target, "evidence": self.evidence}
        figure = explain.draw(model, method=self._method, **settings)
        with explaining_failure(out, "the figure", "choose another place"):
            save_figure(figure, out)
        print(self._signed(f"{figure.get_label()}\n{out}"))
        return {}

    def _signed(self, text: str) -> str:
        """The output, with a line that names the model if that is built in."""
        return text if built_in(self.model) is None else f"model  {model_in_words(self.model)}\n{text}"

    @property
    def _method(self) -> str:
        from vitascope.explain import DEFAULT_METHOD

        return self.method or DEFAULT_METHOD

    def _settings(self) -> dict[str, Any]:
        """The method's own options that are given."""
        settings = {name: getattr(self, name) for name in ("layer", "head", "patch", "fusion", "discard")}
        return {name: value for name, value in settings.items() if value is not None}

    def _check(self, settings: dict[str, Any]) -> None:
        """Reject options that would have no effect, before the model is loaded."""
        from vitascope.analysis.explain.figures import VIEWS, check_method

        asked = [name for name in ("target", "versus", "like") if getattr(self, name) is not None]
        sampled = [name for name in ("images", "seed") if getattr(self, name) is not None]
        if self.compare:
            single = [*settings, *asked, *(n for n in ("method", "out", "evidence") if getattr(self, n))]
            if single:
                raise UserError(
                    f"{option(single[0])} is for one method's figure; leave it out with --compare"
                )
            return
        check_method(self._method, [*settings, *["target"] * bool(asked)])
        if self.json:
            raise UserError("--json needs --compare")
        if sampled and self._method != "distance":
            raise UserError(
                f"{option(sampled[0])} is for --compare and --method distance, not {self._method}"
            )
        takes = VIEWS[self._method].takes if self._method in VIEWS else "some"
        tables = [name for name in self.data if is_table(name)]
        if tables and self._method != "distance":
            raise UserError(
                f"{tables[0]} is a table, and {self._method} explains a picture: name the picture, or add "
                "--compare or --method distance"
            )
        if not self.data and takes == "one":
            raise UserError(f"{self._method} explains a picture: vitascope explain MODEL PICTURE")
        if self.image_size is not None and min(pair(self.image_size)) < 1:
            raise UserError(f"--image-size must be at least 1, not {self.image_size}")
        for idle in (" ".join(self.data), self.image_size and "--image-size"):
            if takes == "nothing" and idle:
                raise UserError(f"{self._method} shows the model alone: leave out {idle}")

    def _checked_out(self) -> Path:
        """The file to write: never the explained picture, and another existing one only if --out names it."""
        from vitascope.layout import EXPLANATIONS, is_run

        if self._many:
            return self._checked_folder()
        subject, model = next(iter(self.data), self.model), Path(self.model)
        # Not the picture's folder, which may be trained on.
        folder = model / EXPLANATIONS if is_run(model) else Path()
        out = self.out or unused(folder / f"{Path(subject).stem or 'model'}-{self._method}.png")
        check_picture(out, "figures are PNG files", self.data, "the explained picture")
        return out

    @property
    def _many(self) -> bool:
        """Whether each of any number of pictures gets a map."""
        return self._method != "distance" and (len(self.data) > 1 or any(map(os.path.isdir, self.data)))

    def _checked_folder(self) -> Path:
        """The folder of the maps of several pictures, which must not become pictures of the next command."""
        from vitascope.analysis.explain.methods import METHODS

        single = self.evidence or self._method not in METHODS
        if single or self.out is None or self.out.suffix.lower() == ".png":
            one = len(self.data) == 1
            several = f"{self.data[0]} is a folder: name a picture in it, or" if one else "several pictures:"
            raise UserError(
                f"{several} add --out FOLDER for a heatmap of each, or --compare or --method distance"
            )
        for place in filter(os.path.isdir, self.data):
            if self.out.resolve().is_relative_to(Path(place).resolve()):
                raise UserError(
                    f"--out {self.out} is in {place}, whose pictures are explained: name another folder"
                )
        return self.out

    def _write_maps(
        self, model: "VisionModel", out: Path, target: "TargetLike", settings: dict[str, Any]
    ) -> dict[str, object]:
        from tqdm import tqdm

        from vitascope.analysis.explain.maps import write_maps
        from vitascope.cli.exits import exit_if_unreadable, exiting_if_stopped
        from vitascope.data.contents import digest_of
        from vitascope.data.reading import Faults
        from vitascope.deploy.predict.predictor import find_images
        from vitascope.models.engines.engine import TorchEngine

        files = list(dict.fromkeys(find_images(self.data)))  # folders may overlap
        places = [place if os.path.isdir(place) else os.path.dirname(place) for place in self.data]
        root = os.path.commonpath(map(os.path.abspath, places))
        pictures = (
            (
                os.path.relpath(str(file), root),
                file,
                digest_of(file).hex() if isinstance(file, str) else file.as_text(),
            )
            for file in files
        )
        engine = TorchEngine(model, precision="fp32", device=self.device)
        asked = [self._method, settings, self.target, self.versus, self.like and digest_of(self.like).hex()]
        about = json.dumps([engine.digest, engine.body_digest, engine.preprocess.to_dict(), *asked])
        faults = Faults(len(files))
        state = f"the finished maps in {out} are kept; repeat the command to continue"
        with (
            exiting_if_stopped(state),
            tqdm(total=len(files), unit=" pictures", delay=3, disable=None) as bar,
        ):
            for _ in write_maps(
                model, pictures, out, self._method, target, about=about, faults=faults, **settings
            ):
                bar.update()
        print(self._signed(f"{counted(faults.images - faults.count, 'map')} in {out}"))
        exit_if_unreadable(faults)
        return {}

    def _compare(self, model: "VisionModel") -> str:
        """Print the comparison of all methods, and return the best one."""
        from tqdm import tqdm

        from vitascope import explain

        with tqdm(unit="", leave=False, disable=not sys.stderr.isatty()) as bar:

            def advance(done: int, total: int) -> None:
                bar.total = total
                bar.update(done - bar.n)

            comparison = explain.compare(model, self._sample(), seed=self.seed or 0, progress=advance)
        print(json.dumps(comparison.to_dict()) if self.json else self._signed(comparison.text()))
        return comparison.best

    def _pictures(self) -> dict[str, Any]:
        """The pictures of the figure, as arguments of `explain.draw`."""
        if self._method in ("positions", "filters"):
            return {}
        if self._method == "distance":
            return {"pictures": self._sample()}
        return {"pictures": self.data[0]} if self.data else labelled_test_images(self.model)

    def _sample(self) -> list[Any]:
        """Pictures of DATA, or the run's test images, drawn by --seed."""
        from vitascope.analysis.explain.inputs import chosen_pictures
        from vitascope.data.datasets import open_pictures

        sources: Sequence[Any] = [picture for name in self.data for picture in open_pictures(name)]
        if not self.data:
            sources = own_test_images(self.model).sources
        return chosen_pictures(sources, SAMPLED if self.images is None else self.images, self.seed or 0)


def own_test_images(ref: str) -> "ImageSet":
    """The test images of a run; UserError for any other MODEL, or if the data are gone."""
    from vitascope.training.run.run import Run

    run = Run(ref)
    if not run.exists:
        raise UserError(f"{ref} is not a run folder, so it has no test images: give a PICTURE or DATA")
    return run.test_images()


def is_picture(word: str) -> bool:
    """Whether a word in the place of MODEL is a PICTURE, by its ending."""
    from vitascope.data.listing import IMAGE_SUFFIXES

    return Path(word).suffix.lower() in IMAGE_SUFFIXES and not Path(word).is_dir()


def labelled_test_images(ref: str) -> dict[str, Any]:
    """Test images of a run, or samples of a built-in model, with classes, as arguments of `explain.draw`."""
    from vitascope.analysis.explain.inputs import chosen_pictures
    from vitascope.data.samples import PHOTOS

    if built_in(ref) is not None:
        return {"pictures": list(PHOTOS.values()), "truths": list(PHOTOS), "kind": "sample"}

    tests = own_test_images(ref)
    chosen = chosen_pictures(range(len(tests)), SHOWN)
    names = None if tests.targets is None else tests.targets.names()
    truths = None if names is None else [names[index] for index in chosen]
    pictures = [tests.sources[index] for index in chosen]
    return {"pictures": pictures, "truths": truths, "kind": f"{tests.name} image"}


def option(field: str) -> str:
    """`--image-size` of `image_size`."""
    return f"--{field.replace('_', '-')}"


def unused(path: Path) -> Path:
    """The path, or the first of `<name>-2.png`, `<name>-3.png`, ... that does not exist."""
    numbered = (path.with_name(f"{path.stem}-{number}{path.suffix}") for number in itertools.count(2))
    return next(each for each in itertools.chain([path], numbered) if not each.exists())
