"""The two threads of a session: one reads features, the other fits the classifier and chooses pictures."""

import threading
from collections.abc import Callable
from contextlib import closing

import numpy as np

from vitascope.analysis.labelling.fit import fit_labels
from vitascope.analysis.labelling.order import EVERY, FEW, UNSURE, doubts, judging, next_pictures, random_keys
from vitascope.data.duplicates import groups_of, near_duplicates
from vitascope.data.features.embed import Model
from vitascope.data.features.stream import FeatureStream
from vitascope.data.looks import look_at
from vitascope.deploy.labelling.session import Session
from vitascope.models.engines.compute import Compute
from vitascope.models.engines.features import OWN
from vitascope.models.engines.runtimes import as_engine

AFTER = 10
"""New labels after which the classifier is fitted again at once."""
IDLE = 1.5
"""Seconds without a new label after which it is fitted to fewer."""
AHEAD = 60
"""Pictures that are chosen at a time."""
RANDOM = "at random, to measure the accuracy"


def learn_from(session: Session, body: Model, compute: Compute) -> list[threading.Thread]:
    """Start the threads, which end with the session; an error of one ends the session, as its `failure`."""

    def run(follow: Callable[..., None], *arguments: object) -> None:
        try:
            follow(session, *arguments)
        except BaseException as error:  # noqa: BLE001 - raised where the end is awaited
            session.stop(error)

    works = ((follow_pictures, body, compute), (follow_labels,))
    threads = [threading.Thread(target=run, args=work, daemon=True) for work in works]
    for thread in threads:
        thread.start()
    return threads


def follow_pictures(session: Session, body: Model, compute: Compute) -> None:
    """Read the features of all pictures in random order, so that those of any share are typical of all; then
    find near-copies."""
    engine = as_engine(body, precision=compute.precision, device=compute.device)
    order = np.random.default_rng(0).permutation(len(session.names))
    stream = FeatureStream(engine, [OWN], [session.sources[n] for n in order.tolist()], compute)
    with closing(iter(stream)) as blocks:
        for rows in blocks:
            numbers, (features,) = order[rows.indices], rows.features
            with session.publishing():
                if session.features is None:
                    session.features = np.zeros((len(order), features.shape[1]), np.float32)
                session.features[numbers], session.known[numbers] = features, True
            if session.stopped:
                return
    with session.publishing():
        session.unreadable |= {int(order[row]): reason for row, reason in stream.faults.reasons.items()}
    numbers = np.flatnonzero(session.known)
    if session.features is not None and len(numbers) > 1:
        looks = look_at([session.sources[n] for n in numbers.tolist()])
        groups = groups_of(near_duplicates(looks, session.features[numbers]), len(numbers))
        with session.publishing():
            session.groups[numbers], session.copies_known = numbers[groups], True


def follow_labels(session: Session) -> None:
    """Fit the classifier after `AFTER` new labels, or fewer and a pause, and when the number of features has
    doubled or is complete, or near-copies are known."""
    labels, features, copies_known = 0, 0, False
    while not session.stopped:
        with session.changed:
            new, read = session.recorded - labels, int(session.known.sum())
            complete = read + len(session.unreadable) >= len(session.names)
            grown = read >= 2 * features + 1 or (complete and read > features)
            grown |= session.copies_known and not copies_known
            if not (read and (grown or new >= AFTER)):
                waited = session.changed.wait(IDLE if read and new else None)
                if waited or session.recorded == labels:
                    continue
            labels, features, copies_known = session.recorded, read, session.copies_known
            session.fitting = True
        fit_and_choose(session, afresh=grown)


def fit_and_choose(session: Session, *, afresh: bool) -> None:
    """Fit to the labels of pictures that a person has looked at, then choose the next pictures.

    One of `EVERY` is random, to judge the classifier. Typical ones are chosen `afresh` or when there
    are few left: labels do not change their order.
    """
    with session.changed:
        numbers = np.flatnonzero(session.known)
        assert session.features is not None
        features, groups = session.features[numbers], session.groups[numbers]
        labels = [session.label_of(number) for number in numbers.tolist()]
        skipped = np.isin(numbers, list(session.skipped))
        class_names, total = tuple(session.classes), len(session.table.labels)
    labelled = np.array([label is not None for label in labels], np.bool_)
    looked = np.array([label is not None and label.source != "accepted" for label in labels], np.bool_)
    names = [label.names for label in labels if label is not None and label.source != "accepted"]
    pool, judges, waiting = judging(random_keys(features), groups, looked | skipped)
    rows, targets = np.flatnonzero(looked), session.table.kind.of_names(names, class_names)
    fit = fit_labels(features, rows, targets, judges=judges[looked], taken=labelled, groups=groups)
    with session.publishing():
        session.fit, session.fitted, session.class_names = fit, numbers, class_names
        session.fit_number, session.fit_labels = session.fit_number + 1, len(names)
        session.fitting = False
        left = sum(session.label_of(number) is None for number in session.next)
    if total < FEW and not afresh and left > AHEAD // 2:
        return
    others, margins, words = np.flatnonzero(~pool), None, list[str]()
    if fit.margins is not None and fit.probabilities is not None:
        margins, words = fit.margins[others], doubts(fit.probabilities, class_names)
    chosen = next_pictures(
        features[others],
        AHEAD - AHEAD // EVERY,
        labelled=(labelled | skipped)[others],
        labels=total,
        margins=margins,
        groups=groups[others],
    )
    pairs = [(int(others[one.index]), one.reason) for one in chosen]
    reasons = [(row, words[row] if reason == UNSURE else reason) for row, reason in pairs]
    for place, row in enumerate(waiting[: AHEAD // EVERY].tolist(), 1):
        reasons.insert(place * EVERY - 1, (row, RANDOM))
    with session.publishing():
        session.next = {int(numbers[row]): reason for row, reason in reasons}
