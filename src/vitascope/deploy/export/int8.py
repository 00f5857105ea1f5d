"""int8 layers of exported files, for ONNX Runtime and OpenVINO: ranges from pictures, and the rounding error.

In an ONNX file, each layer stands between quantize and dequantize, which the runtime's CPU kernels fuse. For
OpenVINO, `FakeQuantize` before each layer makes the runtime choose int8 kernels.
"""

import dataclasses
import itertools
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

from vitascope.data.reading import Faults, readable
from vitascope.deploy.export.formats import silenced
from vitascope.errors import UserError
from vitascope.models.decoding import ImageSource
from vitascope.models.engines.runtimes import INPUT, SECTION, Batch, ExportedEngine, importing, openvino_core

MEASURED = 16
"""Pictures on which the rounding error is measured; each gives thousands of numbers per layer."""
ONNX_LAYERS = ("MatMul", "Gemm", "Conv")
MOST_BYTES = 2**31 - 2**24
"""Limit of one file in protobuf, less what quantization adds."""
OPENVINO_LAYERS = ("MatMul", "Convolution")
PRODUCTS = (*OPENVINO_LAYERS, "ScaledDotProductAttention")
MOVES = ("Convert", "Reshape", "Transpose", "Squeeze", "Unsqueeze", "Slice", "StridedSlice", "Gather")
"""Operations that change no value."""


def calibration_batches(
    engine: ExportedEngine, sources: Sequence[ImageSource], count: int, seed: int
) -> list[Batch]:
    """Up to `count` readable pictures, drawn by `seed`, as the graph takes them: (1, H, W, C) each."""
    preprocess = engine.preprocess
    if engine.input == "pictures":  # keep what the graph will crop: small, but the model sees the same
        size, crop_pct = preprocess.resize_to, preprocess.crop_pct
        if size is None:
            height, width = (round(side / crop_pct) for side in preprocess.image_size)
            size, crop_pct = (height, width), 1.0
        preprocess = dataclasses.replace(preprocess, image_size=size, crop_pct=crop_pct)
    faults, order = Faults(len(sources)), np.random.default_rng(seed).permutation(len(sources))
    pictures = readable(preprocess.pixels, (sources[index] for index in order), faults)
    some = itertools.islice(pictures, count)
    batches = [np.ascontiguousarray(pixels.transpose(1, 2, 0)[None]) for _, pixels in some]
    if not batches:
        raise UserError(f"no picture to calibrate with: {'; '.join(faults.left_out[:1]) or 'there is none'}")
    return batches


def rounding_error(
    pairs: Mapping[str, tuple[str, str]], pictures: Iterable[Mapping[str, npt.NDArray[Any]]]
) -> dict[str, float]:
    """The share of the energy of each layer's input that rounding loses, averaged over channels.

    `pairs` names each layer's input before and after rounding; `pictures` are those tensors, per picture.
    """
    # Averaged, because in a sum a dominant channel would hide the errors of the others, whose range it takes.
    energy: dict[str, npt.NDArray[np.float64]] = {}
    lost: dict[str, npt.NDArray[np.float64]] = {}
    for values in pictures:
        for layer, (before, after) in pairs.items():
            exact = values[before].astype(np.float64)
            energy[layer] = energy.get(layer, 0.0) + energy_of(exact)
            lost[layer] = lost.get(layer, 0.0) + energy_of(exact - values[after])
    return {  # 0 for a channel of zeros
        layer: float((lost[layer] / np.where(total > 0, total, np.inf)).mean())
        for layer, total in energy.items()
    }


