"""Turn vLLM's loaded and sharded layers into SlideLinears, or leave them to vLLM with the reason.

Parameters, their loaders, sharding and fused scales are vLLM's own: a scheme is wrapped, and only the steps after
loading and the product are ours. A layer that is left to vLLM runs exactly its code.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import torch
from vllm.model_executor.layers.linear import (
    LinearBase,
    LinearMethodBase,
    UnquantizedLinearMethod,
    register_weight_loader_v2_supported_method,
)
from vllm.model_executor.layers.quantization.compressed_tensors.schemes import CompressedTensorsScheme

from slidesparse.base.device import give_blocks_back
from slidesparse.gemm.backend import servers_lack
from slidesparse.integrations import SPARSE_TENSOR_CORES
from slidesparse.integrations.gain import LoadedLinear
from slidesparse.integrations.names import NamedLayer, shard_start
from slidesparse.integrations.vllm import LOGGER
from slidesparse.integrations.vllm.model_state import ModelState
from slidesparse.integrations.vllm.private import reads_weight_itself
from slidesparse.integrations.vllm.reload import keep, kept, pack_again
from slidesparse.integrations.vllm.status import LACKED, Outcome
from slidesparse.layer.linear import SlideLinear
from slidesparse.layer.settle import RunsPacked, pack_dense, settle
from slidesparse.weights.quant import QUANTISED

READ_ELSEWHERE = "left to vLLM, which reads its weight in a kernel of its own"

READ_BY_ADAPTERS = "left to vLLM, since LoRA adapters read its weight"

READ_BY_DRAFTS = "left to vLLM, which compares its weight with a draft's"

JOINED = "fused with the norm or activation before it, if there is one"
"""Outcome of a linear that the pass over graphs may join; the operator before it is not known yet."""

log = logging.getLogger(LOGGER)


class WrappedMethod:
    """A layer's method or scheme: vLLM's, ``inner``, until it is loaded, then a SlideLinear if it is packed."""

    def __init__(self, inner: Any, named: NamedLayer, model: ModelState) -> None:
        self.inner, self.named, self.model = inner, named, model
        self.in_features = 0  # of the whole weight
        self.converted: bool | None = None  # not loaded yet

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Pack the weight, or leave it to vLLM, then also when it is loaded again."""
        if self.converted is not False:
            self.converted = pack_layer(layer, self.named, self.in_features, self.model)
        if not self.converted:
            self.inner.process_weights_after_loading(layer)


