import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.models import law, small_config
from vitascope.models.engines.runtimes import (
    Batch,
    ExportedEngine,
    ExportedModelError,
    Outputs,
    metadata_of,
    read_metadata,
)
from vitascope.models.preprocess import Preprocess
from vitascope.models.resnet_config import ResNetConfig

FILE = Path("model.onnx")


class Told(ExportedEngine):
    """An engine of a file that is never run."""

    description = "told"

    def run(self, pixels: Batch) -> Sequence[Outputs]:
        raise NotImplementedError


PREPROCESS = Preprocess(image_size=(32, 32), crop_pct=0.9, mean=(0.1, 0.2, 0.3))
NAMES = ("ant", "bee", "cat", "dog", "eel")


def metadata(**changes: object) -> dict[str, str]:
    texts = metadata_of(small_config(class_names=NAMES), PREPROCESS, "pictures")
    return texts | {key: json.dumps(value) for key, value in changes.items()}


@law
@given(st.lists(st.text(st.characters(exclude_categories=())), min_size=5, max_size=5))
def test_any_class_names_survive_as_ascii(names: list[str]) -> None:
    texts = metadata(class_names=names)
    assert all(text.isascii() and text.isprintable() for text in texts.values())
    again = read_metadata(texts, FILE)
    assert again["class_names"] == tuple(names)
    assert again["preprocess"] == PREPROCESS


def test_digest_covers_the_file_and_its_external_weights(tmp_path: Path) -> None:
    def digest(name: str) -> str:
        return Told(tmp_path / name, metadata()).digest

    for name in ("a.onnx", "a.xml", "a.bin"):
        (tmp_path / name).write_bytes(b"1")
    first = digest("a.onnx"), digest("a.xml")
    assert first[0] == hashlib.sha256(b"1").hexdigest()
    (tmp_path / "a.bin").write_bytes(b"2")
    assert (digest("a.onnx") == first[0], digest("a.xml") == first[1]) == (True, False)


def test_architecture_is_read_if_this_version_knows_its_options() -> None:
    for config in (small_config(), ResNetConfig(layers=(1,), image_size=32)):
        assert Told(FILE, metadata(model=config.to_dict())).architecture == config.summary
    assert Told(FILE, metadata(model={"of_the_future": 1})).architecture == ""
    assert Told(FILE, metadata(model={})).architecture == ""


def test_meaning_of_the_outputs_is_in_the_metadata() -> None:
    several = small_config(outputs="independent", thresholds=(0.1, 0.2, 0.3, 0.4, 0.6))
    even = small_config(outputs="independent")
    for config, thresholds in ((several, several.thresholds), (even, (0.5,) * 5), (small_config(), ())):
        texts = metadata_of(config, PREPROCESS, "pictures") | {
            "model": "{}"
        }  # the options of a later version
        found = Told(FILE, texts)
        assert found.thresholds == thresholds
        assert json.loads(texts["thresholds"]) == list(thresholds)


def test_file_of_features_has_the_digest_of_the_body(tmp_path: Path) -> None:
    texts = metadata_of(small_config(class_names=NAMES), PREPROCESS, "pictures", body_digest="ab")
    found = Told(FILE, texts)
    assert (found.num_classes, found.class_names, found.meaning) == (0, (), "embedding")
    assert found.body_digest == "ab"
    with pytest.raises(ExportedModelError, match=r"model\.onnx: .*body_digest '' for num_classes 0 of embed"):
        read_metadata(texts | {"body_digest": '""'}, FILE)
    (tmp_path / "a.onnx").write_bytes(b"1")
    classifier = Told(tmp_path / "a.onnx", metadata())
    assert classifier.body_digest == classifier.digest


def test_missing_keys_are_named_and_unknown_ones_ignored() -> None:
    with pytest.raises(ExportedModelError, match=r"model\.onnx: not written by .*class_names"):
        read_metadata({"author": "me"}, FILE)
    assert read_metadata(metadata() | {"author": "me"}, FILE) == read_metadata(metadata(), FILE)


@pytest.mark.parametrize(
    ("key", "text", "reason"),
    [
        ("format", "2", "reads format 1, not format 2"),
        ("class_names", "[", "broken"),
        ("class_names", '["one"]', "1 class_names, thresholds [] and"),
        ("class_names", "null", "broken"),
        ("num_classes", "0", "num_classes 0 of exclusive outputs"),
        ("input", '"photos"', "unknown input 'photos'"),
        ("num_classes", "-1", "num_classes -1"),
        ("outputs", '"features"', "outputs"),
        ("outputs", '"embedding"', "num_classes 5 of embedding outputs"),
        ("body_digest", "5", "body_digest"),
        ("body_digest", '"ab"', "body_digest 'ab' for num_classes 5 of exclusive"),
        ("outputs", '"independent"', "thresholds [] and body_digest '' for num_classes 5 of independent"),
        ("thresholds", "[0.5]", "thresholds [0.5]"),
        ("thresholds", '["x"]', "thresholds must be a list of numbers, not ['x']"),
        ("thresholds", '"00000"', "thresholds must be a list of numbers, not '00000'"),
        ("thresholds", "null", "thresholds must be a list of numbers, not None"),
        ("thresholds", "[NaN]", "thresholds must be a list of numbers, not [nan]"),
        ("sets", "[]", "broken"),
        ("sets", '{"masses": [0.5]}', "counts"),
        ("sets", '{"masses": [[[0.5]]], "counts": 1, "ambiguous": 0}', "masses"),
        ("sets", '{"masses": ["x"], "counts": 1, "ambiguous": 0}', "broken"),
        ("sets", '{"masses": [0.5], "counts": 0, "ambiguous": 0}', "masses"),
        ("sets", '{"masses": [[0.5]], "counts": [1, 1, 1, 1, 1], "ambiguous": 0}', "masses of 1 classes"),
        ("sets", '{"masses": [[0.5]], "counts": [1], "ambiguous": 0}', "not those of sets of 5 classes"),
        ("sets", '{"masses": [1e999], "counts": 1, "ambiguous": 0}', "broken"),
        ("preprocess", "[]", "broken"),
        ("preprocess", '{"image_siz": [2, 2]}', "image_size"),
        ("preprocess", '{"image_size": [2, 2], "crop_pct": 7}', "crop_pct"),
    ],
)
def test_broken_metadata_is_rejected_naming_the_file(key: str, text: str, reason: str) -> None:
    with pytest.raises(ExportedModelError, match=r"model\.onnx") as rejected:
        read_metadata(metadata() | {key: text}, FILE)
    assert reason in str(rejected.value)
