import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.model import law, random_images, small_config
from vitascope.model.patches import ConvPatches, LinearPatches, patch_embedding, patchify, unpatchify

SMALL = st.integers(1, 5)


@law
@given(B=SMALL, C=SMALL, gh=SMALL, gw=SMALL, ph=SMALL, pw=SMALL)
def test_unpatchify_undoes_patchify(B: int, C: int, gh: int, gw: int, ph: int, pw: int) -> None:
    images = random_images(B, C, gh * ph, gw * pw)
    patches = patchify(images, (ph, pw))
    assert patches.shape == (B, gh * gw, C * ph * pw)
    assert torch.equal(unpatchify(patches, (gh, gw), (ph, pw)), images)


@law
@given(B=SMALL, C=SMALL, gh=SMALL, gw=SMALL, ph=SMALL, pw=SMALL)
def test_patchify_undoes_unpatchify(B: int, C: int, gh: int, gw: int, ph: int, pw: int) -> None:
    patches = random_images(B, gh * gw, C * ph * pw)
    assert torch.equal(patchify(unpatchify(patches, (gh, gw), (ph, pw)), (ph, pw)), patches)


def test_patches_go_row_by_row_and_keep_their_pixels() -> None:
    images = random_images(2, 3, 4, 9)
    patches = patchify(images, (2, 3))
    for row in range(2):
        for column in range(3):
            tile = images[:, :, 2 * row : 2 * row + 2, 3 * column : 3 * column + 3]
            assert torch.equal(patches[:, 3 * row + column], tile.flatten(1))


@law
@given(C=SMALL, gh=SMALL, gw=SMALL, ph=SMALL, pw=SMALL, seed=st.integers(0, 9))
def test_convolution_and_linear_embedding_are_the_same_function(
    C: int, gh: int, gw: int, ph: int, pw: int, seed: int
) -> None:
    sizes = {"image_size": (gh * ph, gw * pw), "patch_size": (ph, pw), "in_channels": C}
    conv = patch_embedding(small_config(**sizes, patchify="conv"))
    linear = patch_embedding(small_config(**sizes, patchify="linear"))
    torch.nn.init.normal_(conv.bias)
    linear.load_state_dict(conv.state_dict())
    images = random_images(2, C, gh * ph, gw * pw, seed=seed)
    assert conv(images).shape == (2, gh * gw, 16)
    torch.testing.assert_close(linear(images), conv(images), rtol=1e-5, atol=1e-5)


def test_the_embedding_is_the_one_that_the_config_names() -> None:
    assert type(patch_embedding(small_config(patchify="conv"))) is ConvPatches
    assert type(patch_embedding(small_config(patchify="linear"))) is LinearPatches


def test_each_embedding_depends_on_its_own_patch_alone() -> None:
    images = random_images(1, 3, 32, 32)
    changed = images.clone()
    changed[:, :, 8:16, 16:24] += 1  # row 1, column 2 of a 4x4 grid
    for patchify_by in ("conv", "linear"):
        embed = patch_embedding(small_config(patchify=patchify_by))
        moved = (embed(changed) - embed(images)).abs().amax(-1)[0] > 1e-4
        assert moved.nonzero().flatten().tolist() == [1 * 4 + 2]
