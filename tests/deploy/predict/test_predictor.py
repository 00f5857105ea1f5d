"""The predictor: equal predictions for every kind of input."""

import base64
import dataclasses
import io
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.data import bomb, noise, write_picture, write_tree
from tests.models import labelling_model, small_model, small_resnet, with_preprocess
from tests.pretended_gpu import GPU, pretended_gpu
from vitascope.analysis.explain.methods import DEFAULT_METHOD, METHODS
from vitascope.data.reading import READ_AHEAD
from vitascope.deploy.predict.predictor import Prediction, Predictor, find_images
from vitascope.errors import UserError
from vitascope.models.decoding import ImageError, ImageSource
from vitascope.models.engines.engine import Answers, TorchEngine
from vitascope.models.preprocess import Pixels, Preprocess
from vitascope.models.weights.files import CheckpointError
from vitascope.models.weights.loading import save_pretrained

NAMES = ("ant", "bee", "cat", "dog", "eel")


def predictor(precision: str = "fp32", batch_size: int = 32, **options: object) -> Predictor:
    model = small_model(**{"class_names": NAMES, **options})
    return Predictor(TorchEngine(model, precision=precision, device="cpu"), batch_size=batch_size)


def pictures(count: int) -> list[np.ndarray]:
    return [noise(20 + 3 * number, 40 - 2 * number, seed=number) for number in range(count)]


def pixels_of(path: Path) -> np.ndarray:
    return np.asarray(Image.open(path))


def scores(answer: list[Prediction], K: int = 5) -> np.ndarray:
    found = np.zeros(K)
    for guess in answer:
        found[guess.index] = guess.score
    return found


def test_floats_and_tensors_have_the_predictions_of_their_picture() -> None:
    predict, picture = predictor(), noise(30, 40)
    expected = predict(picture)
    tensor = torch.from_numpy(picture).permute(2, 0, 1)
    for same in (picture / 255, np.float32(picture / 255), tensor, tensor / 255):
        assert predict(same) == predict([same])[0] == expected
    for answer in predict(list(torch.stack([tensor, tensor]))):
        np.testing.assert_allclose(scores(answer), scores(expected), atol=1e-6)
    assert "<img" in predict(tensor)._repr_html_()


def test_single_picture_returns_one_list_of_predictions(tmp_path: Path) -> None:
    path = write_picture(tmp_path / "a.png", size=(40, 30))
    predict = predictor()
    (expected,) = predict([path], top_k=3)
    with open(path, "rb") as opened:
        for source in (path, str(path), path.read_bytes(), Image.open(path), pixels_of(path), opened):
            assert predict(source, top_k=3) == expected
    (answer,) = predict.stream(str(path), 3, workers=0)
    assert (answer.image, answer.predictions) == (str(path), expected)
    assert list(find_images(str(path))) == list(find_images(path)) == [str(path)]


def test_predictor_accepts_a_model_a_reference_or_an_engine_and_has_a_short_repr(tmp_path: Path) -> None:
    image = noise(50, 40)
    model = small_model(class_names=NAMES)
    folder = save_pretrained(model, tmp_path / "small")
    engine = TorchEngine(model, precision="fp32", device="cpu")
    expected = [dataclasses.asdict(found) for found in Predictor(engine)(image)]
    for source in (model, folder, str(folder)):
        predict = Predictor(source, precision="fp32", device="cpu")
        found = [dataclasses.asdict(prediction) for prediction in predict(image)]
        assert found == [pytest.approx(each) for each in expected]  # sums depend on how memory is aligned
        assert predict.preprocess == engine.preprocess
    assert repr(predict).startswith("Predictor(TorchEngine(small: torch, fp32")
    assert len(repr(predict)) < 100
    with pytest.raises(UserError, match="an engine has its own precision, device and views"):
        Predictor(engine, precision="fp32")


def test_predictions_display_their_picture_in_a_notebook(tmp_path: Path) -> None:
    path = write_picture(tmp_path / "a.png", size=(400, 300))
    found = predictor(class_names=("<b>", *NAMES[1:]))(path)
    assert found == list(found)
    assert repr(found[0]).startswith(f"Prediction({found[0].label!r}, {found[0].index}, 0.")
    page = found._repr_html_()
    data = base64.b64decode(page.partition("base64,")[2].partition('"')[0])
    assert Image.open(io.BytesIO(data)).size == (180, 240)
    assert page.count("<tr>") == 5
    assert "<b>" not in page
    path.unlink()
    assert "<img" not in found._repr_html_()
    assert found._repr_html_().count("<tr>") == 5


