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
from slidesparse.integrations.sglang import LOGGER
from slidesparse.integrations.sglang.refusals import OPTIONS, SGLangOptions, largest_batch, refuse_what_cannot_work
from slidesparse.integrations.sglang.scheme import SGLangScheme
from slidesparse.integrations.vllm.names import find_layer, rename_layers
from slidesparse.integrations.vllm.warmup import WarmUp
from slidesparse.models.config_keys import MARKER_KEY
from slidesparse.models.targets import read_as_matrix

NOT_INVARIANT = "--enable-deterministic-inference, and only INT8 products are the same in every batch"

log = logging.getLogger(LOGGER)


class SGLangConfig(CompressedTensorsConfig):
    """The configuration of one model that carries our marker.

    Attributes:
        marker: The sparsity of the checkpoint.
        options: The user's options.
        most: Tokens of the largest batch.
        batch_invariant: A request must be computed alike in whatever batch it runs.
        warmup: Runs a layer of each kind when it is loaded: before SGLang captures CUDA graphs.
    """

    marker: Marker
    options: SGLangOptions
    most: int
    batch_invariant: bool = False
    warmup: WarmUp | None = None

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> CompressedTensorsConfig:
        """Return ours for a checkpoint with a marker, which SGLang hands over in ``hf_config``, and its own for others.

        Raises:
            CheckpointError: A marker that cannot be read.
            InputError: An unknown option.
            UnsupportedError: Arguments of the server that sparse layers do not support.
        """
        hf_config = config.get("hf_config")
        marker = Marker.from_config({MARKER_KEY: getattr(hf_config, MARKER_KEY, None)})
        if marker is None:
            return CompressedTensorsConfig.from_config(config)
        arguments = get_server_args()
        refuse_what_cannot_work(arguments)
        made: SGLangConfig = super().from_config(config)
        made.marker, made.options = marker, SGLangOptions.parse(getattr(hf_config, OPTIONS, None))
        made.most = max(largest_batch(arguments), 1)
        made.batch_invariant = bool(getattr(arguments, "enable_deterministic_inference", False))
        log.info("slidesparse: pattern %s, %s", marker.pattern, made.options)
        return made

    def apply_weight_name_mapper(self, hf_to_sglang_mapper: Any) -> None:
        """Rename the layers that the marker names, as SGLang renames its own."""
        super().apply_weight_name_mapper(hf_to_sglang_mapper)
        names = [*self.marker.ignore, *self.marker.layers]
        mapped = {name: new for name in names for new in hf_to_sglang_mapper.apply_list([name])}
        self.marker = rename_layers(self.marker, mapped)

    def get_linear_scheme(
        self, layer: torch.nn.Module, layer_name: str | None = None, *more: Any, **named_more: Any
    ) -> CompressedTensorsLinearScheme | None:
        """Return SGLang's scheme for a layer, wrapped where we can run it. Releases differ in what else they pass."""
        scheme = super().get_linear_scheme(layer, layer_name, *more, **named_more)
        if scheme is None or layer_name is None:
            return scheme
        reason = why_not(scheme)
        if read_as_matrix(layer_name):
            reason = "latent attention reads its weight as a matrix"
        if self.batch_invariant and isinstance(scheme, CompressedTensorsW8A8Fp8):
            reason = NOT_INVARIANT
        named = find_layer(self.marker, layer_name, self.packed_modules_mapping) if reason is None else None
        if named is None or named.pattern is None:
            log_once(f"slidesparse: left to SGLang: {reason or 'left alone when the checkpoint was pruned'}", log=log)
            return scheme
        if self.warmup is None:
            self.warmup = WarmUp(self.most, layer.params_dtype)  # type: ignore[arg-type] # of every linear of SGLang's
        return SGLangScheme(scheme, named.name, named.pattern, self.options, self.warmup)


def why_not(scheme: CompressedTensorsLinearScheme) -> str | None:
    """Return why we cannot run a scheme of SGLang's, or None."""
    if not isinstance(scheme, (CompressedTensorsW8A8Int8, CompressedTensorsW8A8Fp8)):
        return f"{type(scheme).__name__} is neither INT8 nor FP8 W8A8"
    if scheme.strategy != "channel" or scheme.is_static_input_scheme:
        return "weights need one scale a channel and activations one a token"
    if not getattr(scheme, "input_symmetric", True):
        return "asymmetric activations"
    return None
