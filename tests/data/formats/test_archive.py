import bz2
import functools
import gzip
import io
import lzma
import os
import shutil
import stat
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest

from tests.data import write_tar, write_tree
from vitascope.data.datasets import open_data
from vitascope.data.formats.archive import archive_errors, open_plain_tar, tar_members, unpack
from vitascope.errors import UserError

MODES = {".tar": "w", ".tar.gz": "w:gz", ".tgz": "w:gz", ".tar.bz2": "w:bz2", ".tar.xz": "w:xz", ".zip": ""}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VITASCOPE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "unpacked"


def pack(path: Path, root: Path, below: str = "") -> Path:
    """Pack the content of a folder into an archive whose format follows from its name."""
    files = sorted(root.rglob("*"))
    mode = MODES["".join(path.suffixes)]
    if not mode:
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            for file in files:
                archive.write(file, below + str(file.relative_to(root)))
        return path
    with tarfile.open(path, mode) as tar:
        for file in files:
            tar.add(file, below + str(file.relative_to(root)), recursive=False)
    return path


def entry(name: str, content: bytes = b"x", **fields: object) -> tuple[tarfile.TarInfo, bytes]:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    for field, value in fields.items():
        setattr(member, field, value)
    return member, content


def tar_of(path: Path, *entries: tuple[tarfile.TarInfo, bytes], mode: str = "w") -> Path:
    with tarfile.open(path, mode) as tar:
        for member, content in entries:
            tar.addfile(member, io.BytesIO(content) if member.isreg() else None)
    return path


