"""Which links of a chain change their backend where the host is the slower side of a model in vLLM."""

from __future__ import annotations

import pytest

from slidesparse.gemm.chain import Link
from slidesparse.gemm.speed import LayerSpeed
from slidesparse.gemm.switch import Form, Route, Switch
from slidesparse.integrations.vllm.host_bound import HOST_US, describe, unite

TOKENS = (512, 1024, 2048, 4096)
QUICK = (1.0, 1.0, 1.0, 1.0)
FORMS = Form("dense", (), 3), Form("hopper", (), 4)
SPARSE, MIXED = (Route(0, "hopper"),), (Route(0, "hopper"), Route(513, "dense"), Route(8192, "hopper"))


Times = tuple[float | None, ...]


def chain(*routes: tuple[Route, ...], forms: tuple[Form, ...] = FORMS) -> list[Link]:
    return [Link("none", 0.0, True, False, Switch(64 + i, "int8", forms, route)) for i, route in enumerate(routes)]


def speeds(
    links: list[Link], dense: tuple[float | None, ...], sparse: tuple[float | None, ...]
) -> dict[str, LayerSpeed]:
    us = {"dense": dense, "hopper": sparse}
    return {link.weight.to_text(): LayerSpeed("int8", 64, 64, TOKENS, us) for link in links}


def routes(links: list[Link]) -> list[tuple[Route, ...]]:
    return [link.weight.routes for link in links]


def test_links_stay_on_one_backend_up_to_where_the_gpu_is_the_slower_side() -> None:
    links = chain(SPARSE, MIXED)
    times = (10.0, HOST_US / 2, HOST_US, 4 * HOST_US)
    united = unite(links, speeds(links, times, times), 512)
    assert routes(united) == [SPARSE, (Route(0, "hopper"), Route(2049, "dense"), Route(8192, "hopper"))]
    line = "slidesparse: linears in a row all run on hopper from 513 to 2048 tokens: the host is slower there"
    assert describe(united, 512) == line
    assert [link.weight.forms for link in united] == [link.weight.forms for link in links]


def test_what_has_a_graph_is_left_alone() -> None:
    before = Route(0, "dense"), Route(16, "hopper"), Route(1500, "dense")
    links = chain(SPARSE, before)
    known = speeds(links, QUICK, QUICK)
    assert routes(unite(links, known, 4096)) == routes(links)
    assert routes(unite(links, known, 2048))[1] == (*before, Route(2049, "hopper"), Route(4097, "dense"))


def test_the_times_of_all_links_together_decide() -> None:
    links = chain(MIXED, MIXED)
    quick = speeds(links[1:], QUICK, QUICK)
    for share, first_dense in ((1.9, 1025), (2.1, 513)):
        slow = speeds(links[:1], *2 * [(1.0, share * HOST_US, 9e9, 9e9)])
        assert routes(unite(links, slow | quick, 512))[0][1] == Route(first_dense, "dense")


@pytest.mark.parametrize("sparse", [(1.0, None, 1.0, 1.0), (None, None, None, None)])
def test_a_backend_without_a_time_is_not_taken(sparse: tuple[float | None, ...]) -> None:
    links = chain(MIXED, MIXED)
    assert routes(unite(links, speeds(links, QUICK, sparse), 512)) == routes(links)


def test_without_times_or_a_form_in_common_nothing_changes() -> None:
    links = chain(MIXED, MIXED)
    known = speeds(links[:1], QUICK, QUICK)
    assert routes(unite(links, known, 512)) == routes(links)
    alone = chain((Route(0, "dense"),), forms=FORMS[:1])
    both = links[:1] + alone
    assert routes(unite(both, known | speeds(alone, QUICK, QUICK), 512)) == routes(both)
