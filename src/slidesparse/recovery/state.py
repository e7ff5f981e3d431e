"""Saved states of a run, of safetensors; any number of processes may resume from one.

A state is the weights, AdamW's moments and the number of steps: the order of windows is a function of the step, and
nothing is drawn at random. Each process writes its parts of the tensors, which FSDP2 divides by rows, into a file of
its own with digests; the first one's holds the progress too, as bytes of JSON. A state gets its name once it is
complete, and then replaces the one before.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from slidesparse.base.ranks import Ranks
from slidesparse.base.typed_json import decode, parse_json
from slidesparse.errors import CheckpointError, SlideSparseError
from slidesparse.files.tensor_reader import TensorReader
from slidesparse.files.tensor_writer import write_tensors

NAME, FILE, PROGRESS = "step-", "rank-{}.safetensors", "progress"


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
        own = {name: _own(one) for name, one in self._tensors().items()}
        if ranks.is_first:
            own[PROGRESS] = torch.frombuffer(bytearray(json.dumps(asdict(progress)).encode()), dtype=torch.uint8)
        try:
            write_tensors(new / FILE.format(ranks.rank), own)
        except OSError:
            if ranks.is_first:
                shutil.rmtree(new, ignore_errors=True)
            raise
        ranks.wait()
        if ranks.is_first:
            shutil.rmtree(final, ignore_errors=True)  # of a run that began anew
            new.rename(final)
            for other in self.folder.glob(f"{NAME}*"):
                if other != final:
                    shutil.rmtree(other)
        ranks.wait()

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
        readers = [TensorReader(saved / FILE.format(rank)) for rank in range(len([*saved.iterdir()]) or 1)]
        written = parse_json(readers[0].verified(PROGRESS).numpy().tobytes(), PROGRESS)
        progress: Progress = decode(Progress, written, PROGRESS)
        for name, tensor in self._tensors().items():
            if not isinstance(tensor, DTensor) or len(readers) == ranks.world:
                value = readers[ranks.rank if isinstance(tensor, DTensor) else 0].verified(name)
            else:  # FSDP2 divides the first dimension
                whole = torch.cat([one.verified(name) for one in readers]).to(tensor.device)
                value = _own(distribute_tensor(whole, tensor.device_mesh, tensor.placements, src_data_rank=None))
            own = _own(tensor)
            if value.shape != own.shape:
                raise CheckpointError(f"{saved} is damaged", got=f"{list(value.shape)} as {name}")
            own.copy_(value)
        return progress


def _own(tensor: torch.Tensor) -> torch.Tensor:
    """Return this process's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def last_saved(folder: Path) -> Path | None:
    """Return the folder of the last complete state; None where there is none."""
    return max((one for one in folder.glob(f"{NAME}*") if one.suffix != ".tmp"), default=None)


def describe_saved(folder: Path, steps: int | None) -> str:
    """Describe the last state of a run that ended early."""
    saved = last_saved(folder)
    if saved is None:
        return "the text cut into windows"  # for the other processes
    return f"the state after step {int(saved.name.removeprefix(NAME))}" + ("" if steps is None else f" of {steps}")
