"""``save_pretrained`` of a loaded model, or of one made sparse in memory, writes a checkpoint that loads everywhere."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from adapted import Adapted
from checkpoints import add_tokenizer, by_magnitude, make_checkpoint, same_tensors, tokens

import slidesparse
from slidesparse.checkpoints.checkpoint import Checkpoint
from slidesparse.checkpoints.marker import Marker
from slidesparse.errors import InputError, SlideSparseError, UnsupportedError
from slidesparse.offline.inspect import inspect_checkpoint
from slidesparse.offline.prune import prune_checkpoint


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(tokens()).logits.float()


def loaded_dense(folder: Path, name: str) -> transformers.PreTrainedModel:
    make_checkpoint(folder, name, num_hidden_layers=1)
    model: transformers.PreTrainedModel = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    return model.eval()


def check(folder: Path, expected: torch.Tensor) -> None:
    """It loads here with the same bits, elsewhere with the same answers, and inspect finds nothing wrong."""
    assert inspect_checkpoint(folder).ok
    torch.testing.assert_close(logits(slidesparse.load(folder)), expected, rtol=0, atol=0)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
    similarity = torch.nn.functional.cosine_similarity(logits(theirs), expected, dim=-1)
    assert similarity.min() > 0.99


@pytest.mark.parametrize("name", ["llama", "llama-tied", "phi3"])
@pytest.mark.parametrize("dtype", ["int8", "fp8", "bf16"])
def test_a_loaded_model(tmp_path: Path, name: str, dtype: str) -> None:
    make_checkpoint(tmp_path / "m", name, num_hidden_layers=1)
    options = by_magnitude("6:8", dtype, layers={"re:.*down_proj": "4:6"})
    prune_checkpoint(tmp_path / "m", tmp_path / "s", options)
    model = slidesparse.load(tmp_path / "s")
    model.save_pretrained(tmp_path / "again")  # type: ignore[operator]
    check(tmp_path / "again", logits(model))
    before, after = (Checkpoint(tmp_path / folder).config["slidesparse_config"] for folder in ("s", "again"))
    assert after == before
    assert same_tensors(tmp_path / "again", tmp_path / "s")


@pytest.mark.parametrize("name", ["llama", "llama-tied", "qwen2"])
@pytest.mark.parametrize("dtype", ["int8", "fp8", "bf16"])
def test_a_model_made_sparse_in_memory(tmp_path: Path, name: str, dtype: str) -> None:
    model = loaded_dense(tmp_path / "m", name)
    slidesparse.sparsify_(model, "6:8", dtype, layers={"re:.*down_proj": "8:10"}, ignore=["re:.*o_proj"])
    model.save_pretrained(tmp_path / "s")
    check(tmp_path / "s", logits(model))
    config = Checkpoint(tmp_path / "s").config
    marker = Marker.require(config, tmp_path)
    assert str(marker.pattern_of("model.layers.0.mlp.down_proj")) == "8:10"
    assert str(marker.pattern_of("model.layers.0.mlp.up_proj")) == "6:8"
    assert sorted(marker.ignore) == ["lm_head", "model.layers.0.self_attn.o_proj"]
    assert ("quantization_config" in config) == (dtype != "bf16")


def test_a_compiled_model_made_sparse_in_memory(tmp_path: Path) -> None:
    """The wrapper of ``torch.compile`` puts a word before the names of layers, and saves them without it."""
    model: Any = torch.compile(loaded_dense(tmp_path / "m", "llama"), backend="eager")
    slidesparse.sparsify_(model, "6:8", layers={"re:.*down_proj": "8:10"})
    model.save_pretrained(tmp_path / "s")
    check(tmp_path / "s", logits(model))


def test_a_config_that_spoke_of_another_model_in_8_bits(tmp_path: Path) -> None:
    """Two models made of one config object: what the first one wrote there is not true of the second."""
    config = loaded_dense(tmp_path / "m", "llama").config
    for dtype in ("int8", "fp32"):
        model = transformers.LlamaForCausalLM(config).float().eval()
        slidesparse.sparsify_(model, "6:8", dtype)
    model.save_pretrained(tmp_path / "s")
    check(tmp_path / "s", logits(model))


def test_sparse_in_two_steps(tmp_path: Path) -> None:
    model = loaded_dense(tmp_path / "m", "llama")
    slidesparse.sparsify_(model, "6:8", ignore=["re:.*down_proj"])
    slidesparse.sparsify_(model, "4:6")
    model.save_pretrained(tmp_path / "s")
    check(tmp_path / "s", logits(model))
    assert json.loads((tmp_path / "s/config.json").read_text())["slidesparse_config"]["layers"] == {
        "model.layers.0.mlp.down_proj": "4:6"
    }


def test_two_types_in_one_model_are_refused_in_one_line(tmp_path: Path) -> None:
    model = loaded_dense(tmp_path / "m", "llama")
    slidesparse.sparsify_(model, "6:8", "int8", ignore=["re:.*down_proj"])
    slidesparse.sparsify_(model, "6:8", "fp8")
    with pytest.raises(UnsupportedError, match=r"one type of sparse weights; got layers in fp8 and int8") as error:
        model.save_pretrained(tmp_path / "s")
    assert isinstance(error.value, SlideSparseError)
    assert not (tmp_path / "s").exists()


def test_pruning_without_transformers_names_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after ``pip install .`` alone; the line said that slidesparse had a defect."""
    make_checkpoint(tmp_path / "m", num_hidden_layers=1)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UnsupportedError, match="transformers is not installed"):
        prune_checkpoint(tmp_path / "m", tmp_path / "s", by_magnitude("6:8", "int8"))


