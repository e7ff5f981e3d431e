"""Give the output embedding of a checkpoint weights of its own, where it uses those of the input embedding.

Once the gain of the last norm is folded into the output embedding, the two are no longer the same.
"""

from __future__ import annotations

from typing import Any

import torch

from slidesparse.files.checkpoint import ChangedCheckpoint, Checkpoint
from slidesparse.files.meta_model import build_meta_model

TIED = "tie_word_embeddings"


class UntiedCheckpoint(ChangedCheckpoint):
    """A checkpoint with one tensor more, the output embedding, which is read as a copy of the input embedding.

    Args:
        source: The checkpoint.
        embedding: The tensor of the input embedding.
        head: The name that the output embedding's weight gets; a tensor of that name is passed over.
    """

    def __init__(self, source: Checkpoint, embedding: str, head: str) -> None:
        super().__init__(source)
        self.embedding, self.head = embedding, head
        self.config_changes = {TIED: False}
        self.config = {**source.config, **self.config_changes}
        shard = source.files.get(head, source.files[embedding])
        self.files = {**source.files, head: shard}
        self.shards = {**source.shards, shard: {**source.shards[shard], head: source.stored(embedding)}}

    def tensor(self, name: str, device: str | torch.device = "cpu") -> torch.Tensor:
        """Read one tensor."""
        return self.source.tensor(self.embedding if name == self.head else name, device)

    @property
    def n_bytes(self) -> int:
        """Bytes of all tensors that are on disk."""
        return self.source.n_bytes


def untied(checkpoint: Checkpoint) -> Checkpoint:
    """Return a checkpoint whose output embedding has weights of its own; the same one where it has them already."""
    meta = build_meta_model(checkpoint)
    model: Any = meta.model
    weights: list[Any] = [
        getattr(getattr(model, f"get_{end}_embeddings", lambda: None)(), "weight", None) for end in ("input", "output")
    ]
    names = [name for name, one in model.named_parameters(remove_duplicate=False) if one is weights[0]]
    origin = next((meta.names.origins[name] for name in names if name in meta.names.origins), None)
    if weights[0] is not weights[1] or len(names) != 2 or not isinstance(origin, str):
        return checkpoint
    return UntiedCheckpoint(checkpoint, origin, names[1])
