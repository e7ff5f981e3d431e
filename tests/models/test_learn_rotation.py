"""Learning an orthogonal matrix after which patterns remove what costs little."""

from __future__ import annotations

import pytest
import torch

from slidesparse.models import learn_rotation
from slidesparse.models.learn_rotation import Costed, energy, learn, mean_damage, random_rotation, readers, writer

HIDDEN, GROUP = 48, 6


def correlated(columns: int, draw: torch.Generator) -> torch.Tensor:
    """A gram matrix with few strong directions."""
    x = torch.randn(400, columns, generator=draw) @ torch.randn(columns, columns, generator=draw)
    x = x * torch.logspace(0, -2, columns)
    return x.T @ x


def sets(count: int = 4) -> list[Costed]:
    draw = torch.Generator().manual_seed(0)
    found: list[Costed] = []
    for _ in range(count // 2):
        weight, other = torch.randn(60, HIDDEN, generator=draw), torch.randn(HIDDEN, 60, generator=draw)
        found.append(readers(weight, correlated(HIDDEN, draw), draw))
        found.append(writer(other, correlated(60, draw), GROUP, draw))
    return found


@pytest.mark.parametrize("size", [48, 64])
def test_a_start_is_orthogonal_and_its_own(size: int) -> None:
    q = random_rotation(size, 0)
    torch.testing.assert_close(q @ q.T, torch.eye(size), rtol=1e-5, atol=1e-5)
    assert torch.equal(q, random_rotation(size, 0))
    assert not torch.equal(q, random_rotation(size, 1))


def test_few_sets_at_a_time_learn_what_all_do(monkeypatch: pytest.MonkeyPatch) -> None:
    found, start = sets(8), random_rotation(HIDDEN, 0)
    before = mean_damage(torch.eye(HIDDEN), found, GROUP)
    seen: list[float] = []

    def learned(sets_of_a_step: int) -> torch.Tensor:
        monkeypatch.setattr(learn_rotation, "SETS_OF_A_STEP", sets_of_a_step)
        return learn(start, found, GROUP, 60, advance=lambda _, note: seen.append(float(note.split()[-1])))

    one, some = learned(8), learned(2)
    for q in (one, some):
        torch.testing.assert_close(q @ q.T, torch.eye(HIDDEN), rtol=1e-5, atol=1e-5)
    all_at_once, sampled = (mean_damage(q, found, GROUP) for q in (one, some))
    assert all_at_once < 0.7 * before
    assert sampled < all_at_once + 0.2 * (before - all_at_once)
    assert len(seen) == 120
    assert seen[59] < seen[0]


def test_some_rows_and_columns_stand_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = torch.Generator().manual_seed(0)
    weight, gram = torch.randn(2000, HIDDEN, generator=draw), correlated(HIDDEN, draw)
    wide = torch.randn(HIDDEN, 300, generator=draw)
    q = random_rotation(HIDDEN, 0)

    def damages() -> list[float]:
        made = (readers(weight, gram, draw), writer(wide, torch.eye(300), GROUP, draw))
        return [mean_damage(q, [one], GROUP) for one in made]

    whole = damages()
    monkeypatch.setattr(learn_rotation, "MOST_ROWS", 100)
    assert len(readers(weight, gram, draw).weight) == 100
    some = writer(wide, torch.eye(300), GROUP, draw)
    assert some.weight.shape == (HIDDEN, 96)
    groups = wide.unflatten(1, (-1, GROUP))
    assert any(torch.equal(some.weight[:, :GROUP], groups[:, number]) for number in range(50))
    assert damages() == pytest.approx(whole, rel=0.2)


def test_inputs_that_are_all_zero_do_no_harm() -> None:
    made = readers(torch.randn(4, HIDDEN), torch.zeros(HIDDEN, HIDDEN), torch.Generator())
    assert made.energy == 0
    assert bool(made.matrix.isfinite().all())


def test_an_energy_is_that_of_the_outputs() -> None:
    x, weight = torch.randn(50, 7), torch.randn(5, 7)
    assert energy(weight, x.T @ x) == pytest.approx(float((x @ weight.T).square().sum()), rel=1e-4)
