"""A signal ends a command in one line, at any moment, and the line says from what the same command goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from checkpoints import make_checkpoint, prune_words

import slidesparse.offline.info
from slidesparse.cli import failure, main
from slidesparse.errors import CheckpointError
from slidesparse.files.staging import Workplace
from slidesparse.offline import execute

WORDS = [("SIGINT", "interrupted"), ("SIGTERM", "terminated"), ("SIGHUP", "hung up")]


def run_with_torch(folder: Path, code: str, **more: Any) -> subprocess.CompletedProcess[str]:
    """Run ``slidesparse info`` with this code in the place of torch, so that it runs while torch is imported."""
    (folder / "torch.py").write_text(f"import os, signal, time\n{code}\n")
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "slidesparse", "info"]
    return subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}, timeout=60, **more
    )


@pytest.mark.parametrize(("name", "word"), WORDS)
def test_while_torch_is_imported(tmp_path: Path, name: str, word: str) -> None:
    done = run_with_torch(tmp_path, f"os.kill(os.getpid(), signal.{name})\ntime.sleep(30)")
    assert (done.returncode, done.stderr) == (128 + getattr(signal, name), f"slidesparse: {word}\n")


SIGNALS = {
    "a library makes another error of it": (
        """
try:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(30)
except KeyboardInterrupt:
    raise ImportError("numpy's extension modules failed to import")
""",
        130,
        "interrupted",
    ),
    "the exception is lost": (
        """
class Lost:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(30)
Lost()
time.sleep(30)
""",
        143,
        "terminated",
    ),
    "more signals change nothing at first, and then end all": (
        """
try:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(30)
finally:
    for _ in range(5):
        os.kill(os.getpid(), signal.SIGHUP)
    time.sleep(1.1)
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(30)
""",
        143,
        "terminated",
    ),
}


@pytest.mark.parametrize("where", SIGNALS)
def test_signals_that_are_not_simply_raised(tmp_path: Path, where: str) -> None:
    code, status, word = SIGNALS[where]
    done = run_with_torch(tmp_path, code)
    assert (done.returncode, done.stderr) == (status, f"slidesparse: {word}\n")


def test_what_was_ignored_still_is(tmp_path: Path) -> None:
    """As under nohup."""
    code = 'os.kill(os.getpid(), signal.SIGHUP)\ntime.sleep(0.1)\nraise ImportError("went on")'
    done = run_with_torch(tmp_path, code, preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    assert done.returncode == 1
    assert "went on" in done.stderr


def test_children_end_as_they_did(tmp_path: Path) -> None:
    code = """
child = os.fork()
if not child:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(30)
raise ImportError(f"child {os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}")
"""
    done = run_with_torch(tmp_path, code)
    assert done.returncode == 1
    assert "child -15" in done.stderr
    assert "terminated" not in done.stderr


def test_handlers_are_given_back(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    before = [signal.getsignal(getattr(signal, name)) for name, _ in WORDS], sys.unraisablehook
    monkeypatch.setattr(slidesparse.offline.info, "collect", lambda: os.kill(os.getpid(), signal.SIGINT))
    assert main(["info"]) == 130
    assert capsys.readouterr().err == "slidesparse: interrupted\n"
    assert ([signal.getsignal(getattr(signal, name)) for name, _ in WORDS], sys.unraisablehook) == before


@pytest.mark.parametrize(("name", "word"), WORDS)
def test_prune_says_what_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, word: str
) -> None:
    make_checkpoint(tmp_path / "m", shard_size="60KB")
    command = prune_words(tmp_path / "m", tmp_path / "s", "--dtype", "int8")
    write, shards = execute.write_shard, []

    def third(path: Path, *rest: Any) -> dict[str, str]:
        shards.append(path)
        if len(shards) == 3:
            os.kill(os.getpid(), getattr(signal, name))
        return write(path, *rest)

    capsys.readouterr()
    with monkeypatch.context() as patch:
        patch.setattr(execute, "write_shard", third)
        assert main(command) == 128 + getattr(signal, name)
    kept = f"{tmp_path}/s.partial keeps 2 finished files, and the same command goes on from there"
    assert capsys.readouterr().err == f"slidesparse: {word}; {kept}\n"
    assert list((tmp_path / "s.partial").rglob("*.tmp")) == []
    assert main(command) == 0
    assert "taken over from an interrupted run" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("owner", "name", "call", "status"),
    [
        (Workplace, "files", 1, 143),  # for the line
        (Workplace, "files", 2, 143),  # before the folder is left
        (failure, "is_first_to_fail", 1, 1),
    ],
)
def test_a_signal_while_an_error_ends_a_command_takes_no_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    owner: Any, name: str, call: int, status: int,
) -> None:  # fmt: skip
    make_checkpoint(tmp_path / "m", shard_size="60KB")
    write, original, shards, calls = execute.write_shard, getattr(owner, name), [], []

    def third(path: Path, *rest: Any) -> dict[str, str]:
        shards.append(path)
        if len(shards) == 3:
            raise CheckpointError("wrong")
        return write(path, *rest)

    def terminated(*given: Any) -> Any:
        calls.append(given)
        if len(calls) == call:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(*given)

    capsys.readouterr()
    with monkeypatch.context() as patch:
        patch.setattr(execute, "write_shard", third)
        patch.setattr(owner, name, terminated)
        assert main(prune_words(tmp_path / "m", tmp_path / "s", "--dtype", "int8")) == status
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{tmp_path}/s.partial keeps 2 finished files" in line
    assert "the same command goes on from there" in line
