"""The scene of a cell: two gated daemons, an engine with each, a third engine that has business of its own with both."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fault_cells import HELPER, PATHS, Cell, Incident
from fault_control import GatedCluster, GatedNode, until
from fault_engines import EngineFailed, EngineHandle

HITS, NEW, BY_BLOCKS = 8, 2, 3
BLOCKER_BLOCKS = 14
"""With it, the room for reads, or that for write-back, has none left for a victim."""
REACH_S = 4.0
CALL_S = 8.0
SHORT_S = 1.2
AGAIN_PAGE = 24
BLOCKER_PAGE = 46
WARM_S = 20.0


READERS = {
    "PE": {"path": "PE"},
    "DE": {"path": "DE"},
    "split": {"path": "PARTS", "parts": [["pe", 0, 2], ["de", 2, HITS]]},
    "helped": {"path": "PARTS", "parts": [["pe", 0, 1], [HELPER, 1, 7], ["de", 7, HITS]]},
}
"""What a plan says of each path. The last reader has more blocks than its devices take at once: some can be given up."""


class NotReached(Exception):
    """The request did not come into the state of the cell."""


class Stage:
    """Daemons and engines, kept from cell to cell. What an incident has ended is started again."""

    def __init__(self, cluster: GatedCluster) -> None:
        self.cluster = cluster
        self.engines: dict[str, EngineHandle] = {}
        self.base: dict[str, tuple[int, int]] = {}
        self.log_seen_bytes: dict[str, int] = {}
        self.numbers = itertools.count(1)

    def node(self, side: str) -> GatedNode:
        found = {"pe": self.cluster.pe, "de": self.cluster.de}.get(side) or self.cluster.helpers[0]
        assert isinstance(found, GatedNode)
        return found

    @property
    def nodes(self) -> list[GatedNode]:
        return [self.node("pe"), self.node("de"), self.node(HELPER)]

    async def begin(self) -> None:
        for node in self.nodes:
            await node.open_control()
        for name in ("pe", "de", "by"):
            await self.start_engine(name)
        await self.engines["pe"].ask("put", session="pe", name="hits", blocks=HITS)
        await self.engines["by"].ask("put", session="by pe", name="by", blocks=BY_BLOCKS)
        await self.warm_up()

    async def start_engine(self, name: str) -> None:
        """A new process in place of the one of that name, with its sessions."""
        old = self.engines.pop(name, None)
        if old is not None:
            await old.kill()
        self.engines[name] = await EngineHandle.start()
        await self.connect(name)

    async def connect(self, name: str) -> None:
        for session, side in {"pe": [("pe", "pe")], "de": [("de", "de")], "by": [("by pe", "pe"), ("by de", "de")]}[
            name
        ]:
            await self.engines[name].ask("connect", session=session, endpoint=self.node(side).endpoint)

    async def warm_up(self) -> None:
        """Whole requests on all paths: what is opened once is open, and does not look like a leak afterwards."""
        for path in PATHS:
            assert not (wrong := await self.whole_request(path)), f"{path}: {wrong}"
        for node in self.nodes:
            self.base[node.name] = node.footprint()
            self.log_seen_bytes[node.name] = node.log_bytes()

    async def whole_request(self, path: str) -> list[str]:
        """A request from the stream to the decode engine's pages, tried again while a node is left alone after an incident.

        What is wrong with it, empty when nothing is.
        """
        until_s = time.monotonic() + WARM_S
        while ends := await self._request_once(f"whole-{next(self.numbers)}", path):
            if time.monotonic() > until_s:
                return ends
            await asyncio.sleep(0.1)
        return []

    async def _request_once(self, request: str, path: str) -> list[str]:
        pe, de = self.engines["pe"], self.engines["de"]
        keys = [["hits", 0, HITS]]
        asked = {"request": request, "keys": keys, "hit_blocks": HITS} | READERS[path]
        await de.ask("assemble", session="de", call="assembly", request=request)
        await pe.ask("stream", session="pe", call="stream", **asked)
        await pe.ask("push", session="pe", call="push", **asked)
        await pe.ask("compute", push="push", stream="stream")
        await de.ask(
            "deliver_when_whole", session="de", call="deliver", assembly="assembly", request=request, keys=keys
        )
        told = {
            "stream": await pe.ask("end", call="stream", timeout_s=CALL_S),
            "push": await pe.ask("end", call="push", timeout_s=CALL_S),
            "assembly": await de.ask("end", call="assembly", timeout_s=CALL_S),
        }
        if told["assembly"]["end"] == "OK":
            told["deliver"] = await de.ask("end", call="deliver", timeout_s=CALL_S)
        wrong = await pe.ask("over") + await de.ask("over")
        return wrong + [f"{name}: {end['end']} {end['message']}" for name, end in told.items() if end["end"] != "OK"]

    async def end(self, *, is_sound: bool) -> list[str]:
        """Takes all down; what daemons of a sound stage do wrong when they are told to leave."""
        for engine in self.engines.values():
            await engine.kill()
        for node in self.nodes:
            node.forget_control()
            if not is_sound and node.process is not None:
                await asyncio.to_thread(node.kill)
        try:
            await asyncio.to_thread(self.cluster.end)
        except AssertionError as error:
            return [str(error)]
        return []


async def begin_stage(home: Path, transport: str, settings: Mapping[str, str] | None = None) -> Stage:
    """Three daemons, with `settings` of their own, and three engines. Nothing is left running when that fails."""
    kind = type("StageCluster", (GatedCluster,), {"settings": GatedCluster.settings | dict(settings or {})})
    made = Stage(await asyncio.to_thread(kind, home, nodes=3, transport=transport))
    try:
        await made.begin()
    except BaseException:
        await made.end(is_sound=False)
        raise
    return made


@contextmanager
def stage_home() -> Iterator[Path]:
    """A directory with a short name: the paths of sockets are limited."""
    home = Path(tempfile.mkdtemp(prefix="kvmfault-", dir="/tmp"))
    try:
        yield home
    finally:
        shutil.rmtree(home)


@dataclass
class Scene:
    """One cell's traffic. `calls`: (engine, name) of each call of the victim, in the order in which they were made."""

    stage: Stage
    cell: Cell
    request: str
    calls: list[tuple[str, str]] = field(default_factory=list)
    again: list[tuple[str, str]] = field(default_factory=list)
    computing: bool = False
    delivering: bool = False
    ring: bool = False
    was_stopped: bool = False

    @property
    def side(self) -> str:
        return self.cell.process.side

    @property
    def reader(self) -> str:
        return {"PE": "pe", "DE": "de", "split": "de", "helped": HELPER}[self.cell.path]

    @property
    def new_chain(self) -> str:
        return f"new {self.request}"

    def timeout_s(self, side: str) -> float:
        """Short where the cell is about a deadline, or about a process that stands still until the others have ended."""
        if self.cell.incident is Incident.STOP and self.side != HELPER:
            return SHORT_S
        is_due = self.cell.incident is Incident.DEADLINE and self.cell.process.is_daemon
        is_due = is_due or self.cell.incident is Incident.LOSE
        return SHORT_S if is_due and side == self.side else CALL_S

    def engine(self, side: str) -> EngineHandle:
        return self.stage.engines[side]

    async def shut(self, side: str, *gates: str) -> None:
        await self.stage.node(side).ask("shut", *gates)

    async def forget(self) -> None:
        for node in self.stage.nodes:
            await node.ask("forget")

    async def _begin(self, side: str, what: str, call: str, **options: Any) -> None:
        self.calls.append((side, call))
        await self.engine(side).ask(what, session=side, call=call, **({"request": self.request} | options))

    def _prompt(self, attempt: int) -> dict[str, Any]:
        keys = [["hits", 0, HITS], [self.new_chain, 0, NEW]]
        ring = {"ring_sets": 2} if self.ring else {}
        return (
            {
                "keys": keys,
                "hit_blocks": HITS,
                "attempt": attempt,
                "timeout_s": self.timeout_s("pe"),
                "first_page": 0 if attempt == 1 else AGAIN_PAGE,
            }
            | ring
            | READERS[self.cell.path]
        )

    async def prompt(self, *, assemble: bool = True, ring: bool = False) -> None:
        """The three calls of a prompt's request; nothing is computed yet."""
        self.ring = ring
        if assemble:
            await self.assemble()
        await self.stream_and_push()

    async def assemble(self, attempt: int = 1) -> None:
        await self._begin("de", "assemble", f"assembly {attempt}", attempt=attempt, timeout_s=self.timeout_s("de"))

    async def stream_and_push(self, attempt: int = 1) -> None:
        await self._begin("pe", "stream", f"stream {attempt}", **self._prompt(attempt))
        await self._begin("pe", "push", f"push {attempt}", **self._prompt(attempt))

    async def stream_alone(self) -> None:
        """A stream without a decode node: nothing is pushed."""
        await self._begin("pe", "stream", "stream 1", **(self._prompt(1) | {"decode_node": ""}))

    async def compute(self, attempt: int = 1) -> None:
        self.computing = True
        await self.engine("pe").ask("compute", push=f"push {attempt}", stream=f"stream {attempt}")

    async def deliver(self, attempt: int = 1) -> None:
        """As soon as the buffer is whole."""
        self.delivering = True
        await self._begin(
            "de",
            "deliver_when_whole",
            f"deliver {attempt}",
            assembly=f"assembly {attempt}",
            keys=self._prompt(attempt)["keys"],
            attempt=attempt,
            first_page=self._prompt(attempt)["first_page"],
        )

    async def fetch(self, attempt: int = 1) -> None:
        options = {"attempt": attempt, "first_page": 0 if attempt == 1 else AGAIN_PAGE}
        options["timeout_s"] = self.timeout_s(self.side)
        await self._begin(self.side, "fetch", f"fetch {attempt}", chain="hits", blocks=HITS, **options)

    async def store(self, attempt: int = 1) -> None:
        options = {"attempt": attempt, "first_page": 0 if attempt == 1 else AGAIN_PAGE}
        options["timeout_s"] = self.timeout_s(self.side)
        blocks = HITS + NEW
        await self._begin(self.side, "store", f"store {attempt}", chain=self.new_chain, blocks=blocks, **options)

    async def fill_read_room(self, side: str) -> None:
        """A fetch of blocks that nobody has stored, whose reads are held."""
        await self.shut(side, "reads")
        asked = {"chain": f"nobody's {self.request}", "blocks": BLOCKER_BLOCKS, "request": f"blocker {self.request}"}
        await self._begin(side, "fetch", "blocker", timeout_s=CALL_S, **asked)
        await self.reached(side, "fetch", "READING", request=f"blocker {self.request}")

    async def fill_help_room(self) -> None:
        """Another request's part on the third node, of blocks that nobody has stored, whose reads are held."""
        await self.shut(HELPER, "reads")
        keys, parts = [[f"nobody's {self.request}", 0, 2]], [[HELPER, 0, 2]]
        asked = {"keys": keys, "hit_blocks": 2, "path": "PARTS", "parts": parts, "request": f"blocker {self.request}"}
        await self._begin("pe", "stream", "blocker", decode_node="", timeout_s=CALL_S, first_page=BLOCKER_PAGE, **asked)
        await self.reached(HELPER, "part", "READING", request=f"blocker {self.request}")

    async def fill_write_room(self, side: str) -> None:
        """A store whose writes are held."""
        await self.shut(side, "writes")
        asked = {"chain": f"block {self.request}", "blocks": BLOCKER_BLOCKS, "request": f"blocker {self.request}"}
        await self._begin(side, "store", "blocker", timeout_s=CALL_S, first_page=BLOCKER_PAGE, **asked)
        await self.reached(side, "store", "WRITING", request=f"blocker {self.request}")

    async def stop(self, side: str) -> None:
        """The engine of that side cancels: what is under way has to be waited for."""
        self.was_stopped = True
        name = next(call for owner, call in self.calls if owner == side and call != "blocker")
        await self.engine(side).ask("cancel", call=name)

    async def held(self, side: str, gate: str) -> None:
        """Raises `NotReached` when nothing comes to a gate."""

        async def is_held() -> bool:
            return bool(await self.stage.node(side).ask("held", gate))

        if not await until(is_held, REACH_S):
            raise NotReached(f"nothing waits at the gate {gate!r} of {side}")

    async def event(self, side: str, call: str, event: str) -> None:
        await self.engine(side).ask("event", call=call, event=event, timeout_s=REACH_S)

    async def ended(self, side: str, call: str) -> None:
        told = await self.engine(side).ask("end", call=call, timeout_s=REACH_S)
        if not told["end"]:
            raise NotReached(f"{call} did not end")

    async def reached(self, side: str, kind: str, state: str, request: str = "", attempt: int = 1) -> None:
        """Raises `NotReached` when no machine of this kind comes into the state."""
        seen: dict[str, set[str]] = {}

        async def is_there() -> bool:
            nonlocal seen
            seen = await self.stage.node(side).states(request or self.request, attempt)
            return state in seen.get(kind, set())

        if not await until(is_there, REACH_S):
            ends = await self.ends(0.01)
            raise NotReached(f"{kind} on {side} is {seen.get(kind, 'not there')}, not {state}; calls: {ends}")

    async def ends(
        self, timeout_s: float, sides: tuple[str, ...] = ("pe", "de"), without: tuple[str, ...] = ()
    ) -> dict[str, dict[str, Any]]:
        """How the victim's calls have ended, those of living engines; waits for all of them at once."""
        calls = [(side, call) for side, call in self.calls if side in sides and call not in without]
        asked = {call: self._end(side, call, timeout_s) for side, call in calls}
        return dict(zip(asked, await asyncio.gather(*asked.values()), strict=True))

    async def _end(self, side: str, call: str, timeout_s: float) -> dict[str, Any]:
        with contextlib.suppress(EngineFailed):
            told: dict[str, Any] = await self.engine(side).ask(
                "end", call=call, timeout_s=timeout_s, wait_s=timeout_s + 10.0
            )
            return told
        return {"end": "EngineDied", "message": "", "pages_quiet": True, "quiet": True, "wrong": [], "ready": 0}