def test_model_of_several_classes_predicts_those_above_their_thresholds() -> None:
    model = labelling_model(0.3, 0.9, 0.2, 0.6, 0.1, thresholds=(0.25, 0.5, 0.5, 0.7, 0.5), class_names=NAMES)
    predict = Predictor(TorchEngine(model, device="cpu"))
    assert [each.label for each in predict(noise(40, 30))] == ["bee", "ant"]
    assert [each.label for each in predict(noise(40, 30), threshold=0.15)] == ["bee", "dog", "ant", "cat"]
    assert [each.label for each in predict(noise(40, 30), 1, threshold=0.15)] == ["bee"]
    np.testing.assert_allclose(predict(noise(40, 30)).probabilities, [0.3, 0.9, 0.2, 0.6, 0.1], atol=1e-6)


def test_picture_of_no_class_names_the_most_probable_one(tmp_path: Path) -> None:
    predict = Predictor(TorchEngine(labelling_model(0.3, 0.4, class_names=("<b>", "<i>")), device="cpu"))
    found = predict(noise(40, 30))
    assert (found, found.best.label, found.best.score) == ([], "<i>", pytest.approx(0.4))
    page = found._repr_html_()
    assert "none of the classes; the most probable one is &lt;i&gt;, 40.00%" in page
    (result,) = predict.stream([write_picture(tmp_path / "a.png")], workers=0)
    assert (result.predictions, result.error, result.best) == ([], None, found.best)


def test_explanation_without_a_target_is_of_the_most_probable_class_even_below_its_threshold() -> None:
    predict = Predictor(TorchEngine(labelling_model(0.3, 0.4, 0.1, spread=0.1), device="cpu"))
    picture = noise(40, 30)
    assert predict.explain(picture, method="grad-cam").target == predict(picture).best.index == 1
    assert predict.explain(picture, method="grad-cam", target="2").target == 2


def test_predictor_explains_one_picture_or_several() -> None:
    predict = predictor()
    image = noise(50, 40)
    found = predict.explain(image)
    assert (found.method, found.label) == (DEFAULT_METHOD, predict(image)[0].label)
    assert found.heatmap.shape == (4, 4)
    assert found.heatmap.max() == pytest.approx(1)
    images = predict.preprocess.normalize(torch.from_numpy(predict.engine.pixels(image))[None])
    own = METHODS[DEFAULT_METHOD](predict.engine.model, images, found.target)[0]
    np.testing.assert_array_equal(found.heatmap, own.numpy())
    assert Image.open(io.BytesIO(found._repr_png_())).size == found.overlay.size
    first, _ = predict.explain([image, noise(30, 30)], method="grad-cam", target="bee")
    assert (first.target, repr(first)) == (1, "Explanation(grad-cam of 'bee', heatmap (4, 4))")
    with pytest.raises(UserError, match="target does not apply to rollout"):
        predict.explain(image, method="rollout", target=1)


def test_explanation_is_saved_as_its_picture(tmp_path: Path) -> None:
    found = predictor().explain(noise(50, 40))
    path = tmp_path / "new" / "heat.png"
    for _ in range(2):  # the second time, it is replaced
        assert found.save(path) == path
        np.testing.assert_array_equal(pixels_of(path), np.asarray(found.overlay))
    assert Image.open(found.save(str(tmp_path / "heat.jpg"))).format == "JPEG"
    for name in ("heat", "heat.txt"):
        with pytest.raises(UserError, match=f"{name}: a picture's name ends in .png"):
            found.save(tmp_path / name)
    with pytest.raises(UserError, match=r"heat\.png"):
        found.save(path / "below.png")
    assert {each.name for each in tmp_path.iterdir()} == {"new", "heat.jpg"}
    blank = dataclasses.replace(found, heatmap=np.zeros_like(found.heatmap))
    assert repr(blank).endswith("heatmap (4, 4), no evidence)")
    assert (np.asarray(blank.overlay) == 255).all(axis=-1).any()  # white letters


def test_non_picture_is_rejected_with_its_type() -> None:
    cases: list[tuple[Any, str]] = [
        (np.zeros((5, 32, 32, 3), np.uint8), r"\(5, 32, 32, 3\); give several pictures as a list"),
        (torch.randn(3, 32, 32), r"must lie in \[0, 1\].*undo a normalization"),
        ([torch.zeros(3, 32, 3)], r"\(C, H, W\) or \(H, W, C\)"),
        (7, "not a value of type int"),
        ([None], "not a value of type NoneType"),
    ]
    for images, reason in cases:
        with pytest.raises(ImageError, match=reason):
            predictor()(images)


