"""Ship a run as the built-in model `cifar10`, and draw the pictures of the docs that show it again.

    python -m benchmarks.ship runs/cifar10
    python -m benchmarks.ship

The first writes the weights in half precision, and their card with the test accuracy, which is measured
before and after the rounding. A run may have begun with the weights of an earlier one; the card has the
commands of all. Both draw the pictures of docs/gallery.md by the commands of that page, those of the
walkthrough (with the font Noto Sans CJK), and the screenshots of the attention explorer (with Playwright
and Chromium), and write the accuracy into the pages. Sentences that describe a picture have to be read again.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import runpy
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import yaml
from PIL import Image
from tests.browser import tour

from vitascope.analysis.evaluate import evaluate
from vitascope.cli import main as vitascope
from vitascope.data.measures import score_of
from vitascope.data.samples import PHOTOS
from vitascope.models.weights.builtin import DEFAULT, built_in
from vitascope.models.weights.loading import from_pretrained, save_pretrained
from vitascope.training.evaluation.measure import Evaluation
from vitascope.training.run.run import Run

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
GALLERY = DOCS / "gallery.md"
PAGES = (
    ROOT / "README.md",
    ROOT / "README.zh.md",
    GALLERY,
    GALLERY.with_suffix(".zh.md"),
    DOCS / "walkthrough.md",
    DOCS / "walkthrough.zh.md",
)
ACCURACY = re.compile(r"[\d.]+%(?=\s+of\s+5,000\s+test\s+images)|(?<=5,000 张测试图像上的准确率为 )[\d.]+%")
"""The built-in model's accuracy, as a page in either language states it."""
SCREENSHOTS = {
    "light": "explorer",
    "dark": "explorer-dark",
    "compare": "explorer-compare",
    "phone": "explorer-phone",
}
MOST_LOST = 0.002
"""Of the accuracy, by rounding to half precision."""

TORCHRUN = "torchrun --standalone --nproc-per-node {} -m vitascope.cli --"
CARD = """\
# {name}

The model that comes with vitascope: {summary}; {parameters:.2f} M parameters.

```python
import vitascope as vs

predictor = vs.Predictor("{name}")
predictor("photo.jpg")
```

## Data

CIFAR-10 (Krizhevsky 2009, [Learning Multiple Layers of Features from Tiny Images]({report})),
as JPEG files: 45,000 of its 50,000 training images. The other 5,000 measured the validation accuracy and
chose nothing. The test images are {tests:,} of its 10,000, 500 of each class.
Classes: {classes}.

## Training

```sh
{commands}
```

{epochs:.0f} epochs in {hours:.1f} hours, seed {seed}, started on {started} with vitascope {vitascope} and
torch {torch}, on {cpu}. {named} the data set as published,
whose pixels differ slightly from those of the JPEG files.

## Results

| weights | accuracy on {tests:,} test images | 95% interval |
|---|---|---|
| as trained, float32 | {accuracy:.1%} | {low:.1%} to {high:.1%} |
| as shipped, float16 | {shipped:.1%} | {shipped_low:.1%} to {shipped_high:.1%} |

The file has the weights rounded to float16. Loading turns them into float32, and all computation is as for
any other model. {agreement} of {tests:,} images have the same class before and after the rounding.

## Limits

- It knows ten classes. A picture of anything else gets one of them too, often with a high probability.
- It sees 32x32 pixels: the middle of a picture, reduced. An object that is small in its picture is lost.
- It is here to try vitascope, and to see how a Vision Transformer works. It is not made for decisions.
- CIFAR-10 was collected from the web before 2009, and shows objects as people photographed them then.

## Licence

The weights are under Apache-2.0, as vitascope is. They contain no images of CIFAR-10, whose authors publish
it without a licence and ask to cite the report above. Its images come from the Tiny Images dataset, which its
authors withdrew in 2020 because of offensive labels; the ten classes of CIFAR-10 were labelled separately.
"""
REPORT = "https://www.cs.toronto.edu/~kriz/learning-features-2009-TR.pdf"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", nargs="?", help="the run to ship; without it, only draw the pictures")
    arguments = parser.parse_args()
    if arguments.run is not None:
        ship(Run.open(arguments.run), folder())
    draw()


