"""The other files of a source: nothing of the user's own comes along, and nothing is waited for."""

from __future__ import annotations

import json
import os
import socket
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from checkpoints import make_checkpoint

from slidesparse.checkpoints.checkpoint import Checkpoint
from slidesparse.cli import main
from slidesparse.errors import CheckpointError
from slidesparse.files import source_files
from slidesparse.files.source_files import SourceFiles, survey
from slidesparse.offline.prune import PruneOptions, prune_checkpoint

REWRITTEN = {"config.json", "model.safetensors", "model.safetensors.index.json"}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A source as far as this module looks at it, and ``secret/key`` outside."""
    folder = tmp_path / "m"
    (folder / "sub").mkdir(parents=True)
    for name in ("config.json", "model.safetensors", "tokenizer.json", "sub/notes.txt"):
        (folder / name).write_text(name)
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret/key").write_text("private")
    return folder


def names(files: SourceFiles) -> list[str]:
    return [str(file.name) for file in files.copied]


# -- links ---------------------------------------------------------------------------------------------------------


def to_a_file(folder: Path) -> None:
    (folder / "a").symlink_to("../secret/key")


def to_a_folder(folder: Path) -> None:
    (folder / "a").symlink_to(folder.parent / "secret")


def through_a_link(folder: Path) -> None:
    (folder / "way").mkdir()
    (folder / "way/a").symlink_to("b")
    (folder / "way/b").symlink_to("../../secret/key")


def to_a_device(folder: Path) -> None:
    (folder / "a").symlink_to("/dev/zero")


def nowhere(folder: Path) -> None:
    (folder / "a").symlink_to("missing")


def to_itself(folder: Path) -> None:
    (folder / "a").symlink_to("a")


def to_each_other(folder: Path) -> None:
    (folder / "a").symlink_to("b")
    (folder / "b").symlink_to("a")


def above(folder: Path) -> None:
    """Followed, each of the two would double the files at every step, forty steps deep."""
    for name in ("a", "b", "sub/a", "sub/b"):
        (folder / name).symlink_to(folder)


def doubled(folder: Path) -> None:
    """2 ** 40 files without one loop."""
    for i in range(40):
        (folder / f"d{i}").mkdir()
        for name in ("a", "b"):
            (folder / f"d{i}" / name).symlink_to(f"../d{i + 1}")
    (folder / "d40").mkdir()


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (to_a_file, "a is a link out of the source; got .*/secret/key; copy what is there with --links copy"),
        (to_a_folder, "a is a link out of the source; got .*/secret;"),
        (through_a_link, "way/a is a link out of the source"),
        (to_a_device, "a is a link out of the source; got /dev/zero"),
        (nowhere, "a is a link that leads nowhere"),
        (to_itself, "a is a link that leads nowhere"),
        (to_each_other, "a is a link that leads nowhere"),
        (above, "a is a link to a folder above it"),
    ],
)
def test_links_are_refused_or_left_out(source: Path, make: Callable[[Path], None], says: str) -> None:
    make(source)
    with pytest.raises(CheckpointError, match=says):
        survey(source, REWRITTEN)
    left = survey(source, REWRITTEN, "skip")
    assert names(left) == ["sub/notes.txt", "tokenizer.json"]
    assert left.links


def test_links_are_copied_when_the_user_says_so(source: Path, tmp_path: Path) -> None:
    to_a_file(source)
    (source / "b").symlink_to("../secret")
    files = survey(source, REWRITTEN, "copy")
    assert names(files) == ["a", "b/key", "sub/notes.txt", "tokenizer.json"]
    files.copy_to(tmp_path / "out")
    assert (tmp_path / "out/a").read_text() == (tmp_path / "out/b/key").read_text() == "private"
    assert not (tmp_path / "out/a").is_symlink()


@pytest.mark.parametrize("make", [to_a_device, nowhere, above])
def test_what_cannot_be_copied_is_refused_even_then(source: Path, make: Callable[[Path], None]) -> None:
    make(source)
    with pytest.raises(CheckpointError, match=r"a is a link|a cannot be copied"):
        survey(source, REWRITTEN, "copy")


def test_links_within_the_source_are_copied(source: Path) -> None:
    (source / "a").symlink_to("tokenizer.json")
    (source / "b").symlink_to("sub")
    assert names(survey(source, REWRITTEN)) == ["a", "b/notes.txt", "sub/notes.txt", "tokenizer.json"]


def test_links_that_multiply_are_refused(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_files, "MAX_FILES", 5000)
    doubled(source)
    with pytest.raises(CheckpointError, match="too many files"):
        survey(source, REWRITTEN)


def test_the_snapshot_of_a_hub_is_a_source(tmp_path: Path) -> None:
    """As huggingface_hub writes it: every file of a snapshot is a link to a blob."""
    blobs, snapshot = tmp_path / "models--x/blobs", tmp_path / "models--x/snapshots/0123"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (blobs / f"of-{name}").write_text(name)
        (snapshot / name).symlink_to(f"../../blobs/of-{name}")
    assert names(survey(snapshot, REWRITTEN)) == ["tokenizer.json"]
    (snapshot / "a").symlink_to("../../../elsewhere")
    (tmp_path / "elsewhere").write_text("private")
    with pytest.raises(CheckpointError, match="a link out of the source"):
        survey(snapshot, REWRITTEN)


@pytest.mark.parametrize("links", ["refuse", "skip"])
@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_links_in_the_place_of_weights_count_too(source: Path, name: str, links: source_files.Links) -> None:
    (source / name).unlink()
    (source / name).symlink_to("../secret/key")
    with pytest.raises(CheckpointError, match=f"{name} is a link out of the source"):
        survey(source, REWRITTEN, links)
    survey(source, REWRITTEN, "copy")


# -- what is no file -----------------------------------------------------------------------------------------------


def make_socket(path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # a socket's path may have a hundred characters
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(here)


@pytest.mark.parametrize(("make", "kind"), [(os.mkfifo, "a pipe"), (make_socket, "a socket")])
@pytest.mark.parametrize("where", ["a", "sub/a", "model.safetensors"])
def test_pipes_and_sockets_are_refused(source: Path, make: Callable[[Path], None], kind: str, where: str) -> None:
    (source / where).unlink(missing_ok=True)
    make(source / where)
    with pytest.raises(CheckpointError, match=f"{where} cannot be copied; got {kind}"):
        survey(source, REWRITTEN)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "model.safetensors.index.json", "tokenizer.json"])
@pytest.mark.parametrize("command", ["inspect", "prune"])
def test_a_pipe_is_not_waited_for(tmp_path: Path, name: str, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    make_checkpoint(tmp_path / "m")
    (tmp_path / "m" / name).unlink(missing_ok=True)
    if name.endswith("index.json"):
        (tmp_path / "m/model.safetensors").unlink()
    os.mkfifo(tmp_path / "m" / name)
    capsys.readouterr()
    options = [] if command == "inspect" else [str(tmp_path / "s"), "--pattern", "6:8", "--dtype", "int8"]
    assert main([command, str(tmp_path / "m"), *options]) == 1
    assert f"{name} cannot be read; got a pipe" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_files_with_large_holes_are_refused(source: Path) -> None:
    with open(source / "notes.txt", "wb") as file:
        file.truncate(1 << 43)
    with pytest.raises(CheckpointError, match=r"notes.txt has large holes; got 8.8 TB, 0 bytes of them on disk"):
        survey(source, REWRITTEN)


def test_a_json_file_without_end_is_refused(source: Path) -> None:
    with open(source / "config.json", "wb") as file:
        file.truncate(1 << 43)
    with pytest.raises(CheckpointError, match=r"config\.json (is too large|has large holes); got 8\.8 TB"):
        Checkpoint(source)


# -- weights in other forms ----------------------------------------------------------------------------------------


OTHERS = {
    *("pytorch_model.bin", "pytorch_model.bin.index.json", "original/consolidated.00.pth", "model-Q4_K_M.GGUF"),
    *("onnx/model.onnx", "onnx/model.onnx_data", "onnx/model.onnx.data", "tf_model.h5"),
    *("checkpoint-500/model.safetensors", "checkpoint-500/optimizer.pt", "model.ckpt.data-00000-of-00001"),
    *("pytorch_model_fsdp_0/__0_0.distcp", "model.safetensors.index.fp32.json", "hf_quant_config.json"),
    *("quantize_config.json", "speech-lora/adapter_config.json"),
    *("modeling_x.py", "sub/Kernel.SO", "2_Dense/data.pkl"),
}
COPIED = {"tokenizer.model", "LIESMICH.pt.md", "binary.txt", "onnx/config.json", "bin"}


def test_other_weights_and_code_are_named_and_not_copied(source: Path) -> None:
    for name in OTHERS | COPIED:
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_text("weights")
    files = survey(source, REWRITTEN)
    assert {*files.not_copied} == OTHERS
    assert {*names(files)} == {"sub/notes.txt", "tokenizer.json", *COPIED}


def test_weights_of_other_parts_of_a_model_are_copied(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "m")
    for name in ("2_Dense", "old"):
        (tmp_path / "m" / name).mkdir()
        (tmp_path / "m" / name / "model.safetensors").write_bytes(b"another part")
    modules = [{"idx": 0, "path": ""}, {"idx": 1, "path": "1_Pooling"}, {"idx": 2, "path": "2_Dense"}]
    (tmp_path / "m/modules.json").write_text(json.dumps(modules))
    summary = prune_checkpoint(tmp_path / "m", tmp_path / "s", PruneOptions("6:8", "int8"))
    assert (tmp_path / "s/2_Dense/model.safetensors").read_bytes() == b"another part"
    assert summary.not_copied == ["old/model.safetensors"]
    assert "not copied, other weights or code: old/model.safetensors" in summary.describe()


@pytest.mark.parametrize("key", ["auto_map", "auto\\u005fmap"])
def test_names_of_code_are_said_and_not_copied(tmp_path: Path, key: str) -> None:
    """A program that is told to trust code runs what they name, of this folder or of any model of a hub."""
    make_checkpoint(tmp_path / "m")
    config = json.loads((tmp_path / "m/config.json").read_text())
    code = {"AutoModel": "maker/other--evil.Model"}
    (tmp_path / "m/config.json").write_text(json.dumps(config | {"auto_map": code}).replace("auto_map", key))
    said = {"size": 3, "image_processor": {"auto_map": code, "a": [{"auto_map": code}]}}
    (tmp_path / "m/processor_config.json").write_text(json.dumps(said).replace("auto_map", key))
    (tmp_path / "m/vocab.json").write_text('{"auto_map": 7}')
    (tmp_path / "m/broken.json").write_text('{"auto_map": ')
    summary = prune_checkpoint(tmp_path / "m", tmp_path / "s", PruneOptions("6:8", "int8"))
    assert summary.not_copied == ["auto_map of config.json", "auto_map of processor_config.json"]
    assert "auto_map" not in json.loads((tmp_path / "s/config.json").read_text())
    said = json.loads((tmp_path / "s/processor_config.json").read_text())
    assert said == {"size": 3, "image_processor": {"a": [{}]}}
    for name in ("vocab.json", "broken.json"):
        assert (tmp_path / "s" / name).read_bytes() == (tmp_path / "m" / name).read_bytes()


# -- the copies ----------------------------------------------------------------------------------------------------


def test_permissions_of_the_owner_are_not_given_on(source: Path, tmp_path: Path) -> None:
    (source / "tokenizer.json").chmod(0o6754)
    (source / "sub/notes.txt").chmod(0o400)
    files = survey(source, REWRITTEN)
    for _ in range(2):  # the second time as after a kill: a file that nobody may write gives way
        files.copy_to(tmp_path / "out")
    copy = (tmp_path / "out/tokenizer.json").stat()
    assert stat.S_IMODE(copy.st_mode) == 0o754 & ~umask()
    assert copy.st_mtime_ns == (source / "tokenizer.json").stat().st_mtime_ns
    assert stat.S_IMODE((tmp_path / "out/sub/notes.txt").stat().st_mode) == 0o400


def umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_a_file_that_becomes_a_link_is_not_followed(source: Path, tmp_path: Path) -> None:
    files = survey(source, REWRITTEN)
    (source / "tokenizer.json").unlink()
    (source / "tokenizer.json").symlink_to("../secret/key")
    with pytest.raises((CheckpointError, OSError)):
        files.copy_to(tmp_path / "out")
    assert not (tmp_path / "out/tokenizer.json").exists()


def test_a_file_that_changes_is_not_copied(source: Path, tmp_path: Path) -> None:
    files = survey(source, REWRITTEN)
    (source / "tokenizer.json").write_text("grown")
    with pytest.raises(CheckpointError, match=r"tokenizer.json changed while the source was copied"):
        files.copy_to(tmp_path / "out")


def test_names_of_our_own_and_names_that_are_not_utf8_are_copied(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "m")
    (tmp_path / "m/calibrated").mkdir()
    odd = os.fsdecode(b"caf\xe9.txt")
    ours = ("calibrated/data.txt", "slidesparse-plan.json", "plan.json", "failed", odd)
    for name in ours:
        (tmp_path / "m" / name).write_text("the user's")
    (tmp_path / "m" / os.fsdecode(b"caf\xe9.bin")).write_text("weights")
    summary = prune_checkpoint(tmp_path / "m", tmp_path / "s", PruneOptions("6:8", "int8"))
    assert all((tmp_path / "s" / name).read_text() == "the user's" for name in ours)
    assert summary.not_copied == ["caf\\xe9.bin"]


# -- the command ---------------------------------------------------------------------------------------------------


def test_prune_refuses_before_any_work(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_checkpoint(tmp_path / "m")
    (tmp_path / "m/notes.txt").symlink_to("/etc/passwd")
    command = ["prune", str(tmp_path / "m"), str(tmp_path / "s"), "--pattern", "6:8", "--dtype", "int8"]
    capsys.readouterr()
    assert main(command) == 1
    told = capsys.readouterr().err
    assert f"slidesparse: {tmp_path}/m/notes.txt is a link out of the source; got /etc/passwd" in told
    assert told.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["m"]
    assert main([*command, "--links", "skip"]) == 0
    assert "not copied, they are links: notes.txt" in capsys.readouterr().out
    assert not (tmp_path / "s/notes.txt").exists()
