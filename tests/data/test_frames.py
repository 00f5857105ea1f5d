import json
from pathlib import Path

import numpy as np
import pytest

from vitascope.data.frames import data_place
from vitascope.data.table_options import TableOptions
from vitascope.errors import UserError

pandas = pytest.importorskip("pandas", reason="pandas is not installed")


def lines(frame: object, **options: object) -> list[dict[str, object]]:
    with data_place(frame, TableOptions(**options)) as path:
        found = [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]
    assert not Path(path).exists()
    return found


def test_values_of_a_frame_are_plain_and_paths_absolute() -> None:
    frame = pandas.DataFrame(
        {
            "path": [Path("a.png"), "/b.png", None],
            "number": np.array([1, 2, 3]),
            "missing": [0.5, np.nan, None],
            "tags": [["x", "y"], {"z"}, np.array([1])],
            7: pandas.Categorical(["é", "u", None]),
        },
        index=[5, 5, 6],
    )
    assert lines(frame) == [
        {"path": str(Path.cwd() / "a.png"), "number": 1, "missing": 0.5, "tags": ["x", "y"], "7": "é"},
        {"path": "/b.png", "number": 2, "missing": None, "tags": ["z"], "7": "u"},
        {"path": None, "number": 3, "missing": None, "tags": [1], "7": None},
    ]


def test_paths_of_a_frame_are_relative_to_a_folder(tmp_path: Path) -> None:
    frame = pandas.DataFrame({"name": ["a.png"]})
    found = lines(frame, images=str(tmp_path), columns={"image": "name"})
    assert found == [{"name": str(tmp_path / "a.png")}]


def test_errors_name_the_frame_instead_of_its_file() -> None:
    with pytest.raises(UserError, match=r"^the DataFrame: no column of image paths among a"):
        lines(pandas.DataFrame({"a": [1]}))
    with pytest.raises(UserError, match="the columns path, path may each be that of the image"):
        lines(pandas.DataFrame([["a", "b"]], columns=["path", "path"]))
    frame = pandas.DataFrame({"path": ["a.png"]})
    with (
        pytest.raises(UserError, match=r"^the DataFrame: broken$"),
        data_place(frame, TableOptions()) as path,
    ):
        raise UserError(f"{path}: broken")


def test_value_that_json_lacks_is_named_and_other_data_stay_as_they_are() -> None:
    values = pandas.Series([1, 10**5000], dtype=object)
    with pytest.raises(UserError, match=r"^the DataFrame cannot be written as JSON: "):
        lines(pandas.DataFrame({"path": ["a.png", "b.png"], "value": values}))
    for data in ("digits", Path("photos")):
        with data_place(data, TableOptions()) as place:
            assert place == str(data)
