"""Saved states of a run, by torch.distributed.checkpoint; any number of processes may resume from one.

A state is the weights, AdamW's moments and the number of steps: the order of windows is a function of the step, and
nothing is drawn at random. A state gets its name once it is complete, and then replaces the one before.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from slidesparse.base.ranks import Ranks
from slidesparse.base.typed_json import decode
from slidesparse.errors import CheckpointError, first_line
from slidesparse.files.json_files import read_json, write_json

NAME, PROGRESS = "step-", "progress.json"


@dataclass
class Progress:
    """Progress of a run: steps, seconds of training, and the mean loss of each step.

    ``left_out`` steps had a loss of NaN or Inf; the last ``in_a_row`` steps are among them.
    """

    step: int = 0
    seconds: float = 0.0
    left_out: int = 0
    in_a_row: int = 0
    losses: list[float] = field(default_factory=list)


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

    def _tensors(self) -> dict[str, Any]:
        states = self.optimizer.state
        return {name: {"weight": one.detach(), **states[one]} for name, one in self.parameters.items()}

    def save(self, progress: Progress, ranks: Ranks) -> None:
        """Save the state, all processes together; after an OSError the previous state is still there."""
        final = self.folder / f"{NAME}{progress.step:08}"
        new = final.with_suffix(".tmp")
        if ranks.is_first:
            shutil.rmtree(new, ignore_errors=True)
        ranks.wait()
        try:
            save(self._tensors(), checkpoint_id=new)
        except CheckpointException as error:
            raise next(iter(error.failures.values()))[0] from error
        if ranks.is_first:
            write_json(new / PROGRESS, asdict(progress))
            shutil.rmtree(final, ignore_errors=True)  # of a run that began anew
            new.rename(final)
            for other in self.folder.glob(f"{NAME}*"):
                if other != final:
                    shutil.rmtree(other)
        ranks.wait()

    def load(self, ranks: Ranks) -> Progress:
        """Load the last state and return its progress, zero where there is none.

        Raises:
            CheckpointError: The state cannot be read.
        """
        saved = last_saved(self.folder)
        ranks.wait()
        if saved is None:
            return Progress()
        progress: Progress = decode(Progress, read_json(saved / PROGRESS), "progress")
        try:
            load(self._tensors(), checkpoint_id=saved)
        except (CheckpointException, OSError, RuntimeError) as error:
            remedy = f"remove {self.folder.parent} and run again"
            raise CheckpointError(f"{saved} cannot be read", got=first_line(error), remedy=remedy) from error
        return progress


def last_saved(folder: Path) -> Path | None:
    """Return the folder of the last complete state; None where there is none."""
    return max((one for one in folder.glob(f"{NAME}*") if one.suffix != ".tmp"), default=None)


def describe_saved(folder: Path, steps: int | None) -> str:
    """Describe the work that is left of a run that ended early: the last state, or the windows where there is none."""
    saved = last_saved(folder)
    if saved is None:
        return "the text cut into windows"
    return f"the state after step {int(saved.name.removeprefix(NAME))}" + ("" if steps is None else f" of {steps}")
