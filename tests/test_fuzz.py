"""Damaged files and odd arguments: a command succeeds and its result verifies, or it says one line and changes nothing.

Other tests say which line; here any will do. The random ones are slow: half a minute, in which the same cases are tried
everywhere, as many as the machine manages. By hand, for hours and with other cases::

    SLIDESPARSE_FUZZ_SECONDS=36000 SLIDESPARSE_FUZZ_SEED=1000 pytest -m slow tests/test_fuzz.py

A case that failed is printed; it becomes a test of its own.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import resource
import shutil
import signal
import time
import warnings
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import add_tokenizer, by_magnitude, config_of, make_checkpoint, make_w8a8, tensors, tokens, write_text
from fuzz_cases import COMMANDS, DAMAGES, SOURCES, Case, command_line, damage, snapshot, write_data
from hypothesis import given, seed, settings
from hypothesis import strategies as st

import slidesparse
from slidesparse.cli import main
from slidesparse.errors import InputError, SlideSparseError
from slidesparse.models.config_keys import MARKER_KEY
from slidesparse.offline.calibrate.calibration import load_tokenizer
from slidesparse.offline.calibrate.chats import vocabulary_digest
from slidesparse.offline.calibrate.texts import document
from slidesparse.offline.prune import prune_checkpoint
from slidesparse.recovery.training import Training
from slidesparse.recovery.writers import TransformersWriter

SECONDS = float(os.environ.get("SLIDESPARSE_FUZZ_SECONDS", "30"))
FIRST_SEED = int(os.environ.get("SLIDESPARSE_FUZZ_SEED", "0"))

TEMPLATE = "{% for m in messages %}{{ m.content }}{{ m.tool_calls }}. {% endfor %}{{ 'so ' if add_generation_prompt }}"

SPEAKERS = ("slidesparse: ", "recover: ", "answers: ")
"""What lines begin with: errors and warnings, and how far a command came."""

TIME_LIMIT = 600
"""Seconds after which a command hangs. They take a tenth of one, and other processes may need the cores meanwhile."""

MEMORY = 16 << 30
"""Bytes by which the process may grow: a size that a file promises is not to take the machine down."""


class Hang(BaseException):
    """A command took too long. Nothing catches it."""


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder for each of ``SOURCES``, and a text."""
    folder = tmp_path_factory.mktemp("fuzz")
    write_text(folder / "text.txt", words=60)
    for name, size in (("dense", "5GB"), ("sharded", "20KB")):
        make_checkpoint(folder / name, num_hidden_layers=1, hidden_size=32, intermediate_size=40, shard_size=size)
        add_tokenizer(folder / name)
        (folder / name / "chat_template.jinja").write_text(TEMPLATE)
    prune_checkpoint(folder / "dense", folder / "pruned", by_magnitude("4:6", "int8"))
    make_w8a8(folder / "dense", folder / "w8a8")
    prune_checkpoint(folder / "dense", folder / "floats", by_magnitude("4:6", "bf16"))
    shutil.copytree(folder / "floats", folder / "kept")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        kept_work(folder)
        yield folder


def kept_work(folder: Path) -> None:
    """Run ``recover`` to its end, ``whole``, and to its second step, whose work is ``kept.partial``.

    The first answer of ``chats`` is kept in ``answers``.
    """
    (folder / "m").symlink_to("floats")
    (folder / "base").symlink_to("dense")
    assert main(command_line(Case("recover", "floats"), folder)) == 0
    (folder / "out").rename(folder / "whole")
    step = Training._step

    def interrupted(self: Training, number: int, lr: float) -> Any:
        if number == 2:
            raise KeyboardInterrupt
        return step(self, number, lr)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Training, "_step", interrupted)
        assert main(command_line(Case("recover", "floats"), folder)) == 130
    (folder / "out.partial").rename(folder / "kept.partial")
    write_data(folder, 0)
    given = count()

    def answered(*_: Any) -> Any:
        if next(given):
            raise KeyboardInterrupt
        return [[5, 6]]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TransformersWriter, "at_once", 1)
        patch.setattr(TransformersWriter, "answer", answered)
        assert main(command_line(Case("chats", "kept"), folder)) == 130
    (folder / "answers").mkdir()
    for part in folder.glob("out.*.part"):
        part.rename(folder / "answers" / part.name)


