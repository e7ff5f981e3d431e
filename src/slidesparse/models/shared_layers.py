"""Calibrate and prune the layers of a model with several processes.

Each process runs its share of the batches through a layer. The gram matrices are summed, the sets of linears are dealt
out to be pruned, and every process gets all pruned weights: the next layer needs them. The result has the same bits
for any number of processes whose devices compute the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import nn

from slidesparse.base.assignment import assign
from slidesparse.base.rank_tensors import RankTensors
from slidesparse.models.expert_weights import ExpertWeight, only_experts
from slidesparse.models.gram_tree import GramTree, Shares
from slidesparse.models.grams import Inputs, collect_grams, expert_inputs, in_parts, rounding_of, sum_columns, tokens_of
from slidesparse.models.layer_stack import Sample
from slidesparse.models.layerwise import LayerStore, SetLoss, prune_set
from slidesparse.pruning import Pruner, RoundForOutputs
from slidesparse.weights.pattern import Pattern


class SharedLayers:
    """Prunes layers together with other processes: see :data:`slidesparse.models.layerwise.PruneLayer`.

    Attributes:
        own: The batches that this process runs, ascending.
    """

    def __init__(self, tensors: RankTensors, n_batches: int) -> None:
        self.tensors, self.ranks = tensors, tensors.ranks
        self.shares = Shares(n_batches, self.ranks.world)
        self.own = [batch for share in self.shares.of(self.ranks.rank) for batch in self.shares.batches(share)]

    def prune_layer(
        self,
        layer: nn.Module,
        index: int,
        sets: Sequence[Sequence[str]],
        linears: Mapping[str, nn.Linear | ExpertWeight],
        patterns: Mapping[str, Pattern],
        pruner: Pruner,
        samples: Sequence[Sample],
        store: LayerStore,
    ) -> tuple[dict[str, torch.Tensor], list[SetLoss]]:
        """Return the pruned weights of a layer, and what its sets lost, at every process."""
        solver = self._dealt(sets, linears)
        own: dict[str, torch.Tensor] = {}
        told: list[Any] = []
        for part in in_parts(sets, only_experts(linears)):
            heads = {names[0]: linears[names[0]] for names in part}
            tree = self._grams(layer, index, heads, samples, isinstance(pruner, RoundForOutputs))
            self.ranks.wait()
            inputs = self._inputs(tree, part, linears, solver)
            for names in (names for names in part if names[0] in inputs):
                self.ranks.check()
                new, loss = prune_set(names, linears, patterns[names[0]], pruner, inputs.pop(names[0]), store)
                told.append([asdict(loss), str(new[names[0]].dtype).removeprefix("torch.")])
                own |= new
        return self._exchanged(sets, linears, solver, own, told)

    def _inputs(
        self, tree: GramTree, sets: Sequence[Sequence[str]], linears: Mapping[str, Any], solver: Mapping[str, int]
    ) -> dict[str, Inputs]:
        """Return what this process is to know of the inputs of the sets that it prunes, by their first linear."""
        experts = only_experts({names[0]: linears[names[0]] for names in sets})
        sums: dict[str, tuple[torch.Tensor, int]] = {}
        for layer, one in {one.layer: one for one in experts.values()}.items():
            total = self._everywhere(tree, layer, sum_columns(one))
            sums[layer] = total, int(self._everywhere(tree, tokens_of(layer), 1))
        inputs = {}
        for head in (names[0] for names in sets):
            gram = tree.total(head, linears[head].weight.shape[1], solver[head], self.tensors)
            number = tree.total((tokens_of if head in experts else rounding_of)(head), 1, solver[head], self.tensors)
            if gram is None or number is None:
                continue
            if head in experts:
                inputs[head] = expert_inputs(head, gram, int(number), *sums[experts[head].layer])
            else:
                inputs[head] = Inputs(gram, rounding=float(number))
        return inputs

    def _everywhere(self, tree: GramTree, name: str, columns: int) -> torch.Tensor:
        """Return a sum over all shares at every process."""
        total = tree.total(name, columns, 0, self.tensors)
        here = self._empty((columns, columns), torch.float32) if total is None else total
        self.tensors.broadcast(here, 0)
        return here

    def _grams(
        self,
        layer: nn.Module,
        index: int,
        linears: Mapping[str, nn.Linear | ExpertWeight],
        samples: Sequence[Sample],
        alike: bool,
    ) -> GramTree:
        """Return the sums over this process's batches."""
        tree = GramTree(self.shares)
        sample_of = dict(zip(self.own, samples, strict=True))
        for share in self.shares.of(self.ranks.rank):
            self.ranks.check()
            here = [sample_of[batch] for batch in self.shares.batches(share)]
            tree.add(share, collect_grams(layer, index, linears, here, alike) if here else {})
        return tree

    def _dealt(self, sets: Sequence[Sequence[str]], linears: Mapping[str, nn.Linear | ExpertWeight]) -> dict[str, int]:
        """Return which process prunes each set, by its first linear."""
        costs = {}
        for names in sets:
            columns = linears[names[0]].weight.shape[1]
            # SparseGPT factors the gram matrix, updates the columns on the right, and multiplies rows by the matrix.
            costs[names[0]] = columns**2 * (columns + sum(linears[name].weight.shape[0] for name in names))
        return {head: rank for rank, heads in enumerate(assign(costs, self.ranks.world)) for head in heads}

    def _exchanged(
        self,
        sets: Sequence[Sequence[str]],
        linears: Mapping[str, nn.Linear | ExpertWeight],
        solver: Mapping[str, int],
        own: Mapping[str, torch.Tensor],
        told: Sequence[Any],
    ) -> tuple[dict[str, torch.Tensor], list[SetLoss]]:
        """Return all processes' pruned weights and losses, in the order of the sets."""
        known = {}
        for loss, kind in (one for several in self.ranks.gather(told) for one in several):
            known[loss["names"][0]] = SetLoss(**{**loss, "names": tuple(loss["names"])}), kind
        pruned = {}
        for names in sets:
            dtype = getattr(torch, known[names[0]][1])
            for name in names:
                shape = tuple(linears[name].weight.shape)
                weight = own[name].contiguous() if name in own else self._empty(shape, dtype)
                self.tensors.broadcast(weight, solver[names[0]])
                pruned[name] = weight
        return pruned, [known[names[0]][0] for names in sets]

    def _empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=self.tensors.device)
