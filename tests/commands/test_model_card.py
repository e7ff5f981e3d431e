"""The model card that ``prune`` writes, as a hub reads it."""

from __future__ import annotations

from pathlib import Path

import pytest
from architectures import ARCHITECTURES
from checkpoints import add_tokenizer, by_magnitude, make_checkpoint
from huggingface_hub import ModelCard
from small_models import make

from slidesparse.offline.dry_run import dry_run
from slidesparse.offline.outcome import NOT_IN_TRANSFORMERS
from slidesparse.offline.prune import PruneSummary, prune_checkpoint

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
    return prune_checkpoint(source, destination, by_magnitude(pattern, dtype))


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
    assert "README.md is a model card to read and correct; that of the source is README.source.md" in summary.describe()
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
        ("license: 'mit\n", {}),
        ("- a list", {}),
        ('license: "a\\nbase_model: b"', {}),
        ('license: "\\ud800"\nlicense_name: mit', {"license_name": "mit"}),
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


@pytest.mark.parametrize("name", ["dinov2", "mixtral", "olmo-hybrid", "llama"])
def test_what_transformers_cannot_load_is_said_first(tmp_path: Path, name: str) -> None:
    """A card said that transformers loads the folder, which it does not."""
    found = ARCHITECTURES[name]
    make(tmp_path / "m", found, found.dtype)
    done = prune_checkpoint(tmp_path / "m", tmp_path / "s", by_magnitude("6:8", "int8"))
    would = dry_run(tmp_path / "m", tmp_path / "d", by_magnitude("6:8", "int8"))
    card = (tmp_path / "s/README.md").read_text()
    first = card.partition("\n# ")[2].splitlines()[2]
    said = [first, done.describe().splitlines()[-1], would.describe().splitlines()[-1]]
    assert [NOT_IN_TRANSFORMERS in line for line in said] == [name != "llama"] * 3
    assert ("transformers loads the folder" in card) == (name == "llama")
    assert "\n\n\n" not in card
    floats = prune_checkpoint(tmp_path / "m", tmp_path / "f", by_magnitude("6:8", "bf16"))
    assert floats.in_transformers
