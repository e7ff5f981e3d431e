"""A folder is complete or absent; finished files of a killed run are taken over when they hold what was written."""

from __future__ import annotations

import errno
import fcntl
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from checkpoints import add_tokenizer, by_magnitude, contents, make_checkpoint, make_source, tensors, write_text

from slidesparse.base.whole_file import replace_file
from slidesparse.errors import CheckpointError, InputError
from slidesparse.files import staging
from slidesparse.files.staging import Workplace, new_folder, staged
from slidesparse.files.stored import Stored
from slidesparse.files.tensor_writer import TensorWriter
from slidesparse.offline.calibrate.calibration import Calibration
from slidesparse.offline.prune import PruneOptions, prune_checkpoint

INT8 = by_magnitude("6:8", "int8")
LAYOUT = {"x": Stored("F32", (3, 4))}


def write(work: Workplace, name: str = "one.safetensors", layout: dict[str, Stored] = LAYOUT) -> None:
    with TensorWriter(work.output / name, layout) as writer:
        for tensor, stored in layout.items():
            writer.write(tensor, torch.ones(stored.shape))
    work.finish(name, writer.digests)


def stopped(folder: Path, error: BaseException, plan: dict[str, Any], **more: Any) -> str:
    """The message of a run that ends so after its first file."""

    def run() -> None:
        with staged(folder / "s", folder / "m", plan, 0) as work:
            write(work, **more)
            raise error

    with pytest.raises(type(error)) as ended:
        run()
    return str(ended.value)


def killed(*_: Any, **__: Any) -> None:
    raise KeyboardInterrupt


# -- names ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("destination", ["foo/..", ".", "/"])
def test_a_destination_without_a_name_is_refused_before_any_work(
    tmp_path: Path, destination: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint(tmp_path / "m")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match="is no name for a new folder"):
        prune_checkpoint(tmp_path / "m", destination, INT8)
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_folders_above_are_made_and_removed_with_the_run(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()

    def run() -> None:
        with staged(tmp_path / "a/b/../c/s", tmp_path / "m", {}, 0):
            assert (tmp_path / "a/c/s.partial").is_dir()
            raise InputError("something")

    with pytest.raises(InputError, match="something"):
        run()
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_the_source_is_found_under_other_names(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "way").symlink_to("m")
    for destination in ("way", "way/in", "m/../m", "m/../m/in/deeper"):
        with pytest.raises(CheckpointError, match="is the source or lies inside it"):
            new_folder(tmp_path / destination, tmp_path / "m")
    (tmp_path / "dangling").symlink_to(tmp_path / "missing")
    for destination, source in (("dangling", "m"), ("x", "x.partial")):  # the second is where the first would be made
        with pytest.raises(CheckpointError):
            new_folder(tmp_path / destination, tmp_path / source)


# -- what is left --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [InputError("wrong"), KeyboardInterrupt(), OSError(errno.EIO, "broken")])
def test_a_run_that_finished_nothing_leaves_nothing(tmp_path: Path, error: BaseException) -> None:
    def run() -> None:
        with staged(tmp_path / "s", tmp_path / "m", {}, 0) as work:
            (work.output / "half").write_text("half")
            raise error

    with pytest.raises(type(error), match="nothing of .*s was kept" if isinstance(error, KeyboardInterrupt) else None):
        run()
    assert list(tmp_path.iterdir()) == []


def test_an_error_makes_way_for_other_options_and_an_interruption_does_not(tmp_path: Path) -> None:
    stopped(tmp_path, KeyboardInterrupt(), {"pattern": "6:8"})
    with (
        pytest.raises(CheckpointError, match="unfinished output of another run"),
        staged(tmp_path / "s", tmp_path / "m", {"pattern": "4:6"}, 0),
    ):
        pass
    stopped(tmp_path, InputError("wrong"), {"pattern": "6:8"})
    with staged(tmp_path / "s", tmp_path / "m", {"pattern": "4:6"}, 0) as work:
        assert not work.is_finished("one.safetensors", LAYOUT)
        write(work)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["one.safetensors", "s"]


@pytest.mark.parametrize(
    ("plan", "differ"),
    [
        ({}, "options, slidesparse, windows"),
        ({"options": {"pattern": "4:6"}, "slidesparse": "2", "windows": "ab"}, "pattern, match, slidesparse"),
        ({"options": {"pattern": "6:8", "match": 0}, "slidesparse": "1", "windows": "ab", "device": "cpu"}, "device"),
    ],
)
def test_a_run_with_another_plan_is_told_what_differs(tmp_path: Path, plan: dict[str, Any], differ: str) -> None:
    first = {"options": {"pattern": "6:8", "match": 0}, "slidesparse": "1", "windows": "ab"}
    stopped(tmp_path, KeyboardInterrupt(), first)
    says = f"s.partial holds the unfinished output of another run; got a difference in {differ}; repeat that run,"
    with pytest.raises(CheckpointError, match=re.escape(says)), staged(tmp_path / "s", tmp_path / "m", plan, 0):
        pass


def test_a_kill_after_the_output_has_its_name_leaves_nothing_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(staging.shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt), staged(tmp_path / "s", tmp_path / "m", {"a": 1}, 0) as work:
            write(work)
    assert [path.name for path in (tmp_path / "s").iterdir()] == ["one.safetensors"]
    (tmp_path / "s/one.safetensors").unlink()
    (tmp_path / "s").rmdir()
    with staged(tmp_path / "s", tmp_path / "m", {"a": 2}, 0):  # the rest is in nobody's way
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["s"]


def test_half_written_files_of_a_killed_run_are_removed(tmp_path: Path) -> None:
    stopped(tmp_path, KeyboardInterrupt(), {})
    for name in ("plan.json.00.tmp", "output/x.safetensors.0123456789abcdef.tmp", "kept/x.0123456789abcdef.tmp"):
        (tmp_path / "s.partial" / name).write_bytes(b"half")
    with staged(tmp_path / "s", tmp_path / "m", {}, 0) as work:
        assert list(work.path.rglob("*.tmp")) == []
        assert work.is_finished("one.safetensors", LAYOUT)


# -- what is taken over --------------------------------------------------------------------------------------------


def flipped(path: Path) -> None:
    data = bytearray(path.read_bytes())
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


def with_another_header(path: Path) -> None:
    with TensorWriter(path, {"x": Stored("I32", (3, 4))}) as writer:
        writer.write("x", torch.ones(3, 4).view(torch.int32))


def half_a_note(path: Path) -> None:
    note = path.parent.parent / "finished" / f"{path.name}.json"
    note.write_text(note.read_text()[:-9])


def a_link(path: Path) -> None:
    path.rename(path.with_name("other")).with_name(path.name).symlink_to("other")


def shorter(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 4)


@pytest.mark.parametrize("damage", [flipped, with_another_header, shorter, half_a_note, a_link])
def test_a_file_that_is_not_what_was_written_is_written_again(
    tmp_path: Path, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    stopped(tmp_path, KeyboardInterrupt(), {})
    damage(tmp_path / "s.partial/output/one.safetensors")
    with staged(tmp_path / "s", tmp_path / "m", {}, 0) as work:
        assert not work.is_finished("one.safetensors", LAYOUT)
    assert "one.safetensors is not what an earlier run wrote, and is written again" in caplog.text


def test_a_damaged_layer_is_calibrated_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = make_source(tmp_path, "llama", torch.float32)
    options = PruneOptions("6:8", "int8", "wanda", Calibration(str(tmp_path / "text.txt"), 4, 16))
    prune_checkpoint(source, tmp_path / "whole", options)

    with monkeypatch.context() as patch:
        patch.setattr("slidesparse.offline.execute.write_shard", killed)
        with pytest.raises(KeyboardInterrupt):
            prune_checkpoint(source, tmp_path / "s", options)
    flipped(tmp_path / "s.partial/kept/model.layers.0.safetensors")
    prune_checkpoint(source, tmp_path / "s", options)
    assert contents(tmp_path / "s") == contents(tmp_path / "whole")


def test_what_is_no_work_of_ours_is_left_alone(tmp_path: Path) -> None:
    stopped(tmp_path, KeyboardInterrupt(), {})
    assert (tmp_path / "s.partial").stat().st_mode & 0o777 == 0o700
    (tmp_path / "t.partial").symlink_to("s.partial")
    (tmp_path / "u.partial").mkdir(mode=0o700)
    (tmp_path / "u.partial/diary.txt").write_text("dear diary")
    for name, says in (("t", "t.partial is a link"), ("u", "holds the unfinished output of another run")):
        with pytest.raises(CheckpointError, match=says), staged(tmp_path / name, tmp_path / "m", {}, 0):
            pass
    assert (tmp_path / "u.partial/diary.txt").read_text() == "dear diary"


def test_modes_of_files_stay(tmp_path: Path) -> None:
    """What others could not read they cannot read in the output, either."""
    make_checkpoint(tmp_path / "m")
    (tmp_path / "m/notes.txt").write_text("")
    for path in (tmp_path / "m").iterdir():
        path.chmod(0o644 if path.name == "notes.txt" else 0o600)
    prune_checkpoint(tmp_path / "m", tmp_path / "s", by_magnitude("6:8", "int8"))
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "s").iterdir()}
    assert modes.pop("notes.txt") == 0o644
    assert set(modes.values()) == {0o600}
    replace_file(tmp_path / "m/config.json", "{}")
    assert (tmp_path / "m/config.json").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("method", ["magnitude", "wanda"])
