"""The policy "joint": prefill engine, decode engine and readers are chosen together, by the predicted time to the first token.

Requests are chosen for as soon as they come and at each pull, for the engines of all groups: what counts is which engine is the
soonest, not whose leader asks. Nothing is given to a prefill engine that has more than beta to do: what waits in the queue can
still go anywhere. Of equal predictions the one that has read sooner is taken, so that storage NICs are level though prefill
engines are what is short. What can't be compared for all pairs is compared for those that are free first on each side, those
whose nodes read first, and those that have KV of the request.
"""

from __future__ import annotations

from typing import NamedTuple

from kvmoverd.core.scheduling.explain import PathWhy
from kvmoverd.core.scheduling.joint_pace import Pace, Rates
from kvmoverd.core.scheduling.joint_pool import FAR_BYTES
from kvmoverd.core.scheduling.joint_predict import (
    DecodeOption,
    Leading,
    Plan,
    Prediction,
    PrefillOption,
    Ways,
    Work,
    plan,
    plan_of_two,
    soonest,
)
from kvmoverd.core.scheduling.joint_queue import FairQueue
from kvmoverd.core.scheduling.joint_sessions import NOTHING, Kept, Sessions
from kvmoverd.core.scheduling.joint_settings import JointSettings
from kvmoverd.core.scheduling.joint_sides import DecodeStands, PrefillStands, Stand
from kvmoverd.core.scheduling.joint_why import whys
from kvmoverd.core.scheduling.policy import Desk
from kvmoverd.core.scheduling.reports import Role
from kvmoverd.core.scheduling.requests import CachedPrefix, Entry, ReadChoice, Request
from kvmoverd.core.scheduling.state import Engine, Group, Node

DEAL_MAX = 512
"""Requests that are given out in one call, about 50 ms for which other callers wait; the next pull, of any group, goes on."""


class _Passed:
    """The first request for which there was no room: how many went before it since."""

    def __init__(self, entry: Entry) -> None:
        self.entry = entry
        self.count = 0


class _Found(NamedTuple):
    """Leading tokens by where they lie: an engine's or a node's name. `session`: as it is believed to have left them."""

    told: dict[str, int]
    session: Kept

    def at(self, name: str) -> int:
        return self.told.get(name, 0)


NOTHING_FOUND = _Found({}, NOTHING)
NOBODYS = ("soonest", "soonest")
"""Rules of a request of which nobody has anything."""


