"""Headers of tars: the offsets of members in every format, and errors."""

import io
import tarfile
from pathlib import Path

import pytest

from vitascope.data.tars import PIECE, archive_errors, open_plain_tar, open_tar, tar_fault, tar_members
from vitascope.errors import UserError

FORMATS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}


def write_tar(path: Path, members: dict[str, bytes], *, format: int = tarfile.USTAR_FORMAT) -> Path:
    with tarfile.open(path, "w", format=format) as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size, info.mtime = len(content), 1.5 if format == tarfile.PAX_FORMAT else 1
            tar.addfile(info, io.BytesIO(content))
    return path


def read(path: Path) -> list[tuple[str, int, int]]:
    """Name, offset and size of each file."""
    with (
        archive_errors(path),
        open(path, "rb") as file,
        open_plain_tar(file, path.stat().st_size, path) as tar,
    ):
        members = list(tar_members(tar, path))
    return [(member.name, member.offset_data, member.size) for member in members if member.isreg()]


def set_bytes(path: Path, position: int, content: bytes, *, checksum: bool = True) -> None:
    """Change the first header and its checksum."""
    data = bytearray(path.read_bytes())
    data[position : position + len(content)] = content
    if checksum:
        data[148:156] = b" " * 8
        data[148:156] = b"%06o\0 " % sum(data[:512])
    path.write_bytes(data)


@pytest.mark.parametrize("format", FORMATS)
def test_every_format_has_names_and_offsets(tmp_path: Path, format: str) -> None:
    long = "folder/" * 20 + "picture.jpg"  # more than the 100 bytes of the first field
    members = {"a.cls": b"7", "./b.jpg": b"x" * 1000, long: b"y" * 512, "empty.png": b"", "last.jpg": b"z"}
    members |= {} if format == "ustar" else {"n/" * 150 + "é.jpg": b"w"}  # too long for ustar
    path = write_tar(tmp_path / "a.tar", members, format=FORMATS[format])
    found = read(path)
    assert [name for name, _, _ in found] == list(members)
    content = path.read_bytes()
    assert [content[offset : offset + size] for _, offset, size in found] == list(members.values())


def test_size_in_base_256_and_in_a_pax_header_are_read(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", {"a": b"12345"})
    set_bytes(path, 124, b"\x80" + (5).to_bytes(11, "big"))
    assert [size for _, _, size in read(path)] == [5]
    header = tarfile.TarInfo("a")
    header.pax_headers = {"size": "3"}  # the field itself says 0
    content = header.tobuf(tarfile.PAX_FORMAT) + b"abc".ljust(512, b"\0") + bytes(1024)
    path.write_bytes(content)
    assert [(name, size) for name, _, size in read(path)] == [("a", 3)]


def test_folders_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "a.jpg").write_bytes(b"x")
    with tarfile.open(path, "w") as tar:
        tar.add(tmp_path / "folder", "folder")
    assert [name for name, _, _ in read(path)] == ["folder/a.jpg"]


@pytest.mark.parametrize(
    ("kind", "fault"),
    [
        *((kind, "a link") for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE)),
        *((kind, "neither a file nor a folder") for kind in (tarfile.CHRTYPE, tarfile.FIFOTYPE)),
    ],
)
def test_links_and_devices_are_named(tmp_path: Path, kind: bytes, fault: str) -> None:
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w") as tar:
        info = tarfile.TarInfo("1.jpg")
        info.type, info.linkname = kind, "/etc/passwd"
        tar.addfile(info)
    with open_tar(path) as tar:
        assert [tar_fault(member) for member in tar_members(tar, path)] == [fault]


@pytest.mark.parametrize("keep", [0, 100, 512, 900, 1024, 1500])
def test_a_truncated_tar_is_named(tmp_path: Path, keep: int) -> None:
    path = write_tar(tmp_path / "a.tar", {"a": b"x" * 512, "b": b"y" * 512})
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(UserError, match=r"a\.tar: (damaged or cut short after|cannot be read as an archive)"):
        read(path)


def test_size_beyond_the_file_is_rejected(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", {"a": b"x"})
    for size in (b"77777777777\0", b"\x80" + b"\xff" * 11):  # the last offset is beyond any file
        set_bytes(path, 124, size)
        with pytest.raises(UserError, match=r"a\.tar: (damaged or cut short|cannot be read|rejected)"):
            read(path)


def test_a_file_that_is_no_tar_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    path.write_bytes(b"\x1f\x8b" + bytes(range(256)) * 10)
    with pytest.raises(UserError, match="not a tar; a compressed one must be unpacked"):
        read(path)


def test_changed_header_is_rejected(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", {"a": b"x", "b": b"y"})
    set_bytes(path, 1024, b"c", checksum=False)
    with pytest.raises(UserError, match="damaged or cut short after 1 members"):
        read(path)


@pytest.mark.parametrize("size", [b"zzzzzzzzzzz\0", b"-0000000001\0", b"\xff" * 12])
def test_size_that_is_no_number_is_rejected(tmp_path: Path, size: bytes) -> None:
    path = write_tar(tmp_path / "a.tar", {"a": b"x"})
    set_bytes(path, 124, size)
    with pytest.raises(UserError, match=r"a\.tar: (cannot be read as an archive|rejected)"):
        read(path)


@pytest.mark.parametrize(
    "records",
    [
        b"no number\n",
        b"99 path=a\n",
        b"0 path=a\n",
        b"11 size=x1\n",
        b"9" * 5000,
        b"30 size=" + b"9" * 20 + b"\n",
    ],
)
def test_invalid_extended_header_is_rejected(tmp_path: Path, records: bytes) -> None:
    path = write_tar(tmp_path / "a.tar", {"a": records, "b": b"y"})
    set_bytes(path, 156, tarfile.XHDTYPE)
    with pytest.raises(UserError, match=r"a\.tar: (damaged|cannot be read as an archive|rejected)"):
        read(path)


def test_extended_header_of_absurd_size_is_rejected(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", {"a": bytes(PIECE + 1)})
    set_bytes(path, 156, tarfile.GNUTYPE_LONGNAME)
    with pytest.raises(UserError, match=r"rejected: a header of 1,049,088 bytes"):
        read(path)