def test_prune_says_that_zeros_were_filled(tmp_path: Path, caplog: pytest.LogCaptureFixture, method: str) -> None:
    make_checkpoint(tmp_path / "m")
    add_tokenizer(tmp_path / "m")
    text = Calibration(str(write_text(tmp_path / "t.txt")), samples=2, length=16)
    prune_checkpoint(tmp_path / "m", tmp_path / "p", by_magnitude("6:8", "bf16"))
    options = PruneOptions("6:8", "bf16", method, None if method == "magnitude" else text)
    prune_checkpoint(tmp_path / "p", tmp_path / "q", options)
    assert "violate" not in caplog.text
    values = tensors(tmp_path / "p")
    values["model.layers.1.mlp.up_proj.weight"][3] = 1
    safetensors.torch.save_file(values, tmp_path / "p/model.safetensors", {"format": "pt"})
    prune_checkpoint(tmp_path / "p", tmp_path / "r", options)
    assert "1 tensor of" in caplog.text
    assert "violate its own pattern, and are pruned anew: model.layers.1.mlp.up_proj.weight" in caplog.text


def test_who_has_no_lock_removes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two runs make the working folder at once, and the other one has its lock before this one."""
    make, handles = staging._make, []

    def made_at_once(partial: Path) -> list[Path]:
        found = make(partial)
        handles.append(os.open(partial, os.O_RDONLY))
        fcntl.flock(handles[0], fcntl.LOCK_EX)
        return found

    monkeypatch.setattr(staging, "_make", made_at_once)
    with pytest.raises(CheckpointError, match="another run is writing"), staged(tmp_path / "s", tmp_path / "m", {}, 0):
        pass
    os.close(handles[0])
    assert (tmp_path / "s.partial").is_dir()
