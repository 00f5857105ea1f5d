"""int8 with ONNX Runtime: each layer between quantize and dequantize, which its CPU kernels fuse."""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from vitascope.deploy.export.calibration import MEASURED, rounding_error
from vitascope.predict.runtimes import INPUT, Batch, importing

LAYERS = ("MatMul", "Gemm", "Conv")
MOST_BYTES = 2**31 - 2**24
"""Limit of one file in protobuf, less what quantization adds."""


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
            op_types_to_quantize=list(LAYERS),
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
    return rounding_of(target, model, inputs)


def layers_of(graph: Any) -> list[str]:
    """Names of the products with weights (none in attention and resizing), the patch embedding first."""
    constants = {tensor.name for tensor in graph.initializer}
    return [node.name for node in graph.node if node.op_type in LAYERS and node.input[1] in constants]


def rounding_of(target: Path, model: Any, inputs: Sequence[Batch]) -> dict[str, float]:
    """The rounding error of each layer's input, by the layer's name."""
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
        # Fused int8 products saturate on a CPU without VNNI, which is no rounding of the input.
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        runs = (session.run(watched, {INPUT: batch}) for batch in inputs[:MEASURED])
        return rounding_error(pairs, (dict(zip(watched, map(np.asarray, run), strict=True)) for run in runs))