def test_batch_equals_single_predictions_in_order_of_any_iterable() -> None:
    images = pictures(7)
    one_by_one = predictor()
    alone = [scores(one_by_one([image])[0]) for image in images]
    assert np.ptp(alone, axis=0).max() > 1e-3  # the pictures do differ
    for batch_size, given in ((1, iter(images)), (3, deque(images)), (32, tuple(images))):
        together = [scores(answer) for answer in predictor(batch_size=batch_size)(given)]
        np.testing.assert_allclose(together, alone, atol=1e-6)


def test_all_classes_are_sorted_and_sum_to_one_and_have_their_index_for_a_name() -> None:
    for answer in predictor()(pictures(3), top_k=5):
        assert sorted(guess.index for guess in answer) == list(range(5))
        values = [guess.score for guess in answer]
        assert values == sorted(values, reverse=True)
        assert sum(values) == pytest.approx(1, abs=1e-6)
    for guess in predictor(class_names=())([noise(32, 32)])[0]:
        assert guess.label == str(guess.index)
    assert predictor()([]) == []


def test_unreadable_pictures_are_named(tmp_path: Path) -> None:
    (tmp_path / "broken.jpg").write_bytes(b"not a picture")
    for position in (0, 2):
        images: list[object] = list(pictures(2))
        images.insert(position, tmp_path / "broken.jpg")
        with pytest.raises(ImageError, match=r"broken\.jpg"):
            predictor()(images)
    paths = [tmp_path / f"{number}.png" for number in range(5)]  # batches without a picture
    answers = list(predictor(batch_size=2).stream(paths, workers=0))
    assert [answer.error for answer in answers] == [f"{path}: no such file" for path in paths]
    assert list(predictor().stream([])) == []


@pytest.mark.parametrize(("made", "precision"), [(small_model, "fp32"), (small_resnet, "bf16")])
def test_predictions_of_a_model_folder_equal_the_models_output(tmp_path, made: Any, precision: str) -> None:
    model, image = made(class_names=NAMES), noise(50, 40)
    fit = Preprocess(
        image_size=(32, 32), resize="squash", crop_pct=0.8, mean=(0.2, 0.3, 0.4), std=(0.3, 0.3, 0.3)
    )
    with torch.no_grad():
        expected = model(fit.normalize(torch.from_numpy(fit.pixels(image))[None]))[0].softmax(dim=0)
    save_pretrained(with_preprocess(model, fit), tmp_path)
    loaded = Predictor.from_pretrained(tmp_path, precision=precision, device="cpu")
    assert loaded.preprocess == fit
    answer = loaded([image])[0]
    np.testing.assert_allclose(scores(answer), expected.numpy(), atol=1e-6 if precision == "fp32" else 3e-2)
    assert [guess.label for guess in answer] == [NAMES[guess.index] for guess in answer]
    with pytest.raises(CheckpointError, match="revision"):
        Predictor.from_pretrained(tmp_path, revision="main")


def test_unavailable_precision_and_device_are_rejected() -> None:
    for options in ({"precision": "fp8"}, {"device": "nonsense"}):
        with pytest.raises(UserError, match=next(iter(options))):
            Predictor(TorchEngine(small_model(), **options))([noise(32, 32)])


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_model_stored_in_bf16_runs_in_any_precision(tmp_path: Path, precision: str) -> None:
    model = small_model(class_names=NAMES)
    expected = scores(Predictor(TorchEngine(model, precision="fp32", device="cpu"))(pictures(1))[0])
    assert (scores(predictor("bf16")(pictures(1))[0]) != expected).any()  # it is bf16
    save_pretrained(model.to(torch.bfloat16), tmp_path)
    loaded = Predictor.from_pretrained(tmp_path, precision=precision, device="cpu")
    np.testing.assert_allclose(scores(loaded(pictures(1))[0]), expected, atol=3e-2)


def test_prediction_computes_no_gradient_and_disables_dropout() -> None:
    model = small_model(dropout=0.5, class_names=NAMES).train()
    predict = Predictor(TorchEngine(model, precision="fp32", device="cpu"))
    assert predict(pictures(2)) == predict(pictures(2))
    assert not predict.engine.probabilities(torch.zeros(1, 3, 32, 32, dtype=torch.uint8)).requires_grad


