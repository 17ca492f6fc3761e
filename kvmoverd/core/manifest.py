"""Identity of a namespace: everything that makes two KV caches interchangeable, and its fingerprint."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from functools import cached_property

from kvmoverd.core.errors import BadManifest, KvmoverError
from kvmoverd.core.layout import Layout

DIGEST_BYTES = range(16, 65)
FORMAT = 1


@dataclass(frozen=True)
class Manifest:
    """Fields as in `common.proto`. Raises `BadManifest` for a field outside its bounds; an absent digest never matches."""

    model_id: str
    weights_digest: bytes
    tokenizer_digest: bytes
    layout: Layout
    dtype: str
    rope_scaling: str = ""
    parallel_geometry: str = "replicated"
    lora_id: str = ""
    tenant: str = ""
    epoch: int = 0

    def __post_init__(self) -> None:
        for name, low, high in _TEXTS:
            size = len(getattr(self, name))
            if not low <= size <= high:
                raise BadManifest(f"{name} has {size} characters, must have {low} to {high}")
        for name in ("weights_digest", "tokenizer_digest"):
            size = len(getattr(self, name))
            if size not in DIGEST_BYTES:
                raise BadManifest(f"{name} has {size} bytes, must have 16 to 64: an absent digest never matches")
        if not 0 <= self.epoch < 1 << 32:
            raise BadManifest(f"epoch is {self.epoch}, must be 0 to {(1 << 32) - 1}")

    def canonical(self) -> bytes:
        """The bytes that are hashed and stored: JSON with sorted keys, digests in hex."""
        return json.dumps(_plain(self), sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()

    def family(self) -> bytes:
        """32 bytes that all epochs of this model share."""
        return hashlib.blake2b(dataclasses.replace(self, epoch=0).canonical(), digest_size=32).digest()


_TEXTS = (
    ("model_id", 1, 256),
    ("dtype", 1, 64),
    ("rope_scaling", 0, 256),
    ("parallel_geometry", 1, 64),
    ("lora_id", 0, 256),
    ("tenant", 0, 128),
)


@dataclass(frozen=True)
class Namespace:
    """A manifest under its fingerprint: BLAKE2b-256 of the canonical bytes."""

    manifest: Manifest

    @cached_property
    def fingerprint(self) -> bytes:
        return hashlib.blake2b(self.manifest.canonical(), digest_size=32).digest()

    @cached_property
    def layout(self) -> Layout:
        return self.manifest.layout

    def __hash__(self) -> int:
        return hash(self.fingerprint)


def first_difference(stored: bytes, manifest: Manifest) -> str:
    """Name of the first field in which a stored canonical manifest differs, or "" when equal, or "unreadable"."""
    try:
        there = json.loads(stored)
    except ValueError:
        return "unreadable"
    here = _plain(manifest)
    if not isinstance(there, dict):
        return "unreadable"
    return next((name for name in here if there.get(name) != here[name]), "")


def stored_manifest(stored: bytes) -> Manifest:
    """The manifest of its canonical bytes. Raises `BadManifest` for bytes that are not the canonical form of any."""
    try:
        fields = json.loads(stored)
        there = fields.pop("format")
        for name in ("weights_digest", "tokenizer_digest"):
            fields[name] = bytes.fromhex(fields[name])
        layout = fields.pop("layout")
        layers = tuple(tuple(segments) for segments in layout["layers"])
        manifest = Manifest(layout=Layout(layout["block_tokens"], layers), **fields)
    except (ValueError, KeyError, TypeError, AttributeError, KvmoverError) as error:
        raise BadManifest(f"{len(stored)} bytes are no manifest: {type(error).__name__}: {error}") from error
    if there != FORMAT or manifest.canonical() != stored:
        raise BadManifest(f"a manifest of format {there} that this build would not write, it writes format {FORMAT}")
    return manifest


def _plain(manifest: Manifest) -> dict[str, object]:
    fields = {field.name: getattr(manifest, field.name) for field in dataclasses.fields(manifest)}
    fields["weights_digest"] = manifest.weights_digest.hex()
    fields["tokenizer_digest"] = manifest.tokenizer_digest.hex()
    fields["layout"] = {
        "block_tokens": manifest.layout.block_tokens,
        "layers": [list(segments) for segments in manifest.layout.layers],
    }
    return {"format": FORMAT, **fields}
