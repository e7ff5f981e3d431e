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

from slidesparse.base.dealing import deal
from slidesparse.base.rank_tensors import RankTensors
from slidesparse.models.gram_tree import GramTree, Shares
from slidesparse.models.layerwise import LayerStore, Sample, SetLoss, collect_grams
from slidesparse.pattern import Pattern
from slidesparse.prune import Linears, Pruner, output_error


class SharedLayers:
    """Prunes layers together with other processes: see :data:`slidesparse.models.layerwise.PruneLayer`.

    Args:
        tensors: Sends tensors between the processes.
        n_batches: Batches of the calibration text.

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
        linears: Mapping[str, nn.Linear],
        patterns: Mapping[str, Pattern],
        pruner: Pruner,
        samples: Sequence[Sample],
        store: LayerStore,
    ) -> tuple[dict[str, torch.Tensor], list[SetLoss]]:
        """Return the pruned weights of a layer, and what its sets lost, at every process."""
        tree = self._grams(layer, index, {names[0]: linears[names[0]] for names in sets}, samples)
        solver = self._dealt(sets, linears)
        own: dict[str, torch.Tensor] = {}
        told: list[Any] = []
        grams = {}
        self.ranks.wait()
        for names in sets:
            head = names[0]
            gram = tree.total(head, linears[head].weight.shape[1], solver[head], self.tensors)
            if gram is not None:
                grams[head] = gram
        for names in sets:
            if (gram := grams.pop(names[0], None)) is not None:
                self.ranks.check()
                originals = {name: store.weight(name, linears[name]) for name in names}
                new = pruner.prune(Linears(originals, patterns[names[0]], gram))
                loss = SetLoss(tuple(names), str(patterns[names[0]]), output_error(originals, new, gram))
                told.append([asdict(loss), _type_name(new[names[0]].dtype)])
                own |= new
        return self._exchanged(sets, linears, solver, own, told)

    def _grams(
        self, layer: nn.Module, index: int, linears: Mapping[str, nn.Linear], samples: Sequence[Sample]
    ) -> GramTree:
        """Return the sums over this process's batches."""
        tree = GramTree(self.shares)
        sample_of = dict(zip(self.own, samples, strict=True))
        for share in self.shares.of(self.ranks.rank):
            self.ranks.check()
            here = [sample_of[batch] for batch in self.shares.batches(share)]
            tree.add(share, collect_grams(layer, index, linears, here) if here else {})
        return tree

    def _dealt(self, sets: Sequence[Sequence[str]], linears: Mapping[str, nn.Linear]) -> dict[str, int]:
        """Return which process prunes each set, by its first linear."""
        costs = {}
        for names in sets:
            columns = linears[names[0]].weight.shape[1]
            # SparseGPT factors the gram matrix, updates the columns on the right, and multiplies rows by the matrix.
            costs[names[0]] = columns**2 * (columns + sum(linears[name].weight.shape[0] for name in names))
        return {head: rank for rank, heads in enumerate(deal(costs, self.ranks.world)) for head in heads}

    def _exchanged(
        self,
        sets: Sequence[Sequence[str]],
        linears: Mapping[str, nn.Linear],
        solver: Mapping[str, int],
        own: Mapping[str, torch.Tensor],
        told: Sequence[Any],
    ) -> tuple[dict[str, torch.Tensor], list[SetLoss]]:
        """Return all processes' pruned weights and losses, in the order of the sets."""
        known = {}
        for loss, kind in (one for several in self.ranks.gather(told) for one in several):
            known[loss["names"][0]] = SetLoss(tuple(loss["names"]), loss["pattern"], loss["loss"]), kind
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


def _type_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
