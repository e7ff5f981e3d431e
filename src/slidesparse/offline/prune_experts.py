"""How ``slidesparse prune`` treats the experts of a mixture: each is a linear, pruned and quantised on its own.

Experts are many, and most of a model, so one is in memory at a time. Pruned without quantising they keep names and
shapes. Quantised ones are one tensor an expert with a scale for each channel, as vLLM reads them: those that share a
tensor are cut into such.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial

import torch

from slidesparse.base.traced_tensor import sources
from slidesparse.checkpoints.checkpoint import Checkpoint
from slidesparse.checkpoints.expert_tensors import (
    ExpertRowsByName,
    ExpertTensor,
    find_expert_rows,
    find_expert_tensors,
    marker_name,
    read_experts,
)
from slidesparse.checkpoints.marker import Marker
from slidesparse.checkpoints.meta_model import MetaModel
from slidesparse.checkpoints.single_experts import single_experts
from slidesparse.errors import InputError, UnsupportedError
from slidesparse.files.stored import STORED_NAMES, Stored
from slidesparse.files.tensor_writer import TensorWriter
from slidesparse.models.experts import LEAVE_DENSE, describe_treated, find_experts, ignore_entries
from slidesparse.models.targets import IGNORED, matches_entry
from slidesparse.offline.prune_options import PruneOptions, check_type
from slidesparse.offline.treated import unless_named
from slidesparse.weights.pattern import DENSE, Pattern
from slidesparse.weights.quant import QUANTISED, dequantize, loadable, quantize_weight, requantize, rounding_of
from slidesparse.weights.support import check_weight


class ExpertJob:
    """The experts of a checkpoint, and how they are treated.

    Attributes:
        tensors: Tensor of the source -> what it holds, of all experts.
        dense: Experts' weights that are left alone -> why.
        marked: Experts' weights -> pattern, as the marker of a pruned source has them.
        patterns: Experts' weights that are treated -> pattern. Set by :meth:`choose`.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        meta: MetaModel,
        options: PruneOptions,
        marker: Marker | None,
        source_dtype: torch.dtype | None,
        dtype: torch.dtype,
    ) -> None:
        self.checkpoint, self.meta, self.source_dtype, self.dtype = checkpoint, meta, source_dtype, dtype
        self.rounding = options.rounding
        self.found = find_experts(meta.model)
        names = [one.layer(leaf) for one in self.found for leaf in one.weights]
        self.marked = {} if marker is None else self._marked(names, marker)
        left = () if marker is None else unless_named(set(names) - self.marked.keys(), options.layers)
        ignore = [*options.ignore, *left]
        self.dense = {name: IGNORED for name in names for entry in ignore if matches_entry(name, entry)}
        if options.part == "vision":
            self.dense |= dict.fromkeys(names, "in the language model")
        wanted = len(self.dense) < len(names)
        self.tensors: dict[str, ExpertTensor] = find_expert_tensors(meta, checkpoint) if wanted else {}
        self._leave_floats_of_a_quantised_source()
        self.patterns: dict[str, Pattern] = {}
        self.layers = list(dict.fromkeys(one.layer for one in self.tensors.values() if one.layer not in self.dense))
        self._refuse_what_is_not_done(options)

    def _leave_floats_of_a_quantised_source(self) -> None:
        """Leave experts alone that a quantised source has in a float type, since nothing is rounded there."""
        if self.source_dtype is None:
            return
        for name, tensor in self.tensors.items():
            if self.checkpoint.stored(name).dtype != STORED_NAMES[self.source_dtype]:
                self.dense.setdefault(tensor.layer, "not quantised in the source, which is")

    def _refuse_what_is_not_done(self, options: PruneOptions) -> None:
        """Refuse options that experts, or servers that read them, cannot follow, before anything is written."""
        if not self.layers:
            return
        if options.recipe == "ternary":
            raise InputError("the ternary recipe is not for experts", got=self.layers[0], remedy=f"add {LEAVE_DENSE}")
        for name, tensor in self._treated():
            stored = self.checkpoint.stored(name)
            check_type(name, stored, self.source_dtype, self.dtype)
            if self.dtype in QUANTISED and not self._can_be_quantised(name, tensor, stored):
                raise UnsupportedError(
                    f"experts that are stored as {name} cannot be quantised",
                    got=f"one tensor {list(stored.shape)}" if len(stored.shape) == 3 else f"{list(stored.shape)}",
                    needed="experts that vLLM reads as one tensor each [out, in], where it knows scales",
                    remedy=f"use --dtype bf16, which keeps them as they are stored, or add {LEAVE_DENSE}",
                )
        if self.dtype in QUANTISED:
            self._refuse_part_of_a_layer()

    def _treated(self) -> Iterator[tuple[str, ExpertTensor]]:
        return ((name, tensor) for name, tensor in self.tensors.items() if tensor.layer not in self.dense)

    def _can_be_quantised(self, name: str, tensor: ExpertTensor, stored: Stored) -> bool:
        if len(stored.shape) == 2:
            return not tensor.transposed and name.endswith(".weight")
        return self.source_dtype is None and single_experts(type(self.meta.model).__name__, name) is not None

    def _refuse_part_of_a_layer(self) -> None:
        """Refuse experts of which some are quantised and some not, where servers have one type or one form for all."""
        left = [tensor.layer for name, tensor in self.tensors.items() if tensor.layer in self.dense]
        if left and not all(self._is_one_expert(name) for name in self.tensors):
            raise InputError(
                "experts of some layers are left alone, and others are quantised to one tensor an expert",
                got=left[0],
                needed="all of the model, or none: vLLM reads experts in one form",
            )
        for one in dict.fromkeys(tensor.experts.name for tensor in self.tensors.values()):
            here = {tensor.layer: None for tensor in self.tensors.values() if tensor.experts.name == one}
            left = [layer for layer in here if layer in self.dense]
            if left and len(left) < len(here):
                raise InputError(
                    "some experts' weights of a layer are left alone and some are quantised",
                    got=", ".join(left),
                    needed="all of a layer, or none",
                )

    def choose(self, patterns: Mapping[str, Pattern]) -> None:
        """Take the patterns of all layers, and keep those of experts."""
        self.patterns = {layer: patterns[layer] for layer in self.layers}

    def to_calibrate(self) -> ExpertRowsByName | None:
        """Return where the weights are that are pruned with what is routed to them; None where there are none."""
        pruned = {name: one for name, one in self._treated() if self.patterns[one.layer] != DENSE}
        rows = find_expert_rows(self.found, self.meta, self.checkpoint, pruned)
        return ExpertRowsByName(rows, pruned) if rows else None

    def treats(self, name: str) -> bool:
        """Say whether a tensor of the source holds experts that are treated."""
        return name in self.tensors and self.tensors[name].layer in self.patterns

    def outputs(self, name: str, stored: Stored) -> dict[str, Stored]:
        """Return the type and shape of every tensor that a tensor of the source becomes."""
        if self.dtype not in QUANTISED:
            return {name: stored}
        out: dict[str, Stored] = {}
        shape = stored.shape[:-3:-1] if self.tensors[name].transposed else stored.shape[-2:]
        for one in self._written(name):
            for part in one:
                out[part] = Stored(STORED_NAMES[self.dtype], (shape[0] // len(one), shape[1]))
                if self.source_dtype is None:
                    out[f"{part}_scale"] = Stored("F32", (shape[0] // len(one), 1))
        return out

    def _written(self, name: str) -> list[list[str]]:
        """Return the tensors that a tensor of the source becomes, a list for each expert in it."""
        single = single_experts(type(self.meta.model).__name__, name)
        if self.dtype not in QUANTISED or self._is_one_expert(name) or single is None:
            return [[name]]
        return [single.names(name, expert) for expert in range(self.checkpoint.stored(name).shape[0])]

    def write(
        self,
        writer: TensorWriter,
        name: str,
        prune: Callable[[torch.Tensor, int], torch.Tensor],
        device: torch.device,
        advance: Callable[[int], None],
    ) -> None:
        """Prune the experts of a tensor and write them; ``prune`` gets a weight [out, in] and its place there."""
        tensor, stored = self.tensors[name], self.checkpoint.stored(name)
        pattern = self.patterns[tensor.layer]

        def pruned(weight: torch.Tensor, index: int) -> torch.Tensor:
            check_weight(weight, name)
            return weight if pattern == DENSE else prune(weight, index)

        weights = read_experts(self.checkpoint, name, tensor, device)
        if self.dtype not in QUANTISED:
            parts = (tensor.matrix(pruned(weight, index)).cpu() for index, weight in enumerate(weights))
            if len(stored.shape) == 3:
                writer.write_parts(name, parts)
            else:
                writer.write(name, next(parts))
            advance(writer.tensors[name].n_bytes)
            return
        for index, (weight, names) in enumerate(zip(weights, self._written(name), strict=True)):
            for key, value in self._quantised(names, weight, partial(pruned, index=index), pattern).items():
                writer.write(key, value.cpu())
                advance(writer.tensors[key].n_bytes)

    def _quantised(
        self, names: list[str], weight: torch.Tensor, pruned: Callable[[torch.Tensor], torch.Tensor], pattern: Pattern
    ) -> dict[str, torch.Tensor]:
        """Return one expert's weight as it is stored, cut into as many tensors as there are names."""
        if self.source_dtype is None:
            found: dict[str, torch.Tensor] = {}
            recipe = rounding_of(self.rounding, pattern)
            for name, rows in zip(names, pruned(weight).chunk(len(names)), strict=True):
                rounded = loadable(quantize_weight(rows, self.dtype, name=name, recipe=recipe))
                found[name], found[f"{name}_scale"] = rounded
            return found
        (name,) = names
        if pattern == DENSE:
            return {name: weight}
        scale = self.checkpoint.tensor(f"{name}_scale", weight.device)
        return {name: requantize(pruned(dequantize(weight, scale)), scale, self.dtype)}

    def stored(self, layer: str) -> list[str]:
        """Return the tensors of the source that hold experts' weights of one kind, treated or not."""
        states = (s for one in self.found for leaf in one.weights if one.layer(leaf) == layer for s in one.states(leaf))
        origins = (origin for state in states if (origin := self.meta.names.origins.get(state)) is not None)
        return list(dict.fromkeys(name for origin in origins for name in sources(origin)))

    def describe(self) -> list[str]:
        """Return a line for each kind of experts' weights that is treated; layers that differ by number share it."""
        return describe_treated(self.found, {name: str(pattern) for name, pattern in self.patterns.items()})

    def marker(self) -> dict[str, Pattern]:
        """Return what the marker says of the experts."""
        return {
            marker_name(part, 3 if part == name and not self._is_one_expert(name) else 2): self.patterns[tensor.layer]
            for name, tensor in self._treated()
            for part in self._written(name)[0]
        }

    def _marked(self, layers: Iterable[str], marker: Marker) -> dict[str, Pattern]:
        """Return what :meth:`marker` wrote in a source, by layer."""
        names = {
            layer: marker_name(name, 2 if self._is_one_expert(name) else 3)
            for layer in layers
            for name in self.stored(layer)
        }
        return {layer: marker.experts[name] for layer, name in names.items() if name in marker.experts}

    def ignore_entries(self) -> list[str]:
        """Return entries of a quantisation's ignore list for the experts that it leaves alone."""
        if not self.layers:
            return ignore_entries([one.name for one in self.found], every=True)
        left = {name: tensor for name, tensor in self.tensors.items() if tensor.layer in self.dense}
        hub = [marker_name(name, 2).partition(".*.")[0] for name in left if self._is_one_expert(name)]
        return ignore_entries([*(one.experts.name for one in left.values()), *hub], every=False)

    def _is_one_expert(self, name: str) -> bool:
        return len(self.checkpoint.stored(name).shape) == 2
