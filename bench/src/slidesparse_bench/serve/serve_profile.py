"""What a run of ``bench serve`` covers: models, types, the engines of each in their order, and what they are asked."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace

from slidesparse.errors import InputError
from slidesparse.gemm import BACKENDS
from slidesparse.integrations.vllm.graph_sizes import sizes_for
from slidesparse_bench.engine.eagle_head import STEPS
from slidesparse_bench.engine.vllm_checkpoint import ARCHITECTURES, model_config
from slidesparse_bench.kernels.linear import AUTO
from slidesparse_bench.kernels.operands import AUTO_SIX_BITS, rounding_for
from slidesparse_bench.problems import select, select_patterns
from slidesparse_bench.records import DENSE_VARIANT
from slidesparse_bench.serve.serve_load import ANSWERS, FULL, NAMED, QUICK, soak
from slidesparse_bench.serve.serve_options import BATCHED_TOKENS
from slidesparse_bench.served_records import AGAIN, CONTROL, RIVALS, SGLANG, STOCK, VLLM, EngineKey, Workload

DTYPES = ("int8", "fp8", "bf16")

OWN_GRAPHS = 512
"""Tokens of the largest CUDA graph that vLLM captures by itself."""


@dataclass(frozen=True)
class ServeProfile:
    """What a run covers.

    Attributes:
        models: Names out of :data:`slidesparse_bench.engine.vllm_checkpoint.ARCHITECTURES`.
        dtypes: ``int8``, ``fp8`` or ``bf16``.
        patterns: Of the pruned checkpoints.
        workloads: What is asked.
        backends: ``auto``, ``auto-6bit`` or backends' names, an engine each for every pattern.
        graphs: Tokens of the largest CUDA graph of our engines; None: what the plugin chooses. One more stock engine
            captures as large ones.
        layers: Decoder layers; None for all.
        gpus: Tensor parallelism.
        engines: Labels of those that run; None for all.
        budget_s: No engine is started that would end later; None: no limit.
        server: ``vllm`` or ``sglang``.
        rivals: Labels out of :data:`slidesparse_bench.served_records.RIVALS`.
        eagle: Tokens that a step gives in the mean by EAGLE-3's drafts, whose acceptance is forced; None: no drafts.
    """

    models: tuple[str, ...] = ("Qwen2.5-7B",)
    dtypes: tuple[str, ...] = ("int8", "fp8")
    patterns: tuple[str, ...] = ("6:8", "4:6", "2:4")
    workloads: tuple[Workload, ...] = FULL
    backends: tuple[str, ...] = (AUTO,)
    graphs: int | None = None
    layers: int | None = None
    gpus: int = 1
    engines: tuple[str, ...] | None = None
    budget_s: float | None = None
    server: str = VLLM
    rivals: tuple[str, ...] = ()
    eagle: float | None = None

    def keys(self, model: str, dtype: str) -> list[EngineKey]:
        """The engines of a model and type, in the order in which they run."""
        layers = self.layers or ARCHITECTURES[model].layers

        def key(engine: str, pattern: str, backend: str, graphs: int | None) -> EngineKey:
            return EngineKey(model, dtype, layers, self.gpus, engine, pattern, backend, graphs)

        keys = [key(STOCK, DENSE_VARIANT, "", None)]
        if dtype != "bf16":  # in which nothing is joined
            keys.append(key(CONTROL, DENSE_VARIANT, "dense", self.graphs))
        for backend in self.backends:
            six_bits = rounding_for(backend, dtype) == "6bit"  # which dense weights take, too
            for pattern in (DENSE_VARIANT, *self.patterns) if six_bits else self.patterns:
                label = pattern if backend == AUTO else f"{pattern} {backend}"
                keys.append(key(label, pattern, backend, self.graphs))
        keys += [key(rival, DENSE_VARIANT, "", None) for rival in self.rivals if RIVALS[rival] != dtype]
        graphs = self.graphs or larger_graphs(model, self.gpus)
        if graphs is not None and self.server == VLLM:  # in SGLang the plugin leaves graphs alone
            keys.append(key(f"{STOCK}, graphs to {graphs}", DENSE_VARIANT, "", graphs))
        keys.append(key(AGAIN, DENSE_VARIANT, "", None))
        return [found for found in keys if self.engines is None or found.engine in self.engines]


def larger_graphs(model: str, gpus: int) -> int | None:
    """Return the tokens of the largest CUDA graph that the plugin captures of a model; None where vLLM's own suffice.

    >>> larger_graphs("Qwen2.5-7B", 1)
    2048
    """
    sizes = sizes_for(SimpleNamespace(**model_config(model)), gpus, BATCHED_TOKENS, OWN_GRAPHS)
    return sizes[-1] if sizes else None


def adapt(
    *,
    quick: bool = False,
    dtypes: Sequence[str] | None = None,
    models: Sequence[str] | None = None,
    patterns: Sequence[str] | None = None,
    backends: Sequence[str] | None = None,
    engines: Sequence[str] | None = None,
    graphs: int | None = None,
    layers: int | None = None,
    gpus: int | None = None,
    budget_s: float | None = None,
    workloads: Sequence[str] | None = None,
    soak_s: float | None = None,
    server: str = VLLM,
    rivals: Sequence[str] | None = None,
    eagle: float | None = None,
) -> ServeProfile:
    """A profile with a user's choices.

    Raises:
        InputError: An unknown name, or too small a number.
    """
    numbers = {"--graphs": graphs, "--layers": layers, "--gpus": gpus, "--budget-s": budget_s, "--soak": soak_s}
    for what, number in numbers.items():
        if number is not None and not 1 <= number < float("inf"):
            raise InputError(what, got=number, needed="at least 1")
    if graphs is not None and graphs > BATCHED_TOKENS:
        raise InputError("--graphs", got=graphs, needed=f"at most {BATCHED_TOKENS} tokens, the largest batch")
    if eagle is not None and not 1 <= eagle <= STEPS + 1:
        raise InputError("--eagle", got=eagle, needed=f"1 to {STEPS + 1} tokens a step, with drafts of {STEPS}")
    usual = ServeProfile()
    if server == SGLANG and (graphs is not None or "bf16" in (dtypes or ())):
        needed = "neither, which need the plugin in vLLM"
        raise InputError("--server sglang", got="--graphs or --dtype bf16", needed=needed)
    profile = ServeProfile(
        models=select(models, ARCHITECTURES, usual.models, "model"),
        dtypes=select(dtypes, DTYPES, usual.dtypes, "dtype"),
        patterns=select_patterns(patterns, usual.patterns),
        workloads=_workloads(ANSWERS if eagle else QUICK if quick else FULL, workloads, soak_s),
        backends=select(backends, (AUTO, AUTO_SIX_BITS, *BACKENDS), usual.backends, "backend"),
        graphs=graphs,
        layers=layers,
        gpus=gpus or 1,
        budget_s=budget_s,
        server=server,
        rivals=select([f"{STOCK} {name.upper()}" for name in rivals or ()], tuple(RIVALS), (), "rival"),
        eagle=eagle,
    )
    mixtures = [name for name in profile.models if ARCHITECTURES[name].mixture is not None]
    if mixtures and "bf16" in profile.dtypes:
        raise InputError(f"bf16 of {mixtures[0]}", got="experts that nothing packs", needed="int8 or fp8")
    keys = [key for model in profile.models for dtype in profile.dtypes for key in profile.keys(model, dtype)]
    known = {key.engine: key.graphs for key in keys}
    chosen = None if engines is None else select(engines, tuple(sorted(known)), (), "engine")
    if graphs is not None and chosen is not None and all(known[engine] is None for engine in chosen):
        needed = f"one of ours among --engines, or '{STOCK}, graphs to {graphs}': others have vLLM's own"
        raise InputError("--graphs", got=f"--engines {' '.join(map(repr, chosen))}", needed=needed)
    return dataclasses.replace(profile, engines=chosen)


def _workloads(usual: Sequence[Workload], names: Sequence[str] | None, soak_s: float | None) -> tuple[Workload, ...]:
    found = {workload.name: workload for workload in NAMED}
    chosen = select(names, tuple(found), tuple(workload.name for workload in usual), "workload")
    asked = tuple(found[name] for name in found if name in chosen)
    return asked if soak_s is None else (*asked, soak(soak_s))