class Around(torch.nn.Module):
    """A user's own model around one of transformers, with a linear of its own."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.encoder = inner
        self.head = torch.nn.Linear(64, 64)


class Saved(Around):
    """A library's, which saves both: as a sentence encoder does."""

    def save_pretrained(self, folder: Path) -> None:
        self.encoder.save_pretrained(folder)  # type: ignore[operator]


@pytest.mark.parametrize(
    ("kind", "dtype", "head"),
    [(Around, "int8", "SlideLinear"), (Saved, "int8", "Linear"), (Saved, "fp32", "SlideLinear")],
)
def test_a_model_inside_of_another(tmp_path: Path, kind: type[Around], dtype: str, head: str) -> None:
    """Its config named no layers, or as the model around it does, and transformers read 8-bit weights as numbers."""
    inner = loaded_dense(tmp_path / "m", "llama").float()
    around = kind(inner)
    slidesparse.sparsify_(around, "6:8", dtype)
    assert type(around.head).__name__ == head
    inner.save_pretrained(tmp_path / "s")  # type: ignore[operator]
    check(tmp_path / "s", logits(inner))
    assert Checkpoint(tmp_path / "s").config["slidesparse_config"]["ignore"] == ["lm_head"]


def test_a_model_whose_adapters_are_taken_off(tmp_path: Path) -> None:
    model = loaded_dense(tmp_path / "m", "llama")
    attention = model.model.layers[0].self_attn  # type: ignore[index, union-attr]
    attention.q_proj = Adapted(attention.q_proj)
    slidesparse.sparsify_(model, "6:8", layers={"re:.*q_proj": "4:6", "re:.*k_proj": "4:6", "re:.*v_proj": "4:6"})
    attention.q_proj = attention.q_proj.base_layer  # as PEFT's unload does
    model.save_pretrained(tmp_path / "s")
    check(tmp_path / "s", logits(model))


def test_a_model_that_compressed_tensors_runs_is_refused_with_what_to_do(tmp_path: Path) -> None:
    slidesparse.sparsify_(model := loaded_dense(tmp_path / "m", "llama"), "6:8")
    model.save_pretrained(tmp_path / "s")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "s")
    with pytest.raises(InputError, match=r"give the folder to slidesparse\.load"):
        slidesparse.sparsify_(theirs, "6:8")


def test_sentence_transformers_run_our_model_in_8_bits(tmp_path: Path) -> None:
    """The page on models says so, and that they cannot run transformers' own."""
    library = pytest.importorskip("sentence_transformers")
    sizes = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 1}
    torch.manual_seed(0)
    transformers.BertModel(transformers.BertConfig(**sizes, num_attention_heads=4)).save_pretrained(tmp_path / "m")
    add_tokenizer(tmp_path / "m")
    settings = tmp_path / "m/tokenizer_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "pad_token": "<unk>"}))
    prune_checkpoint(tmp_path / "m", tmp_path / "s", by_magnitude("6:8", "int8"))
    dense, pruned = (library.SentenceTransformer(str(tmp_path / name), device="cpu") for name in "ms")
    texts = ["six of eight", "all"]
    with pytest.raises(RuntimeError, match="same dtype"):
        pruned.encode(texts)
    pruned[0].model = slidesparse.load(tmp_path / "s")
    similarity = torch.nn.functional.cosine_similarity(*(torch.tensor(one.encode(texts)) for one in (dense, pruned)))
    assert similarity.min() > 0.9
