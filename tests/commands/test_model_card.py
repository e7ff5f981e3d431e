"""The model card that ``prune`` writes, as a hub reads it, and what ``eval --card`` adds to it."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest
from checkpoints import add_tokenizer, make_checkpoint, write_text
from huggingface_hub import ModelCard

from slidesparse.cli import main
from slidesparse.offline.prune import PruneOptions, PruneSummary, prune_checkpoint

SOURCE = """---
license: other
license_name: qwen-research
license_link: LICENSE
language: [en, no]
pipeline_tag: text-generation
base_model: somebody/else
tags: [chat]
---
# The dense model
"""


def prune(source: Path, destination: Path, pattern: str = "6:8", dtype: str = "int8") -> PruneSummary:
    return prune_checkpoint(source, destination, PruneOptions(pattern, dtype))


def snapshot(tmp_path: Path) -> Path:
    """A folder that is named as one of huggingface_hub's cache."""
    folder = tmp_path / "models--Qwen--Qwen2.5-0.5B/snapshots/0a1b2c"
    make_checkpoint(folder, num_hidden_layers=1)
    add_tokenizer(folder)
    (folder / "README.md").write_text(SOURCE)
    return folder


def test_a_hub_reads_where_the_model_comes_from_and_under_which_licence(tmp_path: Path) -> None:
    source = snapshot(tmp_path)
    summary = prune(source, tmp_path / "q")
    assert summary.source_card == "README.source.md"
    assert "README.md is a model card to read and correct; the source's own is README.source.md" in summary.describe()
    assert (tmp_path / "q/README.source.md").read_text() == SOURCE
    card = ModelCard.load(tmp_path / "q/README.md")
    assert card.data.to_dict() == {
        "base_model": "Qwen/Qwen2.5-0.5B",
        "base_model_relation": "quantized",
        "library_name": "transformers",
        "license": "other",
        "license_name": "qwen-research",
        "license_link": "LICENSE",
        "language": ["en", "no"],
        "pipeline_tag": "text-generation",
        "tags": ["slidesparse", "compressed-tensors", "sparse"],
    }
    assert "# Qwen2.5-0.5B, 6:8, INT8" in card.text
    assert "commit `0a1b2c`, pruned and quantised by slidesparse" in card.text
    assert "vllm serve THIS_FOLDER" in card.text
    assert "- lm_head (output embedding)" in card.text


BOMB = "a: &a {x: y}\n" + "\n".join(f"a{i}: &a{i} {{<<: [*a{i - 1 or ''}, *a{i - 1 or ''}]}}" for i in range(1, 60))


@pytest.mark.parametrize(
    ("said", "carried"),
    [
        ("license: mit\nlanguage:\n  bad: kind", {"license": "mit"}),
        ("license: [mit, {a: b}]", {}),
        ("license: !!python/object/apply:os.system [echo]", {"license": ["echo"]}),  # a tag means nothing
        (f"{BOMB}\nlicense: mit", {"license": "mit"}),
        ("license: " + "[" * 5000, {}),
        ("license: 'mit\n", {}),
        ("- a list", {}),
        ('license: "a\\nbase_model: b"', {"license": "a\nbase_model: b"}),
        ('license: "\\ud800"\nlicense_name: mit', {"license_name": "mit"}),
        ("license: <!-- measured -->\nlicense_name: <!-- end -->\nlanguage: [en]", {"language": ["en"]}),
    ],
)
def test_cards_of_strangers(tmp_path: Path, said: str, carried: dict[str, object]) -> None:
    make_checkpoint(tmp_path / "m", num_hidden_layers=1)
    (tmp_path / "m/README.md").write_text(f"---\n{said}\n---\n")
    (tmp_path / "m/README.source.md").write_text("taken")
    assert prune(tmp_path / "m", tmp_path / "q").source_card == "README.source.source.md"
    assert (tmp_path / "q/README.source.md").read_text() == "taken"
    told = ModelCard.load(tmp_path / "q/README.md").data.to_dict()
    assert {key: value for key, value in told.items() if key not in ("library_name", "tags")} == carried


def test_eval_adds_its_result(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_checkpoint(tmp_path / "m", num_hidden_layers=1)
    add_tokenizer(tmp_path / "m")
    prune(tmp_path / "m", tmp_path / "q")
    text = write_text(tmp_path / "held-out.txt", words=40)
    capsys.readouterr()
    for window in ("16", "32", "32"):
        assert main(["eval", str(tmp_path / "q"), "--text", str(text), "--window", window, "--card", "--json"]) == 0
    value = json.loads(capsys.readouterr().out.rpartition("\n{\n")[2].join(["{", ""]))["perplexity"]["perplexity"]
    write_text(text.with_name("other.txt"), words=30)
    assert main(["eval", str(tmp_path / "q"), "--text", str(text.with_name("other.txt")), "--card"]) == 0
    card = (tmp_path / "q/README.md").read_text()
    rows = [line for line in card.splitlines() if line.startswith("| perplexity on")]
    assert len(rows) == 2
    assert rows[0].startswith(f"| perplexity on held-out.txt | {value:.4f} | ")
    assert "windows of 32 every 16" in rows[0]
    assert card.count("| what | value | how |") == 1
    assert card.index("## Measured") < card.index(rows[0]) < card.index("## Left dense")
    assert ModelCard.load(tmp_path / "q/README.md").data.library_name == "transformers"


def test_what_was_measured_is_not_lost_where_the_disk_is_full(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have taken hours."""
    make_checkpoint(tmp_path / "m", num_hidden_layers=1)
    add_tokenizer(tmp_path / "m")
    prune(tmp_path / "m", tmp_path / "q")
    command = ["eval", str(tmp_path / "q"), "--text", str(write_text(tmp_path / "t.txt", words=40)), "--json"]
    capsys.readouterr()
    assert main(command) == 0
    value = json.loads(capsys.readouterr().out)["perplexity"]["perplexity"]
    before = (tmp_path / "q/README.md").read_text()

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        assert main([*command, "--card"]) == 1
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["kind"] == "CheckpointError"
    assert error["what"] == f"the disk of {tmp_path / 'q/README.md'} is full"
    assert error["remedy"].endswith(f"what was measured: perplexity on t.txt: {value:.4f}")
    assert (tmp_path / "q/README.md").read_text() == before


def test_eval_refuses_a_card_before_it_measures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint(tmp_path / "m", num_hidden_layers=1)  # whose tokenizer cannot be loaded
    text = write_text(tmp_path / "t.txt", words=40)
    cached = snapshot(tmp_path)
    capsys.readouterr()
    for folder, says in (
        (tmp_path / "m", "README.md is missing; leave --card out"),
        (cached, "--card writes into README.md; got a model of the hub; needed a folder of your own"),
    ):
        assert main(["eval", str(folder), "--text", str(text), "--card"]) == 1
        assert says in capsys.readouterr().err
    prune(tmp_path / "m", tmp_path / "q")
    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda path, mode: False)
        assert main(["eval", str(tmp_path / "q"), "--text", str(text), "--card"]) == 1
    assert "q cannot be written to; needed a new README.md in it; leave --card out" in capsys.readouterr().err
    (tmp_path / "m/README.md").write_text(SOURCE)
    assert main(["eval", str(tmp_path / "m"), "--text", str(text), "--card"]) == 1
    assert "has no place for measurements" in capsys.readouterr().err
    assert (tmp_path / "m/README.md").read_text() == SOURCE
