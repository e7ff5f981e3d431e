"""Turn layers that vLLM has loaded and sharded into SlideLinears, or leave them to vLLM with the reason.

Parameters, their loaders, sharding and fused scales are vLLM's own: a scheme is wrapped, and only what happens after
loading and when multiplying is ours. A layer that is left to vLLM runs exactly its code.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import torch

from slidesparse.gemm import Problem, choose
from slidesparse.integrations.vllm import LOGGER
from slidesparse.integrations.vllm.memory import give_blocks_back
from slidesparse.integrations.vllm.model_state import ModelState
from slidesparse.integrations.vllm.names import NamedLayer, shard_start
from slidesparse.integrations.vllm.options import Options
from slidesparse.integrations.vllm.private import reads_weight_itself
from slidesparse.integrations.vllm.reload import keep, kept, pack_again
from slidesparse.integrations.vllm.status import Outcome
from slidesparse.layer.linear import SlideLinear
from slidesparse.tuning.at_load import LoadTuner
from slidesparse.weights.packed import PackedWeight
from slidesparse.weights.packing import pack
from slidesparse.weights.pattern import DENSE, Pattern
from slidesparse.weights.quant import QUANTISED
from slidesparse.weights.support import (
    UNIFORM_PATTERNS,
    check_groups,
    check_weight,
    following_groups,
    satisfies,
    value_bits,
)
from vllm.model_executor.layers.linear import (
    LinearBase,
    LinearMethodBase,
    UnquantizedLinearMethod,
    register_weight_loader_v2_supported_method,
)
from vllm.model_executor.layers.quantization.compressed_tensors.schemes import CompressedTensorsScheme

LEAST_CAPABILITY = 80
"""Ampere: the first Sparse Tensor Cores."""

READ_ELSEWHERE = "left to vLLM, which reads its weight in a kernel of its own"

READ_BY_ADAPTERS = "left to vLLM, since LoRA adapters read its weight"

READ_BY_DRAFTS = "left to vLLM, which compares its weight with a draft's"

log = logging.getLogger(LOGGER)


class SlideScheme(CompressedTensorsScheme):
    """A W8A8 layer's scheme: vLLM's until the layer is loaded, then a SlideLinear where its weight can be packed.

    Args:
        inner: vLLM's scheme.
        named: The layer's name and pattern.
        model: The state of its model.
    """

    def __init__(self, inner: CompressedTensorsScheme, named: NamedLayer, model: ModelState) -> None:
        self.inner, self.named, self.model = inner, named, model
        self.in_features = 0
        self.converted: bool | None = None  # not loaded yet

    @classmethod
    def get_min_capability(cls) -> int:
        """Return the least compute capability, times ten."""
        return LEAST_CAPABILITY

    def create_weights(self, layer: torch.nn.Module, input_size: int, **sizes: Any) -> None:
        """Create vLLM's parameters; ``input_size`` is that of the whole weight."""
        self.in_features = input_size
        self.inner.create_weights(layer=layer, input_size=input_size, **sizes)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Pack the weight, or let vLLM go on with it; a layer that was left to vLLM is so when it is loaded again."""
        if self.converted is not False:
            self.converted = pack_layer(layer, self.named, self.in_features, self.model)
        if not self.converted:
            self.inner.process_weights_after_loading(layer)

    def apply_weights(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Multiply: [..., in] -> [..., out]."""
        y: torch.Tensor = layer.slide(x, bias) if self.converted else self.inner.apply_weights(layer, x, bias)
        return y


