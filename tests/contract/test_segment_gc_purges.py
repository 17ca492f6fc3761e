"""Garbage collection of what was purged: unknown at once, and its bytes gone after the grace."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from gc_kit import RECORDS, SPACE, MakeNode, Node, namespace, nodes_over

pytestmark = pytest.mark.contract


@pytest.fixture
def node(tmp_path: Path) -> Iterator[MakeNode]:
    with nodes_over(tmp_path) as make:
        yield make


def test_a_purged_namespace_is_gone_at_once_and_its_bytes_after_the_grace(node: MakeNode) -> None:
    one, other = node("a.1"), node("b.1")
    two = namespace("other")
    one.open(two)
    keys, kept = one.fill(2), one.fill(1, two)
    other.follow()
    assert other.known(keys[0]) == RECORDS
    one.purges.purge(SPACE)
    assert one.known([key for some in keys for key in some]) == 0
    other.purges.poll()
    assert other.known([key for some in keys for key in some]) == 0, "without a look at any log"
    one.collect()
    one.pass_grace()
    assert one.known(kept[0], two) == RECORDS
    present = {segment.header.fingerprint for segment in _open(one)}
    assert present == {two.fingerprint}, "also the segment that was being filled"
    again = one.put([keys[0][0]])
    assert again[0].place is not None and one.reads(keys[0][0]), "it can be stored anew"


def test_a_tenants_purge_takes_the_segments_of_all_its_namespaces(node: MakeNode) -> None:
    one = node()
    spaces = [namespace("m1", "acme"), namespace("m2", "acme"), namespace("m1", "other")]
    keys = {}
    for space in spaces:
        one.open(space)
        keys[space.fingerprint] = one.fill(1, space)[0]
    one.purges.purge_tenant("acme")
    one.collect()
    one.pass_grace()
    assert [one.known(keys[space.fingerprint], space) for space in spaces] == [0, 0, RECORDS]
    assert {segment.header.fingerprint for segment in _open(one)} == {spaces[2].fingerprint}


def _open(one: Node) -> list:
    """What is open and there, of this node's own."""
    numbers = [int(name.removesuffix(".seg")) for name in one.segments()]
    found = [one.files.take(one.own(), number) for number in numbers]
    for segment in found:
        one.files.let_go(segment.fd)
    return found
