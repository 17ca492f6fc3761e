"""Where blocks lie in the shared store, in words between nodes: a table of authors, and numbers that are packed."""

from __future__ import annotations

from collections.abc import Sequence

from kvmover_proto import node_pb2
from kvmoverd.core.errors import BadRequest
from kvmoverd.core.store.places import Place

AUTHORS_MAX = 256
AUTHOR_CHARS_MAX = 256


def is_author(name: str) -> bool:
    """May it be an author's name? It becomes a part of paths."""
    return 1 <= len(name) <= AUTHOR_CHARS_MAX and not name.startswith(".") and "/" not in name and "\0" not in name


def message_of(places: Sequence[Place | None]) -> node_pb2.BlockPlaces | None:
    """None when nothing is known. Places of authors beyond those that the table takes are left out."""
    numbers: dict[str, int] = {}
    for place in places:
        if place is not None and len(numbers) < AUTHORS_MAX:
            numbers.setdefault(place.author, len(numbers) + 1)
    if not numbers:
        return None
    return node_pb2.BlockPlaces(
        authors=numbers,
        author=[numbers.get(place.author, 0) if place is not None else 0 for place in places],
        segment=[place.segment if place is not None else 0 for place in places],
        page=[place.page if place is not None else 0 for place in places],
    )


def places_from(message: node_pb2.BlockPlaces, blocks_max: int) -> list[Place | None]:
    """Raises `BadRequest`."""
    authors = list(message.authors)
    if len(authors) > AUTHORS_MAX or not all(map(is_author, authors)):
        raise BadRequest(
            f"{len(authors)} authors of places are named, at most {AUTHORS_MAX} are taken, each with 1 to "
            f"{AUTHOR_CHARS_MAX} characters, none of them a slash or a leading dot"
        )
    counts = {len(message.author), len(message.segment), len(message.page)}
    if len(counts) > 1 or max(counts) > blocks_max:
        raise BadRequest(f"places of {sorted(counts)} blocks are given, must be as many of each, at most {blocks_max}")
    if max(message.author, default=0) > len(authors):
        raise BadRequest(f"a place names author {max(message.author)}, {len(authors)} are in the table")
    named = ["", *authors]
    return [
        Place(named[author], segment, page) if author else None
        for author, segment, page in zip(message.author, message.segment, message.page, strict=True)
    ]
