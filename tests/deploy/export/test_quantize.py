"""int8 files: predictions close to their sources', int8 layers where intended, rejection otherwise."""

import dataclasses
import json
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.data import noise, write_tree
from tests.exported import NAMES, exportable_model
from tests.models import small_model
from vitascope.cli.ship import comparison_lines
from vitascope.data.datasets import open_data
from vitascope.data.splits import ImageSet
from vitascope.data.targets import ClassIndices, ClassSets
from vitascope.deploy.export import quantize as module
from vitascope.deploy.export.export import export
from vitascope.deploy.export.int8 import calibration_batches, layers_of, rounding_error
from vitascope.deploy.export.quantize import (
    FileComparison,
    calibration_and_test,
    compare_files,
    quantize,
    quantize_file,
    worst,
)
from vitascope.errors import UserError
from vitascope.models.engines.engine import TorchEngine
from vitascope.models.engines.runtimes import OnnxEngine, OpenVinoEngine
from vitascope.training.evaluation.measure import batches_of, measure
from vitascope.training.options.recipes import TrainConfig
from vitascope.training.run.run import Run

onnx = pytest.importorskip("onnx", reason="onnx is not installed (vitascope[onnx])")
openvino = pytest.importorskip("openvino", reason="OpenVINO is not installed (vitascope[openvino])")

OPEN = {".onnx": OnnxEngine, ".xml": OpenVinoEngine}
PICTURES = [noise(40, 36, seed=seed) for seed in range(40)]


@pytest.fixture(scope="module")
def plain(exported_file) -> dict[str, Path]:
    return {suffix: exported_file(suffix) for suffix in (".onnx", ".xml")}


@pytest.fixture(scope="module")
def labelled(plain: dict[str, Path]) -> ImageSet:
    engine = OnnxEngine(plain[".onnx"])
    labels = (
        engine.predict([engine.pixels(picture) for picture in PICTURES]).probabilities.argmax(dim=1).numpy()
    )
    return ImageSet("test", PICTURES, ClassIndices(labels, NAMES))


@pytest.fixture(scope="module", params=[".onnx", ".xml"])
def done(request: pytest.FixtureRequest, plain, labelled, tmp_path_factory) -> SimpleNamespace:
    """What `quantize_file` returned, and the source and the quantized file in their runtime."""
    source, opened = plain[request.param], OPEN[request.param]
    target = tmp_path_factory.mktemp("int8") / f"small{request.param}"
    found = quantize_file(
        source, target, calibration=PICTURES, test=labelled, calibration_images=8, max_drop=1.0
    )
    return SimpleNamespace(found=found, before=opened(source), after=opened(found.files[0]))


def test_int8_file_opens_like_its_source_and_is_marked_as_int8(done) -> None:
    found, before, engine = done.found, done.before, done.after
    assert engine.stored_precision == "int8"
    assert (engine.class_names, engine.preprocess) == (NAMES, before.preprocess)
    assert engine.input == before.input
    assert not [path for path in found.files[0].parent.iterdir() if path not in found.files]
    assert json.loads(engine.metadata["calibration_images"]) == found.calibration_images == 8


def test_weights_of_all_layers_but_the_patch_embedding_are_int8(done) -> None:
    found = done.found
    layers = 4 + 1  # a block of four, and the head
    assert (found.layers, found.float_layers) == (layers, ())
    path = found.files[0]
    if path.suffix == ".onnx":
        graph = onnx.load(path).graph
        rounded = {node.input[0]: node for node in graph.node if node.op_type == "QuantizeLinear"}
        eight = [
            t.name for t in graph.initializer if t.data_type == onnx.TensorProto.INT8 and len(t.dims) == 2
        ]
        assert (len(eight), len(rounded)) == (layers, layers)
        assert len(layers_of(graph)) == 1  # the one whose weights are not int8
    else:
        types = [op.get_element_type() for op in openvino.Core().read_model(path).get_ops() if is_matrix(op)]
        assert types.count(openvino.Type.i8) == layers


def is_matrix(op: object) -> bool:
    return op.get_type_name() == "Constant" and len(op.get_output_shape(0)) == 2 and op.get_byte_size() > 32


def test_comparison_counts_predictions_and_bytes(done, labelled) -> None:
    comparison = done.found.comparison
    answers = (
        done.after.predict([done.after.pixels(picture) for picture in PICTURES])
        .probabilities.argmax(dim=1)
        .numpy()
    )
    accuracy = comparison.paired
    assert (accuracy.total, accuracy.right, accuracy.won) == (40, 40, 0)
    assert accuracy.right_after == comparison.same == int((answers == labelled.labels).sum())
    assert comparison.after.size == sum(path.stat().st_size for path in done.found.files)
    assert accuracy.drop == pytest.approx(1 - comparison.agreement)


