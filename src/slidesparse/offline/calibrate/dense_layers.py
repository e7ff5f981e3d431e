"""Run the dense layers of a checkpoint one after the other, from disk, to see what a text sends through them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from slidesparse.base.progress import progress_bar
from slidesparse.files.checkpoint import Checkpoint
from slidesparse.models.layer_stack import record_inputs, run_layer
from slidesparse.offline.calibrate.layer_store import open_layers, windows_of_a_batch


class DenseLayers:
    """The layers of a checkpoint, loaded one after the other, and what a text sends through them.

    Attributes:
        meta: The meta model.
        samples: What the current layer reads.

    Raises:
        InputError: The model or its activations cannot be used.
        CheckpointError: The checkpoint is damaged.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        linears: Iterable[str],
        windows: torch.Tensor,
        device: torch.device,
        compute: torch.dtype | None = None,
    ) -> None:
        self.layer_list, self.store = open_layers(checkpoint, linears, checkpoint.path, device, compute=compute)
        self.meta = self.store.meta
        self.model = self.meta.model
        batches = windows.split(windows_of_a_batch(windows))
        inputs: list[Any] = [{"input_ids": ids.to(device), "use_cache": False} for ids in batches]
        self.samples = record_inputs(self.model, self.layer_list, inputs)
        self._outputs: list[torch.Tensor] = []

    def walk(self, label: str, progress: bool | None) -> Iterator[tuple[str, int]]:
        """Load layer after layer, and yield its name and number; what takes one calls :meth:`outputs`."""
        with progress_bar(label, len(self.layer_list.layers), unit="layers", show=progress) as advance:
            for index, (name, layer) in enumerate(self.layer_list.items()):
                self.store.load(name, layer)
                yield name, index
                for sample, hidden in zip(self.samples, self._outputs, strict=True):
                    sample.hidden = hidden
                self.store.release(name, layer)
                advance(1)

    def outputs(self, index: int) -> list[torch.Tensor]:
        """Run a layer on all samples; the next layer reads what comes out, whatever happens to this one after."""
        self._outputs = [run_layer(self.layer_list.layers[index], sample, index) for sample in self.samples]
        return self._outputs

    def output(self, index: int) -> torch.Tensor:
        """Run a layer on the first sample, as it is now; what later layers read of this one stays what it was."""
        return run_layer(self.layer_list.layers[index], self.samples[0].apart(), index)

    def modules(self, names: Iterable[str]) -> dict[str, nn.Module]:
        """Return modules of the model by name."""
        return {name: self.model.get_submodule(name) for name in names}
