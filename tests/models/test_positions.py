from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from tests.models import by_loops, law, random_images, randomize, small_config, small_model
from vitascope.errors import UserError
from vitascope.models.attention import rotate
from vitascope.models.encoder import PatchDropout
from vitascope.models.options import Positions as Kind
from vitascope.models.options import Resample
from vitascope.models.patches import patchify, unpatchify
from vitascope.models.positions import Positions, resample_grid, resample_positions, workplace
from vitascope.models.relations import position_embedding

KINDS, RULES = get_args(Kind), get_args(Resample)
SINCOS = ("sincos_1d", "sincos_2d", "sincos_2d_big_vision")
GRIDS = st.tuples(st.integers(1, 7), st.integers(1, 7))
SMALL_GRIDS = st.tuples(st.integers(1, 4), st.integers(1, 4))
PREFIX = st.integers(0, 2)
RULE = st.sampled_from(RULES)
CPU = torch.device("cpu")

# Prefix tokens by readout: none, class token, class and distillation token with registers.
READOUTS: dict[int, dict[str, Any]] = {
    0: {"pool": "mean"},
    1: {},
    4: {"distillation_token": True, "num_registers": 2},
}


def embedding(kind: str, grid: tuple[int, int] = (3, 5), prefix: int = 1, **options: Any) -> Positions:
    sizes = {"image_size": (8 * grid[0], 8 * grid[1]), "patch_size": 8}
    return randomize(position_embedding(small_config(**sizes, positions=kind, **READOUTS[prefix], **options)))


def random_positions(grid: tuple[int, int], prefix: int, seed: int = 0) -> torch.Tensor:
    return random_images(1, prefix + grid[0] * grid[1], 6, seed=seed)


@law
@given(old=GRIDS, new=GRIDS, prefix=PREFIX, rule=RULE)
def test_resampling_keeps_the_prefix_and_fills_the_new_grid(
    old: tuple[int, int], new: tuple[int, int], prefix: int, rule: str
) -> None:
    positions = random_positions(old, prefix)
    resampled = resample_positions(positions, old, new, prefix, rule)
    assert resampled.shape == (1, prefix + new[0] * new[1], 6)
    assert torch.equal(resampled[:, :prefix], positions[:, :prefix])


@law
@given(old=st.integers(1, 99), new=st.integers(1, 99))
def test_the_scale_of_dinov2_loses_no_row(old: int, new: int) -> None:
    assert resample_grid(torch.zeros(1, 1, old, 1), (new, 1), "dinov2").shape == (1, 1, new, 1)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("old", [(4, 1), (4, 3)])
@pytest.mark.parametrize("length", [2, 4, 7])
def test_one_column_is_resampled_as_one_row(rule: str, old: tuple[int, int], length: int) -> None:
    # torch 2.13's antialiased kernel repeats the first value down a contiguous image of one column.
    image = random_images(1, 2, *old)
    as_row = resample_grid(image.mT.contiguous(), (1, length), rule).mT
    torch.testing.assert_close(resample_grid(image, (length, 1), rule), as_row)
    positions, transposed = image.flatten(2).mT, image.mT.flatten(2).mT
    expected = resample_positions(transposed, old[::-1], (1, length), 0, rule)
    torch.testing.assert_close(resample_positions(positions, old, (length, 1), 0, rule), expected)


@pytest.mark.parametrize("position_prefix", [False, True])
@pytest.mark.parametrize("prefix", READOUTS)
@pytest.mark.parametrize("kind", ["none", "relative", "rotary", "learned", "learned_2d", *SINCOS])
def test_a_table_is_added_to_the_patches_and_if_learned_to_the_prefix(
    kind: str, prefix: int, position_prefix: bool
) -> None:
    layer = embedding(kind, prefix=prefix, position_prefix=position_prefix)
    tokens, table = random_images(2, prefix + 15, 16), layer.table((3, 5))
    placed, layout = layer(tokens, (3, 5)), layer.layout((3, 5), CPU)
    assert (layout.grid, layout.num_prefix_tokens) == ((3, 5), prefix)
    if kind in ("none", "relative", "rotary"):  # attention has the others
        assert table is None
        assert torch.equal(placed, tokens)
        return
    assert layout.rotation is None
    assert not layout.biases
    bare = 0 if kind == "learned" and position_prefix else prefix
    assert table.shape == (1, prefix - bare + 15, 16)
    assert table.abs().amax(-1).min() > 0.1
    assert torch.equal(placed[:, :bare], tokens[:, :bare])
    assert torch.equal(placed[:, bare:], tokens[:, bare:] + table)
    if kind == "learned":
        assert torch.equal(table, layer.weight)


