from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.models import law, law_of_models, randomize, small_config, small_model, valid_configs
from vitascope.models.config import OPTIONS, ViTConfig
from vitascope.models.preprocess import Preprocess
from vitascope.models.vit import VisionTransformer
from vitascope.models.weights.files import CheckpointError
from vitascope.models.weights.mapping import (
    Family,
    Source,
    State,
    Table,
    changes,
    from_family,
    reject,
    reshaped,
    rows,
    stacked,
    to_family,
)

PREPROCESS = Preprocess(image_size=(32, 32))
TABLE: Table = {
    "class_token": "wte",
    "patch_embedding.weight": reshaped(
        "patches",
        theirs=lambda ours: ours.permute(2, 3, 1, 0),
        ours=lambda theirs: theirs.permute(3, 2, 0, 1),
    ),
    "patch_embedding.resnet.stages.{stage}.{unit}.*": "unit[{unit}]of[{stage}].*",
    "encoder.blocks.{i}.attention.qkv.weight": stacked("q[{i}]", "k[{i}]", "v[{i}]"),
    "encoder.blocks.{i}.*": "layer[{i}].*",
    "*": "rest.*",
}


class Toy(Family):
    """Every model, with patches in another layout, separate queries, keys and values, numbers in brackets."""

    name = "toy"
    supports = dict.fromkeys(OPTIONS, ())
    ignored = ("mask.*", "layer[{i}].age")

    def __init__(self, table: Table = TABLE) -> None:
        self.names = table
        self.written: list[tuple[ViTConfig, State, Preprocess]] = []

    def recognizes(self, source: Source) -> bool:
        return source.has("wte")

    def table(self, config: ViTConfig) -> Table:
        return self.names

    def read_config(self, source: Source) -> ViTConfig:
        raise NotImplementedError

    def read_preprocess(self, source: Source, config: ViTConfig) -> Preprocess:
        raise NotImplementedError

    def write(self, config: ViTConfig, state: State, preprocess: Preprocess, folder: Path) -> list[Path]:
        assert folder.is_dir()
        (folder / "toy.bin").touch()
        self.written.append((config, state, preprocess))
        return [folder / "toy.bin"]


class Picky(Toy):
    """Few models: options outside `supports` must have the defaults of `ViTConfig()`."""

    name = "picky"
    supports = {  # noqa: RUF012 - a constant
        "norm_eps": (1e-6, 1e-5),
        "mlp": ("gelu", "swiglu"),
        "layer_scale": (),
        "num_registers": (),
        "positions": ("learned", "rotary"),
    }

    def fixed_there(self, config: ViTConfig) -> ViTConfig:
        return config if config.norms.norm_eps in (1e-6, 1e-5) else config.replace(norm_eps=1e-6)

    def conflicts(self, config: ViTConfig) -> list[str]:
        return ["registers of odd number"] if config.readout.num_registers % 2 else []

    def before_writing(self, state: State, config: ViTConfig) -> State:
        return {**state, "age": torch.zeros(config.depth)}


def written(family: Toy, model: VisionTransformer, folder: Path) -> State:
    assert to_family(family, model, PREPROCESS, folder) == [folder / "toy.bin"]
    return family.written[-1][1]


def source_of(tensors: State) -> Source:
    return Source(name="there", tensors=tensors)


@law_of_models
@given(valid_configs())
def test_written_tensors_are_read_bitwise_identical(
    tmp_path_factory: pytest.TempPathFactory, config: ViTConfig
) -> None:
    model, family = randomize(VisionTransformer(config)), Toy()
    theirs = written(family, model, tmp_path_factory.mktemp("toy"))
    assert all(tensor.is_contiguous() and not tensor.requires_grad for tensor in theirs.values())
    ours = from_family(family, source_of(theirs), config)
    assert list(ours) == list(model.state_dict())
    for name, tensor in model.state_dict().items():
        assert torch.equal(ours[name], tensor), name


