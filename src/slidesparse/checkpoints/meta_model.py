"""Build a checkpoint's model on the meta device, and match its parameters with the tensors of the checkpoint."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn

from slidesparse.base.counted import counted
from slidesparse.base.other_libraries import LOCAL, need
from slidesparse.base.traced_tensor import replay, sources
from slidesparse.checkpoints.checkpoint import Checkpoint
from slidesparse.checkpoints.marker import Marker
from slidesparse.checkpoints.stored_ties import settle_ties
from slidesparse.checkpoints.tensor_names import TensorNames, ask_transformers
from slidesparse.errors import CheckpointError, UnsupportedError, library_errors
from slidesparse.models.parts import output_embedding
from slidesparse.weights.quant import FLOATS

BUILT_IN_ATTENTION = frozenset({None, "eager", "sdpa"})
"""Attention implementations that a config may choose. For others transformers may fetch a kernel from a hub and run
it."""


@dataclass(frozen=True)
class MetaModel:
    """A model without weights, and the checkpoint's tensors that fill it.

    Attributes:
        model: In evaluation mode; parameters on the meta device.
        names: Its state's values in the checkpoint.
    """

    model: nn.Module
    names: TensorNames

    def linears(self, marker: Marker) -> dict[str, nn.Linear]:
        """Return the linears outside of a marker's ignore list, by module name."""
        named = ((name, module) for name, module in self.model.named_modules() if name not in marker.ignore)
        return {name: module for name, module in named if isinstance(module, nn.Linear)}

    def why_stored_otherwise(self) -> dict[str, str]:
        """Return the linears that cannot be changed in place, each with the form of its weight in the checkpoint."""
        reasons = {}
        for name, module in self.model.named_modules():
            origin = self.names.origins.get(f"{name}.weight")
            if not isinstance(module, nn.Linear) or origin is None:
                continue
            if not isinstance(origin, str):
                reasons[name] = f"the checkpoint has it in another form, in {', '.join(sources(origin)[:3])}"
            elif not origin.endswith(".weight"):
                reasons[name] = f"the checkpoint calls its weight {origin}, which has no place for scales"
        return reasons

    def own_tensor(self, checkpoint: Checkpoint, parameter: str) -> str | None:
        """Return the tensor that holds exactly one parameter, unchanged; None if there is none."""
        origin = self.names.origins.get(parameter)
        if not isinstance(origin, str) or origin not in checkpoint.files or self._uses[origin] != 1:
            return None
        return origin

    @cached_property
    def _uses(self) -> Counter[str]:
        """Number of values of the model's state that each tensor is, unchanged."""
        return Counter(origin for origin in self.names.origins.values() if isinstance(origin, str))

    def prefix(self, module: str) -> str:
        """Return the checkpoint's name of a module; a CheckpointError where it stores none."""
        tensor = self.names.origins.get(f"{module}.weight")
        if not isinstance(tensor, str):
            raise CheckpointError(f"the checkpoint holds no {module}.weight")
        return tensor.removesuffix(".weight")

    def read(self, name: str, tensor: Callable[[str], torch.Tensor]) -> torch.Tensor:
        """Return a value of the model's state as transformers computes it; a CheckpointError where nothing fills it."""
        name = name if name in self.names.origins else self.names.tied.get(name, name)
        if name in self.names.made:
            return self.names.made[name]
        if name not in self.names.origins:
            raise CheckpointError(f"the checkpoint holds no {name}")
        return replay(self.names.origins[name], tensor)

    def tie(self, but: Container[str] = ()) -> None:
        """Tie the parameters that transformers ties, ``but`` for those of treated linears."""
        for name, other in self.names.tied.items():
            if name in but:
                continue
            (place, _, leaf), (owner, _, source) = name.rpartition("."), other.rpartition(".")
            setattr(self.model.get_submodule(place), leaf, getattr(self.model.get_submodule(owner), source))

    def runs_in(self, name: str, dtype: torch.dtype) -> torch.dtype:
        """Return the float type of a value in a model of type ``dtype``: transformers keeps some in float32."""
        kept = getattr(self.model, "_keep_in_fp32_modules_strict", None) or ()
        return torch.float32 if any(part in name for part in kept) else dtype

    @property
    def filled(self) -> list[str]:
        """Names of the state that :meth:`read` can read."""
        return [*self.names.origins, *self.names.made]

    def require_complete(self) -> None:
        """Raise a CheckpointError, which names the first tensors, for a checkpoint that does not fill the model."""
        state = self.model.state_dict(keep_vars=True)
        for name, value in state.items():
            if name in self.names.misshapen:
                shape = self.names.misshapen[name]
                needed = f"{list(value.shape)}, as config.json says"
                raise CheckpointError(f"shape of {name}", got=list(shape), needed=needed)
        if missing := self.names.missing:
            like = [name for name in self.names.unused if name.endswith(f".{missing[0]}")][:1]
            head = getattr(output_embedding(self.model), "weight", None)
            remedy = f"save the model that is inside of {like[0].removesuffix(f'.{missing[0]}')}" if like else None
            if all(state[name] is head for name in missing):
                remedy = "if it is the input embedding, write tie_word_embeddings: true into config.json"
            raise CheckpointError(
                f"the checkpoint lacks {counted(len(missing), 'tensor')} of {type(self.model).__name__}",
                got=f"no {', '.join(missing[:3])}{''.join(f', and {name}' for name in like)}",
                needed="all of them, under the names that the installed transformers gives them",
                remedy=remedy,
            )


