"""``slidesparse prune``: from a dense checkpoint to a sparse, quantised one, tensor by tensor.

The source may be BF16, FP16 or FP32, a BitNet b1.58 master (BF16, made ternary), or compressed-tensors W8A8 already.
The output is described in :mod:`slidesparse.files.marker`. Output shards mirror the source's, so that each can be
written, and taken over by a resumed run, on its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from slidesparse.base.device import usable_device, why_no_cuda
from slidesparse.base.paths import usable_path
from slidesparse.base.progress import progress_bar
from slidesparse.commands.cards import describe_trade, warn_of_type
from slidesparse.errors import CheckpointError, InputError
from slidesparse.files.calibration import Calibration, calibration_windows, digest
from slidesparse.files.check_tensors import check_finite, refuse_faults, stored_names
from slidesparse.files.checkpoint import (
    INDEX_FILE,
    SINGLE_FILE,
    STORED_NAMES,
    Checkpoint,
    Stored,
    TensorWriter,
    write_json,
)
from slidesparse.files.generation_settings import generation_settings
from slidesparse.files.identity import fingerprint
from slidesparse.files.layer_stream import PrunedLayers, prune_layers_from_disk
from slidesparse.files.marker import Marker, is_bitnet, quantisation_dtype, source_quantisation
from slidesparse.files.meta_model import build_meta_model
from slidesparse.files.source_files import Links, survey
from slidesparse.files.staging import new_folder, staged
from slidesparse.models.config_keys import MARKER_KEY, MARKER_VERSION, quantization_config
from slidesparse.models.experts import refuse_experts
from slidesparse.models.layerwise import find_layer_list
from slidesparse.models.parts import Part
from slidesparse.models.sparsify import layer_patterns, require_alike, run_once, sets_to_prune
from slidesparse.models.targets import Targets, describe_dense, find_targets
from slidesparse.models.weight_reads import read_without_calling
from slidesparse.pattern import DENSE, Pattern
from slidesparse.prune import Linears, get_pruner
from slidesparse.quant import (
    FLOATS,
    QUANTISED,
    Quantised,
    dequantize,
    dtype_name,
    parse_dtype,
    quantize_weight,
    requantize,
    ternary_scale,
    ternary_weight,
)
from slidesparse.support import check_weight

Recipe = Literal["absmax", "ternary"]


@dataclass(frozen=True)
class PruneOptions:
    """The options of pruning a checkpoint.

    Attributes:
        pattern: The common pattern.
        dtype: ``int8`` or ``fp8``; or the source's own float type, to prune without quantising. None: the type of a
            source that is quantised already.
        method: Pruning method.
        calibration: Text for methods that need it.
        recipe: How INT8 weights are rounded: ``absmax`` per channel, or ``ternary`` (BitNet b1.58).
        ignore: Linears to leave alone: exact names or ``re:`` expressions.
        layers: Exceptions to the common pattern: name or ``re:`` expression -> pattern.
        lm_head: Treat the output embedding too.
        part: Which part of a multimodal model is treated: ``language``, ``vision`` or ``all``.
    """

    pattern: str
    dtype: str | None = None
    method: str = "magnitude"
    calibration: Calibration | None = None
    recipe: Recipe = "absmax"
    ignore: tuple[str, ...] = ()
    layers: Mapping[str, str] = field(default_factory=dict)
    lm_head: bool = False
    part: Part = "language"


@dataclass(frozen=True)
class PruneSummary:
    """The outcome of pruning a checkpoint.

    Attributes:
        destination: The new checkpoint.
        dtype: Type of the treated weights.
        patterns: Treated layer -> pattern.
        dense: Linear left alone -> why.
        other: Layer that multiplies by a weight and is no ``nn.Linear`` -> why it was left alone.
        not_copied: Files of the source that hold other copies of the weights.
        links: Links of the source that were left out.
        unexpected: Unexpected keys: tensors that were copied although the model does not use them.
        resumed: Shards that an interrupted run had finished.
        losses: Linears that read one input -> squared error of their outputs over their energy on the calibration text;
            empty without calibration.
        source_bytes: Tensors of the source.
        destination_bytes: Tensors of the new checkpoint.
    """

    destination: str
    dtype: str
    patterns: dict[str, str]
    dense: dict[str, str]
    other: dict[str, str]
    not_copied: list[str]
    links: list[str]
    unexpected: list[str]
    resumed: list[str]
    losses: dict[str, float]
    source_bytes: int
    destination_bytes: int

    def to_json(self) -> dict[str, Any]:
        """Return all fields."""
        return asdict(self)

    def describe(self) -> str:
        """Return the summary as text."""
        counts = Counter(self.patterns.values())
        lines = [f"treated {sum(counts.values())} layers: " + ", ".join(f"{n} at {p}" for p, n in counts.most_common())]
        if self.losses:
            worst = max(self.losses, key=self.losses.__getitem__)
            mean = sum(self.losses.values()) / len(self.losses)
            lines.append(f"calibration loss: mean {mean:.2e}, worst {self.losses[worst]:.2e} at {worst}")
        lines += describe_dense({**self.dense, **self.other})
        lines += (
            [f"copied, though the model does not use them: {', '.join(self.unexpected)}"] if self.unexpected else []
        )
        lines += [f"taken over from an interrupted run: {', '.join(self.resumed)}"] if self.resumed else []
        lines += [f"not copied, they hold other weights: {', '.join(self.not_copied)}"] if self.not_copied else []
        lines += [f"not copied, they are links: {', '.join(self.links)}"] if self.links else []
        lines.append(f"{self.source_bytes / 1e6:.1f} MB -> {self.destination_bytes / 1e6:.1f} MB in {self.destination}")
        warning = warn_of_type(parse_dtype(self.dtype))
        return "\n".join(lines if warning is None else [*lines, warning])


def prune_checkpoint(
    source: str | Path,
    destination: str | Path,
    options: PruneOptions,
    *,
    device: str | torch.device = "cpu",
    links: Links = "refuse",
    progress: bool | None = None,
) -> PruneSummary:
    """Prune and quantise a checkpoint into a new folder. The source is never touched.

    Args:
        source: A local Hugging Face checkpoint.
        destination: A folder that does not exist.
        options: Patterns, type, method and exceptions.
        device: Where calibration runs the model's layers, one at a time.
        links: What to do with links that lead out of the source.
        progress: Show a progress bar; None: on a terminal only.

    Raises:
        CheckpointError: The source cannot be used, or the destination cannot be written.
        InputError: An option or a path cannot be used.
        UnsupportedError: There is no such device here.
    """
    where = usable_device(device)
    checkpoint = Checkpoint(usable_path(source, "source"))
    destination = new_folder(usable_path(destination, "destination"), checkpoint.path)
    files = survey(checkpoint.path, {"config.json", INDEX_FILE, *checkpoint.shards}, links)
    generation_settings(checkpoint)  # copied as they are: refused where no model would load with them
    job = _Job(checkpoint, options)
    outputs = {name: job.outputs(shard) for name, shard in checkpoint.shards.items()}
    size = sum(stored.n_bytes for shard in outputs.values() for stored in shard.values())
    plan = {"version": MARKER_VERSION, "options": asdict(options), "source": fingerprint(checkpoint, checkpoint.config)}
    if job.windows is not None:
        plan["windows"] = digest(job.windows)
    resumed = []
    with staged(destination, checkpoint.path, plan, size + files.n_bytes) as work:
        job.calibrate(work.kept, where, progress)
        with progress_bar("prune", size, show=progress) as advance:
            for shard, tensors in outputs.items():
                if work.is_finished(shard, tensors):
                    resumed.append(shard)
                    advance(sum(stored.n_bytes for stored in tensors.values()))
                else:
                    written = job.write_shard(work.output / shard, checkpoint.shards[shard], tensors, advance)
                    work.finish(shard, written)
        if list(outputs) != [SINGLE_FILE]:
            weight_map = {tensor: shard for shard, tensors in outputs.items() for tensor in tensors}
            write_json(work.output / INDEX_FILE, {"metadata": {"total_size": size}, "weight_map": weight_map})
        files.copy_to(work.output)
        write_json(work.output / "config.json", job.config())
    return PruneSummary(
        destination=str(destination),
        dtype=dtype_name(job.dtype),
        patterns={name: str(pattern) for name, pattern in job.patterns.items()},
        dense=job.targets.dense,
        other=job.targets.other,
        not_copied=list(files.not_copied),
        links=list(files.links),
        unexpected=list(job.meta.names.unexpected),
        resumed=resumed,
        losses={" ".join(loss.names): loss.loss for loss in job.calibrated.losses} if job.calibrated else {},
        source_bytes=checkpoint.n_bytes,
        destination_bytes=size,
    )


class _Job:
    """A checkpoint and the options, from which follows how every tensor is treated."""

    def __init__(self, checkpoint: Checkpoint, options: PruneOptions) -> None:
        self.checkpoint, self.recipe = checkpoint, options.recipe
        self.source_dtype, self.dtype = _resolve_dtypes(checkpoint, options)
        self.pattern = Pattern.parse(options.pattern)
        self.meta = build_meta_model(checkpoint)
        refuse_experts(self.meta.model)
        refuse_faults(self.meta, checkpoint)
        run = run_once(self.meta.model)
        self.targets = self._find_targets(options, run)
        self.patterns = layer_patterns(self.targets.linears, self.pattern, options.layers)
        self.pruner = get_pruner(options.method)
        self.windows = self._calibration_windows(options)
        self.calibrated: PrunedLayers | None = None
        require_alike(self.meta.model, self.targets.linears, self.patterns, run)
        self.sets = sets_to_prune(self.meta.model, self.targets.linears, self.patterns, self.pruner, run)
        self.set_of = {name: names for names in self.sets for name in names}
        self.prefixes = {name: self.meta.prefix(name) for name in self.targets.linears}
        stored = stored_names(self.meta)
        self.parameters = {stored[name] for name, _ in self.meta.model.named_parameters() if name in stored}
        self.layer_of = {f"{prefix}.weight": name for name, prefix in self.prefixes.items()}
        self._check_tensors()

    def _find_targets(self, options: PruneOptions, run: Callable[[], object] | None) -> Targets:
        """Sort the linears into those to be treated and the rest, by what the model, its run and its files show."""
        model, quantised = self.meta.model, source_quantisation(self.checkpoint.config) if self.source_dtype else {}

        def find(keep: Mapping[str, str]) -> Targets:
            also = quantised.get("ignore", [])
            return find_targets(model, options.ignore, options.lm_head, also, part=options.part, keep=keep)

        stored_otherwise = self.meta.why_stored_otherwise()
        read = read_without_calling(model, find(stored_otherwise).linears, run)
        return find({**stored_otherwise, **read})

    def calibrate(self, folder: Path, device: torch.device, progress: bool | None) -> None:
        """Prune all layers with the calibration text, if the method needs one; ``folder`` keeps them."""
        if self.windows is not None:
            self.calibrated = prune_layers_from_disk(
                self.checkpoint,
                self.sets,
                self.patterns,
                self.pruner,
                self.windows,
                folder,
                device,
                progress=progress,
            )

    def _calibration_windows(self, options: PruneOptions) -> torch.Tensor | None:
        """Return the windows of calibration text, or None; refuse unusable ones before anything is written."""
        calibration = options.calibration
        if not self.pruner.needs_calibration:
            if calibration is None:
                return None
            raise InputError(
                f"{self.pruner.name} takes no calibration text",
                got=calibration.file,
                remedy="use --method wanda or sparsegpt",
            )
        if calibration is None:
            raise InputError(f"{self.pruner.name} needs calibration text", remedy="add --calibration FILE")
        if options.recipe == "ternary":
            raise InputError(
                "the ternary recipe cannot be calibrated", got=self.pruner.name, needed="--method magnitude"
            )
        find_layer_list(self.meta.model, self.patterns)
        return calibration_windows(self.checkpoint.path, getattr(self.meta.model, "config", None), calibration)

    def _check_tensors(self) -> None:
        allowed = {STORED_NAMES[self.source_dtype]} if self.source_dtype else {STORED_NAMES[dtype] for dtype in FLOATS}
        for tensor in self.layer_of:
            stored = self.checkpoint.stored(tensor)
            if stored.dtype not in allowed:
                raise CheckpointError(f"type of {tensor}", got=stored.dtype, needed=" or ".join(sorted(allowed)))
            if self.dtype not in QUANTISED and stored.dtype != STORED_NAMES[self.dtype]:
                raise InputError(
                    f"pruning without quantising keeps the type of {tensor}",
                    got=dtype_name(self.dtype),
                    needed=f"{stored.dtype}, or int8 or fp8 to quantise",
                )

    def outputs(self, shard: Mapping[str, Stored]) -> dict[str, Stored]:
        """Return the type and shape of every tensor of the output shard that a source shard becomes."""
        out: dict[str, Stored] = {}
        for tensor, stored in shard.items():
            if tensor not in self.layer_of:
                out[tensor] = stored
                continue
            out[tensor] = Stored(STORED_NAMES[self.dtype], stored.shape)
            if self.dtype in QUANTISED and self.source_dtype is None:
                out[f"{tensor}_scale"] = Stored("F32", (stored.shape[0], 1))
        return out

    def write_shard(
        self, path: Path, shard: Mapping[str, Stored], outputs: Mapping[str, Stored], advance: Callable[[int], None]
    ) -> dict[str, str]:
        """Write one output shard, and return the digests of its tensors."""
        here = {self.layer_of[tensor]: tensor for tensor in shard if tensor in self.layer_of}
        with TensorWriter(path, outputs) as writer:
            for tensor in shard:
                if tensor not in self.layer_of:
                    self._write(writer, {tensor: self._copied(tensor)}, advance)
            while here:
                # A set that spans two shards is pruned once for each, which is cheaper than keeping it.
                names = self.set_of[next(iter(here))]
                for name, weight in self._prune_set(names).items():
                    if (own := here.pop(name, None)) is not None:
                        self._write(writer, self._stored_form(name, own, weight), advance)
        return writer.digests

    def _copied(self, tensor: str) -> torch.Tensor:
        value = self.checkpoint.tensor(tensor)
        if tensor in self.parameters:
            check_finite(value, tensor)
        return value

    @staticmethod
    def _write(writer: TensorWriter, tensors: dict[str, torch.Tensor], advance: Callable[[int], None]) -> None:
        for name, tensor in tensors.items():
            writer.write(name, tensor)
            advance(writer.tensors[name].n_bytes)

    def _stored_form(self, name: str, tensor: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return a pruned weight as it is stored, with its scale unless the source has one."""
        if self.source_dtype and self.patterns[name] == DENSE:
            return {tensor: self.checkpoint.tensor(tensor)}
        if self.source_dtype:
            return {tensor: requantize(weight, self._scale(name), self.dtype)}
        if self.dtype not in QUANTISED:
            return {tensor: weight}
        values, scale = self._quantise(name, tensor, weight)
        return {tensor: values, f"{tensor}_scale": scale}

    def _prune_set(self, names: list[str]) -> dict[str, torch.Tensor]:
        pattern = self.patterns[names[0]]
        if self.calibrated is not None and pattern != DENSE:
            return {name: self.calibrated.weight(name) for name in names}
        weights = {name: self._float_weight(name) for name in names}
        return weights if pattern == DENSE else self.pruner.prune(Linears(weights, pattern))

    def _float_weight(self, name: str) -> torch.Tensor:
        tensor = f"{self.prefixes[name]}.weight"
        weight = self.checkpoint.tensor(tensor)
        check_weight(weight, tensor)
        return dequantize(weight, self._scale(name)) if self.source_dtype else weight

    def _scale(self, name: str) -> torch.Tensor:
        return self.checkpoint.tensor(f"{self.prefixes[name]}.weight_scale")

    def _in_8_bits(self, name: str) -> bool:
        tensor = self.meta.names.origins.get(f"{name}.weight")
        return isinstance(tensor, str) and self.checkpoint.stored(tensor).dtype == STORED_NAMES[self.dtype]

    def _quantise(self, name: str, tensor: str, weight: torch.Tensor) -> Quantised:
        if self.recipe == "ternary":
            return ternary_weight(weight, ternary_scale(self.checkpoint.tensor(tensor)), self.dtype, name=tensor)
        return quantize_weight(weight, self.dtype, name=tensor)

    def _hub_names(self, names: Iterable[str]) -> list[str]:
        """Return the checkpoint's own names of linears, where they are others than transformers' names.

        Programs that load the output know the one or the other.
        """
        origins = [self.meta.names.origins.get(f"{name}.weight") for name in names]
        stored = [origin.removesuffix(".weight") for origin in origins if isinstance(origin, str)]
        return [name for name in stored if name not in {*names, *self.patterns}]

    def config(self) -> dict[str, Any]:
        """Return the output's config.json."""
        # Linears that a quantised source has in 8 bits stay in 8 bits, also where they are not pruned.
        quantised = [name for name in self.targets.dense if self._in_8_bits(name)] if self.source_dtype else []
        ignore = [name for name in self.targets.dense if name not in quantised]
        exceptions = {name: pattern for name, pattern in self.patterns.items() if pattern != self.pattern}
        exceptions |= dict.fromkeys(quantised, DENSE)
        config = {key: value for key, value in self.checkpoint.config.items() if key != "compression_config"}
        if self.source_dtype is None:
            config.pop("quantization_config", None)
        if self.source_dtype is None and self.dtype in QUANTISED:
            config["quantization_config"] = quantization_config(self.dtype, [*ignore, *self._hub_names(ignore)])
        elif self.source_dtype is not None:
            kept = source_quantisation(self.checkpoint.config).items()
            config["quantization_config"] = {key: value for key, value in kept if key != "sparsity_config"}
        return {**config, MARKER_KEY: Marker(self.pattern, tuple(ignore), exceptions).to_config()}


