"""The tries of a store in numbers, and as stretches without a branch."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from kvmoverd.adapters.storage.inspect.catalog import Progress, no_progress
from kvmoverd.adapters.storage.inspect.links import Links, links_of
from kvmoverd.adapters.storage.inspect.place import find_store
from kvmoverd.core.errors import StorageUnusable
from kvmoverd.core.store.trie import Trie, build

LONGEST = 10
RUNS_MAX = 1000


def tree(root: Path, *, namespace: str = "", depth: int = 16, progress: Progress = no_progress) -> dict[str, object]:
    """As one JSON object. `namespace`: how the fingerprint begins, in hex; `depth`: of the last blocks that are shown one by one.

    Raises `StorageUnusable`, also when no namespace is called so, and `OSError`.
    """
    place = find_store(root)
    found = [_describe(links, depth) for links in links_of(place, namespace.lower(), progress)]
    if namespace and not found:
        raise StorageUnusable(
            f"{root} has no blocks of a namespace {namespace!r}: `store ls` names those that there are"
        )
    return {"path": str(root), "layout": place.layout, "namespaces": found}


def _describe(links: Links, depth: int) -> dict[str, object]:
    rows = links.rows
    trie = build(rows["tag"], rows["parent"], rows["depth"])
    depths, counts = trie.per_depth()
    lengths = trie.lengths()
    runs, left_out = _runs(trie, depth)
    return {
        "namespace": links.fingerprint16.hex(),
        "model_id": links.space.manifest.model_id if links.space else None,
        "tenant": links.space.manifest.tenant if links.space else None,
        "blocks": len(trie.tags),
        "copies": len(rows) - len(trie.tags),
        "chains": int(trie.is_leaf.sum()),
        "firsts": int(trie.is_first.sum()),
        "branching_points": int((trie.children > 1).sum()),
        "orphans": int(trie.is_orphan.sum()),
        "unreachable": int((~trie.is_reachable).sum()),
        "unread": links.unread,
        "depth_max": int(depths[-1]) if len(depths) else None,
        "per_depth": [list(pair) for pair in zip(depths.tolist(), counts.tolist(), strict=True)],
        "longest": [
            {
                "first": _name(trie, int(trie.top[end])),
                "last": _name(trie, end),
                "blocks": int(lengths[end]),
                "reachable": bool(trie.depths[trie.top[end]] == 0),
            }
            for end in trie.longest(LONGEST).tolist()
        ],
        "runs": runs,
        "runs_left_out": left_out,
    }


def _runs(trie: Trie, depth: int) -> tuple[list[dict[str, object]], int]:
    """Stretches that begin no deeper than this, each behind the one that it hangs on, and how many there are beyond these."""
    firsts, lengths, above = trie.runs()
    shown = trie.depths[firsts] <= depth
    firsts, lengths, above = firsts[shown], lengths[shown], above[shown]
    below: dict[int, list[int]] = {}
    for at in np.lexsort((-lengths, above)).tolist():
        below.setdefault(int(above[at]), []).append(at)
    ordered: list[dict[str, object]] = []
    waiting = [(at, 0) for at in reversed(below.get(-1, []))]
    while waiting and len(ordered) < RUNS_MAX:
        at, level = waiting.pop()
        first = int(firsts[at])
        ordered.append(
            {
                "first": _name(trie, first),
                "depth": int(trie.depths[first]),
                "blocks": int(lengths[at]),
                "level": level,
                "orphan": bool(trie.parent[first] < 0 and trie.depths[first] > 0),
            }
        )
        waiting += [(child, level + 1) for child in reversed(below.get(first, []))]
    return ordered, len(firsts) - len(ordered)


def _name(trie: Trie, at: int) -> str:
    """How the block's key begins, in hex."""
    return int(trie.tags[at]).to_bytes(8, "little").hex()
