"""Files that are written to a store: on the local disk first, uploaded when they are complete."""

import hashlib
import os
import shutil
import weakref
from contextlib import AbstractContextManager
from pathlib import Path

from vitascope.cache import ADVICE, cache_folder
from vitascope.errors import UserError, naming
from vitascope.remote.cache import copied
from vitascope.remote.stores import exists, is_url, list_folder, name_in, store_of, upload
from vitascope.storage import explaining_failure


def local_copy(url: str, kind: str) -> Path:
    """The place of the local copy of what is written to a URL; a UserError for the URL of a web server, one
    without a name, and one whose copy would be outside of its own folder."""
    if not store_of(url).writable:
        raise UserError(f"{url}: a web server is read only: choose a local file, s3://, gs:// or hf://")
    bucket, *names = url.partition("://")[2].split("/")
    if not names:
        raise UserError(f"{url}: the name is missing, such as s3://{bucket}/name")
    if any(part in ("", ".", "..") for part in names) or not url.isprintable():
        raise UserError(f"{url!r}: a URL to write to has no empty name, no . or .., no control character")
    return cache_folder() / "remote" / kind / hashlib.sha256(url.encode()).hexdigest()[:16] / names[-1]


class Output:
    """A file to write, perhaps with others beside it whose names begin with its name.

    For a URL, `path` is in `$VITASCOPE_CACHE/remote/outputs/` until `publish` has uploaded it. An interrupted
    job leaves it there, to be resumed on this machine.

    Args:
        out: a path, or the URL of a file in a store.
        resume: whether a file in the store may exist, which is then copied to `path` unless that exists.
        afresh: remove what an interrupted job has left.

    Raises:
        StoreError: the store does not answer, or cannot be written to.
        UserError: the file exists in the store.
    """

    def __init__(self, out: str | os.PathLike[str], *, resume: bool = False, afresh: bool = False) -> None:
        self.url = out if is_url(out) else None
        self.path = Path(out)
        if self.url is None:
            return
        self.path = local_copy(self.url, "outputs")
        folder, _, name = self.url.rpartition("/")
        there = exists(self.url)
        if there and not resume:
            raise UserError(f"{self.url} exists: continue it with --resume, or choose another file")
        with explaining_failure(self.path.parent, "the output", ADVICE):
            if afresh:
                shutil.rmtree(self.path.parent, ignore_errors=True)
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if there and not any(self.path.parent.iterdir()):
                found = [
                    each for each in list_folder(folder)[0] if name_in(each.url, folder).startswith(name)
                ]
                shutil.copytree(copied(found, folder), self.path.parent, dirs_exist_ok=True)

    def publish(self, reader: object = None) -> None:
        """Upload the file, after those beside it; the local ones last as long as what reads them."""
        if self.url is None:
            return
        beside = sorted(path for path in self.path.parent.iterdir() if path != self.path)
        for path in [*beside, self.path]:
            upload(path, f"{self.url.rpartition('/')[0]}/{path.name}")
        if reader is None:
            shutil.rmtree(self.path.parent)
        else:
            weakref.finalize(reader, shutil.rmtree, self.path.parent)

    def named(self) -> AbstractContextManager[None]:
        """Put the URL in place of the local path into the errors of the work on it."""
        return naming(self.path, self.url or str(self.path))
