"""A checkpoint with its model on the meta device, its marker, its linears and its experts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from slidesparse.base.traced_tensor import sources
from slidesparse.checkpoints.checkpoint import Checkpoint
from slidesparse.checkpoints.expert_tensors import marker_name
from slidesparse.checkpoints.marker import Marker
from slidesparse.checkpoints.meta_model import MetaModel, build_meta_model
from slidesparse.models.experts import Experts, find_experts, find_routers
from slidesparse.models.sparsify import run_once
from slidesparse.weights.pattern import Pattern


@dataclass(frozen=True)
class Source:
    """A checkpoint and its structure, by its config and the headers of its files.

    Attributes:
        checkpoint: The files.
        marker: Its marker; None for a dense checkpoint.
        meta: Its model, without weights.
        run: Runs the model on dummy inputs, on the meta device; None for a model that cannot be run.
        experts: The experts of each layer of a mixture.
        expert_layers: Kind of experts' weights in a layer -> its tensors.
        linears: Module name -> linear.
        routers: Router -> reason to leave it alone.
    """

    checkpoint: Checkpoint
    marker: Marker | None
    meta: MetaModel
    run: Callable[[], object] | None
    experts: list[Experts]
    expert_layers: dict[str, list[str]]
    linears: dict[str, nn.Linear]
    routers: dict[str, str]

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> Source:
        """Build a checkpoint's model and read its structure; a CheckpointError where that fails."""
        marker, meta = Marker.from_config(checkpoint.config), build_meta_model(checkpoint)
        model, experts = meta.model, find_experts(meta.model)
        weights = [one.layer(leaf) for one in experts for leaf in one.weights]
        layers = {name: sources(meta.names.origins[name]) if name in meta.names.origins else [] for name in weights}
        linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
        routers = find_routers(model, experts)
        return cls(checkpoint, marker, meta, run_once(model), experts, layers, linears, routers)

    def tensors(self, name: str) -> list[str]:
        """Return the tensors of a parameter, of a module's weight, or of one kind of experts' weights."""
        origin = self.meta.names.origins.get(f"{name}.weight", self.meta.names.origins.get(name))
        return self.expert_layers.get(name) or ([origin] if isinstance(origin, str) else [])

    def is_one_expert(self, tensor: str) -> bool:
        """Return whether a tensor of experts is of a single one: [out, in], and not [experts, out, in]."""
        return len(self.checkpoint.stored(tensor).shape) == 2

    def marked_experts(self) -> dict[str, Pattern]:
        """Return the marker's patterns of kinds of experts' weights."""
        marked = {} if self.marker is None else self.marker.experts
        names = {
            layer: marker_name(tensor, len(self.checkpoint.stored(tensor).shape))
            for layer, tensors in (self.expert_layers if marked else {}).items()
            for tensor in tensors
        }
        return {layer: marked[name] for layer, name in names.items() if name in marked}