def zip_of(path: Path, *members: tuple[str | zipfile.ZipInfo, bytes]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members:
            archive.writestr(name, content)
    return path


def check_rejected(path: Path, cache: Path, match: str) -> None:
    """Check that an archive is rejected in one line that names it, and that nothing is left anywhere."""
    before = {p for p in cache.parent.parent.rglob("*") if not p.is_relative_to(cache.parent)}
    with pytest.raises(UserError, match=match) as caught:
        unpack(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert {p.name for p in cache.iterdir()} == {".lock"}
    assert {p for p in cache.parent.parent.rglob("*") if not p.is_relative_to(cache.parent)} == before


def test_neither_a_single_train_folder_nor_files_of_other_systems_wrap(tmp_path: Path) -> None:
    write_tree(tmp_path / "source" / "train", {"cat": 10, "dog": 10})
    splits = open_data(str(pack(tmp_path / "pets.tar", tmp_path / "source")))
    assert (len(splits.train), len(splits.val), splits.test) == (18, 2, None)
    root = write_tree(tmp_path / "other" / "pets", {"cat": 10, "dog": 10}).parent
    (root / "__MACOSX").mkdir()
    (root / "__MACOSX" / "._cat.png").write_bytes(b"x")
    (root / ".DS_Store").write_bytes(b"x")
    assert len(open_data(str(pack(tmp_path / "pets.zip", root))).train) == 16


def test_archive_is_unpacked_once_and_again_when_it_changes(tmp_path: Path, cache: Path) -> None:
    root = write_tree(tmp_path / "source", {"cat": 3, "dog": 3})
    archive = pack(tmp_path / "pets.tar", root)
    first = unpack(archive)
    (first / "mark").write_text("still there")
    assert unpack(archive) == first
    assert (first / "mark").exists()
    os.utime(archive, (1, 1))
    second = unpack(archive)
    assert second != first
    shutil.copy(archive, tmp_path / "copy")
    os.utime(tmp_path / "copy", (1, 1))
    os.replace(tmp_path / "copy", archive)
    assert unpack(archive) != second  # another file of equal size and time
    assert len(list(cache.glob("pets-*"))) == 3


def test_leftovers_of_a_killed_process_are_removed(tmp_path: Path, cache: Path) -> None:
    archive = pack(tmp_path / "pets.tar", write_tree(tmp_path / "source", {"cat": 3, "dog": 3}))
    name = unpack(archive).name
    shutil.rmtree(cache / name)
    (cache / f".1.{name}" / "cat").mkdir(parents=True)
    (cache / f".1.{name}" / "cat" / "half.png").write_bytes(b"half")
    assert not list(unpack(archive).rglob("half.png"))
    assert {path.name for path in cache.iterdir()} == {".lock", name}


def test_permissions_and_owners_of_members_are_ignored(tmp_path: Path) -> None:
    folder = unpack(tar_of(tmp_path / "a.tar", entry("cat/x.png", mode=0o6777), entry("dog/y.png", mode=0)))
    for path in folder.rglob("*.png"):
        assert stat.S_IMODE(path.stat().st_mode) & 0o7133 == 0
        assert path.stat().st_uid == os.getuid()


HOSTILE_NAMES = {
    **dict.fromkeys(("../evil.png", "cat/../../evil.png", "cat/..", "..\\evil.png"), "leads outside"),
    **dict.fromkeys(("/tmp/evil.png", "//evil.png", "\\evil.png"), "an absolute path"),
    "cat\\evil.png": "a backslash",
    **dict.fromkeys(("C:/evil.png", "c:evil.png"), "a drive letter"),
    **dict.fromkeys(("cat/\x1b[31mevil.png", "cat/new\nline.png"), "a control character"),
}


@pytest.mark.parametrize(("name", "fault"), HOSTILE_NAMES.items())
def test_names_outside_the_folder_are_rejected(tmp_path: Path, cache: Path, name: str, fault: str) -> None:
    tar = tar_of(tmp_path / "a.tar", entry("cat/1.png"), entry(name))
    for path in (tar, zip_of(tmp_path / "a.zip", ("cat/1.png", b"x"), (name, b"x"))):
        check_rejected(path, cache, f"member .* is .*{fault}")


def test_members_other_than_files_and_folders_are_rejected(tmp_path: Path, cache: Path) -> None:
    special = (tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE, tarfile.GNUTYPE_SPARSE)
    for kind, fault in (
        *((kind, "a link") for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE)),
        *((kind, "neither a file nor a folder") for kind in special),
        (b"V", "neither a file nor a folder|cannot be read"),
    ):
        odd = entry("cat/odd.png", b"", type=kind, linkname="1.png")
        check_rejected(tar_of(tmp_path / "a.tar", entry("cat/1.png"), odd), cache, fault)
    for mode in (stat.S_IFLNK, stat.S_IFIFO, stat.S_IFCHR):
        member = zipfile.ZipInfo("cat/odd.png")
        member.external_attr = (mode | 0o777) << 16
        path = zip_of(tmp_path / "a.zip", (member, b"/etc/passwd"))
        check_rejected(path, cache, "odd.png' is (a link|neither)")


def test_encrypted_zip_and_name_with_a_zero_byte_are_rejected(tmp_path: Path, cache: Path) -> None:
    path = zip_of(tmp_path / "a.zip", ("cat/1.png", b"x"))
    content = bytearray(path.read_bytes())
    content[content.index(b"PK\x01\x02") + 8] |= 1
    path.write_bytes(content)
    check_rejected(path, cache, "'cat/1.png' is encrypted")
    path = zip_of(tmp_path / "a.zip", ("cat/1.pngX../x", b"x"))
    path.write_bytes(path.read_bytes().replace(b"pngX", b"png\0"))
    check_rejected(path, cache, "control character")


@pytest.mark.parametrize("second", ["cat/1.png", "./cat/1.png", "cat//1.png", "cat/1.png/2.png", "cat"])
@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_overlapping_members_are_rejected(tmp_path: Path, cache: Path, second: str) -> None:
    check_rejected(tar_of(tmp_path / "a.tar", entry("cat/1.png"), entry(second)), cache, "a duplicate")
    check_rejected(zip_of(tmp_path / "a.zip", ("cat/1.png", b"x"), (second, b"y")), cache, "a duplicate")


fast_lzma = functools.partial(lzma.compress, preset=0)


def test_bombs_are_rejected_before_reading(tmp_path: Path, cache: Path) -> None:
    path, zeros = tmp_path / "a.tar", bytes(2**25)
    member, _ = entry("cat/1.png")
    member.size = 2**40
    for packer in (gzip.compress, bz2.compress, fast_lzma):
        path.write_bytes(packer(member.tobuf() + zeros[: 2**23]))
        check_rejected(path, cache, "'cat/1.png' is part of a bomb")
    tar_of(path, entry("cat/1.png"))
    path.write_bytes(fast_lzma(path.read_bytes() + zeros))  # behind the members
    check_rejected(path, cache, "a bomb")
    check_rejected(zip_of(tmp_path / "a.zip", ("cat/1.png", zeros)), cache, "part of a bomb")
    path = zip_of(tmp_path / "b.zip", ("cat/1.png", b"x" * 100))
    content = path.read_bytes()
    at = content.index(b"PK\x01\x02") + 24  # the size in the list of members
    path.write_bytes(content[:at] + b"\xff\xff\xff\x7f" + content[at + 4 :])
    check_rejected(path, cache, "part of a bomb")
    for kind in (tarfile.GNUTYPE_LONGNAME, tarfile.XHDTYPE, tarfile.XGLTYPE):
        header, _ = entry("././@LongLink", type=kind)
        header.size = 2**32
        path = tmp_path / "a.tar.gz"
        path.write_bytes(gzip.compress(header.tobuf() + b"a" * 2**22))
        check_rejected(path, cache, "a header of 4,294,967,296 bytes")


def test_an_archive_larger_than_the_free_space_is_rejected(tmp_path: Path, cache: Path, monkeypatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    noise = np.random.default_rng(0).bytes(600)
    check_rejected(
        tar_of(tmp_path / "a.tar", entry("a/1", noise), entry("a/2", noise)), cache, "VITASCOPE_CACHE"
    )
    check_rejected(zip_of(tmp_path / "a.zip", ("a/1", noise), ("a/2", noise)), cache, "has room for 0.0 GB")


@pytest.mark.parametrize("suffix", [".tar", ".tgz", ".tar.bz2", ".tar.xz", ".zip"])
def test_a_truncated_archive_is_rejected(tmp_path: Path, cache: Path, suffix: str) -> None:
    root = write_tree(tmp_path / "source", {"cat": 10, "dog": 10}, size=(16, 16))
    path = pack(tmp_path / f"pets{suffix}", root)
    content = path.read_bytes()
    content = content.rstrip(b"\0") if suffix == ".tar" else content
    for share in (0.0, 0.1, 0.5, 0.9, 0.999):
        path.write_bytes(content[: int(len(content) * share)])
        check_rejected(path, cache, "cannot be read|cut short")


@pytest.mark.parametrize("suffix", [".tar", ".tgz", ".tar.bz2", ".tar.xz", ".zip"])
def test_changed_bytes_are_rejected_or_unpacked_inside_the_folder(tmp_path, cache: Path, suffix: str) -> None:
    root = write_tree(tmp_path / "source", {"cat": 2, "dog": 1}, size=(4, 4))
    good = pack(tmp_path / f"good{suffix}", root).read_bytes()
    random = np.random.default_rng(0)
    path = tmp_path / f"a{suffix}"
    for _ in range(25):
        content = bytearray(good)
        for _ in range(random.integers(1, 5)):
            content[random.integers(len(content))] = random.integers(256)
        path.write_bytes(content)
        try:
            assert unpack(path).is_relative_to(cache)
        except UserError:
            assert not [p for p in cache.iterdir() if p.name.startswith(".a")]
        assert {p.name for p in tmp_path.iterdir()} == {"source", "cache", path.name, f"good{suffix}"}


FORMATS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}


def read(path: Path) -> list[tuple[str, int, int]]:
    """Name, offset and size of each file."""
    with archive_errors(path), open(path, "rb") as file, open_plain_tar(file, path) as tar:
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


def test_size_beyond_the_file_and_another_file_are_rejected(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", {"a": b"x"})
    for size in (b"77777777777\0", b"\x80" + b"\xff" * 11):  # the last offset is beyond any file
        set_bytes(path, 124, size)
        with pytest.raises(UserError, match=r"a\.tar: (damaged or cut short|cannot be read|rejected)"):
            read(path)
    path.write_bytes(b"\x1f\x8b" + bytes(range(256)) * 10)
    with pytest.raises(UserError, match="not a tar; a compressed one must be unpacked"):
        read(path)


def test_invalid_extended_header_is_rejected(tmp_path: Path) -> None:
    long, many = b"9" * 5000, b"30 size=" + b"9" * 20 + b"\n"
    for records in (b"no number\n", b"99 path=a\n", b"0 path=a\n", b"11 size=x1\n", long, many):
        path = write_tar(tmp_path / "a.tar", {"a": records, "b": b"y"})
        set_bytes(path, 156, tarfile.XHDTYPE)
        with pytest.raises(UserError, match=r"a\.tar: (damaged|cannot be read as an archive|rejected)"):
            read(path)