def test_learned_2d_positions_are_rows_plus_columns() -> None:
    layer = embedding("learned_2d")
    for number, (row, column) in enumerate(by_loops.places((3, 5))):
        assert torch.equal(layer.table((3, 5))[0, number], layer.rows[0, row] + layer.columns[0, column])


def test_gradients_reach_the_positions_through_the_interpolation() -> None:
    layer = embedding("learned", (2, 2))
    layer(torch.zeros(1, 1 + 9, 16), (3, 3)).sum().backward()
    # The share of each old vector in the new ones: the prefix has 1, the 4 old patches share 9 new ones.
    given = layer.weight.grad[0, :, 0]
    torch.testing.assert_close(given, torch.tensor([1.0, 2.25, 2.25, 2.25, 2.25]))


@law
@given(kind=st.sampled_from(SINCOS), grid=GRIDS, quarter=st.integers(2, 8))
def test_sincos_positions_follow_the_formulas(kind: str, grid: tuple[int, int], quarter: int) -> None:
    layer = position_embedding(small_config(positions=kind, embed_dim=4 * quarter))
    table = layer.table(grid)
    assert table.dtype == torch.float32
    np.testing.assert_allclose(table[0].numpy(), by_loops.sincos(kind, grid, 4 * quarter), atol=1e-6)


def random_qkv(T: int, heads: int, head_dim: int, batch: int = 2) -> torch.Tensor:
    return random_images(batch, T, 3, heads, head_dim)


@pytest.mark.parametrize("prefix", READOUTS)
@law
@given(grid=SMALL_GRIDS, quarter=st.integers(1, 4), base=st.sampled_from([10.0, 100.0, 1e4]))
def test_rotation_turns_pairs_of_channels_as_complex_numbers(
    prefix: int, grid: tuple[int, int], quarter: int, base: float
) -> None:
    config = small_config(
        positions="rotary", rotary_base=base, embed_dim=8 * quarter, num_heads=2, **READOUTS[prefix]
    )
    layout = position_embedding(config).layout(grid, CPU)
    qkv = random_qkv(prefix + grid[0] * grid[1], 2, 4 * quarter)
    turned = rotate(qkv, layout)
    assert torch.equal(turned[:, :, 2], qkv[:, :, 2])  # values
    for image in range(2):
        for part in (0, 1):  # queries, keys
            for head in range(2):
                expected = by_loops.rotate(qkv[image, :, part, head].numpy(), grid, base, prefix)
                np.testing.assert_allclose(turned[image, :, part, head].numpy(), expected, atol=1e-5)


@law
@given(grid=SMALL_GRIDS, stretched=st.sampled_from([None, (3, 5), 4]), offset=st.sampled_from([0.0, 1.0]))
def test_axial_angles_are_the_number_of_the_row_and_of_the_column(
    grid: tuple[int, int], stretched: Any, offset: float
) -> None:
    options = {"rotary_base": 50.0, "rotary_grid": stretched, "rotary_offset": offset}
    layer = position_embedding(small_config(positions="rotary_axial", embed_dim=24, **options))
    cos, sin = layer.layout(grid, CPU).rotation
    sides = {None: grid, 4: (4, 4)}.get(stretched, stretched)
    for patch, (row, column) in enumerate(by_loops.places(grid)):
        y, x = (row + offset) * sides[0] / grid[0], (column + offset) * sides[1] / grid[1]
        angles = np.array([place * 50.0 ** (-k / 3) for place in (y, x) for k in range(3)] * 2)
        np.testing.assert_allclose(cos[patch, 0].numpy(), np.cos(angles), atol=1e-5)
        np.testing.assert_allclose(sin[patch, 0].numpy(), np.sin(angles), atol=1e-5)


def test_mixed_angles_are_a_sum_over_both_axes_in_each_block_and_head() -> None:
    layer = embedding("rotary_mixed", (2, 3))
    columns, rows = layer.frequencies.detach().numpy()
    layout = layer.layout((2, 3), CPU)
    for block in range(3):
        cos, sin = layout.of_block(block).rotation
        for patch, (row, column) in enumerate(by_loops.places((2, 3))):
            angles = column * columns[block] + row * rows[block]  # (heads, hd / 2)
            np.testing.assert_allclose(cos[patch].detach().numpy(), np.tile(np.cos(angles), 2), atol=1e-6)
            np.testing.assert_allclose(sin[patch].detach().numpy(), np.tile(np.sin(angles), 2), atol=1e-6)


