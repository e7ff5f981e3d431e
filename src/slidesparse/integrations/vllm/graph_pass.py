"""The pass over every graph that vLLM compiles: it joins norms with linears, and consecutive linears."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Set
from functools import lru_cache
from pathlib import Path
from typing import Any

from torch import fx

from slidesparse.base import torch_private
from slidesparse.base.log import log_once
from slidesparse.integrations.vllm import LOGGER, private
from slidesparse.integrations.vllm.fuse_chains import find_linears, join_chains
from slidesparse.integrations.vllm.fuse_norms import join_norms
from slidesparse.integrations.vllm.model_state import ModelState

InductorPass: Any = private.inductor_pass()

PACKAGE = Path(__file__).parents[2]

SUFFIXES = (".cu", ".cuh", ".py")
"""Suffixes of sources that a compiled graph depends on."""

log = logging.getLogger(LOGGER)


@lru_cache(maxsize=8)
def hash_sources(folder: Path = PACKAGE) -> str:
    """Return a SHA-256 of the names and contents of all sources in a folder; read once a process.

    A compiled graph holds our operators, their arguments as text, and the results of our passes. Nearly every file
    contributes, so all count: a key that changes too often costs one compilation, a stale graph gives wrong results.
    """
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.suffix in SUFFIXES):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(folder).as_posix()} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()


class GraphPass(InductorPass):
    """The pass of one engine, for all of its models: a draft model is compiled under the same configuration.

    The specs of its linears identify the model of a graph.

    Attributes:
        models: The states of the models, in the order of their building.
    """

    def __init__(self) -> None:
        self.models: list[ModelState] = []

    def __deepcopy__(self, memo: object) -> GraphPass:
        return self  # vLLM copies its configuration, while layers still write to the states

    def __call__(self, graph: fx.Graph) -> None:
        """Rewrite a graph in place."""
        specs = {linear.weight.text for _, linear in find_linears(graph)}
        if not specs:
            return
        model = self.find_model(specs)
        if model is None:
            log_once("slidesparse: a graph is not changed: its linears belong to no loaded model", log=log)
        elif model.options.fuse:
            joins = join_norms(graph)
            chained = join_chains(graph)
            if joins.linears:
                log_once(
                    f"slidesparse: a graph of {joins.linears} linears, {chained} of them in chains: {joins.describe()}",
                    log=log,
                )
            _warm_up_lifts(graph, model)

    def find_model(self, specs: Set[str]) -> ModelState | None:
        """Return the model with layers of all these specs, or None; of several, the first that joins its layers."""
        owners = [model for model in self.models if specs <= set(model.specs.values())]
        return max(owners, key=lambda model: model.options.fuse, default=None)

    def uuid(self) -> str:
        """Return a key for caches: the package's sources, and all choices for every model."""
        models = [model.cache_key() for model in self.models]
        key: str = self.hash_dict({"sources": hash_sources(), "models": models})
        return key


def install_pass(compilation_config: Any, model: ModelState) -> None:
    """Add the pass to vLLM's configuration, or a model to the pass that is there; a user's own pass stays."""
    passes = compilation_config.inductor_compile_config
    installed = passes.setdefault(private.POST_PASS, GraphPass())
    if isinstance(installed, GraphPass):
        installed.models.append(model)
    else:
        log.warning(
            "slidesparse: norms and activations are not fused with linears: another pass has %s", private.POST_PASS
        )


def _warm_up_lifts(graph: fx.Graph, model: ModelState) -> None:
    if model.warmup is None:
        return
    with torch_private.outside_tracing():
        for device, linear in find_linears(graph):
            model.warmup.lift(linear.prologue, linear.weight, device)
