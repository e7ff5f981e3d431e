from __future__ import annotations

import pytest
import torch
from hypothesis import settings

# Deadlines time the machine, not the code; a derandomised run fails for everybody or for nobody.
settings.register_profile("suite", deadline=None, derandomize=True, max_examples=60)
settings.load_profile("suite")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
