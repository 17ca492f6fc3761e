"""The engines of one model, what each was given, and the assignments that come of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import zip_longest

from kvmoverd.core.scheduling.explain import EngineWhy, Explain, PathWhy
from kvmoverd.core.scheduling.held import ADOPTED
from kvmoverd.core.scheduling.policy import PolicyMaker
from kvmoverd.core.scheduling.reports import Role
from kvmoverd.core.scheduling.requests import Assignment, Entry, Fence, ReadChoice, Revoked, Side, State, next_attempt
from kvmoverd.core.scheduling.state import Engine, Group, Model, Node
from kvmoverd.core.status import Path

Assigned = Callable[[Entry, int], None]


class Books:
    """A policy's desk. `assigned` is told of each request that has both engines now; `numbers` are those of fences."""

    def __init__(
        self, model: Model, make: PolicyMaker, nodes: dict[str, Node], assigned: Assigned, numbers: Iterator[int]
    ) -> None:
        self.model = model
        self.nodes = nodes
        self._assigned = assigned
        self._numbers = numbers
        self._groups: dict[Role, dict[str, Group]] = {Role.PREFILL: {}, Role.DECODE: {}}
        self._engines: dict[Role, list[Engine] | None] = {}
        self.policy = make(self)

    def engines(self, role: Role) -> list[Engine]:
        found = self._engines.get(role)
        if found is None:
            by_group = [group.takers for _, group in sorted(self._groups[role].items())]
            turns = zip_longest(*by_group)
            found = self._engines[role] = [engine for turn in turns for engine in turn if engine is not None]
        return found

    def groups(self, role: Role) -> Iterable[Group]:
        return self._groups[role].values()

    def has(self, group: Group) -> None:
        """The group is there, or its engines are others than before."""
        group.look_around()
        self._groups[group.role][group.name] = group
        self._engines[group.role] = None

    def has_not(self, group: Group) -> None:
        del self._groups[group.role][group.name]
        self._engines[group.role] = None

    def give_prefill(self, entry: Entry, engine: Engine, why: EngineWhy, now_ns: int) -> None:
        assert entry.prefill is None, f"{entry.request.request_id} has a prefill engine"
        entry.prefill = Side(engine, entry.tokens, why)
        engine.take(entry)
        if entry.decode is not None:
            self._assign(entry, now_ns)

    def give_decode(self, entry: Entry, engine: Engine, why: EngineWhy, now_ns: int) -> None:
        assert entry.decode is None, f"{entry.request.request_id} has a decode engine"
        entry.decode = Side(engine, entry.tokens, why)
        engine.take(entry)
        engine.node.reserved_bytes += entry.tokens * self.model.kv_bytes_per_token
        if entry.prefill is not None:
            self._assign(entry, now_ns)

    def _assign(self, entry: Entry, now_ns: int) -> None:
        prefill, decode, request = entry.prefill, entry.decode, entry.request
        assert prefill is not None and decode is not None
        node_p, node_d = prefill.engine.node, decode.engine.node
        read, path_why = self.choose_read(node_p, node_d, request.hit_tokens, now_ns, entry)
        why = Explain(self.policy.name, prefill.why, decode.why, path_why, now_ns - entry.since_ns)
        entry.assignment = assignment = Assignment(
            request.request_id,
            entry.attempt,
            prefill.engine.name,
            node_p.name,
            decode.engine.name,
            node_d.name,
            read,
            why,
            request.prompt_tokens,
            request.hit_tokens,
        )
        entry.state = State.ASSIGNED
        prefill.engine.group.tell(assignment, prefill)
        decode.engine.group.tell(assignment, decode)
        self._assigned(entry, now_ns)

    def choose_read(
        self, prefill: Node, decode: Node, hit_tokens: int, now_ns: int, entry: Entry | None = None
    ) -> tuple[ReadChoice, PathWhy]:
        """Who reads, by the policy; it is counted as given to those nodes, less what nobody has to read."""
        hit_bytes = hit_tokens * self.model.kv_bytes_per_token
        read, why = self.policy.read(prefill, decode, hit_bytes, now_ns, entry)
        if read.path is Path.PE:
            prefill.give(why.hit_bytes, now_ns)
        elif read.path is Path.DE:
            decode.give(why.hit_bytes, now_ns)
        else:
            for name, size_bytes in why.reads:
                self.nodes[name].give(size_bytes, now_ns)
        return read, why

    def prefill_ended(self, entry: Entry) -> None:
        """Its prefill is done, or no more that engine's."""
        if entry.prefill is not None:
            entry.prefill.let_go(entry.request.request_id)
            entry.prefill = None
            self.policy.prefill_ended(entry)

    def decode_ended(self, entry: Entry) -> None:
        if entry.decode is not None:
            entry.decode.let_go(entry.request.request_id)
            entry.decode.engine.node.reserved_bytes -= entry.tokens * self.model.kv_bytes_per_token
            entry.decode = None

    def undo(self, entry: Entry) -> None:
        """Nobody has it any more. Leaders that were told of this attempt, and live, are told that it is over; nodes refuse it."""
        if entry.state is State.WAITING:
            self.policy.withdrawn(entry)
        if entry.assignment is not None:
            self._fence(entry.assignment)
        over = Revoked(entry.request.request_id, entry.attempt)
        for side in (entry.prefill, entry.decode):
            # A group that lives is told even if this engine is said to be gone: who says so may err.
            if side is not None and entry.assignment is not None and side.engine.group.engines:
                side.engine.group.tell(over, None)
        self.prefill_ended(entry)
        self.decode_ended(entry)
        entry.assignment = None
        entry.prefilled = False

    def _fence(self, assignment: Assignment) -> None:
        fence = Fence(next(self._numbers), assignment.request_id, next_attempt(assignment.attempt) - 1)
        for name in {assignment.prefill_node, assignment.decode_node}:
            node = self.nodes.get(name)
            if node is not None:
                node.fence(fence)

    def adopt(self, entry: Entry, engine: Engine) -> None:
        """An engine goes on with it since before this scheduler's start; its own numbers hold it."""
        side = Side(engine, entry.tokens, EngineWhy(ADOPTED, engine.name, ()))
        side.heard = True
        engine.live[entry.request.request_id] = entry
        if engine.group.role is Role.PREFILL:
            entry.prefill = side
            return
        entry.decode = side
        engine.node.reserved_bytes += entry.tokens * self.model.kv_bytes_per_token

    def drains(self, node: Node) -> None:
        """It begins or ceases to take new requests."""
        for group in node.groups():
            if group.model == self.model.name:
                self.has(group)
                if not group.takers:
                    self.policy.lost(group)
