"""Calibrate and prune the layers of a model with several processes.

Each process runs its share of the batches through a layer. The gram matrices are summed, each set of linears is pruned
by one process, and every process gets all pruned weights for the next layer. The result has the same bits for any
number of processes whose devices compute the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from slidesparse.base.assignment import assign
from slidesparse.base.rank_tensors import RankTensors
from slidesparse.models.expert_weights import ExpertWeight, only_experts
from slidesparse.models.gram_tree import GramTree, Shares
from slidesparse.models.grams import Inputs, collect_grams, error_key, expert_inputs, in_parts, sum_columns, tokens_key
from slidesparse.models.layer_stack import Sample
from slidesparse.models.layerwise import SetLoss, WeightOf, prune_set
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
        weight_of: WeightOf,
    ) -> tuple[dict[str, torch.Tensor], list[SetLoss]]:
        """Return the pruned weights of a layer, and the losses of its sets, at every process."""
        solver = self._solvers(sets, linears)
        own: dict[str, torch.Tensor] = {}
        losses: list[tuple[SetLoss, torch.dtype]] = []
        for part in in_parts(sets, only_experts(linears)):
            heads = {names[0]: linears[names[0]] for names in part}
            tree = self._grams(layer, index, heads, samples, isinstance(pruner, RoundForOutputs))
            self.ranks.wait()
            inputs = self._inputs(tree, part, linears, solver)
            for names in (names for names in part if names[0] in inputs):
                new, loss = prune_set(names, linears, patterns[names[0]], pruner, inputs.pop(names[0]), weight_of)
                losses.append((loss, new[names[0]].dtype))
                own |= new
        return self._exchanged(sets, linears, solver, own, losses)

    def _inputs(
        self, tree: GramTree, sets: Sequence[Sequence[str]], linears: Mapping[str, Any], solver: Mapping[str, int]
    ) -> dict[str, Inputs]:
        """Return the inputs of the sets that this process prunes, by their first linear."""
        experts = only_experts({names[0]: linears[names[0]] for names in sets})
        sums: dict[str, tuple[torch.Tensor, int]] = {}
        for layer, one in {one.layer: one for one in experts.values()}.items():
            total = self._everywhere(tree, layer, sum_columns(one))
            sums[layer] = total, int(self._everywhere(tree, tokens_key(layer), 1))
        inputs = {}
        for head in (names[0] for names in sets):
            gram = tree.total(head, linears[head].weight.shape[1], solver[head], self.tensors)
            number = tree.total((tokens_key if head in experts else error_key)(head), 1, solver[head], self.tensors)
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
            here = [sample_of[batch] for batch in self.shares.batches(share)]
            tree.add(share, collect_grams(layer, index, linears, here, alike) if here else {})
        return tree

    def _solvers(
        self, sets: Sequence[Sequence[str]], linears: Mapping[str, nn.Linear | ExpertWeight]
    ) -> dict[str, int]:
        """Return the process that prunes each set, by its first linear."""
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
        losses: Sequence[tuple[SetLoss, torch.dtype]],
    ) -> tuple[dict[str, torch.Tensor], list[SetLoss]]:
        """Return all processes' pruned weights and losses, in the order of the sets."""
        known = {one[0].names[0]: one for several in self.ranks.gather(losses) for one in several}
        pruned = {}
        for names in sets:
            dtype = known[names[0]][1]
            for name in names:
                shape = tuple(linears[name].weight.shape)
                weight = own[name].contiguous() if name in own else self._empty(shape, dtype)
                self.tensors.broadcast(weight, solver[names[0]])
                pruned[name] = weight
        return pruned, [known[names[0]][0] for names in sets]

    def _empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=self.tensors.device)
