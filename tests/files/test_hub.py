"""Models of a hub as sources: fetched by huggingface_hub from a server on this machine, and read in its cache."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub.constants
import pytest
from checkpoints import add_tokenizer, make_checkpoint, tokens
from small_hub import COMMIT, TOKEN, SmallHub, small_hub, use

import slidesparse as ss
from slidesparse.checkpoints.checkpoint import Checkpoint
from slidesparse.cli import main
from slidesparse.errors import CheckpointError, InputError
from slidesparse.files.hub import HubModel, hub_model, source_folder

TO_6_OF_8 = ["--pattern", "6:8", "--method", "magnitude"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In two shards, with what repositories hold besides."""
    folder = tmp_path_factory.mktemp("hub") / "m"
    make_checkpoint(folder, num_hidden_layers=1, shard_size="80KB")
    add_tokenizer(folder)
    assert len(list(folder.glob("model-*.safetensors"))) > 1
    for name in ("pytorch_model.bin", "modeling_x.py", "consolidated.safetensors", "onnx/model.json"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("not to be fetched")
    (folder / "README.md").write_text("---\nlicense: mit\n---\n# A model\n")
    (folder / "LICENSE").write_text("MIT")
    return folder


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, model: Path) -> Iterator[SmallHub]:
    with small_hub() as running:
        use(monkeypatch, running, tmp_path / "home")
        running.models["maker/small"] = model
        monkeypatch.chdir(tmp_path)
        yield running


def test_what_is_fetched_and_where_it_is(hub: SmallHub, model: Path, tmp_path: Path) -> None:
    folder = source_folder("maker/small")
    assert folder == tmp_path / "home/hub/models--maker--small/snapshots" / COMMIT
    assert hub_model(folder) == HubModel("maker/small", COMMIT)
    assert Checkpoint(folder).files == Checkpoint(model).files
    assert {"config.json", "tokenizer.json", "README.md", "LICENSE"} < set(hub.fetched())
    others = ("pytorch_model.bin", "modeling_x.py", "consolidated.safetensors", "model.json")
    assert not set(others) & set(hub.fetched())
    hub.asked.clear()
    assert source_folder("maker/small", "v1") == folder
    assert hub.fetched() == []  # it is in the cache


def test_prune_inspect_and_load_by_name(hub: SmallHub, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The files of the cache are links into blobs, which are the model's own; the result is that of the folder."""
    assert main(["inspect", "maker/small", "--revision", "v1", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["layers"]) == 7
    assert main(["prune", "maker/small", "q", *TO_6_OF_8]) == 0
    assert main(["prune", str(model), "same", *TO_6_OF_8]) == 0
    for name in ("config.json", "model.safetensors.index.json", *Checkpoint("q").shards):
        assert Path("q", name).read_bytes() == Path("same", name).read_bytes()
    assert not [path for path in Path("q").rglob("*") if path.is_symlink()]
    assert Path("q/LICENSE").read_text() == "MIT"
    hub.models["maker/pruned"] = Path("q").absolute()
    capsys.readouterr()
    loaded = ss.load("maker/pruned", revision="main")
    assert bool((loaded(tokens()).logits == ss.load("q")(tokens()).logits).all())


def test_a_folder_comes_first(hub: SmallHub, model: Path, tmp_path: Path) -> None:
    (tmp_path / "maker").mkdir()
    (tmp_path / "maker/small").symlink_to(model)
    assert source_folder("maker/small") == Path("maker/small")
    assert hub.asked == []
    with pytest.raises(InputError, match="is a local folder"):
        source_folder("maker/small", "main")
    # As a shell makes of a variable that is not set: huggingface_hub would take the main branch.
    with pytest.raises(InputError, match="--revision; got nothing"):
        source_folder("maker/other", "")
    assert hub.asked == []


@pytest.mark.parametrize("name", ["small", "./small", "../small", "./maker/small", "a/b/c"])
def test_paths_are_not_looked_for_on_the_hub(hub: SmallHub, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CheckpointError, match="no checkpoint folder at"):
        source_folder(name)
    with pytest.raises(CheckpointError, match="no checkpoint folder at"):
        source_folder(Path("maker/small"))
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(CheckpointError, match="no checkpoint folder at"):
        source_folder(name)
    with pytest.raises(ss.UnsupportedError, match="is not installed"):
        source_folder("maker/small")
    assert hub.asked == []


@pytest.mark.parametrize(
    ("name", "revision", "says"),
    [
        ("maker/smal", None, "there is no folder maker/smal, and no such model on the hub; correct the name; a"),
        ("maker/private", None, "there is no folder maker/private, and no such model on the hub"),
        ("maker/gated", None, "maker/gated is a gated model; request access"),
        ("maker/small", "v2", "maker/small has no such revision; got v2; needed a branch, a tag or a commit"),
    ],
)
def test_what_the_hub_refuses_is_one_line(
    hub: SmallHub, model: Path, monkeypatch: pytest.MonkeyPatch, name: str, revision: str | None, says: str
) -> None:
    hub.models |= {"maker/gated": model, "maker/private": model}
    hub.gated.add("maker/gated")
    hub.private.add("maker/private")
    with pytest.raises(CheckpointError) as refusal:
        source_folder(name, revision)
    assert str(refusal.value).startswith(says)
    if name in ("maker/gated", "maker/private"):
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        assert hub_model(source_folder(name)) == HubModel(name, COMMIT)


def test_a_hub_that_cannot_be_reached(hub: SmallHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.broken = True
    began = time.monotonic()
    with pytest.raises(CheckpointError, match=r"maker/small, and a model .* be fetched; got .*500.*check the network"):
        source_folder("maker/small")
    hub.broken = False
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(CheckpointError, match=r"cannot be fetched; got .*[Cc]onnection refused"):
        source_folder("maker/small")
    assert time.monotonic() - began < 10


def test_offline(hub: SmallHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(CheckpointError, match=r"there is no folder maker/small, and not all .* got HF_HUB_OFFLINE"):
        source_folder("maker/small")
    assert hub.asked == []
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    folder = source_folder("maker/small")
    hub.asked.clear()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert source_folder("maker/small") == folder
    (folder / "README.md").unlink()  # which a server does not fetch
    assert source_folder("maker/small") == folder
    min(folder.glob("*.safetensors")).unlink()
    with pytest.raises(CheckpointError, match=r"HF_HUB_OFFLINE, .*model-00001.*\.safetensors"):
        source_folder("maker/small")
    assert hub.asked == []
