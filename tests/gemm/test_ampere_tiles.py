"""The tiles of the kernel for ``mma.sync``: they fit every card, and prompts and decoding get the right ones."""

from __future__ import annotations

from itertools import product

import pytest

from slidesparse.gemm.ampere.tiles import TILES, Card, MmaTile, cheapest, choose_bands, fitting
from slidesparse.gemm.launch import TOKEN_STEP
from slidesparse.gemm.steps import StepForm

A100, H200, L40S = Card(108, 166_912, 2), Card(132, 232_448, 2), Card(142, 101_376, 4)
CARDS = {"A100": A100, "H200": H200, "L40S": L40S}
FORMS = [StepForm(42, 0, bits, dense) for bits in (8, 6) for dense in (False, True)]


@pytest.mark.parametrize("card", CARDS.values(), ids=CARDS)
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_every_card_has_tiles_for_every_form(form: StepForm, card: Card) -> None:
    tiles = fitting(form, 1, card)
    assert any(tile.tokens == 16 for tile in tiles)
    assert any(tile.tokens >= 64 for tile in tiles)
    for tile in tiles:
        assert tile.shared_bytes(1, 0, form.value_bits) <= card.shared_bytes
        assert tile.stages >= 3
        assert tile.dense == form.dense


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_sums_leave_registers_for_operands(tile: MmaTile) -> None:
    assert 4 * tile.row_blocks * tile.token_blocks <= 192
    assert tile.threads <= 256
    assert 256 % tile.channels == 0
    assert tile.tokens % TOKEN_STEP == 0  # so that choices between multiples are those of the next one
    assert tile.split & (tile.split - 1) == 0


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_prompts_take_large_tiles_and_decoding_small_ones(form: StepForm) -> None:
    for card in CARDS.values():
        large, small = (cheapest(tokens, 37888, form, 1, card) for tokens in (4096, 16))
        assert large.tokens * large.channels >= 128 * 64
        assert small.tokens == 16
        assert small.split > 1


def test_two_bands_run_where_a_last_wave_would_be_nearly_empty() -> None:
    form = StepForm(42, 0, 6)
    both = choose_bands(64, 37888, form, 1, H200)  # as measured there: results/h200/mma-sync.jsonl
    assert [f"{band.channels} in {band.tile}" for band in both] == ["33792 in 64x128/2", "4096 in 32x64/4"]
    for card, channels, tokens in product(CARDS.values(), (100, 3584, 37888), range(16, 4097, 80)):
        bands = choose_bands(tokens, channels, form, 1, card)
        assert sum(band.channels for band in bands) == channels
        assert all(band.channels % 256 == 0 for band in bands[:-1])
        one, cycles = (
            cheapest(tokens, channels, form, 1, card),
            [band.tile.cycles(tokens, band.channels, form, 1, card) for band in bands],
        )
        assert sum(cycles) <= one.cycles(tokens, channels, form, 1, card)


def test_a_tile_is_named_by_its_sizes() -> None:
    assert str(MmaTile(2, 2, split=8)) == "16x32/8"
    assert str(MmaTile(4, 12, 2, 2)) == "192x128"
