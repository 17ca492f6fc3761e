"""Where the KV of a conversation was left: in the pages of a prefill engine, in the pool of a decode node.

Nobody reports it. What was left is believed to be there until so much has passed through the same place since that it has been
overwritten, where the size of the place is known, and at most for `session_ns`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import NamedTuple

from kvmoverd.core.scheduling.joint_settings import JointSettings
from kvmoverd.core.scheduling.requests import Request
from kvmoverd.core.scheduling.state import Engine, Node

_FAR = 1 << 50
"""Tokens, beyond what fits anywhere: what was left before a loss has been overwritten."""


class _Left(NamedTuple):
    tokens: int
    at_ns: int
    prefill: str
    prefill_passed: int
    decode: str
    decode_passed: int


class Kept(NamedTuple):
    """Leading tokens that are believed to lie in an engine's pages and in a node's pool; "" and 0: nowhere."""

    engine: str = ""
    engine_tokens: int = 0
    node: str = ""
    node_tokens: int = 0


NOTHING = Kept()


class Sessions:
    """At most `sessions_max`, the least recently used go first."""

    def __init__(self, settings: JointSettings, kv_bytes_per_token: int) -> None:
        self._settings = settings
        self._kv_bytes_per_token = kv_bytes_per_token
        self._left: OrderedDict[tuple[str, str], _Left] = OrderedDict()
        self._engines: dict[str, int] = {}
        self._nodes: dict[str, int] = {}
        """Tokens that were given to a prefill engine, and to decode on a node, by name. They begin with `_from`."""
        self._from = 0

    def __len__(self) -> int:
        return len(self._left)

    def ran(self, request: Request, prefill: Engine, decode: Engine, now_ns: int) -> None:
        """The request was given to these two."""
        tokens, node = request.prompt_tokens, decode.node.name
        by_engine = self._engines[prefill.name] = self._engines.get(prefill.name, self._from) + tokens
        by_node = self._nodes[node] = self._nodes.get(node, self._from) + tokens
        if not request.session or not self._settings.sessions_max:
            return
        key = request.tenant, request.session
        self._left[key] = _Left(tokens, now_ns, prefill.name, by_engine, node, by_node)
        self._left.move_to_end(key)
        if len(self._left) > self._settings.sessions_max:
            self._left.popitem(last=False)

    def kept(self, request: Request, engines: Mapping[str, Engine], nodes: Mapping[str, Node], now_ns: int) -> Kept:
        """Of the request's hit tokens; `engines`: the prefill engines there are."""
        left = self._left.get((request.tenant, request.session)) if request.session else None
        if left is None or now_ns - left.at_ns > self._settings.session_ns:
            return NOTHING
        tokens = min(left.tokens, request.hit_tokens)
        engine, node = engines.get(left.prefill), nodes.get(left.decode)
        engine_tokens = node_tokens = 0
        if engine is not None and left.prefill in self._engines:
            through = self._engines[left.prefill] - left.prefill_passed + left.tokens
            engine_tokens = tokens if through <= engine.tok_e + engine.free_hbm else 0
        if node is not None and node.report is not None and left.decode in self._nodes:
            through = self._nodes[left.decode] - left.decode_passed + left.tokens
            node_tokens = tokens if through <= node.report.buffer_bytes // self._kv_bytes_per_token else 0
        return Kept(left.prefill, engine_tokens, left.decode, node_tokens)

    def lost(self, engine: str, node: str) -> None:
        """The engine is gone, and what lay there and in its node's pool is not believed any more."""
        self._engines.pop(engine, None)
        self._nodes.pop(node, None)
        self._from += _FAR