@pytest.fixture
def asked(plain, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """The layers that were to stay in float in each file, which is empty; the source is measured for it."""
    found = []

    def written(source, target, inputs, in_float, texts):
        found.append(in_float)
        target.write_bytes(b"")
        return dict(zip("abcdefgh", (1, 9, 2, 8, 3, 4, 5, 6), strict=True))

    monkeypatch.setitem(module.WRITERS, ".onnx", written)
    monkeypatch.setattr(module, "open_exported", lambda path, **_: OnnxEngine(plain[".onnx"]))
    return found


def test_large_accuracy_drop_keeps_layers_in_float_and_is_finally_rejected(
    asked, plain, labelled, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drops = iter([20, 16, 1])

    def dropping(*given: object) -> FileComparison:
        found = compare_files(*given)
        return dataclasses.replace(found, paired=dataclasses.replace(found.paired, lost=next(drops)))

    monkeypatch.setattr(module, "compare_files", dropping)
    reason = r"not kept.* 50\.00%, 40\.00%, 2\.50% .*\(95% interval of the last: .*and 1\.00% are allowed"
    with pytest.raises(UserError, match=f"model8.onnx is {reason}"):
        quantize_file(plain[".onnx"], tmp_path / "model8.onnx", calibration=PICTURES, test=labelled)
    assert asked == [(), ("b",), ("b", "d")]
    assert not list(tmp_path.iterdir())


def test_file_of_several_labels_is_compared_by_its_precision(tmp_path: Path) -> None:
    model = small_model(depth=1, class_names=NAMES, outputs="independent")
    own = TorchEngine(model, precision="fp32", device="cpu")
    probabilities = own.predict([own.pixels(picture) for picture in PICTURES]).probabilities  # (40, K)
    thresholds = probabilities.median(dim=0).values
    labels = (probabilities >= thresholds).numpy()
    labels[:3] = False  # images of no class
    model.config = model.config.replace(thresholds=tuple(thresholds.tolist()))
    source = export(model, tmp_path / "plain.onnx", input="tensors", images=PICTURES[:2]).path
    found = quantize_file(
        source,
        tmp_path / "int8.onnx",
        calibration=PICTURES,
        test=ImageSet("test", PICTURES, ClassSets(labels, NAMES)),
        calibration_images=8,
        max_drop=1.0,
    )
    comparison = found.comparison
    (before, _), (after, _) = comparison.paired.rows()
    assert (comparison.paired.name, comparison.paired.total) == ("mAP", 40)
    assert repr(found).startswith(
        f"QuantizationResult({tmp_path / 'int8.onnx'}: mAP {after}, in fp32 {before}"
    )
    assert 0.5 < comparison.agreement <= 1
    printed = "\n".join(comparison_lines(found))
    assert re.search(r"mAP +95% interval", printed)
    assert "of the mAP, 95% interval" in printed
    engine = OnnxEngine(found.files[0])
    assert engine.thresholds
    assert engine.thresholds == pytest.approx(thresholds.tolist())


def test_layers_kept_in_float_are_unchanged(plain, labelled, tmp_path: Path) -> None:
    source = plain[".onnx"]
    *_, head = layers_of(onnx.load(source).graph)
    pictures = calibration_batches(OnnxEngine(source), PICTURES, 4, seed=0)
    losses = module.WRITERS[".onnx"](source, tmp_path / "a.onnx", pictures, (head,), {})
    assert head not in losses
    assert len(losses) == 4
    assert head in layers_of(onnx.load(tmp_path / "a.onnx").graph)


def test_layer_with_an_input_outlier_has_the_largest_error(plain, tmp_path: Path) -> None:
    source = tmp_path / "a.onnx"
    file = onnx.load(plain[".onnx"])
    weight = exportable_model().encoder.blocks[0].mlp.fc1.weight.detach().numpy().T  # (D, 4D)
    changed = 0
    for tensor in file.graph.initializer:  # the same function, with one channel at 300 times the others
        values = onnx.numpy_helper.to_array(tensor).copy()
        if tensor.name.endswith(("norm2.weight", "norm2.bias")):
            values[0] *= 300
        elif np.array_equal(values, weight):
            values[0] /= 300
        else:
            continue
        tensor.CopyFrom(onnx.numpy_helper.from_array(values, tensor.name))
        changed += 1
    assert changed == 3
    onnx.save(file, source)
    pictures = calibration_batches(OnnxEngine(source), PICTURES, 4, seed=0)
    losses = module.WRITERS[".onnx"](source, tmp_path / "b.onnx", pictures, (), {})
    _patches, _qkv, _proj, fc1, _fc2, _head = layers_of(onnx.load(source).graph)
    assert worst(losses, 1 / 8) == (fc1,)
    assert losses[fc1] > 10 * max(loss for name, loss in losses.items() if name != fc1)


def test_rounding_error_is_the_lost_share_of_a_channels_energy() -> None:
    picture = {"x": np.array([3.0, 4.0]), "rounded": np.array([3.0, 3.0]), "z": np.zeros(2)}
    found = rounding_error({"layer": ("x", "rounded"), "zero": ("z", "z")}, [picture, picture])
    assert found == {"layer": (0 + 1 / 16) / 2, "zero": 0.0}


def test_calibration_is_drawn_by_seed_and_skips_unreadable_pictures(plain, tmp_path: Path) -> None:
    broken = tmp_path / "broken.png"
    broken.write_bytes(b"no picture")
    engine = OnnxEngine(plain[".onnx"])
    first, again, other = (calibration_batches(engine, [broken, *PICTURES], 5, seed) for seed in (1, 1, 2))
    assert [len(drawn) for drawn in (first, again, other)] == [5, 5, 5]
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(first, other, strict=True))
    assert len(calibration_batches(engine, [broken, *PICTURES], 1000, 0)) == len(PICTURES)
    with pytest.raises(UserError, match=r"broken\.png"):
        calibration_batches(engine, [broken], 5, 0)


def test_calibration_picture_and_original_have_nearly_the_same_logits(plain) -> None:
    engine = OpenVinoEngine(plain[".xml"], precision="fp32")
    wide = np.tile(np.linspace(0, 255, 360).astype(np.uint8)[None, :, None], (300, 1, 3))
    (small,) = calibration_batches(engine, [wide], 1, 0)
    assert small.shape == (1, 36, 36, 3)  # 32 / 0.9
    own = engine.answers(torch.from_numpy(engine.pixels(wide)[None]))[0]
    seen = torch.from_numpy(engine.run(small)[1])
    assert float((own - seen).abs().max()) < 0.05 * float(own.abs().max())


def test_unreadable_test_pictures_are_named_and_too_many_are_rejected(plain, labelled, tmp_path) -> None:
    broken = tmp_path / "broken.png"
    broken.write_bytes(b"no picture")
    engine = OnnxEngine(plain[".onnx"])
    labels = np.append(labelled.labels, 0)
    images = ImageSet("test", [*PICTURES, broken], ClassIndices(labels, NAMES))
    exact = measure(engine, batches_of(engine, images))
    found = compare_files(engine, engine, images, exact)
    assert (found.paired.total, found.same, len(found.unreadable)) == (40, 40, 1)
    assert str(broken) in found.unreadable[0]
    others = [tmp_path / f"{name}.png" for name in "ab"]
    few = ImageSet("test", [*PICTURES[:2], *others], ClassIndices(labels[:4], NAMES))
    with pytest.raises(UserError, match=r"10% of 4 images of the test set cannot be read.*a\.png"):
        measure(engine, batches_of(engine, few))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tree(tmp_path_factory.mktemp("data"), dict.fromkeys(NAMES, 10), size=(32, 32))


def test_model_without_classes_is_rejected_before_its_data_are_opened(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="int8 is measured by the accuracy of classes, and this model has no"):
        quantize(small_model(depth=1, head="none"), tmp_path / "a.onnx", data=tmp_path / "none")


@pytest.mark.usefixtures("asked")
def test_few_images_are_said_to_be_too_few_to_tell(plain, labelled, tmp_path: Path, caplog) -> None:
    few = labelled.subset("test", np.arange(9))
    for name, allowed, warned in (("a.onnx", 0.2, 1), ("b.onnx", 0.9, 0)):
        caplog.clear()
        quantize_file(plain[".onnx"], tmp_path / name, calibration=PICTURES[:4], test=few, max_drop=allowed)
        assert len(caplog.messages) == warned
    assert (tmp_path / "a.onnx").is_file()


def test_run_provides_training_and_test_images(data, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    config = TrainConfig.from_recipe("digits", data=str(data))
    (run / "config.yaml").write_text(config.to_yaml())
    Run(run).record_split(open_data(str(data)))
    calibration, test = calibration_and_test(Run(run), NAMES, None, None)
    assert (len(calibration) > len(test), len(test), test.name) == (True, 2 * len(NAMES), "test and val")
    assert not set(map(str, calibration)) & set(map(str, test.sources))
    assert [NAMES[label] for label in test.labels] == [Path(str(path)).parent.name for path in test.sources]


def test_calibration_needs_no_labels(data, tmp_path: Path) -> None:
    unlabelled = write_tree(tmp_path, {".": 20})
    calibration, test = calibration_and_test(None, NAMES, str(data), str(unlabelled))
    assert {Path(str(path)).parent for path in calibration} == {unlabelled}
    assert test.class_names == NAMES
    with pytest.raises(UserError, match="no such folder"):
        calibration_and_test(None, NAMES, str(data), str(tmp_path / "nothing"))