# --- folders


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pictures at two depths; one is text, one a decompression bomb, others are hidden or not pictures."""
    root = write_tree(
        tmp_path_factory.mktemp("predict") / "folder", {"b": 3, "a": 4, ".hidden": 1}, size=(40, 30)
    )
    write_picture(root / "z.PNG")
    (root / "a" / "001.png").write_bytes(b"text")
    (root / "b" / "bomb.png").write_bytes(bomb(15_000))
    (root / "b" / "notes.txt").write_text("no picture")
    (root / "b" / ".x.png").write_bytes(b"")
    (root / "loop").symlink_to(root)
    return root


FOUND = ["z.PNG", *(f"a/{n:03}.png" for n in range(4)), *(f"b/{n:03}.png" for n in range(3)), "b/bomb.png"]


@pytest.mark.parametrize("workers", [0, 2])
def test_folder_is_predicted_in_order_with_reasons_for_unreadable_files(folder: Path, workers: int) -> None:
    predict = predictor(batch_size=2)
    answers = list(predict.predict_folder(folder, 3, workers=workers))
    assert [str(Path(answer.image).relative_to(folder)) for answer in answers] == FOUND
    for answer in answers:
        if answer.image.endswith(("a/001.png", "bomb.png")):
            assert answer.predictions == []
            assert answer.image in str(answer.error)
        else:
            assert answer.error is None
            (expected,) = predict([answer.image], top_k=3)
            np.testing.assert_allclose(scores(answer.predictions), scores(expected), atol=1e-6)
    assert "bomb" in str(answers[-1].error)


@pytest.mark.parametrize("workers", [0, 2])
def test_files_are_read_only_a_few_batches_ahead(folder: Path, workers: int) -> None:
    taken = []

    def endless() -> Iterator[str]:
        while True:
            taken.append(str(folder / "z.PNG"))
            yield taken[-1]

    stream = predictor(batch_size=2).stream(endless(), workers=workers)
    for count in range(1, 30):
        assert next(stream).error is None
        assert len(taken) <= count + 2 * (READ_AHEAD + 1)
    stream.close()


class Ragged(TorchEngine):
    own_pixels = True

    def pixels(self, image: ImageSource) -> Pixels:
        return np.ascontiguousarray(np.asarray(Image.open(image).convert("RGB")).transpose(2, 0, 1))  # type: ignore[arg-type]

    def answers(self, pixels: torch.Tensor) -> Answers:
        return super().answers(pixels[:, :, :8, :8].repeat(1, 1, 4, 4))


def test_engine_with_own_preprocessing_predicts_pictures_of_many_sizes(tmp_path: Path) -> None:
    paths = [write_picture(tmp_path / f"{n}.png", size=(8 + n, 12 - n), seed=n) for n in (0, 4, 1, 4)]
    model = small_model(class_names=NAMES)
    engine = Ragged(model, precision="fp32", device="cpu")
    predict = Predictor(engine, batch_size=3)
    together = [scores(answer.predictions) for answer in predict.stream(paths, workers=2)]
    alone = [scores(predict([path])[0]) for path in paths]
    np.testing.assert_allclose(together, alone, atol=1e-6)


def test_missing_folder_and_invalid_options_are_rejected_immediately(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nowhere: no such file or folder"):
        predictor().predict_folder(tmp_path / "nowhere")
    with pytest.raises(UserError, match="top_k must be at least 1, not 0"):
        predictor().predict_folder(tmp_path, 0)


def test_a_gpu_computes_a_batch_while_the_next_is_read_and_the_last_is_fetched() -> None:
    with pretended_gpu() as gpu:
        predict = Predictor(small_model().to(GPU), precision="fp32", device=str(GPU), batch_size=2)
        reading = predict.engine.pixels

        def pixels(picture: ImageSource) -> Pixels:
            gpu.log.append("read")
            return reading(picture)

        predict.engine.pixels = pixels  # type: ignore[method-assign]
        gpu.log.clear()
        with gpu.watched():
            found = predict([noise(32, 32)] * 6, top_k=1)
    assert len(found) == 6
    batch = ["read", "read", "copy to the GPU in side1"]
    computed = ["memory is used in main", "copy from the GPU in main"]
    assert gpu.log == [
        "side1 waits for main",
        *(*batch, *batch, "main waits for side1 1", *computed),
        *(*batch, "main waits for side1 2", *computed, "process waits for main 1"),
        *("main waits for side1 3", *computed, "process waits for main 2", "main waits for side1"),
        "process waits for main 3",
    ]
