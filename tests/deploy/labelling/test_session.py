"""The session: the table has what was decided, whatever the order of decisions, undone steps and threads."""

import csv
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from vitascope.analysis.labelling.table import LabelTable
from vitascope.data.targets import ClassIndices, ClassSets, Targets
from vitascope.deploy.labelling.session import Session
from vitascope.errors import UserError

N = 30


def session_of(folder: Path, kind: type[Targets] = ClassIndices, count: int = N) -> Session:
    """A session of pictures that need not exist, without threads."""
    names = [str(folder / f"{number}.png") for number in range(count)]
    session = Session(names, names, LabelTable(folder / "labels.csv", kind))
    session.begin({})
    return session


def saved(folder: Path) -> dict[int, str]:
    """The labels in the file by the number of the picture, each picture once."""
    if not (folder / "labels.csv").exists():
        return {}
    with open(folder / "labels.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    found = {int(Path(row["image"]).stem): row["label"] for row in rows}
    assert len(found) == len(rows)
    return found


def fitted(session: Session, acceptances: dict[str, list[int]], suspects: tuple[int, ...] = ()) -> None:
    """Publish a classifier that says `cat` for all pictures but the first, which it does not know."""
    offers = [
        SimpleNamespace(label=label, rows=np.array(rows), value=0.97, low=0.95, high=0.99)
        for label, rows in acceptances.items()
    ]
    known = np.arange(1, len(session.names))
    fit: Any = SimpleNamespace(
        probabilities=np.tile(np.float32([0.9, 0.1]), (len(known), 1)),
        score=None,
        reason="too few",
        confused=SimpleNamespace(label="cat", said="dog", count=3),
        acceptances=offers,
        suspects=[SimpleNamespace(image=row) for row in suspects],
    )
    with session.publishing():
        session.fit, session.fitted, session.fit_number = fit, known, session.fit_number + 1
        session.class_names = ("cat", "dog")


@pytest.mark.parametrize("seed", range(4))
def test_file_is_what_a_dictionary_would_be(seed: int, tmp_path: Path) -> None:
    draw, session = np.random.default_rng(seed), session_of(tmp_path)
    labels: dict[int, str] = {}
    steps: list[dict[int, str]] = []
    for _ in range(60):
        if draw.random() < 0.25 and steps:
            session.undo()
            labels = steps.pop()
        else:
            numbers = draw.choice(N, draw.integers(1, 4), replace=False).tolist()
            names = [draw.choice(["cat", "dog", "red fox", ""]) for _ in numbers]
            steps.append(dict(labels))
            session.decide({n: (name,) if name else None for n, name in zip(numbers, names, strict=True)})
            labels = {
                n: name for n, name in {**labels, **dict(zip(numbers, names, strict=True))}.items() if name
            }
        assert saved(tmp_path) == labels
        state = session.state()
        assert state["labelled"] == state["looked"] == len(labels)
        assert {c["name"]: c["count"] for c in state["classes"] if c["count"]} == {
            name: list(labels.values()).count(name) for name in labels.values()
        }
        waiting = session.pictures("next", N)
        assert {picture["id"] for picture in waiting["pictures"]} == set(range(N)) - labels.keys()
        assert waiting["total"] == N - len(labels)
    assert {session.number_of[place] for place in session_of(tmp_path).table.labels} == labels.keys()


def test_decisions_of_many_windows_are_all_saved_once(tmp_path: Path) -> None:
    session = session_of(tmp_path, count=200)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: session.decide({n: ("cat",), (n + 1) % 200: ("dog",)}), range(0, 200, 2)))
    assert saved(tmp_path) == {n: "cat" if n % 2 == 0 else "dog" for n in range(200)}


def test_labels_of_the_data_begin_the_table_and_what_is_taken_away_stays_away(tmp_path: Path) -> None:
    session = session_of(tmp_path)
    session.begin({0: ("cat",), 1: ("dog",)})
    assert session.state()["given"] == 2
    session.decide({0: None, 1: ("cat",)})
    again = session_of(tmp_path)
    again.begin({0: ("cat",), 1: ("dog",)})
    assert saved(tmp_path) == {1: "cat"}
    assert again.state()["looked"] == 1


def test_skipped_pictures_come_last_and_unreadable_ones_never(tmp_path: Path) -> None:
    session = session_of(tmp_path)
    session.next = {4: "typical of 9 pictures", 7: "typical of 2 pictures"}
    session.unreadable = {5: "broken", 9: "broken"}
    session.skip([4, 11])
    shown = session.pictures("next", N)["pictures"]
    assert [picture["id"] for picture in shown[:1] + shown[-2:]] == [7, 4, 11]
    assert shown[0]["reason"] == "typical of 2 pictures"
    assert {picture["id"] for picture in shown} == set(range(N)) - {5, 9}
    assert session.state()["unreadable"] == 2


def test_skips_are_undone_too(tmp_path: Path) -> None:
    session = session_of(tmp_path)
    session.next = {4: "typical"}
    session.decide({3: ("cat",)})
    session.skip([4])
    assert session.undo() == [4]
    assert session.pictures("next", 1)["pictures"][0]["id"] == 4
    assert saved(tmp_path) == {3: "cat"}


def test_a_label_that_is_given_again_is_no_suspect(tmp_path: Path) -> None:
    session = session_of(tmp_path)
    session.decide({3: ("cat",), 5: ("dog",)})
    fitted(session, {}, suspects=(2, 4))
    session.decide({3: ("cat",)})
    assert [picture["id"] for picture in session.pictures("suspects", 9)["pictures"]] == [5]
    assert session.state()["suspects"] == 1