def test_mixed_frequencies_start_as_axial_ones_turned_by_one_angle_per_head() -> None:
    layer = position_embedding(small_config(positions="rotary_mixed", embed_dim=32, rotary_base=10.0))
    layer.start()
    x, y = layer.frequencies.detach()  # (L, heads, hd / 2) each
    lengths = torch.tensor([1.0, 10**-0.25, 10**-0.5, 10**-0.75]).repeat(2)
    torch.testing.assert_close((x**2 + y**2).sqrt(), lengths.expand_as(x))
    torch.testing.assert_close(
        (x * x.roll(4, -1) + y * y.roll(4, -1)), torch.zeros_like(x), atol=1e-6, rtol=0
    )
    assert (x / lengths)[..., :4].std(dim=2).max() < 1e-6
    assert (x / lengths)[..., 0].unique().numel() == 6


@pytest.mark.parametrize("kind", ["rotary_axial", "relative"])
def test_absolute_positions_are_added_beside_relative_or_rotary_ones(kind: str) -> None:
    model, images = small_model(positions=kind, absolute="patches"), random_images(2, 3, 32, 32)
    bare = small_model(positions=kind)
    weights = {name: value for name, value in model.state_dict().items() if name != "positions.weight"}
    bare.load_state_dict(weights)
    traces = [each.trace(images)["embeddings"] for each in (model, bare)]
    torch.testing.assert_close(traces[0][:, 1:] - traces[1][:, 1:], model.positions.weight.expand(2, -1, -1))
    assert torch.equal(traces[0][:, :1], traces[1][:, :1])
    with pytest.raises(UserError, match="absolute 'all' adds learned positions to relative or rotary ones"):
        small_config(positions="learned", absolute="all")


@pytest.mark.parametrize("prefix", READOUTS)
@law
@given(grid=SMALL_GRIDS)
def test_the_relative_bias_equals_a_double_loop(prefix: int, grid: tuple[int, int]) -> None:
    layer = embedding("relative", grid, prefix)
    numbers = None if layer.prefix is None else layer.prefix.detach().numpy()
    expected = by_loops.relative_bias(layer.offsets.detach().numpy(), numbers, grid, prefix)
    bias = layer.layout(grid, CPU).biases[grid][0].detach().numpy()
    np.testing.assert_array_equal(bias, expected.astype(np.float32))


@pytest.mark.parametrize("prefix", READOUTS)
@pytest.mark.parametrize("attention", ["window", "axial"])
@law
@given(counts=st.tuples(st.integers(1, 2), st.integers(1, 2)), window=SMALL_GRIDS)
def test_the_relative_bias_of_a_window_is_that_of_the_grid(
    attention: str, prefix: int, counts: tuple[int, int], window: tuple[int, int]
) -> None:
    grid = (counts[0] * window[0], counts[1] * window[1])
    layer = embedding("relative", grid, prefix, attention=attention, window=window)
    everywhere = embedding("relative", grid, prefix).layout(grid, CPU).biases[grid][0]
    biases = layer.layout(grid, CPU).biases
    assert set(biases) == ({window} if attention == "window" else {(1, grid[1]), (grid[0], 1)})
    for (height, width), inside in biases.items():
        first = [row * grid[1] + column for row in range(height) for column in range(width)]
        tokens = torch.tensor([*range(prefix), *(prefix + number for number in first)])
        assert torch.equal(inside[0], everywhere[:, tokens][:, :, tokens])


@pytest.mark.parametrize("kind", KINDS)
def test_the_order_of_patches_matters_unless_there_are_no_positions(kind: str) -> None:
    model = small_model(positions=kind, image_size=(24, 32))
    images = random_images(1, 3, 24, 32)
    for order in ([1, 0, *range(2, 12)], [*range(4, 12), *range(4)], [*range(11, -1, -1)]):
        shuffled = unpatchify(patchify(images, (8, 8))[:, order], (3, 4), (8, 8))
        in_order, out_of_order = model(torch.cat([images, shuffled]))
        assert ((out_of_order - in_order).abs().max() > 1e-3) == (kind != "none")


@pytest.mark.parametrize("kind", KINDS)
@settings(law, max_examples=4)
@given(old=SMALL_GRIDS, new=SMALL_GRIDS, rule=RULE, prefix=st.sampled_from(list(READOUTS)))
def test_another_grid_on_the_fly_equals_resizing(
    kind: str, old: tuple[int, int], new: tuple[int, int], rule: str, prefix: int
) -> None:
    sizes = {"image_size": (8 * old[0], 8 * old[1])}
    model = small_model(positions=kind, resample=rule, depth=2, **sizes, **READOUTS[prefix])
    images = random_images(1, 3, 8 * new[0], 8 * new[1])
    on_the_fly = model(images)
    names = [name for name, _ in model.named_parameters()]
    model.resize((8 * new[0], 8 * new[1]))
    torch.testing.assert_close(model(images), on_the_fly)
    assert model.positions.grid == model.config.grid == new
    assert [name for name, _ in model.named_parameters()] == names
    assert sum(value.numel() for value in model.parameters()) == model.config.num_parameters


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_tokens_and_parameters_keep_their_dtype(kind: str, dtype: torch.dtype) -> None:
    layer = embedding(kind)
    assert layer(torch.zeros(1, 16, 16, dtype=dtype), (3, 5)).dtype == dtype
    layer.to(dtype).resize((4, 4))
    assert {parameter.dtype for parameter in layer.parameters()} <= {dtype}


