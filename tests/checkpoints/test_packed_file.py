from __future__ import annotations

import errno
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint, tokens, write_packed_form
from safetensors.torch import load_file, save_file

import slidesparse
from slidesparse.checkpoints import packed_file
from slidesparse.checkpoints.checkpoint import Checkpoint
from slidesparse.checkpoints.marker import Marker
from slidesparse.checkpoints.packed_file import FILE_NAME, PACKED_VERSION, PackedFile, _parts, write_packed
from slidesparse.cli import main
from slidesparse.errors import CheckpointError
from slidesparse.files.tensor_writer import TensorWriter
from slidesparse.offline.prune import PruneOptions, prune_checkpoint
from slidesparse.weights.packed import PackedWeight, pack_by


@pytest.mark.parametrize(("pattern", "dtype"), [("6:8", "int8"), ("4:6", "fp8"), ("22:24", "bf16"), ("dense", "int8")])
def test_packed_model_computes_the_same(tmp_path: Path, pattern: str, dtype: str) -> None:
    make_checkpoint(tmp_path / "m")
    prune_checkpoint(tmp_path / "m", tmp_path / "s", PruneOptions(pattern, dtype))
    before = slidesparse.load(tmp_path / "s", backend="reference")(tokens()).logits
    write_packed(tmp_path / "s")
    after = slidesparse.load(tmp_path / "s", backend="reference")(tokens()).logits
    assert torch.equal(before, after)


def test_loading_reads_the_packed_file(tmp_path: Path) -> None:
    """Not the weights: a changed packed value shows."""
    make_checkpoint(tmp_path / "m")
    prune_checkpoint(tmp_path / "m", tmp_path / "s", PruneOptions("6:8", "int8"))
    assert main(["pack", str(tmp_path / "s")]) == 0
    file, name = tmp_path / "s" / FILE_NAME, "model.layers.0.mlp.up_proj.values"
    tensors = load_file(file)
    write_packed_form(file, {**tensors, name: torch.zeros_like(tensors[name])})
    assert (
        not slidesparse.load(tmp_path / "s").model.layers[0].mlp.up_proj(torch.ones(1, 64, dtype=torch.bfloat16)).any()
    )


def test_a_flipped_bit_anywhere_is_refused(pruned: Path) -> None:
    """In the data, the header, its length, the digests or the padding."""
    file = write_packed(pruned)
    whole = file.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    marker = Marker.require(Checkpoint(pruned).config, pruned)

    def read_all() -> None:
        checkpoint = Checkpoint(pruned)
        packed = PackedFile(checkpoint)
        for name in {part.rpartition(".")[0] for part in packed.reader.stored}:
            packed.read(name, marker.pattern_of(name), checkpoint.stored(f"{name}.weight"), None, "cpu")

    read_all()
    places = [*range(8), *range(8, header, 61), *range(header - 9, header), *range(header, len(whole), 1009)]
    passed = []
    for place in places:
        damaged = bytearray(whole)
        damaged[place] ^= 1 << place % 8
        file.write_bytes(damaged)
        try:
            read_all()
            passed.append(place)
        except CheckpointError:
            continue
    assert passed == []


@pytest.mark.parametrize(
    ("number", "says"),
    [
        (errno.ENOSPC, rf"the disk of .*{FILE_NAME} is full; .*free some space and run again: slidesparse pack"),
        (errno.EFBIG, rf"cannot write .*{FILE_NAME}; got File too large; needed .*ulimit -f"),
    ],
)
def test_a_pack_that_fails_names_the_file_and_the_remedy(
    pruned: Path, monkeypatch: pytest.MonkeyPatch, number: int, says: str
) -> None:
    before = names(pruned)

    def fail(*arguments: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(TensorWriter, "write", fail)
    with pytest.raises(CheckpointError, match=says):
        write_packed(pruned)
    assert names(pruned) == before


def test_a_pack_that_cannot_fit_is_refused_first(pruned: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = names(pruned)
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 1000}))
    with pytest.raises(CheckpointError, match=rf"not enough space for .*{FILE_NAME}; got 1 kB free"):
        write_packed(pruned)
    assert names(pruned) == before


