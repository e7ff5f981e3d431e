from __future__ import annotations

import os

import pytest
import torch
from hypothesis import settings

# Without a GPU the kernels run in Triton's interpreter, which must be asked for before anything imports Triton.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# Deadlines time the machine, not the code; a derandomised run fails for everybody or for nobody.
settings.register_profile("suite", deadline=None, derandomize=True, max_examples=60)
settings.load_profile("suite")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
