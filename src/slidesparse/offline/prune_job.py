"""How ``slidesparse prune`` treats every tensor of a checkpoint: which are pruned, and what becomes of each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from slidesparse.base.progress import progress_bar
from slidesparse.base.ranks import Ranks
from slidesparse.checkpoints.check_tensors import check_finite, left_alone, refuse_faults
from slidesparse.checkpoints.checkpoint import Checkpoint
from slidesparse.checkpoints.marker import Marker, source_quantisation
from slidesparse.checkpoints.meta_model import build_meta_model
from slidesparse.checkpoints.stored_ties import config_as_stored
from slidesparse.errors import InputError
from slidesparse.files.source_files import without_code
from slidesparse.files.stored import STORED_NAMES, Stored
from slidesparse.files.tensor_writer import TensorWriter
from slidesparse.models.config_keys import MARKER_KEY, quantization_config
from slidesparse.models.experts import LEAVE_DENSE, find_routers
from slidesparse.models.layer_stack import find_layer_list, require_single_passes
from slidesparse.models.match_layer import Matching
from slidesparse.models.parts import text_config
from slidesparse.models.smooth import Fold
from slidesparse.models.sparsify import layer_patterns, require_alike, run_once, sets_to_prune
from slidesparse.models.targets import Targets, matches_entry, treated_head
from slidesparse.models.unused_linears import entries_for_unused
from slidesparse.models.weight_reads import read_without_calling
from slidesparse.offline.calibrate.calibration import calibration_windows
from slidesparse.offline.calibrate.layer_store import PrunedLayers, prune_layers_from_disk
from slidesparse.offline.calibrate.smoothing import find_smoothing, smooth_checkpoint
from slidesparse.offline.prune_experts import ExpertJob
from slidesparse.offline.prune_options import PruneOptions, check_type, resolve_dtypes
from slidesparse.offline.treated import find_treated, unless_named
from slidesparse.pruning import Linears, RoundForOutputs, SparseGPT, get_pruner
from slidesparse.pruning.round_outputs import FP8, SIX_BITS
from slidesparse.weights.pattern import DENSE, Pattern
from slidesparse.weights.quant import (
    QUANTISED,
    dequantize,
    loadable,
    quantize_weight,
    requantize,
    rounding_of,
    ternary_scale,
    ternary_weight,
)
from slidesparse.weights.support import check_weight


class PruneJob:
    """A checkpoint and the options, from which follows how every tensor is treated."""

    def __init__(self, checkpoint: Checkpoint, options: PruneOptions, device: torch.device) -> None:
        self.checkpoint, self.recipe, self.device = checkpoint, options.recipe, device
        self.rounding = options.rounding
        self.source_dtype, self.dtype = resolve_dtypes(checkpoint, options)
        self.pattern = Pattern.parse(options.pattern)
        self.meta = build_meta_model(checkpoint)
        refuse_faults(self.meta, checkpoint)
        self.marker = Marker.from_config(checkpoint.config)
        self.experts = ExpertJob(checkpoint, self.meta, options, self.marker, self.source_dtype, self.dtype)
        self.routers = find_routers(self.meta.model, self.experts.found)
        self.run = run_once(self.meta.model)
        self.reads: dict[str, str] | None = None
        self.targets = self._find_targets(options, options.ignore)
        if left := self._left_by_the_source(options):
            options = replace(options, ignore=(*options.ignore, *left))
            self.targets = self._find_targets(options, options.ignore)
        treated = [*self.targets.linears, *self.experts.layers]
        named = {} if self.marker is None else {**self.marker.layers, **self.experts.marked}  # a pruned source's
        kept = {name: named[name] for name in treated if name in named and name not in options.layers}
        patterns = layer_patterns(treated, self.pattern, {**options.layers, **kept})
        self.experts.choose(patterns)
        self.patterns = {name: patterns[name] for name in self.targets.linears}
        self._require_marked_patterns(options)
        self.calibrated_patterns = self.patterns if options.calibration is None else self._in_layers()
        self.windows = self._calibration_windows(options)
        self.pruner = get_pruner(options.method)
        self.expert_rows = None if self.windows is None else self.experts.to_calibrate()
        self.must_smooth, self.folds = bool(options.smooth), self._find_folds(options)
        self.matching = self._find_matching(options)
        self.calibrated: PrunedLayers | None = None
        self._require_alike(options)
        self.sets = sets_to_prune(self.meta.model, self.targets.linears, self.patterns, self.pruner, self.run)
        self.set_of = {name: names for names in self.sets for name in names}
        self.layer_of = {f"{self.meta.prefix(name)}.weight": name for name in self.targets.linears}
        for tensor in self.layer_of:
            check_type(tensor, checkpoint.stored(tensor), self.source_dtype, self.dtype)

    def _find_targets(self, options: PruneOptions, ignore: Sequence[str]) -> Targets:
        linears = [name for name, module in self.meta.model.named_modules() if isinstance(module, nn.Linear)]
        return find_treated(
            self.meta,
            self.experts.found,
            self.routers,
            ignore,
            self._read,
            quantise=self.rounds,
            lm_head=options.lm_head,
            also_ignore=left_alone(self.checkpoint.config, linears) if self.source_dtype else (),
            part=options.part,
        )

    def _read(self, linears: Mapping[str, nn.Linear]) -> dict[str, str]:
        """Run the model, once, to see which weights it reads without calling the layer."""
        if self.reads is None:
            self.reads = read_without_calling(self.meta.model, linears, self.run)
        return self.reads

    def _left_by_the_source(self, options: PruneOptions) -> list[str]:
        """Return the linears that a pruned source left alone, and that no option names."""
        found, ignored = self.targets.linears, () if self.marker is None else self.marker.ignore
        head = treated_head(self.meta.model, found)  # which --lm-head names
        return unless_named((name for name in found if name in ignored and name != head), options.layers)

    @property
    def rounds(self) -> bool:
        """Whether weights of a float type become 8 bits."""
        return self.source_dtype is None and self.dtype in QUANTISED

    def _require_alike(self, options: PruneOptions) -> None:
        """Refuse linears that servers join and that would differ.

        What ``--ignore`` leaves alone keeps its type, and so differs from what is dense in 8 bits, too.
        """
        everything = self._find_targets(options, ()).linears if options.ignore else self.targets.linears
        forms = dict.fromkeys(everything, "left alone" if self.rounds else DENSE) | self.patterns
        require_alike(self.meta.model, everything, forms, self.run)

    def _require_marked_patterns(self, options: PruneOptions) -> None:
        """Refuse other patterns than a source was pruned with: what it left dense would lose weights unseen."""
        if (marker := self.marker) is None:
            return
        marked = {name: DENSE if name in marker.ignore else marker.pattern_of(name) for name in self.patterns}
        marked |= dict.fromkeys(self.experts.patterns, DENSE) | self.experts.marked
        for name, pattern in {**self.patterns, **self.experts.patterns}.items():
            if pattern != marked[name]:
                needed = f"{marked[name]}, as {self.checkpoint.path} is pruned"
                entry = next((entry for entry in options.layers if matches_entry(name, entry)), None)
                follow = "leave out --lm-head" if name in marker.ignore else f"use --pattern {marked[name]}"
                remedy = follow if entry is None else f"leave out --layer {entry}={options.layers[entry]}"
                raise InputError(f"pattern of {name}", got=pattern, needed=needed, remedy=remedy)

    def calibrate(self, folder: Path, progress: bool | None, ranks: Ranks) -> None:
        """Prune all layers with the calibration text, if the method needs one; ``folder`` keeps them."""
        if self.windows is None:
            return
        if self.folds:
            how = self.calibrated_patterns, self.windows, folder, self.device, progress, self.dtype, self.rounding
            with ranks.first_alone():  # it finds what the others read from the folder
                self.checkpoint = smooth_checkpoint(self.checkpoint, self.folds, *how, required=self.must_smooth)
        experts = {} if self.expert_rows is None else self.expert_rows.layer_of
        # INT8 gains nothing (docs/log/rounding.md).
        grid = FP8 if self.rounds and self.dtype != torch.int8 else SIX_BITS if self.rounding == "6bit" else None
        self.calibrated = prune_layers_from_disk(
            self.checkpoint,
            [*(names for names in self.sets if names[0] in self.calibrated_patterns), *([name] for name in experts)],
            {**self.calibrated_patterns, **{name: self.experts.patterns[layer] for name, layer in experts.items()}},
            self.pruner,
            self.windows,
            folder,
            self.device,
            progress=progress,
            ranks=ranks,
            experts=self.expert_rows,
            matching=self.matching,
            rounder=RoundForOutputs(grid) if grid is not None and isinstance(self.pruner, SparseGPT) else None,
        )

    def _find_folds(self, options: PruneOptions) -> list[Fold]:
        """Return where outliers of activations are folded into weights; none where nobody asks, or nothing can be."""
        if options.smooth and self.source_dtype is not None:
            raise InputError("smoothing", got="a source in 8 bits", needed="a float source")
        calibrated_int8 = options.calibration is not None and self.source_dtype is None and self.dtype == torch.int8
        if not options.smooth and (options.smooth is not None or not calibrated_int8):
            return []
        try:
            return find_smoothing(self.meta, self.checkpoint, self.calibrated_patterns, self.run)
        except InputError:
            if options.smooth:
                raise
            return []

    def _find_matching(self, options: PruneOptions) -> Matching | None:
        if not options.match:
            return None
        if any(pattern != DENSE for pattern in self.experts.patterns.values()):
            raise InputError(
                "layers whose experts are pruned cannot be matched",
                got=f"experts such as {self.experts.layers[0]}",
                remedy=f"leave out --match, or leave experts dense with {LEAVE_DENSE}",
            )
        return Matching(options.match, 0 if options.calibration is None else options.calibration.seed)

    def _in_layers(self) -> dict[str, Pattern]:
        """Return the patterns of linears but for those outside of the layers that stay dense, which need no text."""
        everything = {**self.patterns, **self.experts.patterns}
        pruned = [name for name, pattern in everything.items() if pattern != DENSE]
        layers = f"{find_layer_list(self.meta.model, pruned or self.patterns).name}."
        return {name: one for name, one in self.patterns.items() if one != DENSE or name.startswith(layers)}

    def _calibration_windows(self, options: PruneOptions) -> torch.Tensor | None:
        """Return the windows of calibration text, or None; refuse unusable ones before anything is written."""
        if options.calibration is None:
            return None
        require_single_passes(self.meta.model, find_layer_list(self.meta.model, self.calibrated_patterns), self.run)
        return calibration_windows(self.checkpoint.path, getattr(self.meta.model, "config", None), options.calibration)

    @property
    def dense(self) -> dict[str, str]:
        """Linears, routers and experts' weights that are left alone -> why."""
        return {**self.targets.dense, **self.routers, **self.experts.dense}

    @property
    def dense_head(self) -> str | None:
        """The output embedding where it is pruned in a float type, and vLLM runs it dense; else None."""
        head = None if self.dtype in QUANTISED else treated_head(self.meta.model, self.targets.linears)
        return None if head is None or self.patterns[head] == DENSE else head

    def outputs(self, shard: Mapping[str, Stored]) -> dict[str, Stored]:
        """Return the type and shape of every tensor of the output shard that a source shard becomes."""
        return {name: one for tensor, stored in shard.items() for name, one in self.stored_as(tensor, stored).items()}

    def stored_as(self, tensor: str, stored: Stored) -> dict[str, Stored]:
        """Return the type and shape of every tensor that one of the source becomes."""
        if self.experts.treats(tensor):
            return self.experts.outputs(tensor, stored)
        if tensor not in self.layer_of:
            return {tensor: stored}
        out = {tensor: Stored(STORED_NAMES[self.dtype], stored.shape)}
        if self.rounds:
            out[f"{tensor}_scale"] = Stored("F32", (stored.shape[0], 1))
        return out

    def write_shard(
        self, path: Path, shard: Mapping[str, Stored], outputs: Mapping[str, Stored], advance: Callable[[int], None]
    ) -> dict[str, str]:
        """Write one output shard, and return the digests of its tensors."""
        here = {self.layer_of[tensor]: tensor for tensor in shard if tensor in self.layer_of}
        with TensorWriter(path, outputs) as writer:
            for tensor in shard:
                if self.experts.treats(tensor):
                    self.experts.write(writer, tensor, self._prune_expert(tensor), self.device, advance)
                elif tensor not in self.layer_of:
                    self._write(writer, {tensor: self._copied(tensor)}, advance)
            # A set that spans two shards is pruned once for each, which is cheaper than keeping it.
            sets = dict.fromkeys(tuple(self.set_of[name]) for name in here)
            for names in sets:
                self._write(writer, self._treated(names, here), advance)
        return writer.digests

    def _prune_expert(self, tensor: str) -> Callable[[torch.Tensor, int], torch.Tensor]:
        """Return what prunes the weight of an expert, which is at some place of a tensor, or has been pruned."""
        rows, calibrated = self.expert_rows, self.calibrated

        def prune(weight: torch.Tensor, index: int) -> torch.Tensor:
            if rows is not None and calibrated is not None:
                return rows.part(tensor, index, calibrated.weight).to(self.device)
            pattern = self.experts.patterns[self.experts.tensors[tensor].layer]
            return self.pruner.prune(Linears({tensor: weight}, pattern))[tensor]

        return prune

    def _treated(self, names: Sequence[str], here: Mapping[str, str]) -> dict[str, torch.Tensor]:
        """Return what is stored of those linears of a set that are in a shard: linear -> tensor in ``here``."""
        pruned = self._prune_set(names)
        return {
            key: one
            for name in names
            if name in here
            for key, one in self._stored_form(name, here[name], pruned[name]).items()
        }

    def require_finite(self, progress: bool | None) -> None:
        """Refuse NaN and Inf in any tensor that is used, before hours of calibration."""
        sizes = {name: self.checkpoint.stored(name).n_bytes for name in sorted(self.meta.names.used)}
        with progress_bar("check", sum(sizes.values()), show=progress) as advance:
            for name, n_bytes in sizes.items():
                check_finite(self.checkpoint.tensor(name), name)
                advance(n_bytes)

    def _copied(self, tensor: str) -> torch.Tensor:
        value = self.checkpoint.tensor(tensor)
        if tensor in self.meta.names.used:
            check_finite(value, tensor)
        return value

    @staticmethod
    def _write(writer: TensorWriter, tensors: dict[str, torch.Tensor], advance: Callable[[int], None]) -> None:
        for name, tensor in tensors.items():
            writer.write(name, tensor.cpu())
            advance(writer.tensors[name].n_bytes)

    def _stored_form(self, name: str, tensor: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return a pruned weight as it is stored, with its scale unless the source has one."""
        if self.source_dtype and self.patterns[name] == DENSE:
            return {tensor: self.checkpoint.tensor(tensor)}
        if self.source_dtype:
            return {tensor: requantize(weight, self._scale(name), self.dtype)}
        if self.dtype not in QUANTISED:
            return {tensor: weight}
        if self.recipe == "ternary":
            absmean = ternary_scale(self.checkpoint.tensor(tensor))  # on the CPU: a sum depends on its order
            values, scale = ternary_weight(weight, absmean.to(self.device), self.dtype, name=tensor)
        else:
            recipe = rounding_of(self.rounding, self.patterns[name])
            values, scale = loadable(quantize_weight(weight, self.dtype, name=tensor, recipe=recipe))
        return {tensor: values, f"{tensor}_scale": scale}

    def _prune_set(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        pattern = self.patterns[names[0]]
        if self.calibrated is not None and pattern != DENSE:
            return {name: self.calibrated.weight(name).to(self.device) for name in names}
        weights = {name: self.float_weight(name) for name in names}
        return weights if pattern == DENSE else self.pruner.prune(Linears(weights, pattern))

    def float_weight(self, name: str) -> torch.Tensor:
        """Read a treated linear's weight onto the device: float [out, in], as the method sees it."""
        tensor = f"{self.meta.prefix(name)}.weight"
        weight = self.checkpoint.tensor(tensor, self.device)
        check_weight(weight, tensor)
        return dequantize(weight, self._scale(name)) if self.source_dtype else weight

    def _scale(self, name: str) -> torch.Tensor:
        return self.checkpoint.tensor(f"{self.meta.prefix(name)}.weight_scale", self.device)

    def _in_8_bits(self, name: str) -> bool:
        tensor = self.meta.names.origins.get(f"{name}.weight")
        return isinstance(tensor, str) and self.checkpoint.stored(tensor).dtype == STORED_NAMES[self.dtype]

    def _hub_names(self, names: Iterable[str]) -> list[str]:
        """Return the checkpoint's own names of linears, where they are others than transformers' names.

        Programs that load the output know the one or the other.
        """
        origins = [self.meta.names.origins.get(f"{name}.weight") for name in names]
        stored = [origin.removesuffix(".weight") for origin in origins if isinstance(origin, str)]
        return [name for name in stored if name not in {*names, *self.patterns}]

    def _unused_entries(self) -> list[str]:
        """Return entries of an ignore list for linears that transformers does not use, and other programs may."""
        unused = self.meta.names.unused
        shapes = {name: self.checkpoint.stored(name).shape for name in unused}
        layers = getattr(text_config(self.meta.model.config), "num_hidden_layers", None)
        return entries_for_unused(shapes, self.checkpoint.files.keys() - set(unused), layers)

    def config(self) -> dict[str, Any]:
        """Return the output's config.json."""
        # Linears that a quantised source has in 8 bits stay in 8 bits, also where they are not pruned.
        quantised = [name for name in self.targets.dense if self._in_8_bits(name)] if self.source_dtype else []
        ignore = [name for name in {**self.targets.dense, **self.routers} if name not in quantised]
        ignore += self._hub_names(self.routers)
        unused = self._unused_entries()
        # Programs would take these for pruned ones. Experts are named one by one where they are pruned.
        without = dict.fromkeys([*ignore, *(entry for entry in unused if not entry.startswith("re:"))])
        exceptions = {name: pattern for name, pattern in self.patterns.items() if pattern != self.pattern}
        exceptions |= dict.fromkeys(quantised, DENSE)
        known = without_code(self.checkpoint.config)
        config = config_as_stored(known, self.meta.model, self.meta.names)
        config.pop("compression_config", None)
        if self.source_dtype is None:
            config.pop("quantization_config", None)
        if self.rounds:
            entries = [*ignore, *self._hub_names(ignore), *self.experts.ignore_entries(), *unused]
            head = treated_head(self.meta.model, self.targets.linears)
            config["quantization_config"] = quantization_config(self.dtype, dict.fromkeys(entries), head)
        elif self.source_dtype is not None:
            kept = source_quantisation(self.checkpoint.config).items()
            config["quantization_config"] = {key: value for key, value in kept if key != "sparsity_config"}
        return {
            **config,
            MARKER_KEY: Marker(self.pattern, tuple(without), exceptions, self.experts.marker()).to_config(),
        }