class SlideScheme(WrappedMethod, CompressedTensorsScheme):
    """The scheme of a W8A8 layer."""

    @classmethod
    def get_min_capability(cls) -> int:
        """Return the least compute capability, times ten."""
        return SPARSE_TENSOR_CORES

    def create_weights(self, layer: torch.nn.Module, input_size: int, **sizes: Any) -> None:
        """Create vLLM's parameters; ``input_size`` is that of the whole weight."""
        self.in_features = input_size
        self.inner.create_weights(layer=layer, input_size=input_size, **sizes)

    def apply_weights(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Multiply: [..., in] -> [..., out]."""
        y: torch.Tensor = layer.slide(x, bias) if self.converted else self.inner.apply_weights(layer, x, bias)
        return y


@register_weight_loader_v2_supported_method
class SlideUnquantizedMethod(WrappedMethod, LinearMethodBase):
    """The method of a BF16 or FP16 layer.

    It is no subclass of the method that it wraps: for that class vLLM's models may read a layer's weight in kernels of
    their own, and a packed layer has none.
    """

    supports_pre_processed_weights = False
    """vLLM from 0.33 on may share processed weights between processes, which ours does not support."""

    def __init__(self, named: NamedLayer, model: ModelState) -> None:
        super().__init__(UnquantizedLinearMethod(), named, model)

    def create_weights(
        self,
        layer: torch.nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        *more: Any,
        **named_more: Any,
    ) -> None:
        """Create vLLM's parameters; ``input_size`` is that of the whole weight."""
        self.in_features = input_size
        sizes = input_size_per_partition, output_partition_sizes, input_size
        self.inner.create_weights(layer, *sizes, *more, **named_more)

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Multiply: [..., in] -> [..., out]."""
        y: torch.Tensor = layer.slide(x, bias) if self.converted else self.inner.apply(layer, x, bias)
        return y


def note_when_loaded(
    scheme: CompressedTensorsScheme, layer: torch.nn.Module, name: str, reason: str, model: ModelState
) -> None:
    """Leave a layer to vLLM's own scheme, whose class vLLM checks, and note the reason when the layer is loaded.

    Where this holds for all layers, the log would otherwise not mention that a pruned checkpoint is served dense.
    """
    load, status = scheme.process_weights_after_loading, model.status

    def load_and_note(loaded: torch.nn.Module) -> None:
        load(loaded)
        if name in status.waiting:  # not when it is loaded again
            status.note_outcome(name, Outcome(False, True, reason), log)

    scheme.process_weights_after_loading = load_and_note
    status.expect_layer(name, layer)


def pack_layer(layer: Any, named: NamedLayer, in_features: int, model: ModelState) -> bool:
    """Turn a loaded layer into a SlideLinear where that is possible and faster, and note the outcome.

    A converted layer gets the new weight, if it fits. Return whether the layer is converted; its weight and scale are
    then removed.

    Args:
        layer: With ``weight`` [out, in of this rank] and, of a quantised layer, ``weight_scale`` [out, 1].
        named: Its name and pattern.
        in_features: ``in`` of the whole weight.
        model: The state of its model.

    Raises:
        PatternViolation: The weight violates the checkpoint's pattern.
        UnsupportedError: The user's backend cannot run it, or a new weight does not fit.
    """
    before = kept(layer)
    if before is not None:
        pack_again(layer, before, named.name)
        return True
    device = layer.weight.device
    slide, outcome = _settle(layer, named, in_features, model)
    model.status.note_outcome(named.name, outcome, log)
    if slide is None:
        return False
    del layer.weight
    if hasattr(layer, "weight_scale"):
        del layer.weight_scale
    keep(layer, slide, model.adapters)
    model.add_layer(named.name, slide)
    give_blocks_back(device)
    if model.warmup is not None and device.type == "cuda":
        model.warmup.layer(slide)
    return True


def _why_kept(layer: Any, model: ModelState) -> str | None:
    if reads_weight_itself(layer):
        return READ_ELSEWHERE
    if not isinstance(layer, LinearBase) and (model.adapters or model.heads_compared):  # an output embedding
        return READ_BY_ADAPTERS if model.adapters else READ_BY_DRAFTS
    return model.why_left(layer.weight.dtype)


def _settle(layer: Any, named: NamedLayer, in_features: int, model: ModelState) -> tuple[SlideLinear | None, Outcome]:
    """Return a loaded layer's SlideLinear, or None where it is left to vLLM, and its outcome.

    A dense layer is converted too where vLLM has no kernel for it, or where the pass of
    :mod:`slidesparse.integrations.vllm.fuse_norms` may join it with the norm or activation before it, for which vLLM
    needs two kernels.
    """
    reason = _why_kept(layer, model)
    if reason is not None:
        return None, Outcome(False, True, reason)
    weight = layer.weight.data
    scale = layer.weight_scale.data if hasattr(layer, "weight_scale") else None
    place = getattr(layer, "tp_rank", None), getattr(layer, "tp_size", None)
    start = shard_start(named.name, weight.shape[1], in_features, *place)
    settled = settle(weight, scale, named.pattern, model.chooser_of(weight), start=start, name=named.name)
    give_blocks_back(weight.device)  # memory of the check, before a backend prepares the packed weight
    linear = LoadedLinear.of(weight, settled.choice)
    if isinstance(settled, RunsPacked):
        slide = SlideLinear(settled.packed, choice=settled.choice)
        sizes = {"kept_bytes": sum(slide.operand_bytes.values()), "dense_bytes": weight.nbytes}
        return slide, Outcome(True, True, settled.reason, eligible=True, linear=linear, how=settled.how, **sizes)
    quantised = weight.dtype in QUANTISED
    outcome = Outcome(False, quantised or settled.pattern is not None, settled.reason, linear=linear)
    if settled.choice is not None:
        outcome = replace(outcome, eligible=model.options.backend != "dense")
    # Graphs do not hold an output embedding, and adapters read a linear's input: nothing is joined with either.
    fuse = model.options.fuse and isinstance(layer, LinearBase) and not model.adapters
    lacked = servers_lack(weight.dtype, weight.device)
    if not quantised or not (fuse or lacked):
        return None, outcome
    slide = SlideLinear(pack_dense(weight, scale, name=named.name), choice=settled.choice)
    text = f"{settled.reason}; {JOINED}" if fuse else settled.reason
    return slide, replace(outcome, text=text, joined=fuse, how=LACKED if lacked else outcome.how)
