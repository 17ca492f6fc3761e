"""What the other policies are measured against: engines by turns, with reads by turns or by the prefill side alone."""

from __future__ import annotations

from collections import OrderedDict

from kvmoverd.core.scheduling.explain import EngineWhy, PathWhy
from kvmoverd.core.scheduling.paper import DECODE_READS, PREFILL_READS
from kvmoverd.core.scheduling.policy import GIVEN_MAX, Desk
from kvmoverd.core.scheduling.reports import Role
from kvmoverd.core.scheduling.requests import Entry, ReadChoice
from kvmoverd.core.scheduling.state import Engine, Group, Node


class RoundRobin:
    """`Policy`: each request goes to the next prefill and the next decode engine, whatever they have to do, as soon as there is
    one of each; the sides read by turns. Turns go from group to group, so that neighbours in time are not on one node."""

    name = "round-robin"

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._waiting: OrderedDict[str, Entry] = OrderedDict()
        self._turns = {Role.PREFILL: 0, Role.DECODE: 0}
        self._reads = 0

    def submitted(self, entry: Entry, now_ns: int, *, again: bool) -> None:
        self._waiting[entry.request.request_id] = entry
        if again:
            self._waiting.move_to_end(entry.request.request_id, last=False)
        else:
            self._deal(now_ns)

    def withdrawn(self, entry: Entry) -> None:
        self._waiting.pop(entry.request.request_id, None)

    def prefill_ended(self, entry: Entry) -> None:
        """Nothing here goes by it."""

    def pulled(self, group: Group, now_ns: int) -> None:
        self._deal(now_ns)

    def lost(self, group: Group) -> None:
        pass

    def _deal(self, now_ns: int) -> None:
        prefill, decode = self._desk.engines(Role.PREFILL), self._desk.engines(Role.DECODE)
        if not prefill or not decode:
            return
        for _ in range(min(len(self._waiting), GIVEN_MAX)):
            _, entry = self._waiting.popitem(last=False)
            engine, why = self._next(Role.PREFILL, prefill)
            self._desk.give_prefill(entry, engine, why, now_ns)
            engine, why = self._next(Role.DECODE, decode)
            self._desk.give_decode(entry, engine, why, now_ns)

    def _next(self, role: Role, engines: list[Engine]) -> tuple[Engine, EngineWhy]:
        turn = self._turns[role] % len(engines)
        self._turns[role] = turn + 1
        engine = engines[turn]
        return engine, EngineWhy("turn", engine.name, (("turn", turn), ("of", len(engines)), ("tok_e", engine.tok_e)))

    def read(
        self, prefill: Node, decode: Node, hit_bytes: int, now_ns: int, entry: Entry | None
    ) -> tuple[ReadChoice, PathWhy]:
        self._reads += 1
        queues = ((prefill.name, prefill.queue_bytes), (decode.name, decode.queue_bytes))
        return (PREFILL_READS if self._reads % 2 else DECODE_READS), PathWhy("alternate", queues, hit_bytes)


class PrefillOnly(RoundRobin):
    """What everyone does today: engines by turns, and the prefill side reads all."""

    name = "prefill-only"

    def read(
        self, prefill: Node, decode: Node, hit_bytes: int, now_ns: int, entry: Entry | None
    ) -> tuple[ReadChoice, PathWhy]:
        queues = ((prefill.name, prefill.queue_bytes), (decode.name, decode.queue_bytes))
        return PREFILL_READS, PathWhy("fixed", queues, hit_bytes)
