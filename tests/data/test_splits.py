import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.test_folds import drawn_images
from tests.models import law
from vitascope.data.folds import division_of
from vitascope.data.splits import (
    ImageSet,
    Inventory,
    bound_sets,
    complete_splits,
    draw_share,
    stratified_split,
)
from vitascope.data.targets import ClassIndices, ClassSets
from vitascope.errors import UserError

NAMES = ("ant", "bee", "cat")


def images_of(targets: ClassIndices | ClassSets, groups: list[str] | None = None) -> ImageSet:
    """Different images of one pixel."""
    sources = [np.array([[number // 256, number % 256]], np.uint8) for number in range(len(targets))]
    given = {} if groups is None else {"groups": np.array(groups, np.str_)}
    return ImageSet("all", sources, targets, **given)


@law
@given(keys=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=40))
def test_images_of_an_equal_key_are_in_one_set(keys: list[tuple[int, int]]) -> None:
    first, second = np.array(keys).T
    sets = bound_sets(first, second)
    for key in (first, second):
        assert all(len(np.unique(sets[key == value])) == 1 for value in key)
    # No more is bound than a chain of equal keys connects.
    assert len(np.unique(bound_sets(np.arange(len(keys)), np.arange(len(keys))))) == len(keys)


def test_an_image_is_called_by_its_part_if_the_data_have_parts() -> None:
    assert ImageSet("test", []).noun == "test image"
    assert ImageSet("all", []).noun == "image"


def test_a_chain_of_equal_keys_binds_its_ends() -> None:
    assert bound_sets(np.array([0, 0, 1, 2]), np.array([5, 6, 6, 7])).tolist() == [0, 0, 0, 1]


@law
@given(
    sizes=st.lists(st.integers(1, 30), min_size=2, max_size=40),
    share=st.sampled_from([0.1, 0.2, 0.5]),
    seed=st.integers(0, 9),
    classes=st.integers(0, 4),
)
def test_no_set_is_divided_and_the_share_is_within_one_set_of_the_request(
    sizes: list[int], share: float, seed: int, classes: int
) -> None:
    sets = np.repeat(np.arange(len(sizes)), sizes)
    # A quarter of the images have none of the classes, so that no class needs all sets.
    labels = np.random.default_rng(seed).random((len(sets), classes)) < 0.3
    labels[np.isin(sets, np.argsort(sizes)[: len(sizes) // 4])] = False
    drawn = draw_share(labels, sets, share, np.random.default_rng(seed), every_class=False)
    assert all(len(np.unique(drawn[sets == number])) == 1 for number in range(len(sizes)))
    assert not (labels.any(axis=0) & (labels[drawn].sum(axis=0) == labels.sum(axis=0))).any()
    bound_by_class = [k for k in range(classes) if not labels[~drawn, k].sum() > labels[drawn, k].sum()]
    if not bound_by_class:
        assert abs(drawn.sum() - share * len(sets)) <= max(sizes)


def test_classes_of_images_with_several_have_their_share() -> None:
    generator = np.random.default_rng(0)
    labels = generator.random((2000, 6)) < np.array([0.01, 0.02, 0.1, 0.3, 0.5, 0.9])
    drawn = draw_share(labels, np.arange(2000), 0.1, generator, every_class=False)
    assert drawn.sum() == 200
    counts = labels.sum(axis=0)
    assert (np.abs(labels[drawn].sum(axis=0) - 0.1 * counts) <= np.maximum(1, 0.03 * counts)).all()


def test_a_split_by_groups_divides_none_and_has_every_class_in_both_parts() -> None:
    groups = [f"patient {number // 5}" for number in range(150)]
    labels = np.array([number // 5 % 3 for number in range(150)])
    rest, val = stratified_split(images_of(ClassIndices(labels, NAMES), groups), 0.1, "val", seed=3)
    assert not set(rest.groups.tolist()) & set(val.groups.tolist())
    assert len(val) == 15
    assert all((part.truth.counts > 0).all() for part in (rest, val))
    again, _ = stratified_split(images_of(ClassIndices(labels, NAMES), groups), 0.1, "val", seed=3)
    other, _ = stratified_split(images_of(ClassIndices(labels, NAMES), groups), 0.1, "val", seed=4)
    assert rest.groups.tolist() == again.groups.tolist() != other.groups.tolist()


def test_copies_in_two_groups_keep_both_in_one_part() -> None:
    images = images_of(ClassIndices(np.zeros(40, np.int64), NAMES[:1]), [str(n // 2) for n in range(40)])
    sources = list(images.sources)
    sources[30] = sources[2]  # groups 15 and 1
    rest, val = stratified_split(
        ImageSet("all", sources, images.targets, groups=images.groups), 0.5, "val", seed=0
    )
    assert any({"1", "15"} <= set(part.groups.tolist()) for part in (rest, val))
    assert not set(rest.groups.tolist()) & set(val.groups.tolist())


@settings(max_examples=30, deadline=None)
@given(
    drawn_images(),
    st.sampled_from(["all", "train"]),
    st.integers(0, 99),
    st.sampled_from(["reject", "train"]),
)
def test_drawn_splits_have_images_and_divide_no_group_and_no_copies(images, name, seed, rare) -> None:
    inventory = Inventory((dataclasses.replace(images, name=name),), 1, None)
    try:
        splits = complete_splits(inventory, "DATA", seed=seed, rare=rare)
    except UserError:
        return
    sets = division_of(images.identified()).sets
    rows = {id(source): row for row, source in enumerate(images.sources)}
    parts = [{sets[rows[id(source)]] for source in part.sources} for part in splits.parts.values()]
    assert all(parts)
    assert sum(map(len, parts)) == len(set().union(*parts))


def test_a_class_in_one_group_alone_cannot_be_divided() -> None:
    groups = ["p"] * 10 + [f"q{n}" for n in range(20)]
    targets = ClassIndices(np.repeat([0, 1], [10, 20]), NAMES[:2])
    with pytest.raises(UserError, match=r"all images of class 'ant' are in one group, 'p'"):
        stratified_split(images_of(targets, groups), 0.1, "val", seed=0)


def test_a_rare_class_of_several_stays_in_training() -> None:
    labels = np.zeros((50, 2), np.bool_)
    labels[::2, 0] = True
    labels[7, 1] = True
    rest, val = stratified_split(images_of(ClassSets(labels, NAMES[:2])), 0.1, "val", seed=0)
    assert len(val) == 5
    assert rest.truth.counts[1] == 1


def test_all_of_a_class_is_not_drawn_even_where_the_share_would_need_it() -> None:
    labels, sets = np.repeat([[True], [False]], [4, 10], axis=0), np.repeat([0, 1], [4, 10])
    assert not draw_share(labels, sets, 0.35, np.random.default_rng(0), every_class=False).any()
