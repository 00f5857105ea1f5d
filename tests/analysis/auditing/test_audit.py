import csv
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageOps

from tests.training import tiny_config, undrawn
from vitascope.analysis.auditing import planted
from vitascope.analysis.auditing.audit import COLUMNS, AuditResult, audit
from vitascope.cli import main
from vitascope.data.decisions import COLUMNS as DECISION_COLUMNS
from vitascope.data.decisions import Decisions
from vitascope.data.finding import Finding
from vitascope.data.table_options import TableOptions
from vitascope.errors import UserError
from vitascope.runs import train

RANDOM = np.random.default_rng(0)


def picture(colour: tuple[int, int, int], random: np.random.Generator) -> Image.Image:
    """Blocks of a colour with shades: no two are alike."""
    shades = random.uniform(0.3, 1.0, (8, 8, 1))
    small = (np.array(colour) * shades).astype(np.uint8)
    noise = random.integers(0, 40, (48, 48, 3))
    return Image.fromarray(np.clip(np.kron(small, np.ones((6, 6, 1))) + noise, 0, 255).astype(np.uint8))


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("data") / "photos"
    random = np.random.default_rng(1)
    for part, count in (("train", 28), ("test", 8)):
        for name, colour in (("red", (230, 20, 20)), ("blue", (20, 20, 230))):
            folder = root / part / name
            folder.mkdir(parents=True)
            for number in range(count):
                picture(colour, random).save(folder / f"{number:02}.png")
    first = Image.open(root / "train" / "red" / "00.png")
    ImageOps.mirror(first).save(root / "test" / "red" / "leak.png")
    for number in range(4):  # a label is listed if the class is as probable as for images that have it
        picture((20, 20, 230), random).save(root / "train" / "red" / f"wrong{number}.png")
    Image.new("RGB", (48, 48), "white").save(root / "train" / "blue" / "empty.png")
    (root / "train" / "blue" / "broken.png").write_bytes(b"no picture")
    return root


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def audited(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> AuditResult:
    return audit(photos, out=tmp_path_factory.mktemp("out") / "audit", seed=1)


def test_faults_are_in_the_file_by_name_with_what_to_do(audited: AuditResult) -> None:
    found = {(row["image"], row["issue"]): row for row in rows(audited.csv)}
    assert set(next(iter(found.values()))) == set(COLUMNS)
    leak = found["train/red/00.png", "leak"]
    assert "mirrored" in leak["detail"]
    assert leak["suggestion"] == "drop"  # the one in train
    assert leak["detail"].endswith("a copy of another image, in test: test/red/leak.png")
    wrong = {image: row["suggestion"] for (image, issue), row in found.items() if issue == "label" and image}
    assert wrong
    assert wrong.keys() <= {f"train/red/wrong{number}.png" for number in range(4)}
    assert set(wrong.values()) == {"relabel blue"}
    assert ("train/blue/empty.png", "empty") in found
    broken = found["train/blue/broken.png", "unreadable"]
    assert (broken["score"], broken["suggestion"]) == ("1.0000", "drop")
    issues = {issue for image, issue in found if image == "train/blue/empty.png"}
    assert issues - {"label", "off-topic"} == {"empty"}  # a picture of one colour is in one list
    page = audited.page.read_text(encoding="utf-8")
    for issue in ("unreadable", "leak", "label", "empty"):
        assert f'id="{issue}"' in page
    assert "planted" in page


def test_planted_errors_are_counted_with_their_intervals(audited: AuditResult) -> None:
    planted = {each.issue: each for each in audited.planted}
    assert {"label", "near-duplicate", "off-topic", "dark", "blurred", "empty"} <= set(planted)
    assert planted["near-duplicate"].share > 0.8
    assert planted["empty"].share == 1
    assert "By kind: digits " in str(planted["off-topic"])
    for each in audited.planted:
        low, high = each.interval
        assert 0 <= low <= each.share <= high <= 1
        assert each.noticed <= each.listed
        assert any(str(each) in line for line in audited.lines())
    assert str(planted["label"]).startswith("In a copy with planted faults, this check lists ")


def test_images_without_labels_are_checked_as_pictures(photos: Path, tmp_path: Path) -> None:
    found = audit(photos / "train" / "red", out=tmp_path / "out")
    assert not found.counts["label"]
    assert any("without labels" in note for note in found.notes)
    assert {each.issue for each in found.planted} >= {"near-duplicate", "off-topic"}


@pytest.mark.parametrize("count", [1, 3])
def test_few_and_equal_images_are_no_error(count: int, tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / "few" / name).mkdir(parents=True)
        for number in range(count):
            Image.new("RGB", (20, 20)).save(tmp_path / "few" / name / f"{number}.png")
    found = audit(tmp_path / "few", out=tmp_path / "out")
    assert found.counts["copy"] == 2 * count - 1
    assert found.counts["empty"] in (0, 2 * count)


def test_a_class_with_one_image_leaves_the_labels_of_the_others_checked(photos: Path, tmp_path: Path) -> None:
    data = tmp_path / "photos"
    for name in ("red", "blue"):
        (data / name).mkdir(parents=True)
        for number in range(30):
            shade = (230, 20, 20) if (name == "red") != (number == 7) else (20, 20, 230)
            picture(shade, RANDOM).save(data / name / f"{number:02}.png")
    (data / "green").mkdir()
    picture((20, 230, 20), RANDOM).save(data / "green" / "00.png")
    found = audit(data, out=tmp_path / "out")
    wrong = {found.names[finding.image] for finding in found.findings if finding.label}
    assert wrong
    assert wrong <= {"red/07.png", "blue/07.png"}
    assert any("no check of 1 label" in note for note in found.notes)


def test_a_sample_with_one_image_of_a_class_is_planted_without_it(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("vitascope.analysis.auditing.planted.SAMPLE", 41)
    random = np.random.default_rng(0)
    for name, count in (("red", 20), ("blue", 20), ("rare", 2)):
        (tmp_path / "data" / name).mkdir(parents=True)
        for number in range(count):
            picture((50, 100, 150), random).save(tmp_path / "data" / name / f"{number:02}.png")
    for seed in range(40):  # of some, one image of the rare class is in the sample
        sample = planted.sample_of(42, seed)
        if len(sample) - np.isin(sample, [20, 21]).sum() == 40:  # classes are in the order of names
            break
    found = audit(tmp_path / "data", out=tmp_path / "out", seed=seed)
    assert "label" in [experiment.issue for experiment in found.planted]


def test_what_cannot_be_audited_is_named(photos: Path, audited: AuditResult, tmp_path: Path, capsys) -> None:
    (tmp_path / "broken" / "a").mkdir(parents=True)
    (tmp_path / "broken" / "a" / "0.png").write_bytes(b"")
    for options, reason in (
        ({"out": audited.csv.parent}, "is not overwritten"),
        ({"seed": -1}, "seed"),
        ({"bodies": "nothing"}, "nothing: no such model"),
        ({"bodies": ()}, "no body"),
        ({"data": tmp_path / "broken"}, "none of 1 image can be read"),
    ):
        with pytest.raises(UserError, match=reason):
            audit(**{"data": photos, "out": tmp_path / "out", **options})
    assert not (tmp_path / "out").exists()
    assert main(["audit", str(photos), "--out", str(tmp_path / "out"), "--body", "nothing"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_body_that_was_trained_on_the_images_is_named(photos, tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    with undrawn():
        train(tiny_config(photos, run="run", steps=1))
    capsys.readouterr()
    command = f"audit {photos} --out out --body run --json --seed 1 --precision fp32 --device cpu"
    assert main(command.split()) == 0
    (note,) = json.loads(capsys.readouterr().out)["notes"]
    assert note.startswith("run was trained on ")


def test_a_finding_keeps_its_images_among_others() -> None:
    places = np.array([4, 7, 9])
    moved = Finding("label", 1.0, "", image=2, other=0).at(places)
    assert (moved.image, moved.other) == (9, 4)
    assert Finding("group", 1.0, "").at(places).image is None


def test_suggestions_are_accepted_in_python_and_in_the_file_of_findings(audited, tmp_path) -> None:
    found = audited
    sure = [one for one in found.findings if one.issue == "label" and one.label and one.score >= 0.5]
    assert found.accept(tmp_path / "labels.csv", ["label"], score=0.5) == len({one.image for one in sure})
    by_image = Decisions.read(str(tmp_path / "labels.csv")).by_image
    assert by_image.keys() == {(found.names[one.image or 0], found.contents[one.image or 0]) for one in sure}
    table = rows(found.csv)
    assert Decisions.read(str(found.csv)).by_image == {}  # as it is written, nothing is decided
    for row in table:
        if row["suggestion"] == "relabel blue":
            row["decision"] = "relabel"
    with (tmp_path / "filled.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(table)
    assert set(Decisions.read(str(tmp_path / "filled.csv")).by_image.values()) == {("relabel", "blue")}
    with pytest.raises(UserError, match="unknown issue 'labels'; nearest: label"):
        found.accept(tmp_path / "none.csv", ["labels"])


def test_what_a_person_has_kept_is_not_listed_again(photos, audited: AuditResult, tmp_path) -> None:
    first = audited
    listed = {one.image for one in first.findings if one.image is not None}
    with (tmp_path / "kept.csv").open("w", encoding="utf-8", newline="") as file:
        rows_kept = [(first.names[image], first.contents[image], "keep", "") for image in sorted(listed)]
        csv.writer(file).writerows([DECISION_COLUMNS, *rows_kept])
    again = audit(
        photos, out=tmp_path / "again", seed=1, table=TableOptions(audit=str(tmp_path / "kept.csv"))
    )
    assert not {one.image for one in again.findings} & listed
    count = sum(one.image is not None for one in first.findings)
    assert f"not listed: {count} findings on images that are kept or relabelled" in again.notes


def test_tables_have_the_scores_of_every_image_and_class(audited: AuditResult) -> None:
    found, images = audited, rows(audited.scores[0])
    assert [row["image"] for row in images] == list(found.names)
    by_name = {row["image"]: row for row in images}
    for finding in found.findings:
        if finding.image is not None and finding.issue in images[0]:
            score = float(by_name[found.names[finding.image]][finding.issue])
            assert score == pytest.approx(finding.score, abs=1e-3)
    broken = by_name["train/blue/broken.png"]
    assert (broken["unreadable"], broken["dark"], broken["label"]) == ("1.0000", "", "")
    for row in rows(found.scores[1]):
        name = row["class"]
        members = [image for image in images if image["classes"] == name]
        assert int(row["images"]) == len(members)
        judged = [float(image["label"]) for image in members if image["label"]]
        assert float(row["label"]) == pytest.approx(np.mean(judged), abs=1e-3)
