from __future__ import annotations

import os
from pathlib import Path

import pytest

from slidesparse.base.whole_file import read_whole, readable_name, replace_file
from slidesparse.errors import InputError


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    replace_file(tmp_path / "a/b", "one")
    replace_file(tmp_path / "a/b", b"two")
    assert read_whole(tmp_path / "a/b", 3) == b"two"
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["b"]


def test_a_link_is_replaced_and_not_followed(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("precious")
    (tmp_path / "b").symlink_to("victim")
    replace_file(tmp_path / "b", "new")
    assert (tmp_path / "victim").read_text() == "precious"


def test_what_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "file").write_text("four")
    with pytest.raises(FileNotFoundError):
        read_whole(tmp_path / "missing", 3)
    for name, says in {"loop": "symbolic links", ".": "Is a directory", "file": "too large; got 4 bytes"}.items():
        with pytest.raises(InputError, match=says):
            read_whole(tmp_path / name, 10_000 if name == "." else 3)


def test_words() -> None:
    assert readable_name(os.fsdecode(b"\xff")) == "\\xff"
    assert readable_name("grün") == "grün"
