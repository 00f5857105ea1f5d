"""`similar`: the most similar pictures, of data and of computed features."""

import dataclasses
import json
import logging
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from sklearn.neighbors import NearestNeighbors

import vitascope as vs
from tests.data import noise, write_picture, write_tree
from tests.deploy.predict import PARQUET
from tests.models import law, small_model
from vitascope.analysis import similar as module
from vitascope.analysis.similar import _Best, similar
from vitascope.data.features.embed import Embeddings, embed
from vitascope.data.table_options import TableOptions
from vitascope.errors import UserError
from vitascope.models.engines.compute import Compute
from vitascope.models.engines.engine import TorchEngine
from vitascope.models.preprocess import Preprocess
from vitascope.models.weights.loading import save_pretrained

HERE = {"compute": Compute(device="cpu", workers=0, precision="fp32")}
ON_CPU = Compute(device="cpu", workers=0)

pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    write_tree(tmp_path / "photos" / "train", {"cat": 4, "dog": 3}, size=(40, 40))
    for number in range(2):  # with other pixels than those of `train`
        write_picture(
            tmp_path / "photos" / "test" / "dog" / f"00{number}.png", size=(40, 40), seed=50 + number
        )
    return tmp_path / "photos"


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    return write_picture(tmp_path / "asked.png", size=(30, 50), seed=99)


def test_similar_pictures_are_those_of_scikit_learn(photos: Path, picture: Path) -> None:
    model = small_model()
    several = [picture, photos / "test" / "dog" / "001.png", noise(20, 20, seed=7)]
    found = similar(model, several, photos, k=5, **HERE)
    features = embed(model, photos, **HERE).features.astype(np.float64)
    asked = embed(model, several, **HERE).features.astype(np.float64)
    distances, indices = NearestNeighbors(n_neighbors=5, metric="cosine").fit(features).kneighbors(asked)
    assert [each.indices.tolist() for each in found] == indices.tolist()
    np.testing.assert_allclose([each.similarities for each in found], 1 - distances, atol=1e-6)
    assert all(each.similarities.dtype == np.float32 for each in found)


def test_every_place_has_its_name_label_and_split(photos: Path, picture: Path) -> None:
    found = similar(small_model(), picture, photos, k=4, **HERE)
    whole = embed(small_model(), photos, **HERE)
    assert found.images.tolist() == whole.images[found.indices].tolist()
    assert found.labels.tolist() == whole.labels[found.indices].tolist()
    assert found.splits.tolist() == whole.splits[found.indices].tolist()
    assert (found.picture, len(found), found.compared) == (str(picture), 4, 9)
    assert (np.diff(found.similarities) <= 0).all()
    first = found.rows()[0]
    assert list(first) == ["rank", "similarity", "label", "split", "image", "index"]
    assert first["image"] == found.images[0]
    assert repr(found).startswith(
        f"SimilarPictures({picture}: {found.similarities[0]:.3f} {found.images[0]}, "
    )
    assert repr(found).endswith(" and 1 other)")


def test_data_frame_has_one_row_per_picture(photos: Path, picture: Path) -> None:
    pytest.importorskip("pandas", reason="pandas is not installed")
    frame = similar(small_model(), picture, photos, k=3, **HERE).to_dataframe()
    assert frame.index.tolist() == [1, 2, 3]
    assert list(frame.columns) == ["similarity", "label", "split", "image", "index"]


@pytest.mark.parametrize("suffix", ["", ".npz", ".npy", PARQUET])
def test_computed_features_give_what_the_data_give(photos, picture, tmp_path, suffix, monkeypatch) -> None:
    spec = {"layer": 1, "pool": "cls_mean"}
    of_data = similar(small_model(), picture, photos, k=6, **spec, **HERE)
    out = tmp_path / f"f{suffix}" if suffix else None
    kept = embed(small_model(), photos, out=out, **spec, **HERE)
    monkeypatch.setattr("vitascope.data.features.embed.BLOCK", 4)
    calls = []
    monkeypatch.setattr(module.embed, "opened_images", lambda *_: calls.append(1))
    for again in (kept, *([out] if out else [])):
        found = similar(small_model(), picture, again, k=6, compute=ON_CPU)
        assert found.rows() == of_data.rows()
        assert found.compared == 9
        assert found.computed == 0
    assert not calls


def test_picture_is_computed_in_the_precision_of_computed_features(photos: Path) -> None:
    asked = photos / "train" / "dog" / "001.png"
    kept = embed(
        small_model(), photos, compute=Compute(device="cpu", workers=0, precision="bf16", cache=False)
    )
    found = similar(small_model(), asked, kept, compute=Compute(device="cpu", workers=0, cache=False))
    assert found.images[0] == str(asked)
    assert found.similarities[0] == pytest.approx(1, abs=1e-3)
    same = embed(small_model(), photos, compute=Compute(device="cpu", workers=0, precision="bf16"))
    assert similar(small_model(), asked, same, compute=ON_CPU).similarities[0] == 1
    of_fp32 = similar(small_model(), asked, same, **HERE)
    assert of_fp32.similarities[0] != 1


