"""int8 by ONNX Runtime: quantize and dequantize around each layer, which its CPU kernels fuse."""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from vitascope.deploy.export.calibration import LOOKED_AT, Calibration, Rounding
from vitascope.deploy.predict.exported_model import INPUT, Batch
from vitascope.deploy.predict.runtimes import missing_extra

LAYERS = ("MatMul", "Gemm", "Conv")
MOST_BYTES = 2**31 - 2**24
"""Of one file in protobuf, with room for what quantization adds."""


def write_onnx_int8(
    source: Path, target: Path, inputs: Calibration, in_float: Collection[str], texts: Mapping[str, str]
) -> dict[str, float]:
    """Write the int8 file of an ONNX file.

    Args:
        source: the file.
        target: the new file.
        inputs: what the graph takes, for the ranges.
        in_float: layers that stay as they are.
        texts: the metadata to write.

    Returns:
        What rounding takes from the input of each int8 layer, see `Rounding.shares`.
    """
    try:
        import onnx
        from onnxruntime.quantization import QuantFormat, QuantType, quantize_static
        from onnxruntime.quantization.shape_inference import quant_pre_process
    except ImportError as error:
        raise missing_extra("onnx", "onnxruntime and onnx") from error
    with tempfile.TemporaryDirectory(prefix=".onnx-", dir=target.parent) as aside:
        shaped, written = Path(aside) / "shaped.onnx", Path(aside) / "int8.onnx"
        apart = sum(file.stat().st_size for file in source.parent.glob(f"{source.name}*")) > MOST_BYTES
        quant_pre_process(
            source,
            shaped,
            skip_optimization=True,  # the runtime does it when it loads a file, for its own machine
            skip_symbolic_shape=True,
            save_as_external_data=apart,
        )
        _, *layers = layers_of(onnx.load(shaped, load_external_data=False).graph)
        quantize_static(
            shaped,
            written,
            reader(inputs),
            quant_format=QuantFormat.QDQ,
            op_types_to_quantize=list(LAYERS),
            nodes_to_quantize=[name for name in layers if name not in in_float],
            per_channel=True,
            activation_type=QuantType.QUInt8,
            weight_type=QuantType.QInt8,
            use_external_data_format=apart,
            # Sums leave the integer units as floats: no second rounding, which would also be slower.
            extra_options={"OpTypesToExcludeOutputQuantization": ["MatMul", "Gemm"]},
        )
        model = onnx.load(written)
    del model.metadata_props[:]
    onnx.helper.set_model_props(model, dict(texts))
    onnx.save(model, target)
    return rounding_of(target, model, inputs)


def layers_of(graph: Any) -> list[str]:
    """The products with weights, by name, the patch embedding first.

    Those of two activations have none, nor have those with the matrices that resample a picture.
    """
    constants = {tensor.name for tensor in graph.initializer}
    return [node.name for node in graph.node if node.op_type in LAYERS and node.input[1] in constants]


def reader(inputs: Calibration) -> Any:
    """The inputs, as the library asks for them."""
    from onnxruntime.quantization import CalibrationDataReader

    class Reader(CalibrationDataReader):  # type: ignore[misc] # untyped
        """One after another, then None."""

        def __init__(self) -> None:
            self._left: Iterator[Batch] = iter(inputs)

        def get_next(self) -> dict[str, Batch] | None:
            """The next, by the name of the graph's input."""
            batch = next(self._left, None)
            return None if batch is None else {INPUT: batch}

    return Reader()


def rounding_of(target: Path, model: Any, inputs: Calibration) -> dict[str, float]:
    """What rounding takes from each layer's input, by the layer's name."""
    import onnx
    import onnxruntime

    makers = {name: node for node in model.graph.node for name in node.output}
    pairs: dict[str, tuple[str, str]] = {}  # the input before and after rounding
    for node in model.graph.node:
        rounded = makers.get(node.input[0]) if node.op_type in LAYERS else None
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
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        rounding = Rounding(pairs)
        for batch in islice(inputs, LOOKED_AT):
            found = dict(zip(watched, session.run(watched, {INPUT: batch}), strict=True))
            rounding.add({name: np.asarray(value) for name, value in found.items()})
    return rounding.shares()
