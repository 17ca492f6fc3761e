"""The policy of the DualPath paper: prefill by its first algorithm, decode in two levels, the side with the shorter read queue.

Where the paper says nothing: equal numbers go by name; a decode group's load holds its private queue, since else all that is
drained at once would go to one group; a read queue holds what was given out since the node's last report, and one that is not
known counts as too long; equal read queues go to the decode side, whose reads cross PCIe 4 times instead of 6. When a decode
group joins, what waits in private queues is dealt anew: else the first one that pulls after a start would have all of it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from heapq import heapify, heappop, heappush, heapreplace

from kvmoverd.core.scheduling.explain import Board, EngineWhy, Given, PathWhy
from kvmoverd.core.scheduling.least_first import LeastFirst
from kvmoverd.core.scheduling.policy import GIVEN_MAX, Desk
from kvmoverd.core.scheduling.reports import Role
from kvmoverd.core.scheduling.requests import Entry, ReadChoice
from kvmoverd.core.scheduling.state import Engine, Group, Node
from kvmoverd.core.status import Path

LEVEL = 1.05
"""Z over the mean load that the group will have: engines below it are chosen by the number of their requests."""
PREFILL_READS = ReadChoice(Path.PE)
DECODE_READS = ReadChoice(Path.DE)

REDEAL_NS = 1_000_000_000
"""Private queues are dealt anew once in so long at most, however many groups join."""

_Heap = list[tuple[int, int, Engine]]
"""Engines by `tok_e`, equal ones by their place in the group: no two are the same, so that engines are never compared."""


class PaperPolicy:
    """`Policy` by the paper's rules."""

    name = "paper"

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._prefill: OrderedDict[str, Entry] = OrderedDict()
        self._decode: OrderedDict[str, Entry] = OrderedDict()
        self._loads = LeastFirst()
        self._groups: dict[str, Group] = {}
        self._joined = False
        self._dealt_ns = -REDEAL_NS

    def submitted(self, entry: Entry, now_ns: int, *, again: bool) -> None:
        request_id = entry.request.request_id
        self._prefill[request_id] = self._decode[request_id] = entry
        if again:
            self._prefill.move_to_end(request_id, last=False)
            self._decode.move_to_end(request_id, last=False)

    def withdrawn(self, entry: Entry) -> None:
        request_id = entry.request.request_id
        self._prefill.pop(request_id, None)
        self._decode.pop(request_id, None)
        group = entry.private_of
        if group is not None:
            _leave_private(group, entry)
            self._loads.put(group.name, group.tok_sum + group.private_tokens)

    def lost(self, group: Group) -> None:
        """What waits in its private queue goes back to the head of the global one, in its order."""
        for entry in list(reversed(group.private.values())):
            _leave_private(group, entry)
            self._decode[entry.request.request_id] = entry
            self._decode.move_to_end(entry.request.request_id, last=False)
        self._groups.pop(group.name, None)
        self._loads.drop(group.name)

    def prefill_ended(self, entry: Entry) -> None:
        """Nothing here goes by it."""

    def pulled(self, group: Group, now_ns: int) -> None:
        if group.role is Role.PREFILL:
            self._choose_prefill(group, now_ns)
            return
        if group.name not in self._groups:
            self._groups[group.name] = group
            self._joined = True
        self._loads.put(group.name, group.tok_sum + group.private_tokens)
        if self._joined and now_ns - self._dealt_ns >= REDEAL_NS:
            self._joined, self._dealt_ns = False, now_ns
            self._collect()
        self._drain()
        self._choose_decode(group, now_ns)

    def _choose_prefill(self, group: Group, now_ns: int) -> None:
        """First come, first served: C2 = read queue at most alpha and load at most beta, C3 = longer read queue and load at most
        beta; the least load of C2, else of C3; who is above beta (C1) gets nothing; no C2 and no C3 ends it."""
        waiting = self._prefill
        if not waiting:
            return
        model = self._desk.model
        alpha, beta = model.alpha_bytes, model.beta_tokens
        engines = group.takers
        low: _Heap = []
        high: _Heap = []
        for index, engine in enumerate(engines):
            if engine.tok_e <= beta:
                (low if 0 <= engine.node.queue_bytes <= alpha else high).append((engine.tok_e, index, engine))
        if not low and not high:
            return
        board = Board([engine.seen() for engine in engines])
        heapify(low)
        heapify(high)
        for _ in range(min(len(waiting), GIVEN_MAX)):
            while low and low[0][2].node.queue_bytes > alpha:
                heappush(high, heappop(low))
            heap = low or high
            if not heap:
                return
            _, index, engine = heap[0]
            _, entry = waiting.popitem(last=False)
            why = _prefill_why("C2" if low else "C3", engine, alpha, beta, board)
            self._desk.give_prefill(entry, engine, why, now_ns)
            board.given.append(Given(index, entry.tokens, engine.node.queue_bytes))
            if engine.tok_e > beta:
                heappop(heap)
            else:
                heapreplace(heap, (engine.tok_e, index, engine))

    def _collect(self) -> None:
        """All that waits in private queues is in the global one again, in the order of arrival."""
        waiting = [entry for group in self._groups.values() for entry in group.private.values()]
        for group in self._groups.values():
            group.private.clear()
            group.private_tokens = 0
            self._loads.put(group.name, group.tok_sum)
        for entry in sorted([*waiting, *self._decode.values()], key=_by_order):
            entry.private_of = None
            self._decode[entry.request.request_id] = entry
            self._decode.move_to_end(entry.request.request_id)

    def _drain(self) -> None:
        """The first level: all that waits goes to the private queues, each request to the group with the least load."""
        if not self._decode:
            return
        loads, groups = self._loads, self._groups
        for request_id, entry in self._decode.items():
            name = loads.least()
            assert name is not None, "a decode group pulls, and none is known"
            group = groups[name]
            group.private[request_id] = entry
            group.private_tokens += entry.tokens
            entry.private_of = group
            loads.put(name, group.tok_sum + group.private_tokens)
        self._decode.clear()

    def _choose_decode(self, group: Group, now_ns: int) -> None:
        """The second level, within the group: the longest head of its queue that fits into all its free HBM, from it the level Z,
        then one by one the engine with the fewest requests below Z, else the one with the least load of those with room."""
        if not group.private:
            return
        engines = group.takers
        head = _longest_head(group.private.values(), sum([max(0, engine.free_hbm) for engine in engines]))
        if not head:
            return
        level = LEVEL * sum([one.tokens for one in head] + [one.tok_e for one in engines]) / len(engines)
        board = Board([engine.seen() for engine in engines])
        for entry in head[:GIVEN_MAX]:
            tokens = entry.tokens
            chosen, is_low = _of_second_level(engines, tokens, level)
            if chosen < 0:
                return
            engine = engines[chosen]
            why = _decode_why("low" if is_low else "least", engine, entry, level, board)
            _leave_private(group, entry)
            self._desk.give_decode(entry, engine, why, now_ns)
            board.given.append(Given(chosen, tokens, engine.node.queue_bytes))

    def read(
        self, prefill: Node, decode: Node, hit_bytes: int, now_ns: int, entry: Entry | None
    ) -> tuple[ReadChoice, PathWhy]:
        return shorter_queue(prefill, decode, hit_bytes)


