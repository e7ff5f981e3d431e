"""The cache is taken only where nobody else can have written."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from slidesparse.base import cache_folder as module
from slidesparse.base.cache_folder import cache_folder
from slidesparse.base.log import log_once

AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")


def forget() -> None:
    """Look at the folder anew, and warn anew."""
    module._refusal.cache_clear()
    log_once.cache_clear()


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    forget()
    yield
    forget()


def is_private(folder: Path) -> bool:
    status = folder.lstat()
    return status.st_uid == os.geteuid() and status.st_mode & 0o777 == 0o700


def refused(caplog: pytest.LogCaptureFixture, folder: Path, why: str) -> None:
    caplog.clear()
    forget()
    other = cache_folder()
    assert other != folder
    assert is_private(other)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert why in record.getMessage()
    assert "\n" not in record.getMessage()
    assert cache_folder() == other
    assert len(caplog.records) == 1


def test_a_new_folder_is_closed_to_others(tmp_path: Path) -> None:
    mask = os.umask(0)
    try:
        assert cache_folder() == tmp_path / "slidesparse"
    finally:
        os.umask(mask)
    assert is_private(tmp_path / "slidesparse")


def test_an_older_folder_is_closed_and_kept(tmp_path: Path) -> None:
    (tmp_path / "slidesparse/hopper").mkdir(parents=True)
    (tmp_path / "slidesparse").chmod(0o775)
    (tmp_path / "slidesparse/hopper/x.cubin").write_text("code")
    assert cache_folder() == tmp_path / "slidesparse"
    assert is_private(tmp_path / "slidesparse")
    assert (tmp_path / "slidesparse/hopper/x.cubin").exists()


@AS_ROOT
def test_what_another_user_has_put_there_is_not_taken(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "slidesparse"
    folder.mkdir()
    os.chown(folder, 65534, -1)
    refused(caplog, folder, "belongs to another user")


def test_links_and_files_are_no_cache(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "slidesparse"
    (tmp_path / "elsewhere").mkdir()
    folder.symlink_to("elsewhere")
    refused(caplog, folder, "is a link or a file")
    folder.unlink()
    folder.write_text("")
    refused(caplog, folder, "cannot be used (File exists)")
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_temporary_folder_goes_with_the_process(tmp_path: Path) -> None:
    (tmp_path / "slidesparse").write_text("in the way")
    code = "from slidesparse.base.cache_folder import cache_folder; print(cache_folder())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.count("\n") == 1
    assert not Path(done.stdout.strip()).exists()


def test_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", no_home)
    refused(caplog, Path("/"), "the user has no home")
