import os
from pathlib import Path
from typing import Any

import pytest

from vitascope.errors import UserError
from vitascope.training.run import run as module
from vitascope.training.run.run import Run, lasting_path

OPTIONS = {"data": "digits", "run": None, "weights": None, "teacher": None, "device": "cpu"}
OPTIONS |= {"task": "classify", "seed": 0}


def created(path: Path | None = None, **options: Any) -> Run:
    return Run.create({**OPTIONS, "run": None if path is None else str(path), **options})


def test_an_existing_run_is_never_overwritten(tmp_path: Path) -> None:
    run = created(tmp_path / "r")
    before = run.config_file.read_bytes()
    with pytest.raises(UserError, match=r"exists.*--resume"):
        created(tmp_path / "r", seed=3)
    assert run.config_file.read_bytes() == before


def test_unnamed_runs_are_named_after_the_data_and_numbered(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = [str(created(data="some/photos/").path) for _ in range(3)]
    assert found == ["runs/photos", "runs/photos-2", "runs/photos-3"]


def test_a_run_opens_with_its_configuration(tmp_path: Path) -> None:
    run = created(tmp_path / "r", seed=5)
    assert Run.open(tmp_path / "r") == run
    assert Run.open(str(tmp_path / "r")).config == {**OPTIONS, "run": str(tmp_path / "r"), "seed": 5}
    assert run.environment["device"] == "cpu"
    with pytest.raises(UserError, match="not a run folder"):
        Run.open(tmp_path)


def test_advice_for_a_better_start_depends_on_the_start(tmp_path: Path) -> None:
    names = (None, "cifar10", "google/vit-base-patch16-224-in21k")
    none, small, large = (created(tmp_path / str(name)[:4], weights=name) for name in names)
    assert none.better_start.startswith("few images need trained weights: --weights cifar10")
    assert small.better_start.startswith(
        "few images may need the weights of a larger model, such as facebook"
    )
    assert large.better_start == ""


def test_a_configuration_that_is_written_can_be_read(tmp_path: Path) -> None:
    columns = 5 * [f"label={','.join(f'label_{number:05}' for number in range(20_000))}"]
    assert created(tmp_path / "wide", columns=columns).config["columns"] == columns


def test_paths_in_the_configuration_are_valid_from_any_folder(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for folder in ("photos", "home/trained"):
        Path(folder).mkdir(parents=True)
    config = created(Path("r"), data="photos/", weights="home/trained").config
    assert (config["data"], config["weights"]) == (str(tmp_path / "photos"), "~/trained")
    assert lasting_path("digits") == "digits"
    assert lasting_path("owner/name") == "owner/name"


def test_an_unavailable_device_leaves_no_run(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be used here"):
        created(tmp_path / "r", device="cuda:99")
    assert not (tmp_path / "r").exists()


def test_a_full_disk_leaves_no_run_and_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(module, "write_json", full)
    with pytest.raises(
        UserError, match=r"r: the run folder cannot be written: No space .*make room"
    ) as raised:
        created(tmp_path / "r")
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "r").exists()


TASK = "task: classify\ndata: digits\nseed: 0\n"
BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n"
    for before, name in zip("abcdefghij", "bcdefghijk", strict=True)
)


def test_a_folder_that_is_no_run_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not a run folder"):
        Run.open(tmp_path)
    for config, message in (
        ("a: [1\nb: 2\n", "is broken"),
        ("[1, 2]", "is broken: a list, not an object"),
        ("task: classify\n", "is broken: it has no data, seed; restore it, or name another run"),
        (TASK + BOMB, r"config\.yaml is broken: line 5: references"),
        *(
            (TASK + line, rf"config\.yaml is broken: .*{line.partition(':')[0]} ")
            for line in ("task: other", "seed: -1", "seed: true", "data: 5", "weights: [1]")
        ),
    ):
        (tmp_path / "config.yaml").write_text(config)
        with pytest.raises(UserError, match=message):
            Run.open(tmp_path).config  # noqa: B018


def test_a_test_of_a_classifier_without_its_accuracy_is_named(tmp_path: Path) -> None:
    run = created(tmp_path / "r")
    run.metrics_file.write_text(
        '{"kind": "test", "step": 2, "split": "test", "images": 3, "loss": 0.5, "seconds": 1}\n'
    )
    with pytest.raises(
        UserError, match=r"metrics\.jsonl is broken: it has no accuracy, correct; remove this line"
    ):
        run.records("test")


def test_a_broken_environment_is_named(tmp_path: Path) -> None:
    wrong = ("{", "[1]", "null", '{"cores": []}', '{"started": "today"}', '{"cores": 1%s}' % ("0" * 400))
    for content in wrong:
        (tmp_path / "environment.json").write_text(content)
        with pytest.raises(UserError, match=r"environment\.json is broken"):
            Run(tmp_path).environment  # noqa: B018


def test_a_run_that_has_just_started_has_only_its_configuration(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("task: masked\ndata: digits\nseed: 0\n")
    run = Run.open(tmp_path)
    assert (run.metrics, run.environment, run.predictions) == ([], {}, None)
    assert not run.split_file.exists()
    assert not run.finished
    assert not run.classifies


def test_auto_finds_the_newest_unfinished_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="no unfinished run to resume"):
        Run.find("auto")
    old, new, finished = (created(Path("runs") / name) for name in ("old", "new", "finished"))
    os.utime(old.config_file, (0, 0))
    finished.model_folder.mkdir()
    (finished.model_folder / "config.json").touch()
    assert Run.find("auto") == (new, None)
    os.utime(new.config_file, (0, 0))
    old.metrics_file.touch()
    assert Run.find("auto") == (old, None)
    checkpoint = old.checkpoints / "step-00000004"
    assert Run.find(checkpoint) == (old, checkpoint)
    with pytest.raises(UserError, match="not a run folder"):
        Run.find("nowhere")
