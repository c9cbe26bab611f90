"""The files of a tar file are those of `tarfile`, whoever has written it."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from spottrain.data.shards.formats.tar_members import members_of

LONG = "/".join(["folder"] * 16) + "/1.txt"


def write(path: Path, names: list[str], format: int) -> None:
    """Write files, folders and links (`name@`)."""
    kinds = {"/": tarfile.DIRTYPE, "@": tarfile.SYMTYPE}
    with tarfile.open(path, "w", format=format) as tar:
        for number, name in enumerate(names):
            member = tarfile.TarInfo(name.rstrip("/@"))
            member.type = kinds.get(name[-1], tarfile.REGTYPE)
            member.size = 511 + number if member.isreg() else 0
            member.linkname = "1.txt" if member.issym() else ""
            member.mtime = 1.5  # which PAX has in an extended header
            tar.addfile(member, io.BytesIO(bytes(member.size)))


@pytest.mark.parametrize(
    ("format", "names", "is_common"),
    [
        (tarfile.USTAR_FORMAT, ["1.txt", "a/é.txt", "a/", "2.txt"], True),
        (tarfile.USTAR_FORMAT, [LONG, "2.txt"], True),
        (tarfile.GNU_FORMAT, ["1.txt", "a/é.txt", "2.txt"], True),
        (tarfile.GNU_FORMAT, [LONG, "2.txt"], False),
        (tarfile.PAX_FORMAT, ["1.txt", "a/1.cls", "2.txt"], True),
        (tarfile.PAX_FORMAT, ["é.txt", "2.txt"], False),
        (tarfile.PAX_FORMAT, [LONG, "2.txt"], False),
        (tarfile.PAX_FORMAT, ["1.txt", "2.txt@", "3.txt"], False),
    ],
)
def test_members_are_those_of_tarfile(
    format: int, names: list[str], is_common: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "0.tar", names, format)
    with tarfile.open(tmp_path / "0.tar") as tar:
        expected = [(each.name, each.offset_data, each.size) for each in tar if each.isfile()]
    read_by_tarfile = list[int]()
    opened = tarfile.open

    def noted(*given: Any, **named: Any) -> tarfile.TarFile:
        read_by_tarfile.append(1)
        return opened(*given, **named)

    monkeypatch.setattr(tarfile, "open", noted)
    with (tmp_path / "0.tar").open("rb") as file:
        assert members_of(file) == expected
    assert bool(read_by_tarfile) != is_common


@pytest.mark.parametrize("change", [lambda content: b"", lambda content: b"x" * 600, lambda content: content[:900]])
def test_what_is_no_whole_tar_is_what_tarfile_says(change: Any, tmp_path: Path) -> None:
    write(tmp_path / "0.tar", ["1.txt", "2.txt"], tarfile.USTAR_FORMAT)
    (tmp_path / "0.tar").write_bytes(change((tmp_path / "0.tar").read_bytes()))

    def said(read: Callable[[], Iterable[Any]]) -> Any:
        try:
            return [each.name for each in read()]
        except tarfile.TarError as error:
            return str(error)

    def of_tarfile() -> list[tarfile.TarInfo]:
        with tarfile.open(tmp_path / "0.tar", "r:") as tar:
            return tar.getmembers()

    with (tmp_path / "0.tar").open("rb") as file:
        assert said(lambda: members_of(file)) == said(of_tarfile)
