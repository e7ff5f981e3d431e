from __future__ import annotations

import os
from pathlib import Path

import pytest

from slidesparse.base.whole_file import read_regular, readable_name, replace_file, require_regular
from slidesparse.errors import InputError


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    replace_file(tmp_path / "a/b", "one")
    replace_file(tmp_path / "a/b", b"two")
    assert read_regular(tmp_path / "a/b", 3) == b"two"
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["b"]


def test_a_link_is_replaced_and_not_followed(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("precious")
    (tmp_path / "b").symlink_to("victim")
    replace_file(tmp_path / "b", "new")
    assert (tmp_path / "victim").read_text() == "precious"


def test_nothing_else_is_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "file").write_text("four")
    with pytest.raises(FileNotFoundError):
        require_regular(tmp_path / "missing")
    cases = {"pipe": "got a pipe", "loop": "symbolic links", ".": "got a folder", "file": "too large; got 4 bytes"}
    for name, says in cases.items():
        with pytest.raises(InputError, match=says):
            read_regular(tmp_path / name, 3)
    with pytest.raises(InputError, match="got a device"):
        read_regular(Path("/dev/zero"), 3)


def test_words() -> None:
    assert readable_name(os.fsdecode(b"\xff")) == "\\xff"
    assert readable_name("grün") == "grün"
