"""The comparison of the logits of two runtimes."""

import pytest
import torch

from vitascope.deploy.export.verification import check_agreement, sample_pictures
from vitascope.errors import UserError
from vitascope.weights.agreement import agreement

OWN = torch.tensor([[1.0, 2.0, 3.0], [4.0, 1.0, 0.0]])


def test_different_top_class_is_rejected_with_the_numbers() -> None:
    other = OWN.clone()
    other[1] = torch.tensor([1.0, 4.0, 0.0])
    found = agreement(OWN, other)
    assert (found.same, found.images, found.difference) == (1, 2, 3)
    with pytest.raises(UserError, match=r"model\.onnx is not kept.*1 of 2 pictures; .*at most 3"):
        check_agreement(found, "model.onnx")


def test_equally_probable_classes_may_be_swapped() -> None:
    own = torch.tensor([[1.0, 1.0, 0.0]])
    other = torch.tensor([[1.0, 1.0 + 1e-6, 0.0]])
    check_agreement(agreement(own, other), "model.onnx")
    apart = torch.tensor([[1.0, 0.99, 0.0]])
    assert agreement(apart, apart[:, [1, 0, 2]]).same == 0


def test_same_class_with_different_logits_is_rejected() -> None:
    found = agreement(OWN, OWN + 0.01)
    assert found.same == 2
    with pytest.raises(UserError, match="outputs differ from the model"):
        check_agreement(found, "model.onnx")
    check_agreement(agreement(OWN, OWN + 0.01, tolerance=0.01), "model.onnx")


def test_nan_logits_are_rejected() -> None:
    for value in (float("nan"), float("inf")):
        other = OWN.clone()
        other[0, 1] = value
        with pytest.raises(UserError, match="outputs differ from the model"):
            check_agreement(agreement(OWN, other), "model.onnx")


def test_sample_pictures_are_photographs_of_several_sizes() -> None:
    pictures = sample_pictures()
    assert len(pictures) == 16
    assert len({picture.shape for picture in pictures}) >= 5
    assert all(picture.std() > 10 for picture in pictures)
