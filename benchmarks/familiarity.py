"""Compare scores of how much a picture is like the training images, by the other pictures that they notice.

    python benchmarks/familiarity.py runs/five --train five/train --test five/test --other new=others digits

`runs/five` was trained on five of the ten classes of CIFAR-10, whose images are in `five`; `others` has the
others. "noticed": the share of other pictures below the score that 1% of the test images are below.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.metrics import roc_auc_score
from torch import Tensor

from conditions import Conditions
from reports import command_line, markdown_table, publish
from vitascope.data.datasets import open_pictures, read_data
from vitascope.models.decoding import ImageSource
from vitascope.models.engines.engine import TorchEngine
from vitascope.models.heads import output_layers
from vitascope.models.trust import nearest_class
from vitascope.models.weights.loading import from_pretrained
from vitascope.training.evaluation.calibration import class_gaussians

BATCH = 250
NEIGHBOURS = 50
Score = Callable[[Tensor], Tensor]
"""Features (N, D) to scores (N,): higher is more familiar."""


def features_of(engine: TorchEngine, sources: Sequence[ImageSource]) -> Tensor:
    """(N, D), float64."""
    parts = [
        engine.features(torch.from_numpy(np.stack([*map(engine.pixels, sources[start : start + BATCH])])))[0]
        for start in range(0, len(sources), BATCH)
    ]
    return torch.cat(parts).double()


def other_pictures(name: str) -> Sequence[ImageSource]:
    """The pictures of a folder, enlarged digits of scikit-learn in grey, or noise."""
    if name == "digits":
        return [
            np.kron(255 - 15.9 * image, np.ones((4, 4))).astype(np.uint8) for image in load_digits().images
        ]
    if name == "noise":
        return list(np.random.default_rng(0).integers(0, 256, (1000, 32, 32, 3), dtype=np.uint8))
    return open_pictures(name)


def scores_of(engine: TorchEngine, known: Tensor, labels: np.ndarray) -> dict[str, Score]:
    """The scores, fitted to the training images with features (N, D) and classes (N,)."""
    head, of = engine.model.head, torch.from_numpy(labels)
    weight, bias = (parameter.detach().double() for parameter in output_layers(head)[-1].parameters())
    K, D = weight.shape

    def logits(f: Tensor) -> Tensor:
        return f @ weight.T + bias

    def energy(f: Tensor) -> Tensor:
        return logits(f).logsumexp(dim=1)

    def neighbour(f: Tensor) -> Tensor:
        similar = F.normalize(f, dim=1) @ F.normalize(known, dim=1).T
        return similar.topk(NEIGHBOURS, dim=1).values[:, -1]

    origin = -(torch.linalg.pinv(weight) @ bias)
    residual_space = torch.linalg.eigh(torch.cov((known - origin).T)).eigenvectors[:, : D - D // 2]

    def residual(f: Tensor) -> Tensor:
        return ((f - origin) @ residual_space).norm(dim=1)

    alpha = logits(known).amax(dim=1).mean() / residual(known).mean()
    read = torch.linalg.pinv(weight) @ weight  # (D, D), onto what the head reads

    def beside(f: Tensor) -> Tensor:
        return F.normalize(f - f @ read, dim=1)

    signature = F.normalize(torch.stack([beside(known)[of == k].mean(dim=0) for k in range(K)]), dim=1)

    def membership(f: Tensor) -> Tensor:
        return (beside(f) * signature[logits(f).argmax(dim=1)]).sum(dim=1)

    def standard(score: Score) -> Score:
        values = score(known)
        return lambda f: (score(f) - values.mean()) / values.std()

    gaussians = class_gaussians(known, labels)
    return {
        "largest probability (Hendrycks and Gimpel 2017)": lambda f: logits(f).softmax(dim=1).amax(dim=1),
        "energy (Liu et al. 2020)": energy,
        f"neighbour {NEIGHBOURS} (Sun et al. 2022)": neighbour,
        "ViM (Wang et al. 2022)": lambda f: energy(f) - alpha * residual(f),
        "CORE (Yang et al. 2026)": lambda f: standard(energy)(f) + standard(membership)(f),
        "Mahalanobis, ours (Lee et al. 2018)": lambda f: -nearest_class(f.float(), **gaussians).double(),
    }


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("model", help="a MODEL reference; its head is linear")
    parser.add_argument("--train", required=True, help="a folder of class folders")
    parser.add_argument("--test", required=True, help="another one")
    parser.add_argument(
        "--other", nargs="+", metavar="NAME[=DATA]", required=True, help="`digits`, `noise`, a folder"
    )
    arguments = parser.parse_args()
    conditions = Conditions.now()
    engine = TorchEngine(from_pretrained(arguments.model), precision="fp32", device="cpu")
    train = read_data(arguments.train).by_name["all"].in_classes(engine.class_names, arguments.train)
    known, tested = features_of(engine, train.sources), features_of(engine, open_pictures(arguments.test))
    names = [name.partition("=") for name in arguments.other]
    others = {name: features_of(engine, other_pictures(data or name)) for name, _, data in names}
    rows = []
    for name, score in scores_of(engine, known, train.truth.labels).items():
        usual, cells = score(tested).numpy(), []
        for features in others.values():
            unusual = score(features).numpy()
            truth = np.repeat([1, 0], [len(usual), len(unusual)])
            area = roc_auc_score(truth, np.concatenate([usual, unusual]))
            cells.append(f"{area:.3f}, {(unusual < np.quantile(usual, 0.01)).mean():.1%}")
        rows.append((name, *cells))
    counts = f"{len(known):,} training images, {len(tested):,} test images"
    header = ("score", *(f"{name} ({len(features):,}): AUROC, noticed" for name, features in others.items()))
    title = conditions.heading(
        "Pictures that are unlike the training images", model=arguments.model, images=counts
    )
    publish("familiarity", f"{title}\n\n{markdown_table(header, rows)}", arguments)


if __name__ == "__main__":
    main()
