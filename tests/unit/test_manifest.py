"""Manifests: every field counts, nothing else does, and a difference is named."""

from __future__ import annotations

import dataclasses
import json

import pytest

from kvmoverd.core.errors import BadManifest
from kvmoverd.core.layout import Layout
from kvmoverd.core.manifest import Manifest, Namespace, first_difference, stored_manifest

LAYOUT = Layout(block_tokens=64, layers=((41_984,), (128, 128)))
MANIFEST = Manifest("model", b"w" * 32, b"t" * 32, LAYOUT, "fp8")
FINGERPRINT = "01fe356989adfb3e1454528476c4fdd2c6c8d54b9022fda12515edd95ffcd6d0"
OTHERS: dict[str, object] = {
    "model_id": "model2",
    "weights_digest": b"W" * 32,
    "tokenizer_digest": b"T" * 32,
    "layout": Layout(block_tokens=64, layers=((41_984,), (256,))),
    "dtype": "bf16",
    "rope_scaling": "yarn-4",
    "parallel_geometry": "tp=0/8",
    "lora_id": "adapter",
    "tenant": "acme",
    "epoch": 1,
}


def changed(name: str) -> Manifest:
    return dataclasses.replace(MANIFEST, **{name: OTHERS[name]})  # type: ignore[arg-type]


def test_the_table_above_covers_every_field() -> None:
    assert set(OTHERS) == {field.name for field in dataclasses.fields(Manifest)}


@pytest.mark.parametrize("name", OTHERS)
def test_every_field_changes_the_fingerprint_and_is_named_when_it_differs(name: str) -> None:
    assert Namespace(changed(name)).fingerprint != Namespace(MANIFEST).fingerprint
    assert first_difference(MANIFEST.canonical(), changed(name)) == name


def test_equal_manifests_are_one_namespace() -> None:
    twin = Namespace(dataclasses.replace(MANIFEST))
    assert twin == Namespace(MANIFEST) and hash(twin) == hash(Namespace(MANIFEST))
    assert first_difference(MANIFEST.canonical(), twin.manifest) == ""


def test_the_fingerprint_is_the_same_in_every_process_and_version() -> None:
    assert Namespace(MANIFEST).fingerprint.hex() == FINGERPRINT


@pytest.mark.parametrize("stored", [b"", b"{", b"[1]", b"null", b"\xff\xfe"])
def test_a_stored_manifest_that_is_no_manifest_is_unreadable(stored: bytes) -> None:
    assert first_difference(stored, MANIFEST) == "unreadable"


def test_a_stored_manifest_of_another_format_is_named() -> None:
    stored = {**json.loads(MANIFEST.canonical()), "format": 2}
    assert first_difference(json.dumps(stored).encode(), MANIFEST) == "format"


def test_the_epochs_of_a_model_are_one_family_and_other_models_are_not() -> None:
    assert changed("epoch").family() == MANIFEST.family()
    assert all(changed(name).family() != MANIFEST.family() for name in OTHERS if name != "epoch")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("weights_digest", b"", "weights_digest has 0 bytes, must have 16 to 64"),
        ("tokenizer_digest", b"x" * 65, "tokenizer_digest has 65 bytes"),
        ("model_id", "", "model_id has 0 characters"),
        ("dtype", "x" * 65, "dtype has 65 characters"),
        ("parallel_geometry", "", "parallel_geometry has 0 characters"),
        ("epoch", -1, "epoch is -1"),
        ("epoch", 1 << 32, "epoch is 4294967296"),
    ],
)
def test_a_field_outside_its_bounds_is_refused_with_its_name(name: str, value: object, message: str) -> None:
    with pytest.raises(BadManifest, match=message):
        dataclasses.replace(MANIFEST, **{name: value})  # type: ignore[arg-type]


def test_the_stored_bytes_give_the_manifest_back() -> None:
    for manifest in (MANIFEST, *map(changed, OTHERS)):
        assert stored_manifest(manifest.canonical()) == manifest


@pytest.mark.parametrize(
    "stored",
    [
        b"",
        b"[]",
        b"{}",
        b"\xff",
        MANIFEST.canonical() + b" ",
        MANIFEST.canonical().replace(b'"format":1', b'"format":2'),
    ],
)
def test_bytes_that_are_no_canonical_manifest_are_refused(stored: bytes) -> None:
    with pytest.raises(BadManifest):
        stored_manifest(stored)