def test_picture_in_the_data_comes_first_and_its_copies_follow_in_their_order(photos: Path) -> None:
    asked = photos / "train" / "dog" / "001.png"
    for place in (photos / "train" / "cat" / "zzz.png", photos / "test" / "dog" / "zzz.png"):
        place.write_bytes(asked.read_bytes())
    found = similar(
        small_model(), asked, photos, k=4, compute=dataclasses.replace(HERE["compute"], batch_size=2)
    )
    assert found.similarities[:3].tolist() == [1.0, 1.0, 1.0]
    assert [Path(name).name for name in found.images[:3]] == ["zzz.png", "001.png", "zzz.png"]
    assert (np.diff(found.indices[:3]) > 0).all()
    assert found.similarities[3] < 1


@law
@given(st.lists(st.integers(1, 6), min_size=1, max_size=8), st.integers(1, 30), st.integers(0, 2**32 - 1))
def test_best_of_parts_are_those_of_the_whole(sizes: list[int], k: int, seed: int) -> None:
    draw = np.random.default_rng(seed)
    queries = draw.normal(size=(3, 2)).astype(np.float32)
    features = draw.integers(-1, 2, (sum(sizes), 2)).astype(np.float32)  # with ties, and zeros
    best = _Best(queries, k)
    for part in np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1]):
        best.add(part, features[part])
        if draw.random() < 0.5:
            best.settle()
    best.settle()
    norms = np.linalg.norm(features, axis=1)
    for row, query in enumerate(queries.astype(np.float64)):
        cosines = features @ query / np.where(norms == 0, 1, norms) / np.linalg.norm(query)
        expected = sorted(range(len(features)), key=lambda each: (-np.float32(cosines[each]), each))[:k]
        np.testing.assert_allclose(best.similarities[row], cosines[expected], atol=1e-6)
        assert best.indices[row].tolist() == expected


def test_only_the_best_are_kept_while_features_come() -> None:
    best = _Best(noise(2, 8, 1).astype(np.float32), 3)
    for start in range(0, 5000, 100):
        best.add(np.arange(start, start + 100), noise(100, 8, 1, seed=start).astype(np.float32))
        waiting = sum(len(indices) for _, indices in best._waiting)
        assert waiting < module.BLOCK
        assert best.indices.shape[1] <= 3
    assert best.compared == 5000


def test_unreadable_images_are_left_out_and_named(photos: Path, picture: Path) -> None:
    (photos / "train" / "cat" / "001.png").write_bytes(b"broken")
    found = similar(small_model(), picture, photos, k=20, **HERE)
    assert len(found) == found.compared == 8
    (reason,) = found.unreadable
    assert "001.png: not a picture" in reason
    assert 1 not in found.indices
    for path in photos.rglob("*.png"):
        path.write_bytes(b"broken")
    with pytest.raises(UserError, match="none of 9 images can be read"):
        similar(small_model(), picture, photos, **HERE)


def test_parquet_table_of_images_is_no_file_of_features(tmp_path: Path, picture: Path) -> None:
    pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed (vitascope[parquet])")
    import pyarrow.parquet as pq

    write_picture(tmp_path / "a.png")
    pq.write_table(pa.table({"image": ["a.png"], "label": ["cat"]}), tmp_path / "t.parquet")
    assert similar(small_model(), picture, tmp_path / "t.parquet", **HERE).labels.tolist() == ["cat"]


# --- the figure


