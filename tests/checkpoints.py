"""Small checkpoints of the supported architectures, made with transformers' own classes."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers

from slidesparse.checkpoints.checkpoint import Checkpoint
from slidesparse.models.config_keys import MARKER_KEY
from slidesparse.offline.calibrate.texts import as_text, read_documents
from slidesparse.offline.prune import prune_checkpoint
from slidesparse.offline.prune_options import PruneOptions

SMALL = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 152,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
"""152 is no multiple of 6 or 10, so down_proj pads its last group at 4:6 and 8:10."""

ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "mistral": ("Mistral", {"sliding_window": 8}),
    "phi3": ("Phi3", {}),
    "smollm3": ("SmolLM3", {"pad_token_id": None}),
    "bitnet": ("BitNet", {"tie_word_embeddings": True}),
}


def make_checkpoint(
    path: Path, name: str = "llama", dtype: torch.dtype = torch.bfloat16, shard_size: str = "5GB", **changes: Any
) -> transformers.PreTrainedModel:
    """Write a small random checkpoint of that architecture and return its model."""
    family, extra = ARCHITECTURES[name]
    config = getattr(transformers, f"{family}Config")(**{**SMALL, **extra, **changes})
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config).to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:  # the default std of 0.02 makes logits too small to compare
                parameter.normal_(std=0.15)
    if name == "bitnet":
        model.config.quantization_config = {
            "quant_method": "bitnet",
            "linear_class": "autobitlinear",
            "quantization_mode": "online",
        }
    model.save_pretrained(path, max_shard_size=shard_size)
    (path / "tokenizer.json").write_text('{"made": "for the test"}')
    return model


SIGNS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 .,;:!?-()'\n"


def add_tokenizer(path: Path, signs: str = SIGNS) -> None:
    """A tokenizer for those checkpoints: one token for each letter, figure and sign."""
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2} | {sign: 3 + i for i, sign in enumerate(signs)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
    made.decoder = tokenizers.decoders.Fuse()
    special = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=made, **special).save_pretrained(path)


def put_bos_first(path: Path) -> None:
    """Let that tokenizer put BOS before a text, as Llama's and Gemma's do."""
    made = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    made.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    made.save(str(path / "tokenizer.json"))


def reverse_letters(path: Path) -> None:
    """Another tokenizer in the place of that one: the same text becomes other tokens."""
    add_tokenizer(path, SIGNS[::-1])


def write_text(path: Path, words: int = 800) -> Path:
    """A text file with something to foresee in it."""
    rng = random.Random(0)
    vocabulary = ["sparse", "dense", "weights", "slide", "over", "windows", "of", "four", "and", "keep", "two"]
    path.write_text(" ".join(rng.choice(vocabulary) for _ in range(words)) + ".\n", encoding="utf-8")
    return path


def tokens(vocabulary: int = SMALL["vocab_size"]) -> torch.Tensor:
    """A batch of token ids."""
    return torch.randint(3, vocabulary, (2, 11), generator=torch.Generator().manual_seed(1))


def make_source(folder: Path, name: str, dtype: torch.dtype) -> Path:
    """A checkpoint ``m`` with a tokenizer, and beside it ``text.txt`` to calibrate with."""
    make_checkpoint(folder / "m", name, dtype)
    add_tokenizer(folder / "m")
    write_text(folder / "text.txt")
    return folder / "m"


def contents(path: Path) -> dict[str, bytes]:
    """The files of a folder, by their places in it."""
    return {str(p.relative_to(path)): p.read_bytes() for p in sorted(path.rglob("*")) if p.is_file()}


def tensors(path: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint."""
    checkpoint = Checkpoint(path)
    return {name: checkpoint.tensor(name) for name in checkpoint.files}


def same_tensors(one: Path, other: Path) -> bool:
    """Whether two checkpoints hold the same tensors under the same names."""
    first, second = tensors(one), tensors(other)
    return first.keys() == second.keys() and all(torch.equal(value, second[name]) for name, value in first.items())


@contextmanager
def edited_config(path: Path) -> Iterator[dict[str, Any]]:
    """What is changed in this object is changed in the checkpoint's config.json."""
    config = config_of(path)
    yield config
    (path / "config.json").write_text(json.dumps(config))


def config_of(path: Path) -> dict[str, Any]:
    """The config.json of a checkpoint."""
    found: dict[str, Any] = json.loads((path / "config.json").read_text())
    return found


def read_text(source: Any, tokenizer: Any = None) -> str:
    """All documents of a source as one text."""
    return as_text(read_documents(source), tokenizer)


def by_magnitude(pattern: str, dtype: str | None = None, **options: Any) -> PruneOptions:
    """Options of pruning that reads no text, where a test is about something else."""
    return PruneOptions(pattern, dtype, **{"method": "magnitude", **options})


def prune_words(source: Path | str, destination: Path | str, *more: str, pattern: str = "6:8") -> list[str]:
    """The command line of pruning that reads no text."""
    return ["prune", str(source), str(destination), "--pattern", pattern, "--method", "magnitude", *more]


def make_w8a8(source: Path, folder: Path, dtype: str = "int8", pattern: str = "dense") -> Path:
    """A quantised checkpoint without a marker, as other tools write it."""
    prune_checkpoint(source, folder, by_magnitude(pattern, dtype))
    with edited_config(folder) as config:
        del config[MARKER_KEY]
    return folder
