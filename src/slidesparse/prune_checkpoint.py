"""``slidesparse prune``: from a dense checkpoint to a sparse, quantised one, tensor by tensor.

The source may be BF16, FP16 or FP32, a BitNet b1.58 master (BF16, made ternary), or compressed-tensors W8A8 already.
The output is described in :mod:`slidesparse.marker`. Output shards mirror the source's, so that each can be written,
and taken over by a resumed run, on its own.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from slidesparse.checkpoint import INDEX_FILE, SINGLE_FILE, STORED_NAMES, Checkpoint, Stored, TensorWriter, write_json
from slidesparse.convert import layer_patterns, run_once, sets_to_prune
from slidesparse.errors import CheckpointError, InputError
from slidesparse.marker import KEY, VERSION, Marker, quantisation_dtype, quantization_config
from slidesparse.pattern import DENSE, Pattern
from slidesparse.progress import progress_bar
from slidesparse.prune import Linears, get_pruner
from slidesparse.quant import (
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
from slidesparse.skeleton import skeleton, tensor_prefixes
from slidesparse.staging import staged
from slidesparse.support import check_weight
from slidesparse.targets import find_targets

Recipe = Literal["absmax", "ternary"]

WEIGHT_SUFFIXES = {".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".onnx", ".gguf", ".ot"}
"""Files that hold weights, which a pruned checkpoint must not carry along."""


@dataclass(frozen=True)
class PruneOptions:
    """What to do with a checkpoint.

    Attributes:
        pattern: The common pattern.
        dtype: ``int8`` or ``fp8``; or the source's own float type, to prune without quantising. None: the type of a
            source that is quantised already.
        method: Pruning method.
        recipe: How INT8 weights are rounded: ``absmax`` per channel, or ``ternary`` (BitNet b1.58).
        ignore: Linears to leave alone: exact names or ``re:`` expressions.
        layers: Exceptions to the common pattern: name or ``re:`` expression -> pattern.
        lm_head: Treat the output embedding too.
    """

    pattern: str
    dtype: str | None = None
    method: str = "magnitude"
    recipe: Recipe = "absmax"
    ignore: tuple[str, ...] = ()
    layers: Mapping[str, str] = field(default_factory=dict)
    lm_head: bool = False


@dataclass(frozen=True)
class PruneSummary:
    """What was done.

    Attributes:
        destination: The new checkpoint.
        patterns: Treated layer -> pattern.
        dense: Linear left alone -> why.
        not_copied: Files of the source that hold other copies of the weights.
        resumed: Shards taken over from an interrupted run.
        source_bytes: Tensors of the source.
        destination_bytes: Tensors of the new checkpoint.
    """

    destination: str
    patterns: dict[str, str]
    dense: dict[str, str]
    not_copied: list[str]
    resumed: list[str]
    source_bytes: int
    destination_bytes: int

    def to_json(self) -> dict[str, Any]:
        """All fields."""
        return asdict(self)

    def describe(self) -> str:
        """For people."""
        counts = Counter(self.patterns.values())
        lines = [f"pruned {sum(counts.values())} layers: " + ", ".join(f"{n} at {p}" for p, n in counts.most_common())]
        lines += [f"left dense: {name} ({why})" for name, why in self.dense.items()]
        lines += [f"taken over from an interrupted run: {', '.join(self.resumed)}"] if self.resumed else []
        lines += [f"not copied, they hold other weights: {', '.join(self.not_copied)}"] if self.not_copied else []
        lines.append(f"{self.source_bytes / 1e6:.1f} MB -> {self.destination_bytes / 1e6:.1f} MB in {self.destination}")
        return "\n".join(lines)


def prune_checkpoint(
    source: str | Path, destination: str | Path, options: PruneOptions, *, progress: bool | None = None
) -> PruneSummary:
    """Prune and quantise a checkpoint into a new folder. The source is never touched.

    Args:
        source: A local Hugging Face checkpoint.
        destination: A folder that does not exist.
        options: What to do.
        progress: Show a progress bar; None: on a terminal only.

    Raises:
        CheckpointError: The source cannot be used, or the destination cannot be written.
        InputError: An option cannot be used.
    """
    checkpoint = Checkpoint(source)
    job = _Job(checkpoint, options)
    outputs = {name: job.outputs(shard) for name, shard in checkpoint.shards.items()}
    size = sum(stored.n_bytes for shard in outputs.values() for stored in shard.values())
    files, not_copied = _other_files(checkpoint.path)
    plan = {"version": VERSION, "options": asdict(options), "source": _fingerprint(checkpoint)}
    with staged(Path(destination), checkpoint.path, plan, size) as (folder, finished):
        with progress_bar("prune", size, show=progress) as advance:
            for shard, tensors in outputs.items():
                if shard in finished:
                    advance(sum(stored.n_bytes for stored in tensors.values()))
                else:
                    job.write_shard(folder / shard, checkpoint.shards[shard], tensors, advance)
        if list(outputs) != [SINGLE_FILE]:
            weight_map = {tensor: shard for shard, tensors in outputs.items() for tensor in tensors}
            write_json(folder / INDEX_FILE, {"metadata": {"total_size": size}, "weight_map": weight_map})
        for file in files:
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(checkpoint.path / file, folder / file)
        write_json(folder / "config.json", job.config())
    return PruneSummary(
        destination=str(destination),
        patterns={name: str(pattern) for name, pattern in job.patterns.items()},
        dense=job.targets.dense,
        not_copied=[str(file) for file in not_copied],
        resumed=sorted(finished),
        source_bytes=checkpoint.n_bytes,
        destination_bytes=size,
    )


class _Job:
    """A checkpoint and the options, resolved into what happens to every tensor."""

    def __init__(self, checkpoint: Checkpoint, options: PruneOptions) -> None:
        self.checkpoint, self.recipe = checkpoint, options.recipe
        self.source_dtype, self.dtype = _resolve_dtypes(checkpoint, options)
        self.pattern = Pattern.parse(options.pattern)
        model = skeleton(checkpoint)
        quantisation = checkpoint.config.get("quantization_config") or {}
        already_ignored = quantisation.get("ignore", []) if self.source_dtype else []
        self.targets = find_targets(model, [*options.ignore, *already_ignored], options.lm_head)
        self.patterns = layer_patterns(self.targets.linears, self.pattern, options.layers)
        self.pruner = get_pruner(options.method)
        sets = sets_to_prune(model, self.targets.linears, self.patterns, self.pruner, run_once(model))
        self.set_of = {name: names for names in sets for name in names}
        prefixes = tensor_prefixes(model, checkpoint, self.targets.linears)
        self.prefixes = prefixes
        self.layer_of = {f"{prefix}.weight": name for name, prefix in prefixes.items()}
        self._check_shapes()
        self._pruned: dict[str, torch.Tensor] = {}

    def _check_shapes(self) -> None:
        allowed = {self.source_dtype} if self.source_dtype else {torch.bfloat16, torch.float16, torch.float32}
        for tensor, name in self.layer_of.items():
            stored, linear = self.checkpoint.stored(tensor), self.targets.linears[name]
            if stored.shape != (linear.out_features, linear.in_features):
                raise CheckpointError(
                    f"shape of {tensor}",
                    got=list(stored.shape),
                    needed=f"[{linear.out_features}, {linear.in_features}]",
                )
            if stored.dtype not in {STORED_NAMES[dtype] for dtype in allowed}:
                raise CheckpointError(f"type of {tensor}", got=stored.dtype, needed=" or ".join(map(str, allowed)))
            if self.source_dtype and f"{self.prefixes[name]}.weight_scale" not in self.checkpoint.files:
                raise CheckpointError(f"the checkpoint holds no scale for {tensor}")
            if self.dtype not in QUANTISED and stored.dtype != STORED_NAMES[self.dtype]:
                raise InputError(
                    f"pruning without quantising keeps the type of {tensor}",
                    got=dtype_name(self.dtype),
                    needed=f"{stored.dtype}, or int8 or fp8 to quantise",
                )

    def outputs(self, shard: Mapping[str, Stored]) -> dict[str, Stored]:
        """What becomes of the tensors of a shard."""
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
    ) -> None:
        """Write one output shard."""
        with TensorWriter(path, outputs) as writer:
            for tensor in shard:
                if tensor in self.layer_of:
                    for name, value in self._treated(tensor).items():
                        writer.write(name, value)
                        advance(outputs[name].n_bytes)
                else:
                    writer.write(tensor, self.checkpoint.tensor(tensor))
                    advance(outputs[tensor].n_bytes)

    def _treated(self, tensor: str) -> dict[str, torch.Tensor]:
        """The pruned and quantised weight, and its scale unless the source has it."""
        name = self.layer_of[tensor]
        if name not in self._pruned:
            # A set may span two shards; it is then pruned once for each, which is cheaper than keeping it.
            self._pruned = self._prune_set(self.set_of[name])
        weight = self._pruned.pop(name)
        if self.source_dtype:
            return {tensor: requantize(weight, self._scale(name), self.dtype)}
        if self.dtype not in QUANTISED:
            return {tensor: weight}
        values, scale = self._quantise(name, tensor, weight)
        return {tensor: values, f"{tensor}_scale": scale}

    def _prune_set(self, names: list[str]) -> dict[str, torch.Tensor]:
        weights = {name: self._float_weight(name) for name in names}
        pattern = self.patterns[names[0]]
        return weights if pattern == DENSE else self.pruner.prune(Linears(weights, pattern))

    def _float_weight(self, name: str) -> torch.Tensor:
        tensor = f"{self.prefixes[name]}.weight"
        weight = self.checkpoint.tensor(tensor)
        check_weight(weight, tensor)
        return dequantize(weight, self._scale(name)) if self.source_dtype else weight

    def _scale(self, name: str) -> torch.Tensor:
        return self.checkpoint.tensor(f"{self.prefixes[name]}.weight_scale")

    def _quantise(self, name: str, tensor: str, weight: torch.Tensor) -> Quantised:
        if self.recipe == "ternary":
            return ternary_weight(weight, ternary_scale(self.checkpoint.tensor(tensor)), self.dtype, name=tensor)
        return quantize_weight(weight, self.dtype, name=tensor)

    def config(self) -> dict[str, Any]:
        """The output's config.json."""
        ignore = list(self.targets.dense)
        exceptions = {name: pattern for name, pattern in self.patterns.items() if pattern != self.pattern}
        config = {key: value for key, value in self.checkpoint.config.items() if key != "compression_config"}
        if self.source_dtype is None:
            config.pop("quantization_config", None)
        if self.source_dtype is None and self.dtype in QUANTISED:
            config["quantization_config"] = quantization_config(self.dtype, ignore)
        elif self.source_dtype is not None:
            quantisation = (
                self.checkpoint.config.get("quantization_config") or self.checkpoint.config["compression_config"]
            )
            config["quantization_config"] = {key: v for key, v in quantisation.items() if key != "sparsity_config"}
        return {**config, KEY: Marker(self.pattern, tuple(ignore), exceptions).to_config()}


