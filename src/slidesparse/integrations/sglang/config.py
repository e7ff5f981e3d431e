"""SGLang's compressed-tensors configuration, with our linears where a marker names them or a user asks."""

from __future__ import annotations

import logging
from typing import Any
from weakref import WeakSet

import torch
from sglang.srt.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig
from sglang.srt.layers.quantization.compressed_tensors.schemes import (
    CompressedTensorsLinearScheme,
    CompressedTensorsMoEScheme,
    CompressedTensorsW8A8Fp8,
    CompressedTensorsW8A8Fp8MoE,
    CompressedTensorsW8A8Int8,
)
from sglang.srt.runtime_context import get_server_args

from slidesparse.base.log import log_once
from slidesparse.checkpoints.marker import Marker
from slidesparse.integrations import NAME
from slidesparse.integrations.experts import why_asked, with_packing
from slidesparse.integrations.gain import LoadedLinear, describe_gain
from slidesparse.integrations.names import (
    LEFT_ALONE,
    find_layer,
    marked_experts,
    rename_layers,
    require_marker,
    require_w8a8,
    why_left,
    why_not_w8a8,
)
from slidesparse.integrations.options import ServerOptions
from slidesparse.integrations.sglang import LOGGER
from slidesparse.integrations.sglang.experts import Int8Experts, PackingScheme
from slidesparse.integrations.sglang.fuse import PROLOGUES, watch
from slidesparse.integrations.sglang.refusals import largest_batch, refuse_what_cannot_work
from slidesparse.integrations.sglang.scheme import SGLangScheme
from slidesparse.integrations.warmup import WarmUp
from slidesparse.layer.settle import Chooser
from slidesparse.tuning.at_load import LoadTuner
from slidesparse.weights.pattern import DENSE

OPTION = "--json-model-override-args"
"""SGLang's option that takes ours, under our name: it has no other place for a plugin's."""

NOT_INVARIANT = "--enable-deterministic-inference, and only INT8 products are the same in every batch"

UNFUSED = (
    *("enable_deterministic_inference", "rl_on_policy_target", "enable_dp_attention", "enable_symm_mem"),
    "speculative_algorithm",
)
"""Arguments that exclude fusing: servers with norms of their own, that gather the results of norms, or choose the
memory of products; and drafts, whose answers were compared with stock's only without fused norms."""

log = logging.getLogger(LOGGER)