def test_figure_has_the_picture_and_the_most_similar_ones_with_label_or_name(
    photos: Path, picture: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = similar(small_model(), picture, photos, k=3, **HERE)
    figure = found.draw()
    assert sum(len(axes.images) for axes in figure.axes) == 4
    written = [text.get_text() for axes in figure.axes for text in axes.texts]
    captions = [
        f"{value:.3f}\n{label}" for value, label in zip(found.similarities, found.labels, strict=True)
    ]
    assert written == ["asked.png", *captions]
    assert figure.get_label() == "3 of 9 images, the most similar to asked.png"
    shown = figure.axes[0].images[0].get_array()
    assert shown.shape == (30, 50, 3)  # its own proportions, and not the model's
    write_picture(tmp_path / "flat" / "one.png", seed=3)
    figure = similar(small_model(), picture, tmp_path / "flat", **HERE).draw()
    assert figure.axes[0].texts[1].get_text().endswith("\none.png")
    monkeypatch.setattr(module, "MAX_DRAWN", 4)
    figure = similar(small_model(), picture, photos, k=9, **HERE).draw()
    assert len(figure.axes[0].images) == 5
    assert figure.get_label().startswith("4 of 9 images")


def test_image_that_has_gone_leaves_its_place_empty_with_a_warning(photos, picture, caplog) -> None:
    found = similar(small_model(), picture, photos, k=3, **HERE)
    assert found._repr_png_().startswith(b"\x89PNG")
    Path(found.images[1]).unlink()
    with caplog.at_level(logging.WARNING):
        figure = found.draw()
    assert len(figure.axes[0].images) == 3
    assert "no picture" in [text.get_text() for text in figure.axes[0].texts]
    assert f"not drawn: {found.images[1]}: no such file" in caplog.text
    for name in (found.images[0], found.images[2]):
        Path(name).unlink()
    with pytest.raises(UserError, match="none of 3 images can be read"):
        found.draw()
    assert found._repr_png_() is None


# --- what is rejected


def test_arguments_in_another_order_are_one_line(photos: Path, picture: Path, tmp_path: Path) -> None:
    save_pretrained(small_model(), tmp_path / "model")
    order = "the model comes first, then the picture, then the data"
    for data in (tmp_path / "model", tmp_path / "model" / "model.safetensors"):
        with pytest.raises(UserError, match=f"is a model, and no images: {order}"):
            similar(photos, picture, data, **HERE)
    with pytest.raises(UserError, match=f"photos is a folder, and no picture: {order}"):
        similar(tmp_path / "model", photos, picture, **HERE)
    with pytest.raises(UserError, match="photos: not a model"):
        similar(photos, picture, "cifar10", **HERE)  # downloads nothing


def test_pictures_that_cannot_be_read_are_one_line(photos: Path, tmp_path: Path) -> None:
    (tmp_path / "broken.png").write_bytes(b"broken")
    (tmp_path / "empty").mkdir()
    for asked, data, reason in (
        ([noise(8, 8), tmp_path / "broken.png"], photos, r"broken\.png: not a picture"),
        (3, photos, "not a value of type int"),
        ([], photos, "no picture given"),
        (noise(8, 8), tmp_path / "empty", "empty: no images in it"),
    ):
        with pytest.raises(UserError, match=reason):
            similar(small_model(), asked, data, **HERE)


def test_features_of_another_model_are_rejected(photos: Path, picture: Path) -> None:
    kept = embed(small_model(), photos, **HERE)
    other = small_model()
    other.preprocess = dataclasses.replace(other.preprocess, crop_pct=0.5)
    for model, options, reason in (
        (small_model(seed=1), {}, r"these features are of a model \(\w{12}\), not of this model"),
        (
            small_model(),
            {"layer": 1, "pool": "cls"},
            "the model's own pooling, not of layer 1, pool cls: embed",
        ),
        (other, {}, r"another preprocessing, crop_pct 1\.0, not 0\.5: embed"),
        (small_model(), {"table": TableOptions(labels="one")}, "labels is about a table, and these features"),
    ):
        with pytest.raises(UserError, match=reason):
            similar(model, picture, kept, compute=ON_CPU, **options)
    assert similar(TorchEngine(small_model(), device="cpu", precision="fp32"), picture, kept).compared == 9
    assert similar(small_model(num_classes=2), picture, kept, compute=ON_CPU).compared == 9


def test_features_that_are_not_finite_are_rejected_with_the_image(photos: Path, picture: Path) -> None:
    kept = embed(small_model(), photos, **HERE)
    kept.features[4, 2] = np.nan
    with pytest.raises(UserError, match=r"dog/000\.png: its features are not finite numbers"):
        similar(small_model(), picture, kept, compute=ON_CPU)


def test_damaged_files_of_features_are_one_line(photos: Path, picture: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nowhere\.npz: no such file"):
        similar(small_model(), picture, tmp_path / "nowhere.npz", **HERE)
    embed(small_model(), photos, out=tmp_path / "f.npy", **HERE)
    np.save(tmp_path / "f.npy", np.ones((9, 5), np.float32))
    with pytest.raises(UserError, match="features of 5 numbers, and the model's have 16"):
        similar(small_model(), picture, tmp_path / "f.npy", compute=ON_CPU)
    np.save(tmp_path / "f.npy", np.ones((3, 16), np.float32))
    with pytest.raises(UserError, match="3 features of 9 images"):
        similar(small_model(), picture, tmp_path / "f.npy", compute=ON_CPU)
    described = json.loads((tmp_path / "f.npy.json").read_text())
    described["made"]["layer"] = "last"
    (tmp_path / "f.npy.json").write_text(json.dumps(described))
    with pytest.raises(UserError, match=r"f\.npy: layer must be a whole number or null, not 'last'"):
        Embeddings.load(tmp_path / "f.npy")


def test_sixteen_bits_are_read_and_drawn_by_the_levels_of_the_model(tmp_path: Path) -> None:
    model = small_model()
    model.preprocess = Preprocess(image_size=model.preprocess.image_size, levels=(0, 4095))
    (tmp_path / "data").mkdir()
    pixels = np.random.default_rng(0).integers(2000, 4096, (40, 40)).astype(np.uint16)
    Image.fromarray(pixels).save(tmp_path / "data" / "a.png")
    found = similar(model, tmp_path / "data" / "a.png", tmp_path / "data", **HERE)
    assert found.similarities.tolist() == [1.0]
    for image in found.draw().axes[0].images:
        assert np.asarray(image.get_array()).max() > 250


def test_model_is_left_as_it_was(photos: Path, picture: Path) -> None:
    model = small_model().train()
    vs.similar(model, picture, photos, **HERE)
    assert model.training
