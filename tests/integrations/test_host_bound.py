"""Which linears of a chain change their backend where the host is the slower side of a model in vLLM."""

from __future__ import annotations

import pytest

from slidesparse.gemm.spec import FormSpec, LinearSpec, Route, WeightSpec
from slidesparse.gemm.speed import LayerSpeed
from slidesparse.integrations.vllm.host_bound import HOST_US, keep_one_backend

TOKENS = (512, 1024, 2048, 4096)
QUICK = (1.0, 1.0, 1.0, 1.0)
FORMS = FormSpec("dense", (), 3), FormSpec("hopper", (), 4)
SPARSE, MIXED = (Route(0, "hopper"),), (Route(0, "hopper"), Route(513, "dense"), Route(8192, "hopper"))


Times = tuple[float | None, ...]


def chain(*routes: tuple[Route, ...], forms: tuple[FormSpec, ...] = FORMS) -> list[LinearSpec]:
    return [
        LinearSpec("none", 0.0, True, False, WeightSpec(64 + i, "int8", forms, route)) for i, route in enumerate(routes)
    ]


def speeds(linears: list[LinearSpec], dense: Times, sparse: Times) -> dict[str, LayerSpeed]:
    us = {"dense": dense, "hopper": sparse}
    return {linear.weight.text: LayerSpeed("int8", 64, 64, TOKENS, us) for linear in linears}


def routes(linears: list[LinearSpec]) -> list[tuple[Route, ...]]:
    return [linear.weight.routes for linear in linears]


def test_linears_stay_on_one_backend_up_to_where_the_gpu_is_the_slower_side() -> None:
    linears, times = chain(SPARSE, MIXED), (10.0, HOST_US / 2, HOST_US, 4 * HOST_US)
    routed, last = keep_one_backend(linears, speeds(linears, times, times), 512)
    assert last == 2048
    assert routes(routed) == [SPARSE, (Route(0, "hopper"), Route(2049, "dense"), Route(8192, "hopper"))]
    assert [linear.weight.forms for linear in routed] == [linear.weight.forms for linear in linears]


def test_what_has_a_graph_is_left_alone() -> None:
    before = Route(0, "dense"), Route(16, "hopper"), Route(1500, "dense")
    linears = chain(SPARSE, before)
    known = speeds(linears, QUICK, QUICK)
    assert keep_one_backend(linears, known, 4096) == (linears, 4096)
    routed, last = keep_one_backend(linears, known, 2048)
    assert last == 4096
    assert routes(routed)[1] == (*before, Route(2049, "hopper"), Route(4097, "dense"))


def test_the_times_of_all_linears_together_decide() -> None:
    linears = chain(MIXED, MIXED)
    quick = speeds(linears[1:], QUICK, QUICK)
    for share, last in ((1.9, 1024), (2.1, 512)):
        slow = speeds(linears[:1], *2 * [(1.0, share * HOST_US, 9e9, 9e9)])
        assert keep_one_backend(linears, slow | quick, 512)[1] == last


def test_without_times_or_a_form_in_common_nothing_changes() -> None:
    linears = chain(MIXED, MIXED)
    known = speeds(linears[:1], QUICK, QUICK)
    assert keep_one_backend(linears, known, 512) == (linears, 512)
    alone = chain((Route(0, "dense"),), forms=FORMS[:1])
    both = linears[:1] + alone
    assert keep_one_backend(both, known | speeds(alone, QUICK, QUICK), 512) == (both, 512)


SLOW, GROWING = (1.0, *3 * (1.1 * HOST_US,)), (1.0, HOST_US / 4, HOST_US / 2, HOST_US)


@pytest.mark.parametrize(
    ("dense", "sparse", "share", "last"),
    [
        (QUICK, SLOW, 1, 512),  # the GPU must be done first on that backend
        (SLOW, QUICK, 1, 4096),
        (QUICK, (1.0, None, 1.0, 1.0), 1, 512),
        (QUICK, (None, None, None, None), 1, 512),
        *((GROWING, GROWING, *told) for told in ((1, 4096), (0.5, 2048), (0.25, 1024), (0.2, 512), (0, 512))),
    ],
)
def test_how_far_one_backend_is_kept(dense: Times, sparse: Times, share: float, last: int) -> None:
    """By the share of the usual time that the user says the host takes."""
    linears = chain(MIXED, MIXED)
    routed, found = keep_one_backend(linears, speeds(linears, dense, sparse), 512, share * HOST_US)
    assert found == last
    assert (routed == linears) == (last == 512)
