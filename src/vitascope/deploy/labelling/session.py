"""A session of labelling: pictures, their labels, and the classifier that follows them.

Requests call the methods, and two threads: one reads the features of the pictures, the other fits the
classifier to the labels and chooses the next pictures. Both publish under one lock.
"""

import os
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, islice, repeat
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from vitascope.analysis.labelling.table import LabelTable, PictureLabel, Source
from vitascope.data.rows.cells import escaped
from vitascope.data.targets import ClassSets
from vitascope.errors import UserError, check_choice
from vitascope.formatting import counted
from vitascope.models.decoding import ImageSource

if TYPE_CHECKING:
    from vitascope.analysis.labelling.fit import Acceptance, LabelFit

Labels = Mapping[int, Sequence[str] | None]
"""By the number of the picture; None takes the label away."""
UNREAD = "at random, as no features are read yet"


class Session:
    """The pictures, numbered from 0, and what is known of them.

    What changes labels raises a `UserError`, and then nothing has changed: for an unknown picture or view, an
    impossible name of a class, a classifier that is another one by now, a table that fails.

    Attributes:
        names, sources, places: of the N pictures; their places are absolute paths.
        unreadable: the reasons, by the number of the picture.
        next: the pictures that were chosen, with their reasons.
        skipped: those that are offered last.
        features, known: (N, D), once there are any; whether those of each picture are known, (N,).
        groups: the group of near-copies of each picture, (N,); its own until the copies are known.
        fit: the classifier of `class_names` and `fit_labels` labels; its rows are `fitted`, (n,), ascending.
        version, recorded: grow with every change that a page shows, and with every label.
        failure: the error of a thread, which ends the session.
    """

    def __init__(self, names: Sequence[str], sources: Sequence[ImageSource], table: LabelTable) -> None:
        N = len(names)
        self.names, self.sources, self.table = names, sources, table
        self.places = [os.path.abspath(name) for name in names]
        self.number_of = {place: number for number, place in enumerate(self.places)}
        self.classes: list[str] = []
        self.notes: list[str] = []
        self.changed = threading.Condition()  # whose lock a thread may take twice
        self.version = self.recorded = self.fit_number = self.fit_labels = 0
        self.unreadable = {  # tables are in UTF-8
            number: f"{name!a}: its name is not UTF-8: rename the file"
            for number, name in enumerate(names)
            if escaped(name) != name
        }
        self.features: npt.NDArray[np.float32] | None = None
        self.known, self.groups = np.zeros(N, np.bool_), np.arange(N)
        self.fit: LabelFit | None = None
        self.fitted = np.arange(0)
        self.class_names: tuple[str, ...] = ()
        self.fitting = self.stopped = self.copies_known = False
        self.failure: BaseException | None = None
        self._began = time.monotonic()
        self.next: dict[int, str] = dict.fromkeys(np.random.default_rng(0).permutation(N).tolist(), UNREAD)
        self.skipped: dict[int, None] = {}
        self._confirmed: set[int] = set()  # labelled twice the same: no suspects
        self._steps: list[tuple[str, dict[str, PictureLabel | None]]] = []

    def begin(self, given: Mapping[int, tuple[str, ...]]) -> None:
        """Continue the table, or begin it with the labels that the data have."""
        with self.publishing():
            if moved := self.table.moved(self.places):
                self.notes.append(f"{counted(moved, 'label')} of pictures that have moved")
            if given and not len(self.table.labels):
                self._record(self._changes(given, "given"), "")
            self._name_classes()

    # What the page asks for

    def state(self) -> dict[str, Any]:
        """All but pictures, as values of JSON."""
        with self.changed:
            labels = [label for place, label in self.table.labels.items() if place in self.number_of]
            counts = Counter(name for label in labels for name in label.names)
            sources, read = Counter(label.source for label in labels), int(self.known.sum())
            left, passed = len(self.names) - len(self.unreadable) - read, time.monotonic() - self._began
            notes, elsewhere = list(self.notes), len(self.table.labels) - len(labels)
            if elsewhere:
                notes.append(f"{counted(elsewhere, 'label')} of pictures elsewhere stay in the table")
            return {
                "version": self.version,
                "out": str(self.table.path),
                "several": self.table.kind is ClassSets,
                "pictures": len(self.names),
                "unreadable": len(self.unreadable),
                "read": read,
                "remaining_s": round(passed * left / read) if read and left else None,
                "labelled": len(labels),
                **{source: sources[source] for source in ("looked", "accepted", "given")},
                "suspects": len(self._suspects()),
                "classes": [{"name": name, "count": counts[name]} for name in self.classes],
                "undo": self._steps[-1][0] if self._steps else None,
                "fitting": self.fitting,
                "notes": notes,
                "fit": self.fit and self._summary(self.fit),
            }

    def wait(self, after: int, seconds: float) -> None:
        """Until the version is another one, or the session ends."""
        with self.changed:
            self.changed.wait_for(lambda: self.version != after or self.stopped, seconds)

    def wait_for_end(self) -> None:
        """Until the session is stopped; raises the error of a thread that has stopped it."""
        with self.changed:
            while not self.stopped:  # in short turns, as Windows interrupts no wait
                self.changed.wait(1)
        if self.failure is not None:
            raise self.failure

    def pictures(self, view: str, count: int, label: str = "") -> dict[str, Any]:
        """The first pictures of a view: `next`, `doubtful`, `suspects` or `labelled`."""
        with self.changed:
            if view == "next":
                asked = {"labels": None, "source": ""}  # also of an accepted one that is to be looked at
                shown = [self._picture(*each) | asked for each in islice(self._waiting(), count)]
                return {"pictures": shown, "total": sum(1 for _ in self._waiting())}
            views = {"doubtful": self._acceptable, "suspects": self._suspects, "labelled": self._labelled}
            check_choice("view", view, ("next", *views))
            numbers = views[view](label)
            return {"pictures": [self._picture(number) for number in numbers[:count]], "total": len(numbers)}

    def decide(self, labels: Labels, source: Source = "looked") -> None:
        """Save labels."""
        with self.publishing():
            self._check(labels, self.unreadable)
            changes = self._changes(labels, source)
            known = {number: self.label_of(number) for number in labels}
            self._confirmed |= {
                n for n, old in known.items() if old and old.names == getattr(changes[n], "names", None)
            }
            some = next((label.names for label in changes.values() if label), None)
            text = "label taken away" if some is None else "; ".join(some) or "no class"
            self._record(changes, f"{text} ({counted(len(changes), 'picture')})")

    def skip(self, numbers: Sequence[int]) -> None:
        """Offer pictures again when no others are left."""
        with self.publishing():
            self._check(numbers, {})
            self.skipped |= dict.fromkeys(numbers)
            before = {self.places[number]: self.label_of(number) for number in numbers}
            self._steps.append((f"skipped ({counted(len(numbers), 'picture')})", before))

    def undo(self) -> list[int]:
        """Take the last step back; the numbers of its pictures."""
        with self.publishing():
            _, before = self._steps[-1] if self._steps else ("", {})
            self.table.record(before)
            self._steps, self.recorded = self._steps[:-1], self.recorded + len(before)
            numbers = [self.number_of[place] for place in before]
            self.skipped = {n: None for n in self.skipped if n not in numbers}
            return numbers

    def add_class(self, name: str) -> None:
        """Add a class without pictures."""
        with self.publishing():
            self._name_classes(*self.table.label((name,), self.classes, "looked").names)

    def accept(self, label: str, fit: int) -> None:
        """Label all that the classifier is sure of."""
        with self.changed:
            if fit != self.fit_number:
                raise UserError("the classifier has learned more meanwhile: look at its new offer")
            self.decide(dict.fromkeys(self._acceptable(label), (label,)), "accepted")

    # What the threads use

    @contextmanager
    def publishing(self) -> Iterator[None]:
        """Change what a page shows."""
        with self.changed:
            yield
            self.version += 1
            self.changed.notify_all()

    def stop(self, failure: BaseException | None = None) -> None:
        """End the threads and those who wait; a failure is raised by `wait_for_end`."""
        with self.changed:
            self.stopped, self.failure = True, self.failure or failure
            self.changed.notify_all()

    def _check(self, numbers: Iterable[int], faults: Mapping[int, str]) -> None:
        for number in numbers:
            if not 0 <= number < len(self.names) or number in faults:
                raise UserError(faults.get(number, f"there is no picture {number}"))

    def _changes(self, names_by_number: Labels, source: Source) -> dict[int, PictureLabel | None]:
        """Labels with the names of classes as the table has them."""
        given = {number: None if names is None else tuple(names) for number, names in names_by_number.items()}
        labels: dict[tuple[str, ...] | None, PictureLabel | None] = {None: None}
        classes = list(self.classes)
        for names in dict.fromkeys(given.values()):
            if names is not None:
                labels[names] = label = self.table.label(names, classes, source)
                classes += label.names
        return {number: labels[names] for number, names in given.items()}

    def _record(self, changes: Mapping[int, PictureLabel | None], text: str) -> None:
        """Save labels, and remember those before as a step in words; an empty one cannot be undone."""
        if self.table.refresh():
            self.notes = [f"{self.table.path} was changed by another program, and read again"]
        by_place = {self.places[number]: label for number, label in changes.items()}
        before = {place: self.table.labels.get(place) for place in by_place}
        self.table.record(by_place)
        if text and changes:
            self._steps = [*self._steps[-1000:], (text, before)]
        self.recorded += len(changes)
        self._name_classes()

    def _name_classes(self, *others: str) -> None:
        """Add the classes of all labels, in their order, and others."""
        names = (name for label in self.table.labels.values() for name in label.names)
        self.classes = list(dict.fromkeys([*self.classes, *names, *others]))

    def label_of(self, number: int) -> PictureLabel | None:
        """The label of a picture, if it has one."""
        return self.table.labels.get(self.places[number])

    def _waiting(self) -> Iterator[tuple[int, str]]:
        """The pictures without labels and their reasons: those that were chosen, others, skipped ones."""
        first = ((number, reason) for number, reason in self.next.items() if number not in self.skipped)
        known = self.next.keys() | self.skipped
        others = ((number, "") for number in range(len(self.names)) if number not in known)
        for number, reason in chain(first, others, zip(self.skipped, repeat("skipped"))):
            label = self.label_of(number)
            checked = label is not None and label.source == "accepted" and number in self.next
            if number not in self.unreadable and (label is None or checked):
                yield number, reason

    def _offers(self) -> "list[tuple[Acceptance, list[int]]]":
        """What the classifier is sure of: pictures that have no label yet."""
        offers = () if self.fit is None else self.fit.acceptances
        pairs = ((offer, self.fitted[offer.rows].tolist()) for offer in offers)
        return [(offer, [n for n in numbers if not self._has(n)]) for offer, numbers in pairs]

    def _acceptable(self, label: str) -> list[int]:
        return [number for offer, numbers in self._offers() if offer.label == label for number in numbers]

    def _suspects(self, label: str = "") -> list[int]:
        """Labelled pictures that contradict the classifier, the worst first."""
        rows = () if self.fit is None else self.fit.suspects
        numbers = [int(self.fitted[suspect.image]) for suspect in rows]
        return [n for n in dict.fromkeys(numbers) if n not in self._confirmed and self._has(n, label)]

    def _labelled(self, label: str) -> list[int]:
        """Of a class, or all, the newest first."""
        numbers = [self.number_of[place] for place in self.table.labels if place in self.number_of]
        return [number for number in reversed(numbers) if self._has(number, label)]

    def _has(self, number: int, label: str = "") -> bool:
        """Whether a picture has this label, or any if it is empty."""
        known = self.label_of(number)
        return known is not None and (not label or label in known.names)

    def _picture(self, number: int, reason: str = "") -> dict[str, Any]:
        label, row = self.label_of(number), int(np.searchsorted(self.fitted, number))
        suggestion = None
        if (
            self.fit is not None
            and self.fit.probabilities is not None
            and number in self.fitted[row : row + 1]
        ):
            best = int(self.fit.probabilities[row].argmax())
            probability = round(float(self.fit.probabilities[row, best]), 4)
            suggestion = {"label": self.class_names[best], "probability": probability}
        alike = {*np.flatnonzero(self.groups == self.groups[number]).tolist()} - {number, *self.unreadable}
        return {
            "id": number,
            "name": self.names[number],
            "reason": reason,
            "copies": [copy for copy in sorted(alike) if not self._has(copy)],
            "labels": label and list(label.names),
            "source": label.source if label else "",
            "suggestion": suggestion,
        }

    def _summary(self, fit: "LabelFit") -> dict[str, Any]:
        """A classifier as values of JSON."""
        shares = ("value", "low", "high")
        limits = (None,) * 3 if fit.score is None else fit.score.value_and_limits
        offers = [
            {"label": offer.label, "count": len(numbers), **{name: getattr(offer, name) for name in shares}}
            for offer, numbers in self._offers()
            if numbers
        ]
        return {
            "number": self.fit_number,
            "labels": self.fit_labels,
            "measure": self.table.kind.measure,
            **dict(zip(shares, limits, strict=True)),
            "reason": fit.reason,
            "confused": fit.confused and dict(zip(("label", "said", "count"), fit.confused, strict=True)),
            "acceptances": offers,
        }