class SGLangConfig(CompressedTensorsConfig):
    """The configuration of one model that carries our marker, or whose user gave options of ours.

    Attributes:
        marker: The sparsity of the checkpoint: none, ``DENSE``, without a marker.
        options: The user's options.
        most: Tokens of the largest batch.
        batch_invariant: Results of a request must not depend on its batch.
        fuses: Norms and activations are fused with the linears that read them.
        tuner: Measures layers when they are loaded; None before the first one, or with ``tune`` off.
        warmup: Runs a layer of each kind before CUDA graphs are captured; None before the first layer.
        expected: Linears that are built and not loaded yet; ``linears``: the loaded ones.
    """

    marker: Marker
    options: ServerOptions
    most: int
    batch_invariant: bool = False
    fuses: bool = False
    tuner: LoadTuner | None = None
    warmup: WarmUp | None = None
    expected: WeakSet[torch.nn.Module]
    linears: list[LoadedLinear]

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> CompressedTensorsConfig:
        """Return our configuration where the ``hf_config`` has a marker or options of ours, else SGLang's.

        Raises:
            CheckpointError: The marker cannot be read.
            InputError: An unknown option.
            UnsupportedError: Sparse layers do not support the server's arguments, or ours not the quantisation.
        """
        hf_config, arguments = config.get("hf_config"), get_server_args()
        marker, given = require_marker(hf_config), getattr(hf_config, NAME, None)
        if marker is None and given is None:
            return CompressedTensorsConfig.from_config(config)
        refuse_what_cannot_work(arguments)
        options = ServerOptions.read(given, OPTION)
        unfused = [name for name in UNFUSED if getattr(arguments, name, None)]
        left = f"; nothing is fused: {', '.join(unfused)}" if unfused else ""
        if marker is None and (unfused or not options.fuse):  # drafts get the options of the model, too
            log.info("slidesparse: a checkpoint without a pattern is left to SGLang%s", left)
            return CompressedTensorsConfig.from_config(config)
        if marker is None:
            require_w8a8(config, f"{NAME} in {OPTION}", "leave it out: SGLang serves the checkpoint as it is")
        made: SGLangConfig = super().from_config(config)
        made.marker, made.options = marker or Marker(DENSE), options
        made.expected, made.linears = WeakSet(), []
        made.most = max(largest_batch(arguments), 1)
        made.batch_invariant = bool(getattr(arguments, "enable_deterministic_inference", False))
        made.fuses = options.fuse and not unfused
        for kind in PROLOGUES if made.fuses else ():
            watch(kind)
        what = "nothing is sparse" if marker is None else f"pattern {marker.pattern}"
        log.info("slidesparse: %s, %s%s", what, options, left)
        return made

    def apply_weight_name_mapper(self, hf_to_sglang_mapper: Any) -> None:
        """Rename the marker's layers, as SGLang renames its own."""
        super().apply_weight_name_mapper(hf_to_sglang_mapper)
        self.marker = rename_layers(self.marker, hf_to_sglang_mapper.apply_list)

    def get_linear_scheme(
        self, layer: torch.nn.Module, layer_name: str | None = None, *more: Any, **named_more: Any
    ) -> CompressedTensorsLinearScheme | None:
        """Return SGLang's scheme for a layer, wrapped where we can run it. Releases differ in further arguments."""
        scheme = super().get_linear_scheme(layer, layer_name, *more, **named_more)
        if scheme is None or layer_name is None:
            return scheme
        reason = why_left(layer_name) or why_not_w8a8(scheme, (CompressedTensorsW8A8Int8, CompressedTensorsW8A8Fp8))
        if self.batch_invariant and isinstance(scheme, CompressedTensorsW8A8Fp8):
            reason = NOT_INVARIANT
        name = self._stored_name(layer_name)
        named = find_layer(self.marker, name, self.packed_modules_mapping) if reason is None else None
        if named is None or named.pattern is None:
            log_once(f"slidesparse: left to SGLang: {reason or LEFT_ALONE}", log=log)
            return scheme
        self._prepare(layer)
        self.expected.add(layer)
        return SGLangScheme(scheme, named, self)

    @property
    def chooser(self) -> Chooser:
        """Chooser of the backends of every linear."""
        return Chooser(self.options.backend, self.options.fallback, self.tuner)

    def note_linear(self, layer: torch.nn.Module, linear: LoadedLinear) -> None:
        """Note a linear that is loaded for the first time; after the last one, log the speed-up."""
        if layer in self.expected:
            self.expected.remove(layer)
            self.linears.append(linear)
            for line in describe_gain(self.linears) if not self.expected else []:
                log.info(line)

    def get_moe_scheme(self, layer: torch.nn.Module, layer_name: str) -> CompressedTensorsMoEScheme | None:
        """Return SGLang's scheme for the experts of a layer, or one that packs them where we can run them.

        Raises:
            UnsupportedError: SGLang's options exclude INT8 experts, or experts that the user wants sparse.
        """
        try:
            scheme = super().get_moe_scheme(layer, layer_name)
        except NotImplementedError:
            if not self._are_int8(layer, layer_name):
                raise
            scheme = Int8Experts(self)
        if not isinstance(scheme, Int8Experts | CompressedTensorsW8A8Fp8MoE):
            return scheme
        arguments, changed = get_server_args(), {}
        if getattr(arguments, "enable_eplb", False):
            changed["--enable-eplb"] = "moves them between GPUs"
        if getattr(arguments, "dwdp_size", 1) > 1:
            changed["--dwdp-size"] = "hands them from GPU to GPU"
        reason = why_asked(self.options.experts, changed, OPTION, "SGLang")
        if self.batch_invariant and not isinstance(scheme, Int8Experts):
            reason = NOT_INVARIANT
        named = marked_experts(self.marker, self._stored_name(layer_name)) if reason is None else None
        if named is None:
            log_once(f"slidesparse: experts left to SGLang: {reason or LEFT_ALONE}", log=log)
            return scheme
        self._prepare(layer)
        packing: CompressedTensorsMoEScheme = with_packing(PackingScheme, scheme, named, self)
        return packing

    def can_fuse_shared_expert(self) -> bool:
        """Return whether SGLang may make a shared expert one of the others: only where they were pruned alike."""
        marker = self.marker
        differs = any("shared_expert" in name and name.endswith("_proj") for name in (*marker.ignore, *marker.layers))
        return not differs and set(marker.experts.values() or [DENSE]) == {marker.pattern}

    def _stored_name(self, name: str) -> str:
        """Return the marker's name of a layer: SGLang's Mixtral leaves out the name of the model."""
        parent, marker = f"model.{name.rpartition('.')[0]}.", self.marker
        names = (*marker.layers, *marker.ignore, *marker.experts)
        return f"model.{name}" if any(known.startswith(parent) for known in names) else name

    def _are_int8(self, layer: torch.nn.Module, layer_name: str) -> bool:
        """Return whether a layer's experts are symmetric INT8, with one scale a channel and one a token."""
        scheme = self.get_scheme_dict(layer, f"{layer_name}.0.gate_proj")
        weights, inputs = scheme["weights"], scheme["input_activations"]
        kinds = {(args.num_bits, args.type, args.symmetric) for args in (weights, inputs)}
        return kinds == {(8, "int", True)} and (weights.strategy, inputs.strategy) == ("channel", "token")

    def _prepare(self, layer: torch.nn.Module) -> None:
        """Create the tuner and the warm-up on the first layer, which has the type of activations."""
        if self.warmup is None:
            dtype: torch.dtype = layer.params_dtype  # type: ignore[assignment] # of every layer of SGLang's
            self.tuner, self.warmup = self.options.tuner(self.most, dtype, log), WarmUp(self.most, dtype)