class JointPolicy:
    """`Policy`: the soonest first token."""

    name = "joint"

    def __init__(self, desk: Desk, settings: JointSettings | None = None) -> None:
        model, settings = desk.model, settings or JointSettings()
        self._desk = desk
        self._settings = settings
        self._rates = Rates(model, desk.nodes)
        self._prefill = PrefillStands(self._rates, model, settings)
        self._decode = DecodeStands(self._rates, model, settings)
        self._queue = FairQueue(settings)
        self._sessions = Sessions(settings, self._rates, model.kv_bytes_per_token)
        self._said_at: dict[str, dict[str, int]] = {}
        """Of requests that wait: what had gone through the pools that their clients name when they said so."""
        self._too_large: dict[str, Entry] = {}
        """Requests that would not have room in an empty cluster."""
        self._passed: _Passed | None = None
        self._full = False
        """In the last round there was no room for those that were looked at."""
        self._short: dict[str, str] = {}
        """Of those that were passed over: "hbm" or "buffer", of which there was too little."""
        self._plan: Plan | None = None

    # Policy.

    def submitted(self, entry: Entry, now_ns: int, *, again: bool) -> None:
        if entry.request.cached:
            self._said_at[entry.request.request_id] = self._passed_bytes(entry.request)
        self._queue.add(entry, again=again)
        # One that came back is given at the next pull: its group is being lost just now.
        if not again and not self._full:
            self._deal(now_ns)

    def withdrawn(self, entry: Entry) -> None:
        name = entry.request.request_id
        self._queue.drop(name)
        self._too_large.pop(name, None)
        self._said_at.pop(name, None)
        self._served(entry)

    def prefill_ended(self, entry: Entry) -> None:
        self._decode.prefilled(entry)

    def pulled(self, group: Group, now_ns: int) -> None:
        if group.role is Role.PREFILL:
            self._prefill.pulled(group)
        else:
            self._decode.pulled(group)
            self._fits_now()
        self._deal(now_ns)

    def lost(self, group: Group) -> None:
        stands = self._prefill if group.role is Role.PREFILL else self._decode
        for stand in stands.drop(group.name):
            for engine in stand.engines:
                self._sessions.lost(engine.name, stand.pace.node)
        self._rates.keep(self._desk.nodes)

    def read(
        self, prefill: Node, decode: Node, hit_bytes: int, now_ns: int, entry: Entry | None
    ) -> tuple[ReadChoice, PathWhy]:
        made, self._plan = self._plan, None
        pace_p, pace_d = self._rates.of(prefill), self._rates.of(decode)
        if made is None or entry is None:
            tokens = hit_bytes // self._desk.model.kv_bytes_per_token
            made = self._planned(pace_p, pace_d, self._work(tokens), Leading(), now_ns)
        queues = [(prefill.name, self._ahead_bytes(pace_p, now_ns))]
        if pace_d is not pace_p:
            queues.append((decode.name, self._ahead_bytes(pace_d, now_ns)))
        # What decodes on a node comes into its pool whole, whoever reads it.
        passed_bytes = hit_bytes if entry is None else entry.tokens * self._desk.model.kv_bytes_per_token
        pace_d.pool.passed_bytes += passed_bytes
        read_bytes, reads = 0, []
        for pace, size_bytes in made.reads:
            if pace is not pace_d:
                pace.pool.passed_bytes += size_bytes
                if pace is not pace_p:
                    pace.help(size_bytes)
                    queues.append((pace.node.name, 0))
            pace.give(size_bytes, now_ns)
            self._prefill.read_more(pace)
            self._decode.read_more(pace)
            read_bytes += size_bytes
            reads.append((pace.node.name, size_bytes))
        return made.choice, PathWhy(made.word, tuple(queues), read_bytes, tuple(reads))

    # The round.

    def _deal(self, now_ns: int) -> None:
        """All that can be given is given, by turns, so many at once. Who finds no room is passed over."""
        passed: dict[str, Entry] = {}
        queue, left = self._queue, DEAL_MAX
        while left and self._prefill.idle and len(self._decode) and len(passed) < self._settings.look_max:
            entry = queue.next(now_ns, passed)
            if entry is None:
                break
            if self._give(entry, now_ns):
                left -= 1
                continue
            if entry.tokens > self._decode.largest_tokens:
                self._served(entry)
                queue.drop(entry.request.request_id)
                self._too_large[entry.request.request_id] = entry
            else:
                passed[entry.request.request_id] = entry
                self._short.setdefault(entry.request.request_id, self._decode.short_of())
                if self._passed is None:
                    self._passed = _Passed(entry)
        queue.end_round()
        self._full = bool(passed)

    def _give(self, entry: Entry, now_ns: int) -> bool:
        """False: no decode node has room for it."""
        mine = self._passed is not None and self._passed.entry is entry
        if not mine and entry.tokens > self._decode.room_tokens:
            return False
        found = self._found(entry, now_ns)
        work = self._work(entry.request.hit_tokens)
        prefills = self._prefills(entry, found, now_ns)
        while prefills:
            decodes = self._decodes(entry, found, mine, now_ns)
            if not decodes:
                break
            best, second = soonest(prefills, decodes, work)
            # A report since the last pull may say that there is less room: then that is known from here on.
            if self._decode.refresh(self._decode.of(best.decode.engine)) >= entry.tokens:
                self._assign(entry, best, second, found, now_ns)
                return True
        return False

    def _assign(self, entry: Entry, best: Prediction, second: Prediction | None, found: _Found, now_ns: int) -> None:
        short_of = self._short.get(entry.request.request_id)
        self._queue.took(entry)
        self._served(entry)
        if self._said_at:
            self._said_at.pop(entry.request.request_id, None)
        if self._passed is not None:
            self._passed.count += 1
            if self._passed.count >= self._settings.bypass_max and self._decode.kept is None:
                self._passed.count = 0
                self._decode.keep_for(self._passed.entry.tokens)
        prefill, decode = best.prefill, best.decode
        work = self._work(entry.request.hit_tokens)
        if best.held or prefill.pace is decode.pace or prefill.pace.starved != decode.pace.starved:
            held = self._believed(best) if best.held else Leading()
            self._plan = self._planned(prefill.pace, decode.pace, work, held, now_ns)
        else:
            helpers = self._helpers(prefill.pace, decode.pace, work, now_ns)
            ways = Ways(prefill.pace, decode.pace, helpers)
            self._plan = plan(ways, work, now_ns) if helpers else plan_of_two(prefill, decode, work)
        rules = _rules(best, found) if best.held else NOBODYS
        why_p, why_d = whys(best, second, rules, self._prefill.rate(prefill.engine), short_of)
        self._desk.give_decode(entry, decode.engine, why_d, now_ns)
        self._desk.give_prefill(entry, prefill.engine, why_p, now_ns)
        self._prefill.gave(prefill.engine)
        self._decode.gave(entry, decode.engine, now_ns)
        self._sessions.ran(entry.request, prefill.engine, decode.engine, now_ns)

    def _believed(self, best: Prediction) -> Leading:
        """What nobody reads; its nodes' pools are held to it."""
        prefill, decode = best.prefill, best.decode
        pace = decode.pace if best.held > max(prefill.pages, prefill.pool) else prefill.pace
        in_pages = min(best.held, prefill.pages)
        kv_bytes_per_token = self._desk.model.kv_bytes_per_token
        prefill.pace.pool.vouch(in_pages * kv_bytes_per_token)
        pace.pool.vouch((best.held - in_pages) * kv_bytes_per_token)
        return Leading(best.held, prefill.pages, pace.node)

    def _served(self, entry: Entry) -> None:
        """It does not wait any more; what was kept for it is free."""
        self._short.pop(entry.request.request_id, None)
        if self._passed is not None and self._passed.entry is entry:
            self._passed = None
            self._decode.kept = None

    def _fits_now(self) -> None:
        """A larger engine or buffer is there: those that were too large wait again."""
        if not self._too_large:
            return
        largest = self._decode.largest_tokens
        for name, entry in list(self._too_large.items()):
            if entry.tokens <= largest:
                del self._too_large[name]
                self._queue.add(entry, again=True)

    # Candidates.

    def _found(self, entry: Entry, now_ns: int) -> _Found:
        request = entry.request
        if not request.cached and not request.session:
            return NOTHING_FOUND
        told = {prefix.where: self._lasting(request, prefix) for prefix in request.cached}
        session = self._sessions.kept(request, self._prefill.by_engine, self._desk.nodes, now_ns)
        # Who has nothing that is believed is compared only if it is among the soonest.
        told = {where: tokens for where, tokens in told.items() if tokens}
        return _Found(told, session) if told or session is not NOTHING else NOTHING_FOUND

    def _lasting(self, request: Request, prefix: CachedPrefix) -> int:
        """Tokens of what the client says that are believed to be there now."""
        kv_bytes_per_token = self._desk.model.kv_bytes_per_token
        size_bytes = prefix.tokens * kv_bytes_per_token
        node, engine = self._desk.nodes.get(prefix.where), self._prefill.by_engine.get(prefix.where)
        if node is not None:
            pace = self._rates.of(node)
            # Of a node that nobody knew then nothing is known now.
            since_bytes = self._said_at[request.request_id].get(prefix.where, -FAR_BYTES)
            return pace.pool.lasting(size_bytes, pace.rate, since_bytes) // kv_bytes_per_token
        if engine is None:
            return 0
        pace = self._rates.of(engine.node)
        return pace.pool.believed(size_bytes, pace.rate) // kv_bytes_per_token

    def _passed_bytes(self, request: Request) -> dict[str, int]:
        """By the names of pools that its client says have some of it."""
        nodes = [self._desk.nodes.get(prefix.where) for prefix in request.cached]
        return {node.name: self._rates.of(node).pool.passed_bytes for node in nodes if node is not None}

    def _prefills(self, entry: Entry, found: _Found, now_ns: int) -> list[PrefillOption]:
        """Engines that may be given work, each once."""
        stands, session = self._prefill, found.session
        foremost = stands.foremost(self._settings.candidates)
        if found is NOTHING_FOUND:
            tokens, options = entry.tokens, []
            for stand in foremost:
                engine, pace = stand.best, stand.pace
                if stands.takes(engine):
                    rate = engine.tokens_per_s or stands.model_rate
                    lane = pace.reads(now_ns)
                    options.append(PrefillOption(engine, pace, lane, engine.tok_e / rate, tokens / rate))
            return options
        engines = {stand.best.name: stand.best for stand in foremost}
        for name in (session.engine, session.node, *found.told):
            named = stands.by_engine.get(name)
            if named is not None:
                engines[name] = named
            for stand in stands.on_node(name):
                engines[stand.best.name] = stand.best
        return [
            self._prefill_option(engine, entry, found, now_ns) for engine in engines.values() if stands.takes(engine)
        ]

    def _prefill_option(self, engine: Engine, entry: Entry, found: _Found, now_ns: int) -> PrefillOption:
        session, node = found.session, engine.node
        pages = max(found.at(engine.name), session.engine_tokens if engine.name == session.engine else 0)
        pool = max(found.at(node.name), session.node_tokens if node.name == session.node else 0)
        rate = self._prefill.rate(engine)
        pace = self._rates.of(node)
        reads = pace.reads(now_ns)
        return PrefillOption(engine, pace, reads, engine.tok_e / rate, entry.tokens / rate, pages, pool)

    def _decodes(self, entry: Entry, found: _Found, mine: bool, now_ns: int) -> list[DecodeOption]:
        """Engines with room for it, each once; those above the level only where there are no others."""
        stands, tokens = self._decode, entry.tokens
        fit = stands.with_room(tokens, self._settings.candidates)
        if found is not NOTHING_FOUND:
            for name in (found.session.node, *found.told):
                fit += [stand for stand in stands.on_node(name) if stand not in fit and stands.room(stand) >= tokens]
        if stands.kept is not None and not mine:
            fit = [stand for stand in fit if stand is not stands.kept]
        fit = stands.level(fit, tokens)
        if found is NOTHING_FOUND:
            return [DecodeOption(stand.best, pace := stand.pace, pace.sends(now_ns)) for stand in fit]
        return [self._decode_option(stand, found, now_ns) for stand in fit]

    def _decode_option(self, stand: Stand, found: _Found, now_ns: int) -> DecodeOption:
        engine, pace = stand.best, stand.pace
        pool = found.at(pace.node.name) if found.told else 0
        if pace.node.name == found.session.node:
            pool = max(pool, found.session.node_tokens)
        return DecodeOption(engine, pace, pace.sends(now_ns), pool)

    # Readers.

    def _work(self, hit_tokens: int) -> Work:
        return Work(hit_tokens, self._desk.model.kv_bytes_per_token, self._settings.floor_ns / 1e9)

    def _planned(self, prefill: Pace, decode: Pace, work: Work, held: Leading, now_ns: int) -> Plan:
        helpers = self._helpers(prefill, decode, work, now_ns)
        return plan(Ways(prefill, decode, helpers, held), work, now_ns)

    def _helpers(self, prefill: Pace, decode: Pace, work: Work, now_ns: int) -> list[Pace]:
        """Third nodes whose storage NICs have nothing to do, and that have room for half of it."""
        most = self._settings.helpers_max
        if not most or min(self._prefill.first_ns, self._decode.first_ns) > now_ns:
            return []
        size = work.hit_tokens * work.kv_bytes_per_token
        found: list[Pace] = []
        for pace in (*self._prefill.readers(most + 2), *self._decode.readers(most + 2)):
            if (
                pace.free_ns <= now_ns
                and pace.help_room_bytes >= size // 2
                and not pace.starved
                and not pace.node.draining
                and pace is not prefill
                and pace is not decode
                and pace not in found
            ):
                found.append(pace)
        return found[:most]

    def _ahead_bytes(self, pace: Pace, now_ns: int) -> int:
        if pace.node.report is None:
            return -1
        ahead_ns = pace.free_ns - now_ns
        return int(ahead_ns * pace.rate / 1e9) if ahead_ns > 0 else 0


def _rules(best: Prediction, found: _Found) -> tuple[str, str]:
    """Of both engines: who said that the KV is there, the client or the session's last request."""
    prefill, decode = best.prefill, best.decode
    rule_p = rule_d = "soonest"
    if best.held <= max(prefill.pages, prefill.pool):
        rule_p = "cached" if found.at(prefill.engine.name) or found.at(prefill.pace.node.name) else "affinity"
    if best.held <= decode.pool:
        rule_d = "cached" if found.at(decode.pace.node.name) else "affinity"
    return rule_p, rule_d