def shorter_queue(prefill: Node, decode: Node, hit_bytes: int) -> tuple[ReadChoice, PathWhy]:
    """The side whose storage NIC has less ahead of it; of equal ones the decode side. One whose queue is not known reads only if
    neither's is."""
    ahead_p, ahead_d = prefill.queue_bytes, decode.queue_bytes
    queues = ((prefill.name, ahead_p), (decode.name, ahead_d))
    if ahead_p < 0 or ahead_d < 0:
        return (PREFILL_READS if ahead_p >= 0 else DECODE_READS), PathWhy("unknown", queues, hit_bytes)
    if ahead_p == ahead_d:
        return DECODE_READS, PathWhy("tie", queues, hit_bytes)
    return (PREFILL_READS if ahead_p < ahead_d else DECODE_READS), PathWhy("shorter", queues, hit_bytes)


def _longest_head(waiting: Iterable[Entry], room_tokens: int) -> list[Entry]:
    head = []
    for entry in waiting:
        room_tokens -= entry.tokens
        if room_tokens < 0:
            break
        head.append(entry)
    return head


def _of_second_level(engines: Sequence[Engine], tokens: int, level: float) -> tuple[int, bool]:
    """The place of the engine for so many tokens, -1 if none has room, and whether it is below the level; of equals the first."""
    chosen, least, then, is_low = -1, 0, 0, False
    for index, engine in enumerate(engines):
        if engine.free_hbm < tokens:
            continue
        load = engine.tok_e
        if load + tokens <= level:
            first, second, better = engine.seq_e, load, not is_low
            is_low = True
        elif is_low:
            continue
        else:
            first, second, better = load, engine.seq_e, chosen < 0
        if better or first < least or (first == least and second < then):
            chosen, least, then = index, first, second
    return chosen, is_low


def _by_order(entry: Entry) -> int:
    return entry.order


def _leave_private(group: Group, entry: Entry) -> None:
    del group.private[entry.request.request_id]
    group.private_tokens -= entry.tokens
    entry.private_of = None


def _prefill_why(rule: str, engine: Engine, alpha: int, beta: int, board: Board) -> EngineWhy:
    numbers = (
        ("tok_e", engine.tok_e),
        ("read_queue_bytes", engine.node.queue_bytes),
        ("alpha_bytes", alpha),
        ("beta_tokens", beta),
    )
    return EngineWhy(rule, engine.name, numbers, board, len(board.given))


def _decode_why(rule: str, engine: Engine, entry: Entry, level: float, board: Board) -> EngineWhy:
    numbers = (
        ("tok_e", engine.tok_e),
        ("seq_e", engine.seq_e),
        ("free_hbm_tokens", engine.free_hbm),
        ("tokens", entry.tokens),
        ("z_tokens", level),
        ("group_tok_e", engine.group.tok_sum),
    )
    return EngineWhy(rule, engine.name, numbers, board, len(board.given))
