"""The other files of a source: nothing of the user's own comes along, and no code."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from checkpoints import by_magnitude, make_checkpoint

from slidesparse.errors import CheckpointError
from slidesparse.files.source_files import Links, SourceFiles, survey
from slidesparse.offline.prune import prune_checkpoint

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


def through_a_link(folder: Path) -> None:
    (folder / "way").mkdir()
    (folder / "way/a").symlink_to("b")
    (folder / "way/b").symlink_to("../../secret/key")


LINKS: dict[str, tuple[Callable[[Path], None], str]] = {
    "to a file": (
        lambda folder: (folder / "a").symlink_to("../secret/key"),
        "a is a link out of the source; got .*/secret/key; copy what is there with --links copy",
    ),
    "to a folder": (lambda folder: (folder / "a").symlink_to(folder.parent / "secret"), "a is a link to a folder"),
    "through a link": (through_a_link, "way/a is a link out of the source"),
    "to a device": (lambda folder: (folder / "a").symlink_to("/dev/zero"), "a is a link out of the source"),
    "nowhere": (lambda folder: (folder / "a").symlink_to("missing"), "a is a link that leads nowhere"),
    "in circles": (lambda folder: (folder / "sub/a").symlink_to(folder), "sub/a is a link to a folder"),
}


@pytest.mark.parametrize("name", LINKS)
def test_links_are_refused_or_left_out(source: Path, name: str) -> None:
    make, says = LINKS[name]
    make(source)
    with pytest.raises(CheckpointError, match=says):
        survey(source, REWRITTEN)
    left = survey(source, REWRITTEN, "skip")
    assert names(left) == ["sub/notes.txt", "tokenizer.json"]
    assert left.links
    if name in ("to a device", "nowhere", "in circles"):  # which cannot be copied
        with pytest.raises(CheckpointError, match=r"a is a link|a cannot be copied"):
            survey(source, REWRITTEN, "copy")


def test_links_are_copied_when_the_user_says_so(source: Path, tmp_path: Path) -> None:
    (source / "a").symlink_to("../secret/key")
    files = survey(source, REWRITTEN, "copy")
    assert names(files) == ["a", "sub/notes.txt", "tokenizer.json"]
    files.copy_to(tmp_path / "out")
    assert (tmp_path / "out/a").read_text() == "private"
    assert not (tmp_path / "out/a").is_symlink()


def test_links_within_the_source_are_copied(source: Path) -> None:
    (source / "a").symlink_to("tokenizer.json")
    assert names(survey(source, REWRITTEN)) == ["a", "sub/notes.txt", "tokenizer.json"]


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
def test_links_in_the_place_of_weights_count_too(source: Path, name: str, links: Links) -> None:
    (source / name).unlink()
    (source / name).symlink_to("../secret/key")
    with pytest.raises(CheckpointError, match=f"{name} is a link out of the source"):
        survey(source, REWRITTEN, links)
    survey(source, REWRITTEN, "copy")


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
    summary = prune_checkpoint(tmp_path / "m", tmp_path / "s", by_magnitude("6:8", "int8"))
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
    summary = prune_checkpoint(tmp_path / "m", tmp_path / "s", by_magnitude("6:8", "int8"))
    assert summary.not_copied == ["auto_map of config.json", "auto_map of processor_config.json"]
    assert "auto_map" not in json.loads((tmp_path / "s/config.json").read_text())
    said = json.loads((tmp_path / "s/processor_config.json").read_text())
    assert said == {"size": 3, "image_processor": {"a": [{}]}}
    for name in ("vocab.json", "broken.json"):
        assert (tmp_path / "s" / name).read_bytes() == (tmp_path / "m" / name).read_bytes()


# -- the copies ----------------------------------------------------------------------------------------------------


def test_names_of_our_own_and_names_that_are_not_utf8_are_copied(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "m")
    (tmp_path / "m/calibrated").mkdir()
    odd = os.fsdecode(b"caf\xe9.txt")
    ours = ("calibrated/data.txt", "slidesparse-plan.json", "plan.json", "failed", odd)
    for name in ours:
        (tmp_path / "m" / name).write_text("the user's")
    (tmp_path / "m" / os.fsdecode(b"caf\xe9.bin")).write_text("weights")
    summary = prune_checkpoint(tmp_path / "m", tmp_path / "s", by_magnitude("6:8", "int8"))
    assert all((tmp_path / "s" / name).read_text() == "the user's" for name in ours)
    assert summary.not_copied == ["caf\\xe9.bin"]


# -- the command ---------------------------------------------------------------------------------------------------