@register_weight_loader_v2_supported_method
class SlideUnquantizedMethod(LinearMethodBase):
    """The same for a BF16 or FP16 layer; arguments as of :class:`SlideScheme`.

    It is no subclass of the method that it wraps: vLLM's models ask for that class before they read a layer's weight in
    kernels of their own, and a packed layer has none.
    """

    supports_pre_processed_weights = False
    """vLLM from 0.33 on may hand weights over between processes as they are after packing; ours cannot be."""

    def __init__(self, named: NamedLayer, model: ModelState) -> None:
        self.inner, self.named, self.model = UnquantizedLinearMethod(), named, model
        self.in_features = 0
        self.converted: bool | None = None  # not loaded yet

    def create_weights(
        self,
        layer: torch.nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **attributes: Any,
    ) -> None:
        """Create vLLM's parameters; ``input_size`` is that of the whole weight."""
        self.in_features = input_size
        sizes = input_size_per_partition, output_partition_sizes, input_size, output_size
        self.inner.create_weights(layer, *sizes, params_dtype, **attributes)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Pack the weight, or let vLLM go on with it; a layer that was left to vLLM is so when it is loaded again."""
        if self.converted is not False:
            self.converted = pack_layer(layer, self.named, self.in_features, self.model)
        if not self.converted:
            self.inner.process_weights_after_loading(layer)

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Multiply: [..., in] -> [..., out]."""
        y: torch.Tensor = layer.slide(x, bias) if self.converted else self.inner.apply(layer, x, bias)
        return y


def tell_when_loaded(
    scheme: CompressedTensorsScheme, layer: torch.nn.Module, named: NamedLayer, reason: str, model: ModelState
) -> None:
    """Leave a layer to vLLM's own scheme, and note why when it is loaded; the status would not wait for it otherwise.

    Where all layers are left so, nothing else would say that a pruned checkpoint is served dense.

    Args:
        scheme: Of this layer alone, as vLLM makes it. Its class stays: vLLM asks for it.
        layer: The layer.
        named: Its name.
        reason: Why it is left to vLLM.
        model: The state of its model.
    """
    load, status = scheme.process_weights_after_loading, model.status

    def load_and_tell(loaded: torch.nn.Module) -> None:
        load(loaded)
        if named.name in status.waiting:  # not when it is loaded again
            status.note_outcome(named.name, Outcome(False, True, reason), log)

    scheme.process_weights_after_loading = load_and_tell
    status.expect_layer(named.name, layer)


def pack_layer(layer: Any, named: NamedLayer, in_features: int, model: ModelState) -> bool:
    """Turn a loaded layer into a SlideLinear where that is possible and pays, and note the outcome.

    A layer that is a SlideLinear already gets the new weight, if it fits.

    Args:
        layer: With ``weight`` [out, in of this rank] and, of a quantised layer, ``weight_scale`` [out, 1].
        named: Its name and pattern.
        in_features: ``in`` of the whole weight.
        model: The state of its model.

    Returns:
        Whether ``layer.slide`` is there now; then weight and scale are gone.

    Raises:
        PatternViolation: The weight does not satisfy the pattern that the checkpoint claims.
        UnsupportedError: The backend that the user named cannot run it, or a new weight does not fit.
    """
    before = kept(layer)
    if before is not None:
        pack_again(layer, before, named, in_features)
        return True
    weight = layer.weight.data
    reason = _why_kept(layer, model)
    if reason is not None:
        model.status.note_outcome(named.name, Outcome(False, True, reason), log)
        return False
    start = shard_start(weight.shape[1], in_features, getattr(layer, "tp_rank", 0))
    scale = layer.weight_scale.data if hasattr(layer, "weight_scale") else None
    named = replace(named, pattern=model.pattern_of(named, weight, start))
    # Graphs do not hold an output embedding, and adapters read what a linear reads: nothing is joined with either.
    joins = model.options.fuse and isinstance(layer, LinearBase) and not model.adapters
    options = replace(model.options, fuse=joins)
    packed, outcome = pack_shard(weight, scale, named, options, start, model.tuner)
    if packed is None:
        model.status.note_outcome(named.name, outcome, log)
        return False
    give_blocks_back(weight.device)  # those of the checks are as large as the dense weight
    backend = model.options.backend if outcome.sparse else "auto"
    slide = SlideLinear(packed, backend=backend, fallback=model.options.fallback)
    kept_bytes = sum(slide.operand_bytes.values())
    model.status.note_outcome(named.name, replace(outcome, kept_bytes=kept_bytes, dense_bytes=weight.nbytes), log)
    del layer.weight
    if scale is not None:
        del layer.weight_scale
    keep(layer, slide, model.adapters)
    model.add_layer(named.name, slide)
    device = weight.device
    del weight, scale, packed
    give_blocks_back(device)
    if model.warmup is not None and device.type == "cuda":
        model.warmup.layer(slide)
    return True


