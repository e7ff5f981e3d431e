"""Turn SGLang's loaded and sharded layers into SlideLinears, or leave them to SGLang with the reason."""

from __future__ import annotations

import copy
import inspect
import logging
from typing import Any

import torch
from sglang.srt.layers.quantization.compressed_tensors.schemes import CompressedTensorsLinearScheme

from slidesparse.base.device import give_blocks_back
from slidesparse.base.log import log_once
from slidesparse.errors import UnsupportedError
from slidesparse.gemm.backend import servers_lack
from slidesparse.integrations import SPARSE_TENSOR_CORES
from slidesparse.integrations.gain import LoadedLinear
from slidesparse.integrations.names import NamedLayer, shard_start
from slidesparse.integrations.sglang import LOGGER, fuse
from slidesparse.layer.linear import SlideLinear
from slidesparse.layer.settle import RunsPacked, pack_dense, settle
from slidesparse.models.layer_kinds import kind_of

SUBMODULE = "slide"
"""Attribute of a converted layer for its SlideLinear."""

LACKED = "dense by torch, since SGLang has no INT8 kernel for this GPU"

NEVER_UPDATED, ASKED = "_derived_weight_cache_error", "_unsupported_derived_weight_cache_error"
"""SGLang's attribute of a module with the reason why its weights cannot be replaced (captured CUDA graphs hold packed
ones), and the function that finds it. Every update of a running engine calls that first, and returns a reason."""

log = logging.getLogger(LOGGER)


class SGLangScheme(CompressedTensorsLinearScheme):
    """The scheme of a W8A8 layer: SGLang's, ``inner``, until the layer is loaded, then a SlideLinear where that pays.

    That is a layer that runs sparse, and a dense one where norms are fused or SGLang has no kernel for it. ``model``:
    its model's configuration.
    """

    def __init__(self, inner: CompressedTensorsLinearScheme, named: NamedLayer, model: Any) -> None:
        self.inner, self.model = inner, model
        self.name, self.pattern = named.name, named.pattern
        self.in_features = 0
        self.converted = False

    @classmethod
    def get_min_capability(cls) -> int:
        """Return the least compute capability, times ten."""
        return SPARSE_TENSOR_CORES

    def create_weights(self, layer: torch.nn.Module, input_size: int, **sizes: Any) -> None:
        """Create SGLang's parameters; ``input_size`` is that of the whole weight."""
        self.in_features = input_size
        self.inner.create_weights(layer=layer, input_size=input_size, **sizes)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Pack the weight and run the layer once, before any CUDA graph is captured; or leave it to SGLang.

        Raises:
            PatternViolation: The weight violates the checkpoint's pattern.
            UnsupportedError: The user's backend cannot run it; or it is a shard of unknown rank.
        """
        if self.converted:
            return  # the end of an update, which was refused
        slide = self.pack_layer(layer)
        if slide is None:
            self.inner.process_weights_after_loading(layer)
            return
        del layer.weight, layer.weight_scale
        # SGLang lets torch's allocator split blocks of any size: the packed weight lies in a larger one, whose rest
        # would stay taken. Its copy gets a block of its own.
        give_blocks_back(slide.device)
        slide = copy.deepcopy(slide)
        give_blocks_back(slide.device)
        layer.add_module(SUBMODULE, slide)
        refuse_updates(layer, self.name)
        self.converted = True
        if slide.forms[0].tensors[0].is_cuda:
            self.model.warmup.layer(slide)

    def pack_layer(self, layer: Any) -> SlideLinear | None:
        """Return the SlideLinear of a loaded layer, which is not changed; None where it is left to SGLang."""
        weight, scale = layer.weight.data, layer.weight_scale.data
        start = shard_start(self.name, weight.shape[1], self.in_features, *_place(layer))
        settled = settle(weight, scale, self.pattern, self.model.chooser, start=start, name=self.name)
        slide, how = None, "dense"
        if isinstance(settled, RunsPacked):
            how = settled.how
            slide = SlideLinear(settled.packed, choice=settled.choice, activation_rounding="sglang")
        elif (lacked := servers_lack(weight.dtype, weight.device)) or self.model.fuses:
            how = LACKED if lacked else how
            packed = pack_dense(weight, scale, name=self.name)
            slide = SlideLinear(packed, choice=settled.choice, activation_rounding="sglang")
        log_once(f"slidesparse: {kind_of(self.name)}: {how}, {settled.reason}", log=log)
        self.model.note_linear(layer, LoadedLinear.of(weight, settled.choice))
        return slide

    def apply_weights(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Multiply: [..., in] -> [..., out]; already quantised activations cannot be lifted."""
        if not self.converted:
            y: torch.Tensor = self.inner.apply_weights(layer, x, bias)
            return y
        if not isinstance(x, torch.Tensor):
            raise UnsupportedError(
                f"activations of {self.name}, which quantises them itself",
                got=f"{type(x).__name__}, quantised by the layer before it",
                needed="a tensor in the model's type",
                remedy="turn SGLang's fusion of norm and quantisation off",
            )
        if isinstance(x, fuse.Unread) and (product := x.product_of(layer, bias)) is not None:
            return product
        if self.model.fuses and not torch.compiler.is_compiling():
            fuse.see(layer, self.name, x, bias, self.model.warmup)
        y = layer.slide(x, bias)
        return y


def refuse_updates(layer: torch.nn.Module, name: str) -> None:
    """Make SGLang refuse every update of the weights of a running engine, which packed layers do not support."""
    got, remedy = f"{name}, whose dense weight is gone", "start SGLang again"
    refusal = str(UnsupportedError("weights for a running engine with sparse layers", got=got, remedy=remedy))
    setattr(layer, NEVER_UPDATED, refusal)
    from sglang.srt.model_executor.model_runner_components import weight_updater

    if not inspect.signature(getattr(weight_updater, ASKED)).parameters:
        # 0.5.17 asks no module, and skips weights that have no parameter: it would replace norms and embeddings alone.
        setattr(weight_updater, ASKED, lambda: refusal)


def _place(layer: Any) -> tuple[int, int]:
    """Return a layer's rank, and the ranks of its group: SGLang 0.5.23 gives a layer its group, 0.5.17 numbers."""
    group = getattr(layer, "tp_group", None)
    if group is not None:
        return group.rank_in_group, group.world_size
    return getattr(layer, "tp_rank", 0), getattr(layer, "tp_size", 1)
