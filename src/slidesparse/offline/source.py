"""What commands look up about a checkpoint: its model on the meta device, its marker, its experts and their routers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from torch import nn

from slidesparse.base.traced_tensor import sources
from slidesparse.checkpoints.checkpoint import Checkpoint
from slidesparse.checkpoints.marker import Marker
from slidesparse.checkpoints.meta_model import MetaModel, build_meta_model
from slidesparse.models.experts import Experts, find_experts, find_routers, linears_inside
from slidesparse.models.sparsify import run_once


@dataclass(frozen=True)
class Source:
    """A checkpoint, and what follows from its config and the headers of its files.

    Attributes:
        checkpoint: The files.
        marker: Its marker; None: it is dense, as far as it says.
        meta: Its model, without weights.
        experts: The experts of each layer of a mixture.
    """

    checkpoint: Checkpoint
    marker: Marker | None
    meta: MetaModel
    experts: list[Experts]

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> Source:
        """Look a checkpoint up; a CheckpointError where it has no model that can be built."""
        marker, meta = Marker.from_config(checkpoint.config), build_meta_model(checkpoint)
        return cls(checkpoint, marker, meta, find_experts(meta.model))

    @cached_property
    def routers(self) -> dict[str, str]:
        """Modules that choose among experts -> that as the reason to leave them alone."""
        return find_routers(self.meta.model, self.experts)

    @cached_property
    def inside_experts(self) -> dict[str, str]:
        """Linears that are parts of experts -> that as the reason to leave them to these."""
        return linears_inside(self.meta.model, self.experts)

    @cached_property
    def linears(self) -> dict[str, nn.Linear]:
        """All other linears by module name."""
        named = ((name, module) for name, module in self.meta.model.named_modules() if name not in self.inside_experts)
        return {name: module for name, module in named if isinstance(module, nn.Linear)}

    @cached_property
    def run(self) -> Callable[[], object] | None:
        """Runs the model on dummy inputs, on the meta device; None for a model that cannot be run."""
        return run_once(self.meta.model)

    @cached_property
    def expert_layers(self) -> dict[str, list[str]]:
        """Weights of one kind of all experts of a layer -> the tensors that hold them."""
        found: dict[str, list[str]] = {}
        for one in self.experts:
            for leaf in one.weights:
                origins = (self.meta.names.origins.get(state) for state in one.states(leaf))
                names = (name for origin in origins if origin is not None for name in sources(origin))
                found[one.layer(leaf)] = list(dict.fromkeys(names))
        return found

    def tensors(self, name: str) -> list[str]:
        """Return the tensors that hold a parameter, the weight of a module, or one kind of weights of experts."""
        if name in self.expert_layers:
            return self.expert_layers[name]
        origin = self.meta.names.origins.get(f"{name}.weight", self.meta.names.origins.get(name))
        return [origin] if isinstance(origin, str) else []

    def is_one_expert(self, tensor: str) -> bool:
        """Return whether a tensor of experts holds one of them alone: [out, in], and not [experts, out, in]."""
        return len(self.checkpoint.stored(tensor).shape) == 2