def folder() -> Path:
    """The folder of the built-in model."""
    found = built_in(DEFAULT)
    assert found is not None, (
        f"{DEFAULT} in this folder is another model; start in the root of the repository"
    )
    return found


def ship(run: Run, folder: Path) -> None:
    """Write a run's weights, rounded to half precision, and their card into a model folder."""
    data = run.config["data"]
    trained = evaluate(from_pretrained(run.path), data, device="cpu", precision="fp32")
    shutil.rmtree(folder, ignore_errors=True)
    save_pretrained(from_pretrained(run.path, dtype=torch.float16), folder)
    rounded = evaluate(from_pretrained(folder), data, device="cpu", precision="fp32")
    if trained.accuracy - rounded.accuracy > MOST_LOST:
        raise SystemExit(
            f"half precision loses too much: {trained.accuracy:.2%} became {rounded.accuracy:.2%}"
        )
    for file in folder.iterdir():
        file.chmod(0o644)  # safetensors' own is for the owner alone
    (folder / "README.md").write_text(card(run, folder, trained, rounded), encoding="utf-8")
    size = sum(file.stat().st_size for file in folder.iterdir())
    print(f"{folder}: {size:,} bytes, {trained.accuracy:.2%} as trained, {rounded.accuracy:.2%} as shipped")


def card(run: Run, folder: Path, trained: Evaluation, rounded: Evaluation) -> str:
    """The card of the built-in model, with the metadata of the hub."""
    model, stages = from_pretrained(folder), stages_of(run)
    last = [stage.records("epoch")[-1] for stage in stages]
    score = {"type": "accuracy", "value": round(rounded.accuracy, 4)}
    result = {
        "task": {"type": "image-classification"},
        "dataset": {"name": "CIFAR-10", "type": "cifar10", "split": "test"},
        "metrics": [score],
    }
    metadata = {
        "library_name": "vitascope",
        "license": "apache-2.0",
        "pipeline_tag": "image-classification",
        "tags": ["vision-transformer", "image-classification"],
        "model-index": [{"name": DEFAULT, "results": [result]}],
    }
    scores = (score_of(each.labels, each.probabilities) for each in (trained, rounded))
    (low, high), (shipped_low, shipped_high) = (score.interval for score in scores)
    text = CARD.format(
        name=DEFAULT,
        summary=model.config.summary,
        parameters=sum(part.numel() for part in model.parameters()) / 1e6,
        report=REPORT,
        classes=", ".join(model.config.class_names),
        tests=len(trained.labels),
        commands="\n".join(map(training_command, stages)),
        named="The commands name" if len(stages) > 1 else "The command names",
        epochs=sum(record["epoch"] for record in last),
        hours=sum(record["seconds"] for record in last) / 3600,
        seed=run.config["seed"],
        started=str(stages[0].environment["started"])[:10],
        vitascope=run.environment["vitascope"],
        torch=run.environment["torch"],
        cpu=f"{run.environment['cores']} cores of an {run.environment['cpu']}",
        accuracy=trained.accuracy,
        low=low,
        high=high,
        shipped=rounded.accuracy,
        shipped_low=shipped_low,
        shipped_high=shipped_high,
        agreement=f"{(trained.classes == rounded.classes).sum():,}",
    )
    return f"---\n{yaml.safe_dump(metadata, sort_keys=False)}---\n\n{text}"


def stages_of(run: Run) -> list[Run]:
    """The runs that led to the weights, in order: each but the first began with those of the one before."""
    weights = run.config["weights"]
    begun = weights is not None and Run(weights).exists
    return [*(stages_of(Run(weights)) if begun else []), run]


