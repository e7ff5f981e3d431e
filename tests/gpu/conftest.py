"""What tests of the Hopper kernel share."""

from __future__ import annotations

import pytest

from slidesparse.gemm.hopper.tiles import DENSE_TILES, TILES, Tile


@pytest.fixture(params=TILES, ids=str)
def tile(request: pytest.FixtureRequest) -> Tile:
    """Every tile in turn, whatever the sizes would choose."""
    chosen: Tile = request.param
    return chosen


@pytest.fixture(params=DENSE_TILES, ids=str)
def dense_tile(request: pytest.FixtureRequest) -> Tile:
    """Every tile for dense weights of six bits."""
    chosen: Tile = request.param
    return chosen
