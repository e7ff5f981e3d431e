"""SGLang's compressed-tensors configuration, with our linears where the marker of a checkpoint names them."""

from __future__ import annotations

import logging
from typing import Any

import torch
from sglang.srt.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig
from sglang.srt.layers.quantization.compressed_tensors.schemes import (
    CompressedTensorsLinearScheme,
    CompressedTensorsW8A8Fp8,
    CompressedTensorsW8A8Int8,
)
from sglang.srt.runtime_context import get_server_args

from slidesparse.base.log import log_once
from slidesparse.files.marker import Marker
from slidesparse.integrations import NAME
from slidesparse.integrations.names import LEFT_ALONE, find_layer, rename_layers, require_marker, why_left, why_not_w8a8
from slidesparse.integrations.options import ServerOptions
from slidesparse.integrations.sglang import LOGGER
from slidesparse.integrations.sglang.fuse import PROLOGUES, watch
from slidesparse.integrations.sglang.refusals import largest_batch, refuse_what_cannot_work
from slidesparse.integrations.sglang.scheme import SGLangScheme
from slidesparse.integrations.warmup import WarmUp
from slidesparse.layer.settle import Chooser

OPTION = "--json-model-override-args"
"""The option of SGLang's that holds ours, under our name: it has no other place for a plugin's."""

NOT_INVARIANT = "--enable-deterministic-inference, and only INT8 products are the same in every batch"

APART = ("enable_deterministic_inference", "rl_on_policy_target", "enable_dp_attention", "enable_symm_mem")
"""Arguments of servers with norms of their own, that gather what norms return, or choose the memory of products."""

log = logging.getLogger(LOGGER)


class SGLangConfig(CompressedTensorsConfig):
    """The configuration of one model that carries our marker.

    Attributes:
        marker: The sparsity of the checkpoint.
        options: The user's options.
        most: Tokens of the largest batch.
        batch_invariant: A request must be computed alike in whatever batch it runs.
        fuses: Norms and activations are fused with the linears that read them.
    """

    marker: Marker
    options: ServerOptions
    most: int
    batch_invariant: bool = False
    fuses: bool = False
    _shared: tuple[Chooser, WarmUp] | None = None

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> CompressedTensorsConfig:
        """Return ours for a checkpoint with a marker, which SGLang hands over in ``hf_config``, and its own for others.

        Raises:
            CheckpointError: A marker that cannot be read.
            InputError: An unknown option.
            UnsupportedError: Arguments of the server that sparse layers do not support.
        """
        hf_config = config.get("hf_config")
        marker = require_marker(hf_config)
        if marker is None:
            return CompressedTensorsConfig.from_config(config)
        arguments = get_server_args()
        refuse_what_cannot_work(arguments)
        made: SGLangConfig = super().from_config(config)
        made.marker, made.options = marker, ServerOptions.read(getattr(hf_config, NAME, None), OPTION)
        made.most = max(largest_batch(arguments), 1)
        made.batch_invariant = bool(getattr(arguments, "enable_deterministic_inference", False))
        apart = [name for name in APART if getattr(arguments, name, None)]
        made.fuses = made.options.fuse and not apart
        for kind in PROLOGUES if made.fuses else ():
            watch(kind)
        left = f"; nothing is fused: {', '.join(apart)}" if apart else ""
        log.info("slidesparse: pattern %s, %s%s", marker.pattern, made.options, left)
        return made

    def apply_weight_name_mapper(self, hf_to_sglang_mapper: Any) -> None:
        """Rename the layers that the marker names, as SGLang renames its own."""
        super().apply_weight_name_mapper(hf_to_sglang_mapper)
        self.marker = rename_layers(self.marker, hf_to_sglang_mapper.apply_list)

    def get_linear_scheme(
        self, layer: torch.nn.Module, layer_name: str | None = None, *more: Any, **named_more: Any
    ) -> CompressedTensorsLinearScheme | None:
        """Return SGLang's scheme for a layer, wrapped where we can run it. Releases differ in what else they pass."""
        scheme = super().get_linear_scheme(layer, layer_name, *more, **named_more)
        if scheme is None or layer_name is None:
            return scheme
        reason = why_left(layer_name) or why_not_w8a8(scheme, (CompressedTensorsW8A8Int8, CompressedTensorsW8A8Fp8))
        if self.batch_invariant and isinstance(scheme, CompressedTensorsW8A8Fp8):
            reason = NOT_INVARIANT
        named = find_layer(self.marker, layer_name, self.packed_modules_mapping) if reason is None else None
        if named is None or named.pattern is None:
            log_once(f"slidesparse: left to SGLang: {reason or LEFT_ALONE}", log=log)
            return scheme
        if self._shared is None:  # the first layer tells the type of activations
            self._shared = self._prepare(layer.params_dtype)  # type: ignore[arg-type] # of every linear of SGLang's
        return SGLangScheme(scheme, named, self.fuses, *self._shared)

    def _prepare(self, dtype: torch.dtype) -> tuple[Chooser, WarmUp]:
        """Return what layers share: what chooses backends, and what runs a layer of each kind before CUDA graphs."""
        tuner = self.options.tuner(self.most, dtype, log)
        return Chooser(self.options.backend, self.options.fallback, tuner), WarmUp(self.most, dtype, log)
