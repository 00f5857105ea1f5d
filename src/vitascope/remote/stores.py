"""S3, Google Cloud Storage, the Hugging Face hub and web servers, through fsspec.

fsspec and its libraries find the credentials. An object is a size and a version, as it was listed; every read
compares both afterwards, so that no two versions are mixed. A fault is one line, after a bounded time.
"""

import contextlib
import dataclasses
import importlib.util
import re
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeGuard, TypeVar
from urllib.parse import unquote

from vitascope.cache import fault_in_words, local_failure
from vitascope.errors import SourceError
from vitascope.network import Threads, seconds_for, within

T = TypeVar("T")

ATTEMPTS = 10
"""Requests for one thing that may fail, before the error is reported."""
ATTEMPTS_ITSELF = 5
"""Those of a library that repeats failed requests itself."""
PAUSE = 0.2
"""Seconds before the second attempt; each further pause is twice as long, up to `LONGEST_PAUSE`."""
LONGEST_PAUSE = 2.0
PATIENCE = 60.0
"""Seconds after which nothing is repeated."""
CONNECT_SECONDS = 10.0
"""Time to connect."""
READ_SECONDS = 15.0
"""Time without a byte after which a connection counts as broken."""
LISTING_SECONDS = 900.0
"""Time limit of what takes several requests: a listing, or the removal of a folder."""
DEEPEST = 32
"""Folders in each other: links of a web server may lead back."""
CONNECTIONS = 32
"""Simultaneous connections of a process."""

_URL = re.compile(r"[A-Za-z][\w+.-]+://(?=.)")
_VERSIONS = ("generation", "ETag", "etag", "blob_id", "Last-Modified")
"""Names of an object's version in the libraries' answers; the first that is there counts."""
_CUT = ("ClientPayloadError", "IncompleteRead", "IncompleteReadError", "ResponseStreamingError")
"""Names of errors for answers that break off."""
_NO_CREDENTIALS = re.compile(r"\w*(NoCredentials|PartialCredentials|CredentialRetrieval|SSOToken)\w*")
"""Names of errors before any request is sent."""


class StoreError(SourceError):
    """A store cannot be reached or rejects a request, or the local cache fails; the message names which."""


class MissingError(StoreError):
    """No object or folder has a URL."""


class ChangedError(OSError):
    """An object is another one than when it was listed, or is gone."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Store:
    """How a kind of store is reached."""

    package: str
    """The library, beside fsspec."""
    extra: str
    """The extra of vitascope that installs it."""
    login: str = "check your access"
    """What to do about missing or expired credentials."""
    retries_itself: bool = False
    """Whether the library repeats failed requests."""
    writable: bool = True
    options: Callable[[], Mapping[str, Any]] = dict
    """Arguments of the library's file system."""


def _s3_options() -> Mapping[str, Any]:
    retries = {"mode": "standard", "max_attempts": ATTEMPTS_ITSELF}
    seconds = {"connect_timeout": CONNECT_SECONDS, "read_timeout": READ_SECONDS}
    return {"config_kwargs": {"retries": retries, "max_pool_connections": CONNECTIONS, **seconds}}


def _http_options() -> Mapping[str, Any]:
    from aiohttp import ClientPayloadError, ClientResponse, ClientTimeout

    class Response(ClientResponse):
        """A response whose text, which is a list of files, is whole as far as that can be seen."""

        async def text(self, *arguments: Any, **options: Any) -> str:
            text = await super().text(*arguments, **options)
            is_counted = "Content-Length" in self.headers or "Transfer-Encoding" in self.headers
            if not is_counted and "<html" in text.lower() and "</html>" not in text.lower():
                raise ClientPayloadError("the list of files breaks off before </html>")
            return text

    timeout = ClientTimeout(total=None, sock_connect=CONNECT_SECONDS, sock_read=READ_SECONDS)
    return {"client_kwargs": {"timeout": timeout, "response_class": Response}}


_WEB = Store(package="aiohttp", extra="http", writable=False, options=_http_options)
STORES = {
    "s3": Store(
        package="s3fs",
        extra="s3",
        login="set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE",
        retries_itself=True,
        options=_s3_options,
    ),
    "gs": Store(
        package="gcsfs",
        extra="gcs",
        login="log in with `gcloud auth application-default login`, or set GOOGLE_APPLICATION_CREDENTIALS",
        retries_itself=True,
    ),
    "hf": Store(package="huggingface_hub", extra="", login="log in with `hf auth login`, or set HF_TOKEN"),
    "http": _WEB,
    "https": _WEB,
}
"""By the scheme of the URL."""


@dataclasses.dataclass(frozen=True, slots=True)
class RemoteObject:
    """An object as it was listed."""

    url: str
    size: int  # bytes
    version: str  # as the store names it: equal for equal content alone

    def __str__(self) -> str:
        return self.url

    @property
    def name(self) -> str:
        """The last part of the URL."""
        return self.url.rpartition("/")[2]


def is_url(ref: object) -> TypeGuard[str]:
    """Whether an argument is a URL, perhaps of an unknown kind of store, and no local path."""
    return isinstance(ref, str) and _URL.match(ref) is not None


