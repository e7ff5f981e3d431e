"""Which links of a chain change their backend where the host is the slower side of a model in vLLM."""

from __future__ import annotations

import pytest

from slidesparse.gemm.chain import Link
from slidesparse.gemm.spec import Form, Route, Switch
from slidesparse.gemm.speed import LayerSpeed
from slidesparse.integrations.vllm.host_bound import HOST_US, unite

TOKENS = (512, 1024, 2048, 4096)
QUICK = (1.0, 1.0, 1.0, 1.0)
FORMS = Form("dense", (), 3), Form("hopper", (), 4)
SPARSE, MIXED = (Route(0, "hopper"),), (Route(0, "hopper"), Route(513, "dense"), Route(8192, "hopper"))


Times = tuple[float | None, ...]


def chain(*routes: tuple[Route, ...], forms: tuple[Form, ...] = FORMS) -> list[Link]:
    return [Link("none", 0.0, True, False, Switch(64 + i, "int8", forms, route)) for i, route in enumerate(routes)]


def speeds(links: list[Link], dense: Times, sparse: Times) -> dict[str, LayerSpeed]:
    us = {"dense": dense, "hopper": sparse}
    return {link.weight.to_text(): LayerSpeed("int8", 64, 64, TOKENS, us) for link in links}


def routes(links: list[Link]) -> list[tuple[Route, ...]]:
    return [link.weight.routes for link in links]


def test_links_stay_on_one_backend_up_to_where_the_gpu_is_the_slower_side() -> None:
    links, times = chain(SPARSE, MIXED), (10.0, HOST_US / 2, HOST_US, 4 * HOST_US)
    united, last = unite(links, speeds(links, times, times), 512)
    assert last == 2048
    assert routes(united) == [SPARSE, (Route(0, "hopper"), Route(2049, "dense"), Route(8192, "hopper"))]
    assert [link.weight.forms for link in united] == [link.weight.forms for link in links]


def test_the_gpu_must_be_done_first_on_that_backend() -> None:
    links, slow = chain(MIXED, MIXED), (1.0, 1.1 * HOST_US, 1.1 * HOST_US, 1.1 * HOST_US)
    assert unite(links, speeds(links, QUICK, slow), 512) == (links, 512)
    assert unite(links, speeds(links, slow, QUICK), 512)[1] == TOKENS[-1]


def test_what_has_a_graph_is_left_alone() -> None:
    before = Route(0, "dense"), Route(16, "hopper"), Route(1500, "dense")
    links = chain(SPARSE, before)
    known = speeds(links, QUICK, QUICK)
    assert unite(links, known, 4096) == (links, 4096)
    united, last = unite(links, known, 2048)
    assert last == 4096
    assert routes(united)[1] == (*before, Route(2049, "hopper"), Route(4097, "dense"))


def test_the_times_of_all_links_together_decide() -> None:
    links = chain(MIXED, MIXED)
    quick = speeds(links[1:], QUICK, QUICK)
    for share, last in ((1.9, 1024), (2.1, 512)):
        slow = speeds(links[:1], *2 * [(1.0, share * HOST_US, 9e9, 9e9)])
        assert unite(links, slow | quick, 512)[1] == last


@pytest.mark.parametrize("sparse", [(1.0, None, 1.0, 1.0), (None, None, None, None)])
def test_a_backend_without_a_time_is_not_taken(sparse: tuple[float | None, ...]) -> None:
    links = chain(MIXED, MIXED)
    assert unite(links, speeds(links, QUICK, sparse), 512) == (links, 512)


def test_without_times_or_a_form_in_common_nothing_changes() -> None:
    links = chain(MIXED, MIXED)
    known = speeds(links[:1], QUICK, QUICK)
    assert unite(links, known, 512) == (links, 512)
    alone = chain((Route(0, "dense"),), forms=FORMS[:1])
    both = links[:1] + alone
    assert unite(both, known | speeds(alone, QUICK, QUICK), 512) == (both, 512)
