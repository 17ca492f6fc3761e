"""Runs one cell: brings the request into the state, lets the incident happen, and checks what everyone is owed."""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from fault_cells import UNREACHABLE, Cell, Incident
from fault_control import until
from fault_engines import EngineFailed
from fault_incidents import INCIDENTS, carry_on, go_on, mend
from fault_recipes import NoRecipe, bring_about
from fault_scene import BY_BLOCKS, CALL_S, HITS, NEW, NotReached, Scene, Stage

from kvmoverd.adapters.storage.owners import ORPHAN_AGE_S, reclaim_orphans

PROMPT_S = 4.0
"""Within this time after an incident everyone concerned has heard of it; only a deadline takes its own time."""
HELD_S = 3.0
"""How long a call that was stopped may take to end while the devices still hold what is under way."""
SETTLE_S = 8.0
QUIET_S = 4.0
CELL_S = 60.0
FOOTPRINT_S = 5.0
FILES_MORE, THREADS_MORE = 6, 4
"""What a daemon may have open beside what it had after the warm-up: a connection and a thread that come and go."""
UNTYPED = {"INTERNAL", "KvmoverError", "TimedOut", "EngineDied"}


@dataclass
class Verdict:
    """What became of a cell. `reason`: why it was not reached; `may_be_reached`: only time was against it.

    `late`: a call that ended by its own deadline, as nobody had told it before.
    """

    cell: Cell
    reason: str = ""
    may_be_reached: bool = False
    wrong: list[str] = field(default_factory=list)
    hangs: list[str] = field(default_factory=list)
    leaks: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    late: list[str] = field(default_factory=list)
    leaked_slots: int = 0
    ends: dict[str, str] = field(default_factory=dict)
    took_s: float = 0.0

    @property
    def is_clean(self) -> bool:
        return not (self.problems() or self.leaked_slots)

    @property
    def is_sound(self) -> bool:
        """May the next cell use the same daemons? One that was not reached changes nothing."""
        return not (self.hangs or self.leaks or self.failures or self.leaked_slots)

    def problems(self) -> list[str]:
        not_reached = [f"not reached: {self.reason}"] if self.reason else []
        return [*not_reached, *self.wrong, *self.hangs, *self.leaks, *self.failures, *self.late]


async def run_cell(stage: Stage, cell: Cell) -> Verdict:
    """One cell. After a hang, or when the stage could not be mended, the caller needs a new stage."""
    verdict = Verdict(cell)
    began_s = time.monotonic()
    unreachable = UNREACHABLE.get((cell.machine, cell.state, cell.path))
    if unreachable is not None:
        verdict.reason = f"unreachable: {unreachable}"
        return verdict
    run = _Run(stage, cell, verdict)
    try:
        async with asyncio.timeout(CELL_S) as limit:
            await run.run()
    except NoRecipe as error:
        verdict.reason = str(error)
    except TimeoutError as error:
        within = f"the cell did not end within {CELL_S:g} s" if limit.expired() else f"no answer: {error}"
        verdict.hangs.append(f"{run.step}: {within}")
    except (NotReached, EngineFailed, ConnectionError, AssertionError, OSError) as error:
        verdict.failures.append(f"{run.step}: {type(error).__name__}: {error}")
    verdict.took_s = time.monotonic() - began_s
    return verdict


