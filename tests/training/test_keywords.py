"""The keywords of `train` for type checkers are the options of `TrainConfig`."""

import dataclasses
from os import PathLike
from types import NoneType
from typing import Any, get_args, get_type_hints

from vitascope.data.frames import DataFrame
from vitascope.models.configuration import field_types
from vitascope.training.keywords import TrainKeywords
from vitascope.training.options.recipes import GROUP_OF, TrainConfig

RECORDED = {"task", "fold"}


def leaves(kind: Any) -> set[Any]:
    """The plain types and the choices in a type: of `int | tuple[int, int] | None` int and NoneType."""
    if not get_args(kind):
        return {kind}
    return set().union(*({part} if isinstance(part, str) else leaves(part) for part in get_args(kind)))


def test_keywords_of_train_are_its_options_with_their_types() -> None:
    keywords = get_type_hints(TrainKeywords)
    groups = {name for name, kind in field_types(TrainConfig).items() if dataclasses.is_dataclass(kind)}
    assert set(keywords) == {*GROUP_OF, *groups} - RECORDED
    for name, group in GROUP_OF.items():
        if name not in RECORDED:
            option = field_types(TrainConfig if group is None else field_types(TrainConfig)[group])[name]
            as_text = {PathLike[str], DataFrame, str} if str in leaves(keywords[name]) else set()
            as_numbers = {float} if name == "class_weights" else set()  # by name, as columns are
            assert leaves(keywords[name]) - as_text - as_numbers == leaves(option) - {..., str}, name


def test_none_is_a_keyword_where_it_is_a_default() -> None:
    keywords = get_type_hints(TrainKeywords)
    for name in keywords.keys() & GROUP_OF.keys():
        assert TrainConfig().option(name) is not None or NoneType in get_args(keywords[name]), name
