"""Where the KV of a conversation was left: in the pages of a prefill engine, in the pool of a decode node.

Nobody reports it. What was left is believed to be there until so much has passed through the same place since that it has been
overwritten, and at most for `session_ns`: the oldest goes first, and KV without its head is worth nothing. Of pages only that
is believed which engines are said to keep (`pages_tokens`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import NamedTuple

from kvmoverd.core.scheduling.joint_pace import Rates
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
    """Bytes; the other one is in tokens."""


class Kept(NamedTuple):
    """Leading tokens that are believed to lie in an engine's pages and in a node's pool; "" and 0: nowhere."""

    engine: str = ""
    engine_tokens: int = 0
    node: str = ""
    node_tokens: int = 0


NOTHING = Kept()


class Sessions:
    """At most `sessions_max`, the least recently used go first."""

    def __init__(self, settings: JointSettings, rates: Rates, kv_bytes_per_token: int) -> None:
        self._settings = settings
        self._rates = rates
        self._kv_bytes_per_token = kv_bytes_per_token
        self._left: OrderedDict[tuple[str, str], _Left] = OrderedDict()
        self._engines: dict[str, int] = {}
        """Tokens that were given to a prefill engine, by name. They begin with `_from`."""
        self._from = 0

    def __len__(self) -> int:
        return len(self._left)

    def ran(self, request: Request, prefill: Engine, decode: Engine, now_ns: int) -> None:
        """The request was given to these two; the decode node's pool knows of it."""
        tokens, node, by_engine = request.prompt_tokens, decode.node, 0
        if self._settings.pages_tokens:
            by_engine = self._engines[prefill.name] = self._engines.get(prefill.name, self._from) + tokens
        if not request.session or not self._settings.sessions_max:
            return
        key = request.tenant, request.session
        passed_bytes = self._rates.of(node).pool.passed_bytes
        self._left[key] = _Left(tokens, now_ns, prefill.name, by_engine, node.name, passed_bytes)
        self._left.move_to_end(key)
        if len(self._left) > self._settings.sessions_max:
            self._left.popitem(last=False)

    def kept(self, request: Request, engines: Mapping[str, Engine], nodes: Mapping[str, Node], now_ns: int) -> Kept:
        """Of the request's hit tokens; `engines`: the prefill engines there are."""
        left = self._left.get((request.tenant, request.session)) if request.session else None
        if left is None or now_ns - left.at_ns > self._settings.session_ns:
            return NOTHING
        tokens = min(left.tokens, request.hit_tokens)
        node = nodes.get(left.decode)
        node_tokens = 0 if node is None else self._in_pool(left, tokens, node)
        engine_tokens = 0
        if left.prefill in engines and left.prefill in self._engines:
            through = self._engines[left.prefill] - left.prefill_passed + left.tokens
            engine_tokens = tokens if through <= self._settings.pages_tokens else 0
        if not engine_tokens and not node_tokens:
            return NOTHING
        return Kept(left.prefill, engine_tokens, left.decode, node_tokens)

    def _in_pool(self, left: _Left, tokens: int, node: Node) -> int:
        """Where its size is not known nothing is."""
        pace, kv = self._rates.of(node), self._kv_bytes_per_token
        if node.report is None:
            return 0
        through_bytes = pace.pool.passed_bytes - left.decode_passed + left.tokens * kv
        if through_bytes > node.report.buffer_bytes:
            return 0
        return pace.pool.believed(tokens * kv, pace.rate) // kv

    def lost(self, engine: str, node: Node) -> None:
        """The engine is gone, and what lay there and in its node's pool is not believed any more."""
        if self._engines.pop(engine, None) is not None:
            self._from += _FAR
        self._rates.of(node).pool.empty()
