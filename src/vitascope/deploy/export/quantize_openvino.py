"""int8 by NNCF, for OpenVINO: `FakeQuantize` before each layer, which the runtime turns into int8 kernels."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from vitascope.deploy.export.calibration import LOOKED_AT, Calibration, Rounding
from vitascope.deploy.export.silencing import silenced
from vitascope.deploy.predict.exported_model import INPUT, SECTION
from vitascope.deploy.predict.runtimes import missing_extra, openvino_core

LAYERS = ("MatMul", "Convolution")
PRODUCTS = (*LAYERS, "ScaledDotProductAttention")
MOVES = ("Convert", "Reshape", "Transpose", "Squeeze", "Unsqueeze", "Slice", "StridedSlice", "Gather")
"""Operations that change no number."""


def write_openvino_int8(
    source: Path, target: Path, inputs: Calibration, in_float: Collection[str], texts: Mapping[str, str]
) -> dict[str, float]:
    """Write the int8 file of an OpenVINO file; arguments and result as those of `write_onnx_int8`."""
    try:
        import openvino

        with silenced():
            import nncf
            from nncf.quantization.range_estimator import RangeEstimatorParametersSet
    except ImportError as error:
        raise missing_extra("openvino", "openvino and nncf") from error
    model = openvino_core().read_model(source)
    products = [op for op in all_operations(model) if op.get_type_name() in PRODUCTS]
    # Of attention NNCF would round the queries alone, which no kernel of the runtime makes use of; and the
    # matrices that resample a picture are computed, they have no weights.
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
                # Its default, the mean of the pictures' own ranges, cuts off what most of them have.
                activations_range_estimator_params=RangeEstimatorParametersSet.MINMAX
            ),
        )
    for key, text in texts.items():
        quantized.set_rt_info(text, [SECTION, key])
    openvino.save_model(quantized, target, compress_to_fp16=False)
    return rounding_of(quantized, inputs)


def all_operations(model: Any) -> Iterator[Any]:
    """Those of a graph, and of the branches in it."""
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
    """Where the numbers that an operation hands on come from."""
    while op.get_type_name() in MOVES:
        op = op.input_value(0).get_node()
    return op


def rounding_of(quantized: Any, inputs: Calibration) -> dict[str, float]:
    """What rounding takes from each int8 layer's input, by the layer's name."""
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
    rounding = Rounding(pairs)
    for batch in islice(inputs, LOOKED_AT):
        found = compiled({INPUT: batch})
        rounding.add({name: found[place] for place, name in enumerate(names)})
    return rounding.shares()
