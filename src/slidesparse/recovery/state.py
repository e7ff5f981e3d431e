"""Saved states of a run, of safetensors and JSON; any number of processes may resume from one.

A state is the weights, AdamW's moments and the number of steps: the order of windows is a function of the step, and
nothing is drawn at random. Each process writes its parts of the tensors, which FSDP2 divides by rows, into a file of
its own. A state gets its name once it is complete, and then replaces the one before.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from slidesparse.base.ranks import Ranks
from slidesparse.base.typed_json import decode
from slidesparse.errors import CheckpointError, SlideSparseError
from slidesparse.files.data_digest import data_digest
from slidesparse.files.json_files import read_json, write_json
from slidesparse.files.stored import STORED_NAMES, Stored
from slidesparse.files.tensor_reader import TensorReader
from slidesparse.files.tensor_writer import TensorWriter

NAME, PROGRESS = "step-", "progress.json"


@dataclass
class Progress:
    """Progress of a run: steps, seconds of training, and the mean loss of each step.

    ``left_out`` steps had a loss of NaN or Inf; the last ``in_a_row`` steps are among them. ``before`` are the figures
    of the pruned model.
    """

    step: int = 0
    seconds: float = 0.0
    left_out: int = 0
    in_a_row: int = 0
    losses: list[float] = field(default_factory=list)
    before: dict[str, float] = field(default_factory=dict)


class State:
    """State of a run, in a folder that all processes see.

    ``parameters`` are the trained ones by name; ``optimizer`` is an AdamW that has made no step.
    """

    def __init__(self, folder: Path, parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
        self.folder, self.parameters, self.optimizer = folder, parameters, optimizer
        fused = bool(optimizer.defaults.get("fused"))
        for parameter in parameters.values():  # as AdamW makes them in its first step
            optimizer.state[parameter] = {
                "step": torch.zeros((), device=parameter.device if fused else "cpu"),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }

    def _tensors(self) -> dict[str, torch.Tensor]:
        states = self.optimizer.state
        both = {name: {"weight": one.detach(), **states[one]} for name, one in self.parameters.items()}
        return {f"{name}:{key}": value for name, state in both.items() for key, value in state.items()}

    def save(self, progress: Progress, ranks: Ranks) -> None:
        """Save the state, all processes together; after an OSError the previous state is still there."""
        final = self.folder / f"{NAME}{progress.step:08}"
        new = final.with_suffix(".tmp")
        if ranks.is_first:
            shutil.rmtree(new, ignore_errors=True)
            new.mkdir()
        ranks.wait()
        try:
            own = self._write(new / _file(ranks.rank))
        except OSError:
            if ranks.is_first:
                shutil.rmtree(new, ignore_errors=True)
            raise
        digests = ranks.gather(own)
        if ranks.is_first:
            content = {"progress": asdict(progress), "digests": digests}
            write_json(new / PROGRESS, {**content, "seal": _seal(content)})
            shutil.rmtree(final, ignore_errors=True)  # of a run that began anew
            new.rename(final)
            for other in self.folder.glob(f"{NAME}*"):
                if other != final:
                    shutil.rmtree(other)
        ranks.wait()

    def _write(self, path: Path) -> dict[str, str]:
        """Write this process's parts, and return their digests."""
        own = {name: _own(one) for name, one in self._tensors().items()}
        stored = {name: Stored(STORED_NAMES[one.dtype], tuple(one.shape)) for name, one in own.items()}
        with TensorWriter(path, stored) as writer:
            for name, one in own.items():
                writer.write(name, one.cpu())
        return writer.digests

    def load(self, ranks: Ranks) -> Progress:
        """Load the last state and return its progress, zero where there is none.

        Raises:
            CheckpointError: The state cannot be read, or is not what was written.
        """
        saved = last_saved(self.folder)
        ranks.wait()
        if saved is None:
            return Progress()
        try:
            return self._loaded(saved, ranks)
        except SlideSparseError as error:
            raise CheckpointError.of(error, f"remove {self.folder.parent} and run again") from error

    @torch.no_grad()
    def _loaded(self, saved: Path, ranks: Ranks) -> Progress:
        content = read_json(saved / PROGRESS)
        if content.pop("seal", None) != _seal(content):
            raise CheckpointError(f"{saved / PROGRESS} is damaged", got="other content than was written")
        progress: Progress = decode(Progress, content.get("progress"), "progress")
        digests = decode(list[dict[str, str]], content.get("digests"), "digests")
        readers = [TensorReader(saved / _file(rank)) for rank in range(len(digests))]

        def part(rank: int, name: str) -> torch.Tensor:
            value = readers[rank].tensor(name)
            if digests[rank].get(name) != data_digest(value):
                raise CheckpointError(f"{readers[rank].path} is damaged", got=f"other data of {name} than were written")
            return value

        for name, tensor in self._tensors().items():
            if not isinstance(tensor, DTensor) or len(readers) == ranks.world:
                value = part(ranks.rank if isinstance(tensor, DTensor) else 0, name)
            else:  # FSDP2 divides the first dimension
                whole = torch.cat([part(rank, name) for rank in range(len(readers))]).to(tensor.device)
                value = _own(distribute_tensor(whole, tensor.device_mesh, tensor.placements, src_data_rank=None))
            own = _own(tensor)
            if value.shape != own.shape:
                raise CheckpointError(f"{saved} is damaged", got=f"{list(value.shape)} as {name}")
            own.copy_(value)
        return progress


def _own(tensor: torch.Tensor) -> torch.Tensor:
    """Return this process's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _file(rank: int) -> str:
    return f"rank-{rank}.safetensors"


def _seal(content: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def last_saved(folder: Path) -> Path | None:
    """Return the folder of the last complete state; None where there is none."""
    return max((one for one in folder.glob(f"{NAME}*") if one.suffix != ".tmp"), default=None)


def describe_saved(folder: Path, steps: int | None) -> str:
    """Describe the last state of a run that ended early."""
    saved = last_saved(folder)
    if saved is None:
        return "the text cut into windows"  # for the other processes
    return f"the state after step {int(saved.name.removeprefix(NAME))}" + ("" if steps is None else f" of {steps}")