def store_of(url: str) -> Store:
    """The kind of store of a URL; a StoreError for one that is unknown."""
    scheme = url.partition("://")[0]
    if scheme not in STORES:
        raise StoreError(
            f"{url}: unknown scheme {scheme}://; URLs begin with "
            f"{', '.join(f'{store}://' for store in STORES)}, and local paths have none"
        )
    return STORES[scheme]


def name_in(url: str, folder: str) -> str:
    """The path of an object below a folder: `cat/1.jpg`; a StoreError for one that leads out of it."""
    name = url.removeprefix(folder.rstrip("/") + "/")
    name = unquote(name) if url.startswith("http") else name
    if any(part in ("", ".", "..") for part in name.split("/")) or "\0" in name or "\\" in name:
        raise StoreError(f"{url}: its name is no path below {folder}")
    return name


def find_object(url: str) -> RemoteObject | None:
    """The object of this URL as it is now; None for a folder.

    Raises:
        StoreError: neither is there, or the store does not answer.
    """

    def found(files: Any) -> RemoteObject | None:
        info = files.info(files._strip_protocol(url))
        is_page = store_of(url) is _WEB and (url.endswith("/") or info.get("mimetype") == "text/html")
        if info["type"] == "directory" or is_page:
            return None
        return _object(url, info)

    try:
        return _asked(url, found)
    except FileNotFoundError as error:
        raise MissingError(f"{url}: no such object, folder or bucket") from error


def exists(url: str) -> bool:
    """Whether an object or a folder has this URL; raises as `find_object`, if the store does not answer."""
    try:
        find_object(url)
    except MissingError:
        return False
    return True


def walk(url: str, depth: int = 0) -> Iterator[RemoteObject]:
    """The objects below a folder without hidden ones: those of a folder, then its folders, each by name.

    Only one folder's names and those of its parents are in memory. Raises as `find_object`.
    """
    if depth > DEEPEST:
        raise StoreError(f"{url}: more than {DEEPEST} folders in each other: does one of them list itself?")
    objects, folders = list_folder(url)
    yield from objects
    del objects
    for folder in folders:
        yield from walk(folder, depth + 1)


def list_folder(url: str) -> tuple[list[RemoteObject], list[str]]:
    """The objects and the folders in a folder, each by name; raises as `find_object`."""
    url = url.rstrip("/")

    def entries(files: Any) -> list[tuple[str, Mapping[str, Any]]]:
        own = files._strip_protocol(url)
        return [
            (files.unstrip_protocol(entry["name"]), entry)
            for entry in files.ls(f"{own}/" if url.startswith("http") else own, detail=True)
        ]

    try:
        found = _asked(url, entries, LISTING_SECONDS)
    except FileNotFoundError as error:
        raise MissingError(f"{url}: no such folder or bucket") from error
    folders, objects = [], []
    is_web = store_of(url) is _WEB
    for place, entry in sorted(found, key=lambda each: each[0]):
        name = place.removeprefix(f"{url}/").rstrip("/")
        if not name or place.rstrip("/") == url:
            if not is_web and place.endswith("/") and (entry["type"] == "directory" or entry["size"]):
                raise StoreError(f"{url}//: a folder without a name cannot be listed: rename its objects")
        elif name.startswith(".") or (is_web and re.search("[/?#]", name)):
            continue  # of a web page, links to other places too
        elif entry["type"] == "directory":
            folders.append(place.rstrip("/"))
        else:
            objects.append((place, entry))
    # Some programs mark a folder by an empty object of its name.
    objects = [(place, entry) for place, entry in objects if entry["size"] != 0 or place not in folders]
    with Threads(CONNECTIONS) as pool:  # a web page has names alone
        return list(pool.map(lambda each: _described(*each), objects)), folders


def _described(url: str, entry: Mapping[str, Any]) -> RemoteObject:
    if entry.get("size") is not None:
        return _object(url, entry)
    found = find_object(url)
    if found is None:
        raise StoreError(f"{url}: listed as an object, but it is a folder")
    return found


def _object(url: str, info: Mapping[str, Any]) -> RemoteObject:
    version = next((str(info[name]) for name in _VERSIONS if info.get(name)), None)
    if version is None or info.get("size") is None:
        lacks = "size" if version else "ETag or date of its last change"
        raise StoreError(f"{url}: the server gives no {lacks}, so changes would go unnoticed: download it")
    return RemoteObject(url, int(info["size"]), version)


