"""`labelling`: the data, the table and its lock, the session and the server of `vitascope label`."""

import os
import threading
import webbrowser
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from threadpoolctl import threadpool_limits

from vitascope.analysis.labelling.table import LabelTable
from vitascope.data.all_images import AllImages, all_images
from vitascope.data.table_options import TableOptions, is_table
from vitascope.data.targets import ClassIndices, ClassSets, Targets
from vitascope.deploy.labelling.server import LabelServer
from vitascope.deploy.labelling.session import Session
from vitascope.errors import UserError
from vitascope.formatting import canonical
from vitascope.models.engines.compute import Compute
from vitascope.storage import check_local, locked


@contextmanager
def labelling(
    data: str, out: Path, *, several: bool, port: int, table: TableOptions
) -> Iterator[LabelServer]:
    """The server of a session, whose table no other process may change meanwhile.

    Args:
        data: a DATA argument of image files.
        out: the table, new or to be continued.
        several: whether a picture may have any number of classes; as the data or the table have it, too.
        port, table: 0 for a free port; how DATA are read, if they are a table.

    Raises:
        UserError: no such data, images that are no files, another table, a table that another process holds,
            a port that is not free.
    """
    check_local(out)
    images = all_images(data, table)
    if others := [n for n in range(len(images)) if not isinstance(images[n], str | os.PathLike)]:
        raise UserError(f"{images.names[others[0]]} is no image file: unpack the images into a folder")
    places = list(map(os.path.abspath, images.names))
    splits = None if set(images.splits) == {"all"} else dict(zip(places, images.splits, strict=True))
    labels = LabelTable(out, ClassSets if several or images.several else ClassIndices, splits)
    session = Session(images.names, images, labels)
    lock = out.with_name(f".{out.name}.lock")
    with LabelServer(session, port) as server, locked(lock, holder=server.name):
        session.begin(_given(images, labels.kind, in_table=is_table(data)))
        yield server


def serve_session(server: LabelServer, body: str, compute: Compute, *, in_browser: bool) -> None:
    """Serve until the session ends; raises the error of a thread that has ended it."""
    from vitascope.deploy.labelling.learning import learn_from  # while the first pictures are shown

    serving = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    serving.start()
    if in_browser:
        webbrowser.open(server.address)
    session, learning = server.session, list[threading.Thread]()
    try:
        # Limits of threads are those of the process: where one thread restored them, BLAS could have several
        # threads within those of another's k-means.
        with threadpool_limits(1, user_api="blas"):
            learning = learn_from(session, body, compute)
            session.wait_for_end()
    finally:
        session.stop()
        server.shutdown()
        for thread in learning:  # it keeps the features that it has computed
            thread.join(5)


def _given(images: AllImages, kind: type[Targets], *, in_table: bool) -> dict[int, tuple[str, ...]]:
    """The labels that the data have, by the number of the image: of a table, or the names of folders. Those
    in the names of files do not count: `IMG` and `DSC` are cameras."""
    return {
        number: tuple(filter(None, kind.names_in(text)))
        for number, text in enumerate(images.labels or ())
        if in_table or text in map(canonical, Path(images.names[number]).parent.parts)
        if text or kind is ClassSets
    }
