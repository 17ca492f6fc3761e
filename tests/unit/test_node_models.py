"""Registered namespaces: bounded, and the bound locks nobody out."""

from __future__ import annotations

import dataclasses

import pytest
from node_kit import MANIFEST

from kvmoverd.core.errors import QueueFull, UnknownModel
from kvmoverd.core.manifest import Namespace
from kvmoverd.node import models
from kvmoverd.node.models import Models

FOUR = [Namespace(dataclasses.replace(MANIFEST, lora_id=f"adapter {number}")) for number in range(4)]


@pytest.fixture(autouse=True)
def three_may_be_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "NAMESPACES_MAX", 3)


def registered(known: Models) -> list[int]:
    return [number for number, namespace in enumerate(FOUR) if _knows(known, namespace)]


def _knows(known: Models, namespace: Namespace) -> bool:
    try:
        return known.get(namespace.fingerprint) == namespace
    except UnknownModel:
        return False


def full(*in_use: int) -> Models:
    """Three namespaces, registered in order; `in_use` of them are used."""
    known = Models(lambda: {FOUR[number].fingerprint for number in in_use})
    for namespace in FOUR[:3]:
        known.add(namespace)
    return known


def test_a_namespace_that_is_registered_again_is_the_same() -> None:
    known = full()
    again = Namespace(dataclasses.replace(MANIFEST, lora_id="adapter 1"))
    assert known.add(again) is FOUR[1]
    assert len(known) == 3


@pytest.mark.parametrize(("in_use", "left"), [((), [1, 2, 3]), ((0,), [0, 2, 3]), ((0, 1), [0, 1, 3])])
def test_a_new_namespace_takes_the_place_of_the_oldest_unused_one(in_use: tuple[int, ...], left: list[int]) -> None:
    known = full(*in_use)
    known.add(FOUR[3])
    assert registered(known) == left


def test_registering_again_makes_a_namespace_the_newest() -> None:
    known = full()
    known.add(FOUR[0])
    known.add(FOUR[3])
    assert registered(known) == [0, 2, 3]


def test_namespaces_that_are_all_in_use_leave_no_room_and_the_refusal_comes_before_the_store_is_asked() -> None:
    known = full(0, 1, 2)
    with pytest.raises(QueueFull, match="3 namespaces are in use, at most 3 may be") as refused:
        known.make_room(FOUR[3])
    assert refused.value.retryable
    known.make_room(FOUR[1])
    assert registered(known) == [0, 1, 2]


def test_making_room_is_enough_for_the_one_that_it_was_made_for() -> None:
    known = full()
    known.make_room(FOUR[3])
    assert registered(known) == [1, 2]
    known.make_room(FOUR[3])
    known.add(FOUR[3])
    assert registered(known) == [1, 2, 3]


def test_a_node_that_does_not_say_what_it_uses_loses_nothing() -> None:
    known = Models()
    for namespace in FOUR[:3]:
        known.add(namespace)
    with pytest.raises(QueueFull):
        known.add(FOUR[3])
    known.drop(FOUR[1])
    known.add(FOUR[3])
    assert registered(known) == [0, 2, 3]