def test_each_tensor_has_the_name_and_the_layout_of_the_table(tmp_path: Path) -> None:
    model = small_model(depth=2)
    theirs = written(Toy(), model, tmp_path / "new" / "folder")
    ours = model.state_dict()
    assert torch.equal(theirs["wte"], ours["class_token"])
    assert theirs["patches"].shape == (8, 8, 3, 16)
    assert theirs["patches"][5, 6, 2, 11] == ours["patch_embedding.weight"][11, 2, 5, 6]
    for part, name in enumerate("qkv"):
        rows_of = slice(16 * part, 16 * (part + 1))
        assert torch.equal(theirs[f"{name}[1]"], ours["encoder.blocks.1.attention.qkv.weight"][rows_of])
    assert torch.equal(theirs["layer[0].mlp.fc2.bias"], ours["encoder.blocks.0.mlp.fc2.bias"])
    assert torch.equal(theirs["rest.head.weight"], ours["head.weight"])
    assert not any(name.startswith(("encoder", "layer[0].attention.qkv.weight")) for name in theirs)


def test_the_first_matching_key_is_used() -> None:
    table = {"encoder.blocks.1.norm1.*": "mine.*", "encoder.blocks.{i}.*": "layer[{i}].*", "*": "rest.*"}
    names = {ours: stored.names for ours, _, stored in rows(Toy(table), small_config())}
    assert names["encoder.blocks.1.norm1.bias"] == ("mine.bias",)
    assert names["encoder.blocks.2.norm1.bias"] == ("layer[2].norm1.bias",)
    backwards = Toy(dict(reversed(table.items())))
    names = {ours: stored.names for ours, _, stored in rows(backwards, small_config())}
    assert names["encoder.blocks.1.norm1.bias"] == ("rest.encoder.blocks.1.norm1.bias",)


@pytest.mark.parametrize(
    ("pattern", "fits"),
    [
        ("head.*", {"head.weight", "head.bias"}),
        ("head.weight", {"head.weight"}),
        ("head.weight*", {"head.weight"}),  # * may match nothing
        ("he.d.weight", set()),  # a dot matches only a dot
        ("head", set()),
        ("ead.weight", set()),
        ("encoder.blocks.{i}.norm1.bias", {f"encoder.blocks.{i}.norm1.bias" for i in (0, 1, 2)}),
        ("encoder.{i}.norm1.bias", set()),
    ],
)
def test_a_key_matches_only_complete_names_and_numbers(pattern: str, fits: set[str]) -> None:
    family = Toy({pattern: "here.*", "*": "rest.*"})
    found = {ours for ours, _, stored in rows(family, small_config()) if stored.names[0].startswith("here")}
    assert found == fits


def test_a_tensor_without_a_place_is_rejected() -> None:
    table = {key: value for key, value in TABLE.items() if key != "*"}
    with pytest.raises(CheckpointError, match=r"toy has no place for patch_embedding\.bias"):
        list(rows(Toy(table), small_config()))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> State:
    return written(Toy(), small_model(), tmp_path_factory.mktemp("toy"))


@law
@given(data=st.data())
def test_missing_extra_and_misshapen_tensors_are_all_listed(data: st.DataObject, whole: State) -> None:
    names = data.draw(st.permutations(sorted(whole)))
    lost, spoilt, kept = names[:2], names[2:4], names[4:]
    added = data.draw(st.sets(st.sampled_from(["layer[3].norm1.bias", "q[7]", "age", "rest.head"])))
    tensors = {name: whole[name] for name in kept}
    tensors |= {name: torch.zeros(3, 5, 7) for name in (*spoilt, *added)}
    with pytest.raises(CheckpointError) as error:
        from_family(Toy(), source_of(tensors), small_config())
    message = str(error.value)
    assert message.startswith("there: not a complete toy checkpoint of this architecture: ")
    for name in lost:
        assert f"missing {name}" in message
    for name in added:
        assert f"extra {name} (3, 5, 7)" in message
    for name in spoilt:  # if other parts of its tensor are missing, those are listed instead
        parts_lost = name[0] in "qkv" and name[1] == "[" and any(name[1:] == other[1:] for other in lost)
        assert parts_lost or f"{name} is (3, 5, 7)" in message


@pytest.mark.parametrize(
    ("name", "shape", "listed"),
    [
        ("rest.head.bias", (4,), r"rest\.head\.bias is \(4,\), the model's head\.bias \(5,\)"),
        ("rest.head.weight", (16, 5), r"rest\.head\.weight is \(16, 5\)"),  # the same number of elements
        ("patches", (3, 16, 8, 8), r"patches is \(3, 16, 8, 8\)"),  # the same number, and permutable
        ("patches", (16, 192), r"patches is \(16, 192\)"),  # not permutable
        # not stackable
        ("q[1]", (16, 17), r"q\[1\] is \(16, 17\), k\[1\] is \(16, 16\), v\[1\] is \(16, 16\)"),
        ("v[1]", (15, 16), r"v\[1\] is \(15, 16\)"),
    ],
)
def test_a_misshapen_tensor_is_reported_with_both_shapes(
    name: str, shape: tuple[int, ...], listed: str, whole: State
) -> None:
    with pytest.raises(CheckpointError, match=listed):
        from_family(Toy(), source_of({**whole, name: torch.zeros(shape)}), small_config())


