"""Turn a GGUF of a published model into an ordinary BF16 checkpoint that says which file it came from.

    python convert.py MODEL.gguf OUT

A GGUF holds weights rounded to 4 to 8 bits. The checkpoint is what that file computes, not what its authors trained:
absolute scores lie below those on the model's card, differences from this checkpoint are what the records compare.
``OUT/source.json`` keeps the file's name, SHA-256, ``general.name`` and file type; the other scripts copy it into
their records.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import gguf
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def describe(path: Path) -> dict[str, Any]:
    """Return what a GGUF says of itself."""
    fields = gguf.GGUFReader(path).fields

    def value(key: str) -> Any:
        return fields[key].contents() if key in fields else None

    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    kind = value("general.file_type")
    return {
        "file": path.name,
        "sha256": digest,
        "name": value("general.name"),
        "architecture": value("general.architecture"),
        "licence": value("general.license"),
        "file_type": None if kind is None else gguf.LlamaFileType(kind).name,
        "rounded_to": "BF16",
    }


def convert(path: Path, out: Path) -> None:
    """Write the checkpoint: configuration, weights, tokenizer and ``source.json``."""
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    packed = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.bfloat16)
    # transformers remembers the packed form and refuses to save it, so the weights move to a model without one.
    settings = packed.config.to_dict()
    for key in ("quantization_config", "_name_or_path"):
        settings.pop(key, None)
    model = type(packed)(type(packed.config)(**settings)).to(torch.bfloat16)
    model.load_state_dict(packed.state_dict())
    model.generation_config = packed.generation_config
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    (out / "source.json").write_text(json.dumps(describe(path), indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gguf", type=Path)
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    convert(options.gguf, options.out)
    print((options.out / "source.json").read_text())


if __name__ == "__main__":
    main()