def read_range(object: RemoteObject, start: int, stop: int) -> bytes:
    """The bytes of an object from `start` up to `stop`, of the listed version.

    Raises:
        ChangedError: another object has this URL now, or none.
        StoreError: the store does not answer, or not with these bytes.
    """

    def read(files: Any) -> bytes:
        place = files._strip_protocol(object.url)
        try:
            content: bytes = files.cat_file(place, start=start, end=stop)
        except Exception as error:  # of any library
            if _status(error) != 416:  # it ends before this range
                raise
            content = b""
        now = _object(object.url, files.info(place))
        if now != object:
            raise ChangedError(f"changed since it was listed ({object.size:,} bytes then, {now.size:,} now)")
        if len(content) == object.size > stop - start:
            raise StoreError(f"{object.url}: the server sends no parts of files: download it")
        if len(content) != stop - start:
            raise _CutError(f"{len(content):,} of {stop - start:,} bytes arrived")
        return content

    try:
        return _asked(object.url, read, seconds_for(stop - start)) if start < stop else b""
    except FileNotFoundError as error:
        raise ChangedError("it was listed, and is gone") from error


def upload(path: Path, url: str) -> None:
    """Write a file to a store, whole or not at all; raises as `find_object`."""
    try:
        _asked(
            url,
            lambda files: files.put_file(str(path), files._strip_protocol(url)),
            seconds_for(path.stat().st_size),
        )
    except FileNotFoundError as error:
        raise StoreError(f"{url}: cannot be written: no such bucket") from error


def remove(url: str) -> None:
    """Remove an object, or a folder with everything below it, if it is there; raises as `find_object`."""
    with contextlib.suppress(FileNotFoundError):
        _asked(url, lambda files: files.rm(files._strip_protocol(url), recursive=True), LISTING_SECONDS)


class _CutError(OSError):
    """An answer of another length than was asked for."""


def _asked(url: str, call: Callable[[Any], T], seconds: float | None = None) -> T:
    """The result of a call with the file system of a URL, repeated while that may help.

    A call may take so many seconds, by default the time limit of a request for a few bytes.

    Raises:
        FileNotFoundError, ChangedError: as the call.
        StoreError: any other failure of the store, or of a local file.
    """
    store, attempt, began = store_of(url), 1, time.monotonic()
    files = _file_system(url)
    while True:
        try:
            return within(lambda: call(files), seconds_for(0) if seconds is None else seconds)
        except (ChangedError, StoreError, MemoryError):
            raise
        except Exception as error:  # each library has its own, also for answers of other forms
            if (local := local_failure(error)) is not None:
                raise StoreError(f"{url}: {fault_in_words(local)}") from error
            reason = _hidden(error)
            if isinstance(reason, FileNotFoundError) or _status(reason) == 410:
                raise FileNotFoundError(url) from error
            is_last = attempt == ATTEMPTS or time.monotonic() - began > PATIENCE
            if is_last or not _may_pass(reason, store):
                raise StoreError(f"{url}: {_reason(reason, store, attempt)}") from error
        time.sleep(min(PAUSE * 2 ** (attempt - 1), LONGEST_PAUSE))
        attempt += 1


def _file_system(url: str) -> Any:
    """fsspec's file system for a URL, one for each process."""
    import fsspec

    scheme, store = url.partition("://")[0], store_of(url)
    if importlib.util.find_spec(store.package) is None:
        raise StoreError(f'{url}: {scheme}:// needs an extra: pip install "vitascope[{store.extra}]"')
    # Without fsspec's own listings, which would hide changes.
    files = fsspec.filesystem(scheme, use_listings_cache=False, **store.options())
    if scheme == "s3":
        files.retries = 1  # botocore repeats failed requests, and we those whose answers break off
    return files


def _status(error: BaseException) -> int | None:
    """The HTTP status of an error or of its cause, if it has one."""
    for each in filter(None, (error, error.__cause__)):
        answer = getattr(each, "response", None)  # of botocore an object of JSON
        found = getattr(each, "status", None) or getattr(answer, "status_code", None)
        if isinstance(answer, Mapping):
            found = answer.get("ResponseMetadata", {}).get("HTTPStatusCode")
        if found is not None:
            return int(found)
    return None


def _lacks_access(error: BaseException) -> bool:
    named = _NO_CREDENTIALS.fullmatch(type(error).__name__) is not None
    return named or isinstance(error, PermissionError) or _status(error) in (401, 403)


def _hidden(error: Exception) -> BaseException:
    """The failure of a web server that fsspec reports as a missing file; other errors as they are."""
    cause = error.__cause__
    if not isinstance(error, FileNotFoundError) or cause is None or _status(cause) in (404, 410):
        return error
    is_of_web = type(cause).__module__.partition(".")[0] == "aiohttp" or isinstance(cause, TimeoutError)
    return cause if is_of_web else error


def _may_pass(error: BaseException, store: Store) -> bool:
    """Whether the same request may succeed when it is repeated by us."""
    if isinstance(error, _CutError) or type(error).__name__ in _CUT:
        return True
    status = _status(error)
    if status is not None and status not in (408, 429) and status < 500:
        return False
    return not _lacks_access(error) and (status is not None or not store.retries_itself)


def _reason(error: BaseException, store: Store, attempts: int) -> str:
    said = " ".join(str(error).split())[:200] or type(error).__name__
    if _lacks_access(error):
        return f"no access: {said}; {store.login}"
    tried = f" after {attempts} attempts" if attempts > 1 else ""
    return f"the store does not answer as it should{tried}: {said}; try again"
