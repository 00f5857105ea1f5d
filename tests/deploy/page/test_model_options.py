"""The models that a page holds."""

import pytest

from tests.model import small_model, small_resnet
from vitascope.deploy.page.model_options import EVERY, HELD, check_held
from vitascope.errors import UserError
from vitascope.model.config import ViTConfig


def test_table_has_every_option_of_a_model() -> None:
    assert set(HELD) == set(ViTConfig().to_dict())


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"attention": "axial"}, "of attention 'global', not of attention 'axial'"),
        ({"token_merging": 2}, "of token_merging 0, not of token_merging 2"),
        ({"stem": "resnet", "resnet_layers": (1,), "resnet_width": 4}, "not of stem 'resnet'"),
        ({"in_channels": 2}, "of in_channels 1 or 3, not of in_channels 2"),
    ],
)
def test_other_values_are_rejected_by_the_options_name(options: dict, named: str) -> None:
    with pytest.raises(UserError, match="vitascope serve") as error:
        check_held(small_model(**options))
    assert named in str(error.value)


def test_resnet_is_rejected() -> None:
    with pytest.raises(UserError, match="a page holds Vision Transformers, not a ResNet"):
        check_held(small_resnet())


def test_options_of_which_a_page_has_every_value_are_not_tuples() -> None:
    assert all(values == EVERY for values in HELD.values() if isinstance(values, str))
