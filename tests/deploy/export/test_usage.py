"""The program that uses an exported model without vitascope."""

from pathlib import Path

import pytest

from vitascope.data.preprocess import Preprocess
from vitascope.deploy.export.usage import usage


@pytest.mark.parametrize("suffix", [".onnx", ".xml", ".pt2"])
def test_program_for_tensors_and_classes_without_names_is_a_program(suffix: str) -> None:
    fit = Preprocess(image_size=(32, 24), channels=1, mean=(0.5,), std=(0.5,), exif_orientation=False)
    program = usage(Path(f"a{suffix}"), fit, (), "tensors")
    compile(program, "usage", "exec")
    assert "class_names[" not in program
    assert "exif_transpose" not in program
    assert 'convert("L")' in program
    assert "(24, 32)" in program