def test_near_copies_are_offered_with_a_picture(tmp_path: Path) -> None:
    session = session_of(tmp_path)
    session.groups[[6, 8]] = 2
    session.decide({6: ("cat",)})
    (picture,) = (p for p in session.pictures("next", N)["pictures"] if p["id"] == 2)
    assert picture["copies"] == [8]


def test_accepted_answers_are_marked_and_are_never_of_labelled_pictures(tmp_path: Path) -> None:
    session = session_of(tmp_path)
    session.decide({5: ("dog",), 3: ("cat",)})
    fitted(session, {"cat": [8, 4, 2, 0], "dog": [4]}, suspects=(4, 2, 7))
    assert [picture["id"] for picture in session.pictures("doubtful", 9, "cat")["pictures"]] == [9, 1]
    assert [picture["id"] for picture in session.pictures("suspects", 9)["pictures"]] == [5, 3]
    offers = session.state()["fit"]["acceptances"]
    assert [(offer["label"], offer["count"]) for offer in offers] == [("cat", 2)]
    with pytest.raises(UserError, match="learned more"):
        session.accept("cat", session.fit_number + 1)
    session.accept("cat", session.fit_number)
    assert saved(tmp_path) == {5: "dog", 3: "cat", 9: "cat", 1: "cat"}
    assert (session.state()["looked"], session.state()["accepted"]) == (2, 2)
    assert session.state()["undo"] == "cat (2 pictures)"
    session.undo()
    assert saved(tmp_path) == {5: "dog", 3: "cat"}


def test_pictures_have_the_answer_of_the_classifier(tmp_path: Path) -> None:
    session = session_of(tmp_path)
    assert session.pictures("next", 1)["pictures"][0]["suggestion"] is None
    fitted(session, {})
    by_number = {picture["id"]: picture["suggestion"] for picture in session.pictures("next", N)["pictures"]}
    assert by_number.pop(0) is None
    assert {tuple(suggestion.values()) for suggestion in by_number.values()} == {("cat", 0.9)}
    assert session.state()["fit"]["reason"] == "too few"
    assert session.state()["fit"]["confused"] == {"label": "cat", "said": "dog", "count": 3}


def test_several_classes_and_none_are_labels(tmp_path: Path) -> None:
    session = session_of(tmp_path, ClassSets)
    session.decide({0: ("cat", "dog", "cat"), 1: ()})
    session.add_class("red fox")
    again = session_of(tmp_path)  # the file says that there are several
    assert [again.label_of(n) and again.label_of(n).names for n in range(3)] == [("cat", "dog"), (), None]
    assert [c["name"] for c in session.state()["classes"]] == ["cat", "dog", "red fox"]


@pytest.mark.parametrize("names", [(), ("cat", "dog"), ("",), ("a;b",)])
def test_impossible_labels_change_nothing(names: tuple[str, ...], tmp_path: Path) -> None:
    session = session_of(tmp_path)
    session.decide({0: ("cat",)})
    before = session.state()
    with pytest.raises(UserError):
        session.decide({0: ("owl",), 1: names})
    with pytest.raises(UserError, match="no picture 30"):
        session.decide({N: ("cat",)})
    with pytest.raises(UserError, match="view"):
        session.pictures("nothing", 1)
    assert session.state() == before
    assert saved(tmp_path) == {0: "cat"}


def test_another_program_s_changes_are_shown(tmp_path: Path) -> None:
    session = session_of(tmp_path)
    session.decide({0: ("cat",)})
    table = tmp_path / "labels.csv"
    table.write_text(table.read_text().replace("cat", "lynx"))
    session.decide({1: ("dog",)})
    assert saved(tmp_path) == {0: "lynx", 1: "dog"}
    assert "lynx" in [c["name"] for c in session.state()["classes"]]
    assert "another program" in session.state()["notes"][0]


def test_labels_of_pictures_elsewhere_stay(tmp_path: Path) -> None:
    session_of(tmp_path).decide(dict.fromkeys(range(N), ("cat",)))
    fewer = session_of(tmp_path, count=3)
    fewer.decide({0: ("dog",)})
    assert saved(tmp_path) == {n: "dog" if n == 0 else "cat" for n in range(N)}
    assert fewer.state()["labelled"] == 3
    assert "27 labels" in fewer.state()["notes"][0]


def test_an_error_of_a_thread_ends_the_session(tmp_path: Path) -> None:
    session = session_of(tmp_path)
    session.stop(UserError("no such model"))
    with pytest.raises(UserError, match="no such model"):
        session.wait_for_end()
    session.wait(session.version, 20)  # returns at once


def test_no_field_of_the_state_is_missing_where_there_is_one_picture_or_none(tmp_path: Path) -> None:
    fields = set(session_of(tmp_path).state())
    for count in (0, 1):
        session = session_of(tmp_path / str(count), count=count)
        assert set(session.state()) == fields
        assert session.pictures("next", 12)["total"] == count


def test_a_name_that_no_table_can_have_is_unreadable(tmp_path: Path) -> None:
    names = [str(tmp_path / "a.png"), str(tmp_path / "\udcff.png")]
    session = Session(names, names, LabelTable(tmp_path / "labels.csv"))
    assert [picture["id"] for picture in session.pictures("next", 9)["pictures"]] == [0]
    with pytest.raises(UserError, match="not UTF-8"):
        session.decide({0: ("cat",), 1: ("cat",)})
    assert session.state()["unreadable"] == 1
    assert not saved(tmp_path)
