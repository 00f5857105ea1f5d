"""int8 with NNCF, for OpenVINO: `FakeQuantize` before each layer makes the runtime choose int8 kernels."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from vitascope.deploy.export.calibration import MEASURED, rounding_error
from vitascope.deploy.export.formats import silenced
from vitascope.predict.runtimes import INPUT, SECTION, Batch, importing, openvino_core

LAYERS = ("MatMul", "Convolution")
PRODUCTS = (*LAYERS, "ScaledDotProductAttention")
MOVES = ("Convert", "Reshape", "Transpose", "Squeeze", "Unsqueeze", "Slice", "StridedSlice", "Gather")
"""Operations that change no value."""


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
    return rounding_of(quantized, inputs)


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
        op.get_type_name() in LAYERS and unmoved(op.input_value(1).get_node()).get_type_name() == "Constant"
    )


def unmoved(op: Any) -> Any:
    """The operation that computed the values, before any that only move them."""
    while op.get_type_name() in MOVES:
        op = op.input_value(0).get_node()
    return op


def rounding_of(quantized: Any, inputs: Sequence[Batch]) -> dict[str, float]:
    """The rounding error of each int8 layer's input, by the layer's name."""
    import openvino

    rounded = {
        op.get_friendly_name(): source
        for op in quantized.get_ordered_ops()
        if op.get_type_name() in LAYERS
        and (source := unmoved(op.input_value(0).get_node())).get_type_name() == "FakeQuantize"
    }
    ports = [port for op in rounded.values() for port in (op.input_value(0), op.output(0))]
    watched = openvino.Model(ports, quantized.get_parameters(), "watched")
    compiled = openvino_core().compile_model(watched, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    pairs = {name: (f"{name} before", f"{name} after") for name in rounded}
    names = [name for pair in pairs.values() for name in pair]
    runs = (compiled({INPUT: batch}) for batch in inputs[:MEASURED])
    return rounding_error(pairs, ({name: run[place] for place, name in enumerate(names)} for run in runs))