def _resolve_dtypes(checkpoint: Checkpoint, options: PruneOptions) -> tuple[torch.dtype | None, torch.dtype]:
    """The quantised type of the source (None: float) and the type of the output."""
    config = checkpoint.config
    if config.get(KEY) is not None:
        raise CheckpointError(
            f"{checkpoint.path} is pruned already", got=f"a {KEY}", remedy="start from the dense model"
        )
    if options.recipe not in ("absmax", "ternary"):
        raise InputError("unknown recipe", got=repr(options.recipe), needed="absmax or ternary")
    wanted = None if options.dtype is None else parse_dtype(options.dtype)
    bitnet = (config.get("quantization_config") or {}).get("quant_method") == "bitnet"
    if bitnet:
        if config["quantization_config"].get("quantization_mode") != "online":
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
        raise InputError("which type shall the weights have", got="no --dtype", needed="int8 or fp8, or bf16 or fp16")
    if options.recipe == "ternary" and dtype != torch.int8:
        raise InputError("the ternary recipe ends in INT8 storage", got=dtype_name(dtype), needed="--dtype int8")
    return source, dtype


def _other_files(path: Path) -> tuple[list[Path], list[Path]]:
    """Files to copy, and files that hold weights in another form; both relative to ``path``."""
    rewritten = {Path("config.json"), Path(INDEX_FILE)}
    files = sorted(file.relative_to(path) for file in path.rglob("*") if file.is_file())
    visible = [f for f in files if f not in rewritten and not any(part.startswith(".") for part in f.parts)]
    copied = [f for f in visible if f.suffix not in WEIGHT_SUFFIXES and not f.name.endswith(".index.json")]
    checkpoint_files = set(Checkpoint(path).shards)
    return copied, [f for f in visible if f not in copied and f.as_posix() not in checkpoint_files]


def _fingerprint(checkpoint: Checkpoint) -> dict[str, list[int]]:
    """Size and time of every file that the output depends on."""
    names = ["config.json", *checkpoint.shards]
    stats = {name: (checkpoint.path / name).stat() for name in names}
    return {name: [stat.st_size, stat.st_mtime_ns] for name, stat in stats.items()}