def _why_kept(layer: Any, model: ModelState) -> str | None:
    """Return why a loaded layer keeps its weight, in words; None where it need not."""
    if reads_weight_itself(layer):
        return READ_ELSEWHERE
    if not isinstance(layer, LinearBase) and (model.adapters or model.heads_compared):  # an output embedding
        return READ_BY_ADAPTERS if model.adapters else READ_BY_DRAFTS
    return model.why_left(layer.weight.dtype)


def pack_shard(
    weight: torch.Tensor,
    scale: torch.Tensor | None,
    named: NamedLayer,
    options: Options,
    start: int,
    tuner: LoadTuner | None = None,
) -> tuple[PackedWeight | None, Outcome]:
    """Pack one rank's weight if it is to run sparse.

    Args:
        weight: [out, columns of this rank].
        scale: [out, 1], or None.
        named: The layer's name and pattern.
        options: The user's options.
        start: Column of the whole weight at which this rank's begin.
        tuner: Measures the layer first where this machine has no times of its kind.

    Returns:
        The packed weight, or None where the layer is left to vLLM; and what to say about it. A layer that runs dense,
        by choice or because the checkpoint says so, is taken over too where the pass of
        :mod:`slidesparse.integrations.vllm.fuse_norms` can join it with the norm or activation before it, for which
        vLLM has two kernels.
    """
    pattern = named.pattern or find_pattern(weight, start)
    if pattern is None:
        return None, Outcome(False, False, "its weight satisfies no pattern")
    if pattern == DENSE:
        return _stay_dense(weight, scale, named, options, "as the checkpoint says")
    k_offset = start % pattern.group
    groups = None if pattern.is_uniform else following_groups(weight, pattern, k_offset)
    check_groups(weight, pattern, groups, k_offset=k_offset, name=named.name)
    if groups is not None and not len(groups):
        return _stay_dense(weight, scale, named, options, f"no column group of this shard follows {pattern}")
    out, columns = weight.shape
    problem = Problem(pattern, weight.dtype, out, columns, weight.device, bits=value_bits(weight))
    if tuner is not None and tuner.wants(problem, options.backend, options.fallback):
        packed = pack(weight, pattern, scale=scale, k_offset=k_offset, groups=groups, name=named.name)
        tuner.measure(problem, packed, options.fallback)
        del packed  # a large layer of this kind may follow
    choice, eligible = choose(problem, options.backend, options.fallback), options.backend != "dense"
    if choice.backends == ("dense",):
        joined, outcome = _stay_dense(weight, scale, named, options, str(pattern), f"; {choice.reason}")
        return joined, replace(outcome, eligible=eligible, sparse_by=choice.able)
    packed = pack(weight, pattern, scale=scale, k_offset=k_offset, groups=groups, name=named.name)
    offset = f", from position {k_offset} of a group" if k_offset else ""
    return packed, Outcome(True, True, f"{pattern}: {choice.describe()}{offset}; {choice.reason}", eligible)


def _stay_dense(
    weight: torch.Tensor, scale: torch.Tensor | None, named: NamedLayer, options: Options, what: str, why: str = ""
) -> tuple[PackedWeight | None, Outcome]:
    """Take a weight that stays dense over as it is where the pass over graphs can join it, else leave it to vLLM."""
    if not (options.fuse and weight.dtype in QUANTISED):
        return None, Outcome(False, True, what + why)
    packed = pack(weight, DENSE, scale=scale, name=named.name)
    return packed, Outcome(False, True, f"{what}, {JOINED}{why}")


JOINED = "joined with the operation before it where that is a norm or an activation"
"""What the pass over graphs does to a linear: nothing yet says what is before it, and before an o_proj is attention."""


def find_pattern(weight: torch.Tensor, start: int) -> Pattern | None:
    """Return the tightest uniform pattern that a shard satisfies; where its groups begin depends on their size."""
    check_weight(weight)
    by_density = sorted(UNIFORM_PATTERNS, key=lambda pattern: pattern.density)
    return next((pattern for pattern in by_density if satisfies(weight, pattern, start % pattern.group)), None)