class _Run:
    """The steps of a cell, in order."""

    def __init__(self, stage: Stage, cell: Cell, verdict: Verdict) -> None:
        self.stage = stage
        self.cell = cell
        self.verdict = verdict
        self.step = "beginning"
        self.shared_before = shared_names()
        self.scene = Scene(stage, cell, f"cell {next(stage.numbers)}")

    async def run(self) -> None:
        try:
            await bring_about(self.scene)
        except NotReached as error:
            self.verdict.reason, self.verdict.may_be_reached = str(error), True
        else:
            await self._happen()
        await self._step(self._open)
        await self._step(self._carry_on)
        await self._step(self._survivors)
        if self.cell.incident is Incident.STOP and not self.verdict.reason:
            await self._step(self._after_the_stop)
        await self._step(self._bystanders_ends)
        await self._step(self._collect)
        if not self.verdict.reason:
            self.step = "mending"
            await mend(self.scene)
        await self._step(self._settled)
        await self._step(self._serves)
        await self._step(self._footprints)

    async def _step(self, step: Callable[[], Awaitable[None]]) -> None:
        self.step = step.__name__.strip("_").replace("_", " ")
        await step()

    async def _happen(self) -> None:
        await self._step(self._bystanders)
        self.step = self.cell.incident.value
        await INCIDENTS[self.cell.incident](self.scene)
        await self._step(self._while_held)

    async def _carry_on(self) -> None:
        await carry_on(self.scene)

    async def _after_the_stop(self) -> None:
        await go_on(self.scene)
        await self._open()
        await carry_on(self.scene)
        await self._ends((self.scene.side,), PROMPT_S)

    def _is_away(self, side: str, *, daemon: bool) -> bool:
        """Is this process dead or still? Without an incident, none is."""
        if self.verdict.reason or self.cell.incident not in (Incident.KILL, Incident.STOP):
            return False
        return self.cell.process.is_daemon is daemon and self.scene.side == side

    async def _open(self) -> None:
        for node in self.stage.nodes:
            if node.is_running() and not node.is_stopped():
                await node.ask("twisted")
                await node.ask("open")

    async def _bystanders(self) -> None:
        for side in ("pe", "de"):
            asked = {"chain": "by", "blocks": BY_BLOCKS, "request": f"by {side} {self.scene.request}"}
            await self.stage.engines["by"].ask(
                "fetch", session=f"by {side}", call=f"by {side}", first_page=0, timeout_s=CALL_S, **asked
            )

    async def _while_held(self) -> None:
        """A device that does not answer holds up nobody who has cancelled, or whose time is over."""
        if self.cell.incident not in (Incident.DEADLINE, Incident.CANCEL, Incident.LOSE):
            return
        if self.cell.incident is Incident.CANCEL and self.cell.process.is_daemon:
            return
        own = [call for side, call in self.scene.calls if side == self.scene.side and call != "blocker"]
        ends = await self.scene.ends(HELD_S, (self.scene.side,), without=("blocker",))
        waits_alone = self.cell.state == "WAITING_ENGINE" or self.scene.delivering
        for call in own:
            if not ends[call]["end"] and not waits_alone:
                self.verdict.hangs.append(f"{call} did not end while the devices were held: {self.cell.incident.value}")

    async def _survivors(self) -> None:
        sides = tuple(side for side in ("pe", "de") if not self._is_away(side, daemon=False))
        if self.cell.incident is Incident.STOP and self.cell.process.is_daemon and not self.verdict.reason:
            sides = tuple(side for side in sides if side != self.scene.side)
            await self._bystander_ends("de" if self.scene.side == "pe" else "pe")
        await self._ends(sides, PROMPT_S)

    async def _ends(self, sides: tuple[str, ...], prompt_s: float) -> None:
        """Collects how calls ended: promptly, or late, which is by their own deadline, or not at all."""
        ends = await self.scene.ends(prompt_s, sides)
        late = [call for call, told in ends.items() if not told["end"]]
        if late:
            self.verdict.late += [f"{call} took longer than {prompt_s:g} s" for call in late]
            ends |= await self.scene.ends(CALL_S + PROMPT_S, sides)
        for call, told in ends.items():
            self._judge(call, told)
        for side, call in self.scene.calls:
            if side in sides and ends[call]["end"] not in ("", "EngineDied") and not await self._is_quiet(side, call):
                self.verdict.hangs.append(f"{call}: its pages were not said to be quiet within {QUIET_S:g} s")

    async def _is_quiet(self, side: str, call: str) -> bool:
        found: bool = await self.stage.engines[side].ask("quiet", call=call, timeout_s=QUIET_S)
        return found

    def _judge(self, call: str, told: dict[str, Any]) -> None:
        self.verdict.ends[call] = told["end"]
        if not told["end"]:
            self.verdict.hangs.append(f"{call} has not ended")
        elif told["end"] in UNTYPED:
            self.verdict.failures.append(f"{call} ended with {told['end']}: {told['message']}")
        if call in [name for _, name in self.scene.again] and told["end"] != "OK":
            self.verdict.failures.append(f"{call}, the next attempt, ended with {told['end']}: {told['message']}")

    async def _bystanders_ends(self) -> None:
        if self.verdict.reason:
            return
        for side in ("pe", "de"):
            await self._bystander_ends(side)

    async def _bystander_ends(self, side: str) -> None:
        """All is well for whoever has nothing to do with the incident."""
        told = await self.stage.engines["by"].ask("end", call=f"by {side}", timeout_s=CALL_S + PROMPT_S)
        self.verdict.ends[f"by {side}"] = told["end"]
        is_hit = self.cell.incident is Incident.CUT and self.cell.process.is_daemon and side == self.scene.side
        is_hit = is_hit or (self.cell.incident is Incident.SHORT and side == self.scene.side)
        if not told["end"]:
            self.verdict.hangs.append(f"the bystander on {side} has not ended")
        elif told["end"] in UNTYPED or (told["end"] != "OK" and not is_hit and not self._is_away(side, daemon=True)):
            self.verdict.failures.append(f"the bystander on {side} ended with {told['end']}: {told['message']}")

    async def _collect(self) -> None:
        """What the engines found in their pages."""
        for name, engine in self.stage.engines.items():
            if engine.process.returncode is None:
                self.verdict.wrong += [f"{name}: {text}" for text in await engine.ask("over")]

    async def _settled(self) -> None:
        """Everything goes home: slots, room, pages, requests, leases; on both nodes."""
        for node in self.stage.nodes:

            async def is_home(node: Any = node) -> bool:
                return not await node.owed()

            if await until(is_home, SETTLE_S):
                continue
            owed = await node.owed()
            self.verdict.leaks.append(f"{node.name} has not settled after {SETTLE_S:g} s: {owed}")
            self.verdict.leaked_slots += sum(count for name, count in owed.items() if name.startswith("slots "))
        for node in self.stage.nodes:
            for error in (await node.ask("books"))["loop_errors"]:
                self.verdict.failures.append(f"{node.name}: {error}")
            seen = self.stage.log_seen_bytes[node.name]
            self.stage.log_seen_bytes[node.name] = node.log_bytes()
            self.verdict.failures += [f"{node.name}: traceback: {text}" for text in node.new_tracebacks(seen)]

    async def _serves(self) -> None:
        """What was stored is right wherever it is found, and a whole request goes through."""
        for side in ("pe", "de"):
            blocks = HITS + NEW if self.cell.machine == "store" else NEW
            asked = {"chain": self.scene.new_chain, "blocks": blocks}
            self.verdict.wrong += await self.stage.engines["by"].ask("verify", session=f"by {side}", **asked)
        self.verdict.failures += [f"afterwards: {text}" for text in await self.stage.whole_request(self.cell.path)]

    async def _footprints(self) -> None:
        """Nothing is left open, in any daemon that has lived through it, nor in the store."""
        for node in self.stage.nodes:
            base = self.stage.base[node.name]

            async def is_small(node: Any = node, base: Any = base) -> bool:
                files, threads = node.footprint()
                return bool(files <= base[0] + FILES_MORE and threads <= base[1] + THREADS_MORE)

            if not await until(is_small, FOOTPRINT_S):
                files, threads = node.footprint()
                what = f"{files} descriptors and {threads} threads, it had {base[0]} and {base[1]}"
                self.verdict.leaks.append(f"{node.name} has {what}: {await node.ask('threads')} {node.descriptors()}")
        if not await until(self._is_swept, FOOTPRINT_S):
            self.verdict.leaks.append(f"files are left behind: {self._temporary_files()}")

    def _temporary_files(self) -> set[str]:
        """Blocks that were being written, and shared memory that has a name.

        What a dead daemon was writing goes with the first start of any daemon after `ORPHAN_AGE_S`; here it goes now, by the
        same code, so that what it would not take away is found.
        """
        temps = self.stage.cluster.store / "kvm1/.tmp"
        reclaim_orphans(temps, now_s=time.time() + ORPHAN_AGE_S)
        return {str(path) for path in temps.iterdir()} | shared_names() - self.shared_before

    async def _is_swept(self) -> bool:
        return not self._temporary_files()


def shared_names() -> set[str]:
    """What has a name in shared memory, without the semaphores of other Python programs: no daemon makes one."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith("sem.mp-")}


def summed(verdicts: list[Verdict]) -> Counter[str]:
    """The numbers of a report."""
    return Counter(
        cells=len(verdicts),
        wrong_bytes=sum(len(verdict.wrong) for verdict in verdicts),
        hangs=sum(len(verdict.hangs) for verdict in verdicts),
        leaked_slots=sum(verdict.leaked_slots for verdict in verdicts),
    )