def energy_of(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """The sum of squares per channel, of (B, C, H, W) or with the channels last."""
    channels = 1 if values.ndim == 4 else values.ndim - 1
    return np.square(values).sum(axis=tuple(axis for axis in range(values.ndim) if axis != channels))


def write_onnx_int8(
    source: Path,
    target: Path,
    inputs: Sequence[Batch],
    in_float: Collection[str],
    metadata: Mapping[str, str],
) -> dict[str, float]:
    """Write the int8 file of an ONNX file; return the rounding error of each int8 layer's input."""
    with importing("onnx", "onnxruntime and onnx"):
        import onnx
        from onnxruntime.quantization import QuantFormat, QuantType, quantize_static
        from onnxruntime.quantization.shape_inference import quant_pre_process
    with tempfile.TemporaryDirectory(prefix=".onnx-", dir=target.parent) as aside:
        shaped, written = Path(aside) / "shaped.onnx", Path(aside) / "int8.onnx"
        apart = sum(file.stat().st_size for file in source.parent.glob(f"{source.name}*")) > MOST_BYTES
        quant_pre_process(
            source,
            shaped,
            skip_optimization=True,  # the runtime optimizes when it loads a file, for its machine
            skip_symbolic_shape=True,
            save_as_external_data=apart,
        )
        _, *layers = layers_of(onnx.load(shaped, load_external_data=False).graph)
        quantize_static(
            shaped,
            written,
            # as a CalibrationDataReader: one input after another, then None
            SimpleNamespace(get_next=partial(next, ({INPUT: batch} for batch in inputs), None)),
            quant_format=QuantFormat.QDQ,
            op_types_to_quantize=list(ONNX_LAYERS),
            nodes_to_quantize=[name for name in layers if name not in in_float],
            per_channel=True,
            activation_type=QuantType.QUInt8,
            weight_type=QuantType.QInt8,
            use_external_data_format=apart,
            # Sums stay floats: a second rounding would lose accuracy and time.
            extra_options={"OpTypesToExcludeOutputQuantization": ["MatMul", "Gemm"]},
        )
        model = onnx.load(written)
    del model.metadata_props[:]
    onnx.helper.set_model_props(model, dict(metadata))
    onnx.save(model, target)
    return onnx_rounding(target, model, inputs)


def layers_of(graph: Any) -> list[str]:
    """Names of the products with weights (none in attention and resizing), the patch embedding first."""
    constants = {tensor.name for tensor in graph.initializer}
    return [node.name for node in graph.node if node.op_type in ONNX_LAYERS and node.input[1] in constants]


def onnx_rounding(target: Path, model: Any, inputs: Sequence[Batch]) -> dict[str, float]:
    """The rounding error of each layer's input, by the layer's name."""
    import onnx
    import onnxruntime

    makers = {name: node for node in model.graph.node for name in node.output}
    pairs: dict[str, tuple[str, str]] = {}  # the input before and after rounding
    for node in model.graph.node:
        rounded = makers.get(node.input[0]) if node.op_type in ONNX_LAYERS else None
        if rounded is not None and rounded.op_type == "DequantizeLinear":
            pairs[node.name] = (makers[rounded.input[0]].input[0], node.input[0])
    watched = sorted(
        {name for pair in pairs.values() for name in pair} - {out.name for out in model.graph.output}
    )
    model.graph.output.extend(onnx.helper.make_empty_tensor_value_info(name) for name in watched)
    with tempfile.TemporaryDirectory(prefix=".onnx-", dir=target.parent) as aside:
        path = Path(aside) / "watched.onnx"
        onnx.save(model, path)
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        # Fused int8 products saturate on a CPU without VNNI, which is no rounding of the input.
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        runs = (session.run(watched, {INPUT: batch}) for batch in inputs[:MEASURED])
        return rounding_error(pairs, (dict(zip(watched, map(np.asarray, run), strict=True)) for run in runs))


def write_openvino_int8(
    source: Path,
    target: Path,
    inputs: Sequence[Batch],
    in_float: Collection[str],
    metadata: Mapping[str, str],
) -> dict[str, float]:
    """Write the int8 file of an OpenVINO file; arguments and result are those of `write_onnx_int8`."""
    with importing("openvino", "openvino and nncf"):
        import openvino

        with silenced():
            import nncf
            from nncf.quantization.range_estimator import RangeEstimatorParametersSet
    model = openvino_core().read_model(source)
    products = [op for op in all_operations(model) if op.get_type_name() in PRODUCTS]
    # Products without weights stay in float: in attention, NNCF would round the queries alone, which no
    # kernel of the runtime uses; and the matrices that resample a picture are computed.
    patch_embedding = next(op for op in products if has_weights(op))
    kept = [op.get_friendly_name() for op in products if op == patch_embedding or not has_weights(op)]
    with silenced():
        quantized = nncf.quantize(
            model,
            nncf.Dataset(inputs),
            subset_size=len(inputs),
            model_type=nncf.ModelType.TRANSFORMER,
            preset=nncf.QuantizationPreset.MIXED,
            ignored_scope=nncf.IgnoredScope(names=[*kept, *in_float]),
            advanced_parameters=nncf.AdvancedQuantizationParameters(
                # The default, the mean of each picture's own range, clips values of most pictures.
                activations_range_estimator_params=RangeEstimatorParametersSet.MINMAX
            ),
        )
    for key, text in metadata.items():
        quantized.set_rt_info(text, [SECTION, key])
    openvino.save_model(quantized, target, compress_to_fp16=False)
    return openvino_rounding(quantized, inputs)


def all_operations(model: Any) -> Iterator[Any]:
    """The operations of a graph and of its branches."""
    for op in model.get_ordered_ops():
        yield op
        if op.get_type_name() == "If":
            for branch in (0, 1):
                yield from all_operations(op.get_function(branch))


def has_weights(op: Any) -> bool:
    """Whether an operation multiplies by a constant."""
    return (
        op.get_type_name() in OPENVINO_LAYERS
        and unmoved(op.input_value(1).get_node()).get_type_name() == "Constant"
    )


def unmoved(op: Any) -> Any:
    """The operation that computed the values, before any that only move them."""
    while op.get_type_name() in MOVES:
        op = op.input_value(0).get_node()
    return op


def openvino_rounding(quantized: Any, inputs: Sequence[Batch]) -> dict[str, float]:
    """The rounding error of each int8 layer's input, by the layer's name."""
    import openvino

    rounded = {
        op.get_friendly_name(): source
        for op in quantized.get_ordered_ops()
        if op.get_type_name() in OPENVINO_LAYERS
        and (source := unmoved(op.input_value(0).get_node())).get_type_name() == "FakeQuantize"
    }
    ports = [port for op in rounded.values() for port in (op.input_value(0), op.output(0))]
    watched = openvino.Model(ports, quantized.get_parameters(), "watched")
    compiled = openvino_core().compile_model(watched, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    pairs = {name: (f"{name} before", f"{name} after") for name in rounded}
    names = [name for pair in pairs.values() for name in pair]
    runs = (compiled({INPUT: batch}) for batch in inputs[:MEASURED])
    return rounding_error(pairs, ({name: run[place] for place, name in enumerate(names)} for run in runs))