@pytest.mark.parametrize("trainable", [False, True])
@pytest.mark.parametrize("kind", ["learned", "learned_2d", "relative"])
def test_resizing_keeps_requires_grad(kind: str, trainable: bool) -> None:
    layer = embedding(kind).requires_grad_(trainable)
    layer.resize((4, 4))
    assert {parameter.requires_grad for parameter in layer.parameters()} == {trainable}
    assert all(parameter.is_leaf for parameter in layer.parameters())
    if trainable:
        biases = sum(bias.sum() for bias in layer.layout((4, 4), CPU).biases.values())
        (layer(torch.ones(1, 17, 16), (4, 4)).sum() + biases).backward()
        assert all(parameter.grad.abs().min() > 0 for parameter in layer.parameters())


@law
@given(prefix=st.sampled_from(list(READOUTS)), rate=st.sampled_from([0.2, 0.5, 0.8]), seed=st.integers(0, 9))
def test_patches_kept_by_dropout_have_the_rotation_of_the_full_sequence(
    prefix: int, rate: float, seed: int
) -> None:
    layout = embedding("rotary", prefix=prefix).layout((3, 5), CPU)
    qkv = random_qkv(prefix + 15, 2, 8, batch=4)
    torch.manual_seed(seed)
    kept, selected = PatchDropout(rate).train()(qkv.flatten(2), layout)
    turned, everything = rotate(kept.unflatten(2, (3, 2, 8)), selected), rotate(qkv, layout)
    for image in range(4):
        origin = [int((qkv[image].flatten(1) == token).all(1).nonzero()) for token in kept[image]]
        torch.testing.assert_close(turned[image], everything[image, origin])


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_runs_on_the_cpu_and_trains_after_the_meta_device_and_inference_mode(kind: str) -> None:
    model, images = small_model(positions=kind, image_size=(16, 88)), random_images(1, 3, 16, 88)
    with torch.device("meta"):
        small_model(positions=kind, image_size=(16, 88))(torch.empty(1, 3, 16, 88))
    with torch.inference_mode():
        assert model(images).isfinite().all()
    model.train()(images).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("kind", ["sincos_2d", "relative", "rotary", "rotary_axial"])  # that keep tables
def test_a_model_runs_after_another_was_exported(kind: str) -> None:
    options = {"positions": kind, "image_size": (16, 120), "depth": 1}
    model, images = small_model(**options), random_images(1, 3, 16, 120)
    torch.export.export(model, (images,))
    assert type(model(images).detach()) is torch.Tensor
    assert type(small_model(**options)(images).detach()) is torch.Tensor


@pytest.mark.parametrize("kind", [*SINCOS, "rotary"])
def test_a_table_is_copied_to_a_device_once(kind: str) -> None:
    model = small_model(positions=kind, image_size=(16, 136)).to("meta")  # a device that is not the CPU
    images = torch.empty(1, 3, 16, 136, device="meta")
    model(images)
    with FromTheCPU() as copies:
        model(images)
    assert not copies.seen


class FromTheCPU(TorchDispatchMode):
    """Record every operation with an argument on the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(isinstance(value, torch.Tensor) and value.device == CPU for value in args):
            self.seen.append(str(operation))
        return operation(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", SINCOS)
def test_sincos_tables_are_cached_in_each_dtype_of_the_tokens(kind: str) -> None:
    layer, tokens = embedding(kind), torch.zeros(1, 16, 12)
    for dtype in (torch.float32, torch.bfloat16):
        kept = layer.table_for(tokens.to(dtype), (3, 5))
        assert torch.equal(kept, layer.table((3, 5)).to(dtype))
        assert kept is layer.table_for(tokens.to(dtype), (3, 5))


def test_tables_are_computed_on_a_gpu_only_while_compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda", 0)
    assert workplace(gpu) == CPU
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert (workplace(gpu), workplace(torch.device("mps"))) == (gpu, CPU)
    monkeypatch.setattr(torch.compiler, "is_exporting", lambda: True)
    assert workplace(gpu) == CPU
