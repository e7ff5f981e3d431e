"""Pack the experts of a checkpoint for transformers' model, one layer at a time."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain

import torch

from slidesparse.base.log import LOG
from slidesparse.base.traced_tensor import replay
from slidesparse.checkpoints.checkpoint import Checkpoint
from slidesparse.checkpoints.expert_tensors import ExpertTensor, marker_name, tensors_of
from slidesparse.checkpoints.marker import Marker, quantisation_dtype
from slidesparse.checkpoints.meta_model import MetaModel
from slidesparse.gemm import Problem, get_backend
from slidesparse.gemm.expert_times import GROUPED, ExpertKind, was_wrong
from slidesparse.gemm.grouped import AT_DENSE, GroupedProduct, grouped_patterns
from slidesparse.gemm.select import WRONG_HERE, Fallback, grouped_product
from slidesparse.layer.experts import SlideExperts, split_rows
from slidesparse.models.experts import Experts, experts_of_a_token, find_experts
from slidesparse.models.packed_mixture import PARAMETERS, PackedMixture, why_not_packed
from slidesparse.models.parts import text_config
from slidesparse.weights.packed import PackedWeight, common_bits
from slidesparse.weights.packing import pack
from slidesparse.weights.pattern import DENSE, Pattern

WITH_EXPERTS = ("hopper", "hopper-6bit")
"""Backends with kernels for experts too."""


@dataclass
class ExpertLoader:
    """Packs the experts of a model that were pruned in 8 bits."""

    meta: MetaModel
    checkpoint: Checkpoint
    marker: Marker
    device: torch.device
    backend: str
    fallback: Fallback
    _reasons: dict[str, list[str]] = field(default_factory=dict)

    def load(self) -> set[str]:
        """Put packed experts into the model, log why others stay dense, and return the states that are filled.

        Experts that violate their marked pattern are a PatternViolation.
        """
        filled: set[str] = set()
        for experts in find_experts(self.meta.model) if self.marker.experts else ():
            slide = self._packed(experts)
            if isinstance(slide, str):
                self._reasons.setdefault(slide, []).append(experts.name)
                continue
            self.meta.model.set_submodule(experts.name, PackedMixture(slide))
            filled |= {experts.layer(leaf) for leaf in experts.weights}
        for reason, names in self._reasons.items():
            layers = names[0] if len(names) == 1 else f"{len(names)} layers"
            LOG.info("slidesparse: the experts of %s run dense: %s", layers, reason)
        return filled

    def _packed(self, experts: Experts) -> SlideExperts | str:
        dtype = quantisation_dtype(self.checkpoint.config)
        if dtype is None:
            return "their weights are of a float type"
        why_not = why_not_packed(self.meta.model.get_submodule(experts.name), experts)
        if why_not is not None:
            return why_not
        tensors = tensors_of(experts, self.meta, self.checkpoint)
        if any(one.transposed or f"{name}_scale" not in self.checkpoint.files for name, one in tensors.items()):
            return "their weights are transposed, or have no scales"
        patterns = {leaf: self._patterns(experts.layer(leaf), tensors) for leaf in PARAMETERS}
        pair = grouped_patterns(*patterns.values())
        if isinstance(pair, str):
            return pair
        kind = self._kind(experts, dtype, *pair)
        product = self._product(kind)
        if isinstance(product, str):
            return product
        packed = [
            self._read(f"{experts.name}.{leaf}", pattern, experts.count)
            for leaf, pattern in zip(PARAMETERS, pair, strict=True)
        ]
        kind = replace(kind, bits=common_bits(chain(*packed)))
        if kind.pattern == DENSE and kind.bits != 6:
            return AT_DENSE
        if self.backend == "auto" and was_wrong(kind):  # only now, since the values' bits are part of the kind
            product = self._or_definition(f"{GROUPED}: {WRONG_HERE}")
            if isinstance(product, str):
                return product
        return self._why_not_bits(kind.bits) or SlideExperts(packed[0], packed[1], product)

    def _patterns(self, layer: str, tensors: dict[str, ExpertTensor]) -> set[Pattern]:
        """Return the patterns of the tensors of a layer's weights; dense for unpruned ones."""
        names = (name for name, tensor in tensors.items() if tensor.layer == layer)
        marked = (marker_name(name, len(self.checkpoint.stored(name).shape)) for name in names)
        return {self.marker.experts.get(name, DENSE) for name in marked}

    def _kind(self, experts: Experts, dtype: torch.dtype, gate_up: Pattern, down: Pattern) -> ExpertKind:
        _, out, columns = experts.weights["gate_up_proj"]
        numbers = experts.count, experts.count, experts_of_a_token(text_config(self.meta.model.config))
        return ExpertKind(dtype, gate_up, down, columns, out // 2, *numbers, self.device)

    def _product(self, kind: ExpertKind) -> GroupedProduct | str:
        """Return the product of the user's choice, or the reason why there is none."""
        if self.backend == "reference":
            return GroupedProduct()
        if self.backend != "auto" and self.backend not in WITH_EXPERTS:
            return f"the backend {self.backend} does not multiply by experts"
        if kind.device.type == "cpu" and self.fallback != "none":
            return "no kernel multiplies by experts on a CPU"
        problem = kind.pattern, kind.dtype, 2 * kind.inner, kind.hidden, kind.device
        return self._or_definition(
            grouped_product(Problem(*problem, slid=kind.pattern != DENSE, bits=6))  # of values that are not read yet
        )

    def _or_definition(self, product: GroupedProduct | str) -> GroupedProduct | str:
        """Return the product, or the definition where there is none and ``fallback`` forbids running dense."""
        return GroupedProduct() if isinstance(product, str) and self.fallback == "none" else product

    def _why_not_bits(self, bits: int) -> str | None:
        """Return the reason why a chosen backend cannot keep values of this many bits, or None."""
        known = None if self.backend == "auto" else get_backend(self.backend).bits
        return None if known in (None, bits) else f"{self.backend}: a value of their weights has more than {known} bits"

    def _read(self, state: str, pattern: Pattern, count: int) -> list[PackedWeight]:
        """Return the packed weights of all experts of one state of the model, [experts, out, in]."""
        origin = self.meta.names.origins[state]
        values = replay(origin, partial(self.checkpoint.tensor, device=self.device))
        scale = replay(origin, lambda name: self.checkpoint.tensor(f"{name}_scale", self.device))
        whole = pack(values.flatten(0, 1), pattern, scale=scale.flatten(), name=state)
        return split_rows(whole, count)