def test_other_weights_and_other_versions_are_refused(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "m")
    prune_checkpoint(tmp_path / "m", tmp_path / "s", PruneOptions("6:8", "int8"))
    file = write_packed(tmp_path / "s")
    with pytest.raises(CheckpointError, match="exists"):
        write_packed(tmp_path / "s")
    weights = load_file(tmp_path / "s/model.safetensors")
    weights["model.embed_tokens.weight"] += 1
    save_file(weights, tmp_path / "s/model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match="not of these weight files"):
        slidesparse.load(tmp_path / "s")
    save_file(load_file(file), file, {"slidesparse_packed_version": "9"})
    with pytest.raises(CheckpointError, match="version"):
        PackedFile(Checkpoint(tmp_path / "s"))


@pytest.fixture
def pruned(tmp_path: Path) -> Path:
    make_checkpoint(tmp_path / "m")
    prune_checkpoint(tmp_path / "m", tmp_path / "s", PruneOptions("6:8", "int8"))
    return tmp_path / "s"


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_the_second_of_two_packs_is_refused_and_harms_nothing(
    pruned: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before, tried = names(pruned), []

    def second(*arguments: Any, **named: Any) -> PackedWeight:
        if not tried:
            tried.append(main(["pack", str(pruned)]))
        return pack_by(*arguments, **named)

    monkeypatch.setattr(packed_file, "pack", second)
    write_packed(pruned)
    assert tried == [1]
    assert f"another run is packing {pruned}; wait for it" in capsys.readouterr().err
    assert names(pruned) == before | {FILE_NAME}
    slidesparse.load(pruned)


def test_pack_writes_through_no_link(pruned: Path) -> None:
    victim = pruned.parent / "victim"
    victim.write_text("precious")
    for name in (FILE_NAME, f"{FILE_NAME}.tmp"):
        (pruned / name).symlink_to(victim)
    write_packed(pruned)
    assert victim.read_text() == "precious"
    assert not (pruned / FILE_NAME).is_symlink()
    assert not (pruned / f"{FILE_NAME}.tmp").is_symlink()
    slidesparse.load(pruned)


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_a_pack_that_stops_leaves_nothing(
    pruned: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    before, seen = names(pruned), []

    def stop(*arguments: Any) -> None:
        seen.extend(names(pruned) - before)
        raise error

    monkeypatch.setattr(TensorWriter, "write", stop)
    with pytest.raises(error):
        write_packed(pruned)
    assert len(seen) == 1
    assert re.fullmatch(rf"{FILE_NAME}\.[0-9a-f]{{16}}\.tmp", seen[0])
    assert names(pruned) == before


def test_the_next_pack_removes_what_a_killed_one_left(pruned: Path) -> None:
    before = names(pruned)
    for name in (f"{FILE_NAME}.tmp", f"{FILE_NAME}.0123456789abcdef.tmp"):
        (pruned / name).write_bytes(b"half")
    (pruned / "notes.tmp").write_text("not ours")
    write_packed(pruned)
    assert names(pruned) == before | {FILE_NAME, "notes.tmp"}


def _packed_checkpoint(path: Path) -> Path:
    make_checkpoint(path / "m")
    prune_checkpoint(path / "m", path / "s", PruneOptions("6:8", "int8"))
    write_packed(path / "s")
    return path / "s"


@pytest.mark.parametrize("damage", ["cut off", "of other weights", "other data"])
def test_inspect_tells_a_packed_file_that_loading_refuses(
    pruned: Path, capsys: pytest.CaptureFixture[str], damage: str
) -> None:
    write_packed(pruned)
    assert main(["inspect", str(pruned)]) == 0
    if damage == "cut off":
        os.truncate(pruned / FILE_NAME, 1000)
    elif damage == "other data":
        data = bytearray((pruned / FILE_NAME).read_bytes())
        data[-1] ^= 1
        (pruned / FILE_NAME).write_bytes(data)
    else:
        weights = load_file(pruned / "model.safetensors")
        weights["model.norm.weight"] += 1
        save_file(weights, pruned / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError) as error:
        slidesparse.load(pruned, device="cpu")
    if damage != "other data":
        assert str(error.value).endswith(f"; remove the file and run: slidesparse pack {pruned}")
    capsys.readouterr()
    assert main(["inspect", str(pruned)]) == 1
    assert f"PROBLEM: {error.value}" in capsys.readouterr().out


def test_the_file_of_an_older_version_says_what_to_do(tmp_path: Path) -> None:
    folder = _packed_checkpoint(tmp_path)
    file = folder / FILE_NAME
    save_file(load_file(file), file, {"slidesparse_packed_version": PACKED_VERSION, "fingerprint": "0" * 64})
    with pytest.raises(CheckpointError, match="another version of slidesparse"):
        slidesparse.load(folder)


def test_golden_bytes() -> None:
    """The layout, byte for byte: changing it needs a new PACKED_VERSION."""
    weight = torch.tensor(
        [[5, 0, 7, 1, 0, 2, 0, 3, 1, 2, 3, 4, 5, 6, 0, 0], [0, 0, 0, 0, 0, 0, 0, 0, 0, -1, 0, -2, 0, 0, -3, 4]],
        dtype=torch.int8,
    )
    parts = _parts("x", pack_by(weight, "6:8"))
    assert PACKED_VERSION == "2"
    assert (
        parts["x.values"].view(torch.uint8).numpy().tobytes().hex() == "050007010203"
        "010203040506"
        "000000000000"
        "00ff00fe"
        "fd04"
    )
    # Code b(b-1)/2 + a of the last two zeros a < b: (4, 6), (6, 7); (6, 7), (4, 5).
    assert parts["x.code"].tolist() == [[19, 27], [27, 14]]


def test_golden_bytes_of_a_dense_layer() -> None:
    weight = torch.tensor([[1, 2, 3, 4, 5, 6]], dtype=torch.int8)
    parts = _parts("x", pack_by(weight, "dense"))
    assert {name: part.tolist() for name, part in parts.items()} == {"x.dense": [[1, 2, 3, 4, 5, 6, 0, 0]]}