def build_meta_model(
    checkpoint: Checkpoint, *, real_buffers: bool = False, dtype: torch.dtype | None = None
) -> MetaModel:
    """Build a checkpoint's model without weights, and match its parameters with the checkpoint's tensors.

    Args:
        checkpoint: The checkpoint.
        real_buffers: Compute buffers (rotary tables) on the CPU, for a model that will be filled and run; else they are
            on the meta device too, and the model takes no memory.
        dtype: Float type in which the model will run, and of its buffers by default; None: the config's.
    """
    known, config = model_class(checkpoint)
    what = f"cannot build {known.__name__} from {checkpoint.path}/config.json"
    init_empty = need("accelerate").init_empty_weights if real_buffers else None
    empty = torch.device("meta") if init_empty is None else init_empty(include_buffers=False)
    with library_errors(CheckpointError, what), empty, _default_dtype(dtype or config.dtype):
        model: nn.Module = known(config)
    with library_errors(CheckpointError, what):
        set_experts: Any = getattr(model, "set_experts_implementation", None)
        if not real_buffers and set_experts is not None:
            set_experts("batched_mm")  # the others depend on values, or run in BF16 only
    with library_errors(CheckpointError, f"transformers cannot tell which tensors of {checkpoint.path} are which"):
        names = ask_transformers(known, config, {name: checkpoint.stored(name) for name in checkpoint.files})
    return MetaModel(model.eval(), settle_ties(model, names, checkpoint))


def model_class(checkpoint: Checkpoint) -> tuple[Any, Any]:
    """Return transformers' class and config of a checkpoint; a CheckpointError where it has none."""
    transformers = need("transformers")
    architectures = checkpoint.config.get("architectures")
    if not isinstance(architectures, list) or not architectures:
        raise CheckpointError(
            f"{checkpoint.path}/config.json names no architecture",
            got=f"architectures {architectures!r:.80}",
            needed='"architectures": ["SomeModel"]',
            remedy="take config.json from where the weights are from",
        )
    known = getattr(transformers, str(architectures[0]), None)
    if not (isinstance(known, type) and issubclass(known, transformers.PreTrainedModel)):
        raise CheckpointError(
            "architecture of the checkpoint",
            got=architectures[0],
            needed=f"a model that transformers {transformers.__version__} has",
            remedy="upgrade transformers; custom code is not run",
        )
    with library_errors(CheckpointError, f"cannot read {checkpoint.path}/config.json"):
        model_type = checkpoint.config.get("model_type")
        if "AutoConfig" in (checkpoint.config.get("auto_map") or {}) and model_type not in transformers.CONFIG_MAPPING:
            raise UnsupportedError(
                f"{checkpoint.path}/config.json needs code of its own",
                got=f"model_type {model_type!r} and an auto_map",
                needed=f"a model type that transformers {transformers.__version__} has",
                remedy="upgrade transformers; custom code is not run",
            )
        config = transformers.AutoConfig.from_pretrained(str(checkpoint.path), **LOCAL)
        if not set(_attention_of(config)) <= BUILT_IN_ATTENTION:
            config._attn_implementation = None  # transformers then chooses, for all parts of the model
    return known, config


def _attention_of(config: Any) -> Iterator[str | None]:
    """Yield the attention implementation of a config, then those of the configs inside it."""
    yield getattr(config, "_attn_implementation", None)
    for name in getattr(config, "sub_configs", ()):
        if (part := getattr(config, name, None)) is not None:
            yield from _attention_of(part)


@contextmanager
def _default_dtype(dtype: torch.dtype | None) -> Iterator[None]:
    """Set the type of new float tensors for a block, as transformers does while it builds a model."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype if dtype in FLOATS else before)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