def _resolve_dtypes(checkpoint: Checkpoint, options: PruneOptions) -> tuple[torch.dtype | None, torch.dtype]:
    """Return the quantised type of the source (None: float) and the type of the output."""
    config = checkpoint.config
    if config.get(MARKER_KEY) is not None:
        raise CheckpointError(
            f"{checkpoint.path} is pruned already", got=f"a {MARKER_KEY}", remedy="start from the dense model"
        )
    if options.recipe not in ("absmax", "ternary"):
        raise InputError("unknown recipe", got=repr(options.recipe), needed="absmax or ternary")
    wanted = None if options.dtype is None else parse_dtype(options.dtype)
    bitnet = is_bitnet(config)
    if bitnet:
        if source_quantisation(config).get("quantization_mode") != "online":
            raise CheckpointError(
                "the BitNet checkpoint holds packed ternary weights",
                needed="its BF16 master (quantization_mode: online)",
            )
        if options.recipe != "ternary":
            raise InputError("a BitNet master means its weights to be ternary", remedy="pass --recipe ternary")
    source = None if bitnet else quantisation_dtype(config)
    if source is not None and (options.recipe == "ternary" or wanted not in (None, source)):
        raise InputError(
            "the source is quantised already and is not rounded twice",
            got=f"--dtype {options.dtype}, --recipe {options.recipe}",
            needed=f"--dtype {dtype_name(source)} or none",
        )
    dtype = source or wanted
    if dtype is None:
        raise InputError(
            "which type shall the weights have",
            got="no --dtype",
            needed="int8 or fp8, or bf16, fp16 or fp32 to prune only",
            remedy=describe_trade(_gpus()),
        )
    if options.recipe == "ternary" and dtype != torch.int8:
        raise InputError("the ternary recipe ends in INT8 storage", got=dtype_name(dtype), needed="--dtype int8")
    return source, dtype


def _gpus() -> list[tuple[str, tuple[int, int]]]:
    """Return name and compute capability of this machine's GPUs."""
    count = torch.cuda.device_count() if why_no_cuda() is None else 0
    return [(torch.cuda.get_device_name(i), torch.cuda.get_device_capability(i)) for i in range(count)]
