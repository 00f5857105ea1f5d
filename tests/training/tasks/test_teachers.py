from pathlib import Path

import pytest
import torch

from tests.models import random_images, small_model, with_preprocess
from vitascope.errors import UserError
from vitascope.models.preprocess import Preprocess
from vitascope.models.weights.loading import save_pretrained
from vitascope.training.tasks.teachers import class_order, open_teacher

PETS = ("ant", "bee", "cat", "dog", "elk")


def saved(folder: Path, preprocess: Preprocess | None = None, **options) -> str:
    model = small_model(**options)
    save_pretrained(model if preprocess is None else with_preprocess(model, preprocess), folder)
    return str(folder)


def pictures(*shape: int) -> torch.Tensor:
    return random_images(*shape).sigmoid()


def test_teacher_returns_its_models_logits_of_normalized_images(tmp_path: Path) -> None:
    preprocess = Preprocess(image_size=(32, 32), mean=(0.1, 0.4, 0.7), std=(0.2, 0.3, 0.6))
    teacher = open_teacher(saved(tmp_path, preprocess, class_names=PETS), PETS, device="cpu")
    images = pictures(2, 3, 32, 32)
    mean, std = torch.tensor([0.1, 0.4, 0.7]).view(3, 1, 1), torch.tensor([0.2, 0.3, 0.6]).view(3, 1, 1)
    expected = small_model(class_names=PETS)((images - mean) / std)
    torch.testing.assert_close(teacher(images), expected)
    assert not teacher(images).requires_grad
    assert not teacher.model.training
    assert not any(parameter.requires_grad for parameter in teacher.model.parameters())


def test_teachers_classes_are_reordered_to_match_the_data(tmp_path: Path) -> None:
    ours = ("dog", "ant", "elk", "cat", "bee")
    ref, images = saved(tmp_path, class_names=PETS), pictures(2, 3, 32, 32)
    alike, permuted = (open_teacher(ref, names, device="cpu")(images) for names in (PETS, ours))
    for index, name in enumerate(ours):
        torch.testing.assert_close(permuted[:, index], alike[:, PETS.index(name)])


def test_other_classes_are_rejected_with_the_difference(tmp_path: Path) -> None:
    ref = saved(tmp_path, class_names=PETS)
    with pytest.raises(
        UserError, match=r"5 classes, which are not the 3 .* lacks fly; the data lack cat, dog, elk"
    ):
        open_teacher(ref, ("ant", "bee", "fly"), device="cpu")
    with pytest.raises(UserError, match="it lacks fly; the data lack elk"):
        open_teacher(ref, ("ant", "bee", "cat", "dog", "fly"), device="cpu")
    with pytest.raises(UserError, match=r"lacks a0, a1, a2, a3, a4 and 2 more; the data lack ant, bee"):
        class_order("t", ("ant", "bee"), 2, tuple(f"a{index}" for index in range(7)))


def test_teacher_without_class_names_is_accepted_with_a_note_if_the_count_matches(tmp_path, capsys) -> None:
    ref = saved(tmp_path)
    assert open_teacher(ref, PETS, device="cpu").order is None
    note = f"teacher {ref} has no class names: its 5 are assumed to be in the data's order\n"
    assert capsys.readouterr().out == note
    with pytest.raises(UserError, match="has 5 classes, without names; the data have 3"):
        open_teacher(ref, PETS[:3], device="cpu")
    open_teacher(saved(tmp_path / "named", class_names=PETS), PETS, device="cpu")
    assert capsys.readouterr().out == ""


def test_wordnet_ids_match_imagenet_class_names(capsys) -> None:
    """ImageNet's folders are named by ids, its models' classes by words, both in the order of the ids."""
    ids = ("n01440764", "n01443537")
    assert class_order("t", ("tench", "goldfish"), 2, ids) is None
    assert "in words" in capsys.readouterr().out
    assert class_order("t", ids[::-1], 2, ids) == [1, 0]
    for theirs, ours in ((("n01440764", "n01484850"), ids), (ids, ("goldfish", "tench"))):
        with pytest.raises(UserError, match="classes, which are not the 2 of the data"):
            class_order("t", theirs, 2, ours)


def test_model_that_cannot_teach_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="a teacher needs a head"):
        open_teacher(saved(tmp_path / "headless", head="none"), PETS, device="cpu")
    ref = saved(tmp_path / "odd", Preprocess(image_size=(30, 30)), class_names=PETS)
    with pytest.raises(UserError, match=r"does not take images \(1, 3, 30, 30\): .*multiple of patch 8"):
        open_teacher(ref, PETS, device="cpu")