def training_command(run: Run) -> str:
    """The command that started a run, with runs in `runs/` and without other folders of the machine."""
    words = shlex.split(run.environment["command"])[1:]
    plain = [Path(word).name if "/" in word else word for word in words]
    names = {"--run": run.path.name, "--weights": Path(run.config["weights"] or "").name}
    for option, name in names.items():
        if option in plain:
            plain[plain.index(option) + 1] = f"runs/{name}"
    processes = run.environment["processes"]
    program = "vitascope" if processes == 1 else TORCHRUN.format(processes)
    return f"{program} {shlex.join(plain)}"


def card_of(folder: Path) -> dict[str, Any]:
    """The metadata of a card."""
    _, metadata, _ = (folder / "README.md").read_text(encoding="utf-8").split("---\n", 2)
    values = yaml.safe_load(metadata)
    assert isinstance(values, dict)
    return values


def accuracy_of(folder: Path) -> float:
    """The accuracy that a card states."""
    return float(card_of(folder)["model-index"][0]["results"][0]["metrics"][0]["value"])


def draw() -> None:
    """Draw every picture of the docs that shows the built-in model, and write its accuracy into the pages."""
    for page in PAGES:
        text, count = ACCURACY.subn(f"{accuracy_of(folder()):.1%}", page.read_text(encoding="utf-8"))
        if not count:
            raise SystemExit(f"{page.name} does not state the accuracy of {DEFAULT}")
        page.write_text(text, encoding="utf-8")
    draw_gallery()
    runpy.run_path(str(DOCS / "learn" / "notebooks.py"), run_name="__main__")
    draw_explorer()


def draw_gallery() -> None:
    """Run the commands of the gallery on the sample photographs, for the pictures that the page shows."""
    text = GALLERY.read_text(encoding="utf-8")
    commands = "".join(re.findall(r"^```sh\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
    with tempfile.TemporaryDirectory() as scratch, contextlib.chdir(scratch):
        for label, photo in PHOTOS.items():
            place = Path("photos", label, "001.jpg")
            place.parent.mkdir(parents=True)
            shutil.copy(photo, place)
        for line in commands.replace("\\\n", " ").splitlines():
            words = shlex.split(line)
            if words[:3] != ["vitascope", "explain", DEFAULT] or words[-1].partition(".")[2] != "png":
                continue
            if vitascope(words[1:]):
                raise SystemExit(f"failed: {line}")
            drawn = Path(words[words.index("--out") + 1])
            (shown,) = set(re.findall(rf"images/gallery/{drawn.stem}\.\w+", text))
            with Image.open(drawn) as picture:  # as JPEG where the page has a photograph at a large size
                picture.convert("RGB").save(DOCS / shown, quality=85, optimize=True)


def draw_explorer() -> None:
    """Take the screenshots of the attention explorer."""
    with serving() as address, tempfile.TemporaryDirectory() as scratch:
        tour.main(address, scratch, layer=3, head=1)
        for name, picture in SCREENSHOTS.items():
            with Image.open(Path(scratch, f"{name}.png")) as shot:
                shot.convert("RGB").save(DOCS / "images" / f"{picture}.png", optimize=True)


@contextlib.contextmanager
def serving() -> Iterator[str]:
    """The address of a server with the built-in model, which runs meanwhile."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    command = [sys.executable, "-m", "vitascope.cli", "serve", "--port", port, "--no-access-log"]
    with subprocess.Popen(command, cwd=ROOT) as server:
        address = f"http://127.0.0.1:{port}"
        try:
            while not ready(address):
                if server.poll() is not None:
                    raise SystemExit("the server has ended")
                time.sleep(0.2)
            yield address
        finally:
            server.terminate()


def ready(address: str) -> bool:
    """Whether the server's model is loaded."""
    try:
        with urllib.request.urlopen(f"{address}/readyz", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


if __name__ == "__main__":
    main()
