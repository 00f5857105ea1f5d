from pathlib import Path

import numpy as np
import pytest
import torch

import vitascope as vs
from tests.data import noise
from tests.exported import NAMES, exportable_model
from tests.models import small_model, with_preprocess
from vitascope.data.splits import ImageSet
from vitascope.data.targets import ClassIndices
from vitascope.deploy.export.compress import compress
from vitascope.errors import UserError
from vitascope.models.engines.engine import TorchEngine
from vitascope.models.engines.runtimes import ProgramEngine
from vitascope.models.preprocess import Preprocess
from vitascope.training.evaluation.measure import batches_of, measure

FIT = Preprocess(image_size=(32, 32))
PICTURES = [noise(40, 36 + 4 * (seed % 3), seed=seed) for seed in range(20)]


def labelled(classes: int) -> ImageSet:
    names = NAMES[:classes]
    return ImageSet("test", PICTURES, ClassIndices(np.arange(len(PICTURES)) % classes, names))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from PIL import Image

    root = tmp_path_factory.mktemp("data")
    for number, picture in enumerate(PICTURES):
        folder = root / NAMES[number % len(NAMES)]
        folder.mkdir(exist_ok=True)
        Image.fromarray(picture).save(folder / f"{number:02}.png")
    return root


def test_exported_file_is_evaluated_as_a_loop_over_the_predictor_does(exported_file, data: Path) -> None:
    engine = ProgramEngine(exported_file(".pt2"))
    evaluation = vs.evaluate(engine, data, batch_size=7)
    predict = vs.Predictor(engine)
    answers = [(predict(path, top_k=1)[0].label, path.parent.name) for path in sorted(data.rglob("*.png"))]
    assert evaluation.score.total == len(PICTURES)
    assert evaluation.score.right == sum(label == truth for label, truth in answers)
    of_model = vs.evaluate(exportable_model(), data, precision="fp32", device="cpu")
    assert evaluation.loss == pytest.approx(of_model.loss, rel=1e-3)
    with pytest.raises(UserError, match="an engine has its own precision, device and views"):
        vs.evaluate(engine, "digits", precision="fp32")


def test_evaluate_and_compress_report_the_same_numbers(data: Path, tmp_path: Path) -> None:
    model = exportable_model()
    merged = compress(model, tmp_path / "merged", merge=2, data=str(data), precision="fp32", device="cpu")
    assert merged.paired is not None
    for place, right in ((model, merged.paired.right), (merged.folder, merged.paired.right_after)):
        assert vs.evaluate(place, data, precision="fp32", device="cpu").score.right == right


def test_parts_of_several_processes_make_one_evaluation() -> None:
    images, engine = labelled(3), TorchEngine(with_preprocess(small_model(num_classes=3), FIT), device="cpu")
    whole = measure(engine, batches_of(engine, images))
    parts = []
    for places in (np.arange(1, 20, 2), np.arange(0, 20, 2)):  # in another order than the split's
        batches = batches_of(engine, images)
        batches._rows[np.setdiff1d(np.arange(20), places)] = -1  # what other processes compute
        measure(engine, batches, lambda part: parts.append(part) or [part])
    joined = measure(engine, batches_of(engine, images), lambda _: parts)
    torch.testing.assert_close(joined.probabilities, whole.probabilities)
    assert joined.indices.tolist() == list(range(20))
    assert joined.loss == pytest.approx(whole.loss)


def test_independent_outputs_are_measured_by_binary_cross_entropy() -> None:
    images = labelled(3)
    exclusive, independent = (
        TorchEngine(with_preprocess(small_model(num_classes=3, outputs=kind), FIT), device="cpu")
        for kind in ("exclusive", "independent")
    )
    one, any_of_them = (measure(engine, batches_of(engine, images)) for engine in (exclusive, independent))
    assert one.classes.tolist() == any_of_them.classes.tolist()
    np.testing.assert_allclose(one.probabilities.sum(axis=1), 1, rtol=1e-5)
    given = any_of_them.probabilities.astype(np.float64)
    truth = np.eye(3)[images.labels]
    assert any_of_them.loss == pytest.approx(-np.log(np.where(truth, given, 1 - given)).mean(), rel=1e-5)


def test_an_embedding_is_never_measured_as_classes() -> None:
    model = with_preprocess(small_model(num_classes=3, outputs="embedding"), FIT)
    for ask in (lambda: vs.evaluate(model, "digits"), lambda: vs.Predictor(model)):
        with pytest.raises(UserError, match="no head for classes"):
            ask()


@pytest.mark.parametrize("kind", ["exclusive", "independent"])
def test_another_number_of_classes_is_rejected(kind: str) -> None:
    engine = TorchEngine(with_preprocess(small_model(num_classes=3, outputs=kind), FIT), device="cpu")
    for classes in (2, 5):
        images = labelled(classes)
        with pytest.raises(UserError, match=f"the model has 3 classes, and the test images have {classes}: "):
            measure(engine, batches_of(engine, images))