def test_tensors_that_a_classifier_does_not_need_are_ignored(whole: State) -> None:
    more = {"mask.token": torch.zeros(1), "layer[12].age": torch.zeros(1)}
    assert (
        from_family(Toy(), source_of(whole | more), small_config()).keys()
        == small_model().state_dict().keys()
    )
    for name in ("mask", "layer[x].age", "layer[12].ages", "a.mask.token"):
        with pytest.raises(CheckpointError, match="extra"):
            from_family(Toy(), source_of({**whole, name: torch.zeros(1)}), small_config())


def test_faults_of_several_blocks_stand_together() -> None:
    faults = [f"missing blocks.{index}.{name}" for index in (0, 1, 10, 2) for name in ("w", "b")]
    faults += [f"extra blocks.{index}.w (3, 4)" for index in (3, 4)] + ["missing head.1.w"]
    with pytest.raises(CheckpointError) as error:
        reject(faults, "broken")
    several, two = "missing blocks.{0,1,2,10}.", "extra blocks.{3..4}.w (3, 4)"
    assert str(error.value) == f"broken: {several}w; {several}b; {two}; missing head.1.w"


def test_a_list_of_faults_is_bounded() -> None:
    with pytest.raises(CheckpointError, match=r"missing t199; and 101 more$"):
        reject([f"missing t{number}" for number in range(301)], "broken")
    with pytest.raises(CheckpointError, match=r"^here: x{400}; y$"):  # a hostile name is truncated
        reject(["x" * 10**6, "y"], "here")
    reject([], "nothing wrong")


def test_a_source_has_shapes_prefixes_and_counts(whole: State) -> None:
    source = source_of(whole)
    assert source.shape("wte") == (1, 1, 16)
    with pytest.raises(CheckpointError, match=r"there: missing wpe"):
        source.shape("wpe")
    assert source.has("wte")
    assert not source.has("wt")
    assert source.has_any("wt")
    assert not source.has_any("te")
    assert source.count("layer[{i}].norm1.bias") == 3
    assert source.count("layer[{i}].*") == 3
    assert source.count("layers[{i}].*") == 0


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"norm": "post"}, "norm 'post'"),  # not in `supports`: only its default is supported
        ({"mlp": "gelu_tanh"}, "mlp 'gelu_tanh'"),
        ({"positions": "rotary", "rotary_base": 7.0}, "rotary_base 7.0"),
        ({"positions": "none", "position_prefix": False}, "positions 'none'"),
        ({"position_prefix": False}, "position_prefix False"),
        ({"num_registers": 3}, "registers of odd number"),
        ({"stem": "overlap", "stride": (8, 4)}, "stem 'overlap', stride (8, 4)"),
        ({"stem": "tokenizer", "tokenizer_widths": (4, 4)}, "stem 'tokenizer', tokenizer_widths (4, 4)"),
        (
            {"attention": "window", "window": 2, "head": "mlp", "num_registers": 1},
            "attention 'window', window (2, 2), head 'mlp', registers of odd number",
        ),
    ],
)
def test_an_unsupported_model_is_rejected_with_every_option(
    options: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    family = Picky()
    with pytest.raises(CheckpointError) as error:
        to_family(family, small_model(**options), PREPROCESS, tmp_path / "new")
    assert str(error.value) == f"picky has no model with {reason}"
    assert family.written == []
    assert not (tmp_path / "new").exists()


def test_an_option_fixed_by_the_library_is_reported_and_written(tmp_path: Path) -> None:
    family, model = Picky(), small_model(norm_eps=1e-12)
    assert changes(family, model.config) == ["norm_eps 1e-12 becomes 1e-06: picky has no other"]
    assert changes(family, small_config(norm_eps=1e-5)) == []
    written(family, model, tmp_path)
    assert family.written[0][0] == model.config.replace(norm_eps=1e-6)
    assert model.config.norms.norm_eps == 1e-12