@pytest.fixture(scope="module", autouse=True)
def _limited() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, hard))
    yield
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@contextlib.contextmanager
def in_time() -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise Hang

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(TIME_LIMIT)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def run(words: list[str]) -> tuple[int, str, str]:
    """Status, output and errors of a command; ``load`` is the function of Python."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            if words[0] != "load":
                return main(words), out.getvalue(), err.getvalue()
            slidesparse.load(words[1])
            return 0, "loaded", ""
        except SlideSparseError as error:
            assert words[0] == "load"
            return 1, "", f"slidesparse: {error}\n"
        except SystemExit as error:
            return int(str(error.code)), out.getvalue(), err.getvalue()


def check(case: Case, sources: Path, folder: Path) -> int:
    """Run a case, hold it against the oracle, and return the status."""
    folder.mkdir()
    shutil.copytree(sources / case.source, folder / "m")
    shutil.copy(sources / "text.txt", folder)
    shutil.copytree(sources / "dense", folder / "base")
    write_data(folder, sum(case.arguments))
    work = {"recover": "kept.partial", "chats": "answers"}.get(case.command) if case.source == "kept" else None
    if work is not None:
        shutil.copytree(sources / work, folder / "out.partial")
    for name, number in case.damages:
        damage(folder / ("m" if work is None else "out.partial"), name, number)
    if work == "answers":
        for path in (folder / "out.partial").iterdir():
            path.rename(folder / path.name)
        (folder / "out.partial").rmdir()
    before = snapshot(folder)
    words = command_line(case, folder)
    with in_time():
        status, out, err = run(words)
    said = f"{words}: {status}\n{out}\n{err}"
    after = snapshot(folder)
    if work is not None:  # which grows, and goes
        before, after = ({name: one for name, one in some.items() if ".part" not in name} for some in (before, after))
    assert status in (0, 1, 2), said
    assert "Traceback" not in err, said
    assert "unexpected error" not in err, said
    assert all(sign.isprintable() or sign == "\n" for sign in out + err), repr(said)
    assert {name: after.get(name) for name in before} == before, said
    if status == 0:
        assert out, said
        verify(case, words, folder, sources)
    elif not (status == 1 and case.command == "inspect" and ("PROBLEM" in out or '"faults"' in out)):
        lines = err.splitlines()
        assert len(lines) == 1 or status == 2 or all(line.startswith(SPEAKERS) for line in lines), said
        assert lines[-1].startswith("slidesparse: ") or status == 2, said
        assert lines, said
        assert len(lines[-1]) < 2000, said
        assert after == before or " keeps " in lines[-1], said
    return status


def verify(case: Case, words: list[str], folder: Path, sources: Path) -> None:
    """Hold what a command that succeeded made against what it promises."""
    if case.command == "prune":
        assert_success(["inspect", words[2]])
        try:
            logits_of(Path(words[2]))
        except InputError as error:  # a damaged config can make NaN of right weights, which a layer in INT8 refuses
            if "NaN" not in str(error):
                raise
    if case.command == "recover":
        assert all(bool(one.isfinite().all()) for one in tensors(Path(words[2])).values())
        if config_of(Path(words[2])).get(MARKER_KEY) is not None:  # a pattern without a marker is trained, too
            assert bool(logits_of(Path(words[2])).isfinite().all())
        text = (Path(words[2]) / "recover.json").read_text()
        assert str(folder) not in text
        assert "NaN" not in text
        if case.source == "kept" and not case.arguments:  # nothing of damaged work got through
            same = [(path / "model.safetensors").read_bytes() for path in (Path(words[2]), sources / "whole")]
            assert same[0] == same[1]
    if case.command == "chats":
        lines = Path(words[2]).read_bytes().splitlines()
        chats = [json.loads(line) for line in lines]
        assert all(chat["messages"][-1]["role"] == "assistant" for chat in chats)
        vocabulary = vocabulary_digest(load_tokenizer(folder / "m"))
        assert all(document("chat", chat).has_tokens_of(vocabulary) for chat in chats)
        assert case != Case("chats", "kept") or chats[0]["tokens"][-2:] == [5, 6]  # which was kept
    if case.command == "load":
        logits_of(folder / "m")


def assert_success(words: list[str]) -> None:
    status, out, err = run(words)
    assert status == 0, f"{words}: {status}\n{out}\n{err}"


def logits_of(folder: Path) -> torch.Tensor:
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        model: Any = slidesparse.load(folder, backend="reference")
        return model(tokens() % model.config.vocab_size).logits.nan_to_num()


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("source", SOURCES)
def test_without_damage(command: str, source: str, sources: Path, tmp_path: Path) -> None:
    """The oracle itself, where the answer is known."""
    fits = ["inspect", "eval", "chats", "prune" if source in ("dense", "sharded", "w8a8") else "load"]
    fits += ["recover"] if source in ("floats", "kept") else []
    assert (check(Case(command, source), sources, tmp_path / "w") == 0) == (command in fits)


NUMBERS = st.integers(0, 2**32 - 1)
CASES = st.builds(
    Case,
    st.sampled_from(COMMANDS),
    st.sampled_from(SOURCES),
    st.lists(st.tuples(st.sampled_from(DAMAGES), NUMBERS), max_size=3).map(tuple),
    st.lists(NUMBERS, max_size=3).map(tuple),
)


@pytest.mark.slow
def test_random(sources: Path, tmp_path: Path) -> None:
    end, number, failed = time.monotonic() + SECONDS, count(), []

    @settings(max_examples=100, deadline=None, database=None, derandomize=False)
    @given(CASES)
    def attempt(case: Case) -> None:
        if time.monotonic() >= end and not failed:  # a case that failed is made smaller, whatever the time
            return
        folder = tmp_path / str(next(number))
        try:
            check(case, sources, folder)
        except BaseException:
            failed.append(case)
            raise
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    for one in count(FIRST_SEED):
        if time.monotonic() >= end:
            break
        seed(one)(attempt)()
    print(f"{next(number)} cases, seeds {FIRST_SEED} to {one - 1}")
