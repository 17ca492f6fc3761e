"""What happens to a process in a cell, and how what it has ended is started again."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable, Mapping

from fault_cells import BETWEEN_NODES, DEVICE_INCIDENTS, HELPER, Incident
from fault_scene import SHORT_S, Scene

DEVICES = ("storage", "local", "remote")
TWISTED = 2
"""Completions of each device that are not as they should be."""
LATE_S = 0.2
SLOW_READ_S, SLOW_ENGINE_S = 0.1, 0.15
"""What a read takes, about a hundred times what it does else; what an engine takes for each layer."""

Act = Callable[[Scene], Awaitable[None]]


async def _kill(scene: Scene) -> None:
    if scene.cell.process.is_daemon:
        await asyncio.to_thread(scene.stage.node(scene.side).kill)
    else:
        await scene.engine(scene.side).kill()


async def _stop(scene: Scene) -> None:
    if scene.cell.process.is_daemon:
        scene.stage.node(scene.side).pause()
    else:
        scene.engine(scene.side).signal(signal.SIGSTOP)


async def _cut(scene: Scene) -> None:
    if scene.cell.process.is_daemon:
        what = "nodes" if scene.cell.machine in BETWEEN_NODES else "engines"
        await scene.stage.node(scene.side).ask("cut", what)
    else:
        await scene.engine(scene.side).ask("cut", session=scene.side)


async def _deadline(scene: Scene) -> None:
    """A daemon's deadlines were set with the calls; an engine's patience ends now."""
    if scene.cell.process.is_daemon:
        await asyncio.sleep(SHORT_S)
        return
    for side, call in scene.calls:
        if side == scene.side:
            await scene.engine(side).ask("give_up", call=call)


async def _twist(scene: Scene) -> None:
    """What the devices had held goes on, and some of its completions are not as they should be."""
    node = scene.stage.node(scene.side)
    for device in DEVICES:
        await node.ask("twist", device, scene.cell.incident.value, TWISTED)
    await node.ask("open")
    await carry_on(scene)
    if scene.cell.incident is Incident.LATE:
        await asyncio.sleep(LATE_S)
    elif scene.cell.incident is Incident.LOSE:
        await asyncio.sleep(SHORT_S)


async def _slow(scene: Scene) -> None:
    """What the devices had held goes on, at a hundredth of the rate; an engine takes its time."""
    if scene.cell.process.value.endswith("engine"):
        await scene.engine(scene.side).ask("slow", pause_s=SLOW_ENGINE_S)
        return
    node = scene.stage.node(scene.side)
    await node.ask("slow", SLOW_READ_S)
    await node.ask("open")
    await carry_on(scene)


async def _cancel(scene: Scene) -> None:
    if scene.cell.process.is_daemon:
        await _again(scene)
        return
    name = next((call for side, call in scene.calls if side == scene.side and call != "blocker"), None)
    if name is not None:
        await scene.engine(scene.side).ask("cancel", call=name)


async def _again(scene: Scene) -> None:
    """The next attempt, of which the cell's node hears first."""
    before = len(scene.calls)
    match scene.cell.machine, scene.side:
        case "fetch", _:
            await scene.fetch(2)
        case "store", _:
            await scene.store(2)
        case _, _ if scene.cell.state == "WAITING_ENGINE":
            # A decode engine that has not spoken of an attempt may not end it: the prefill side does.
            await scene.stream_and_push(2)
            await scene.reached("de", "assemble", "WAITING_ENGINE", attempt=2)
            await scene.assemble(2)
        case _, "pe":
            await scene.stream_and_push(2)
            await scene.assemble(2)
        case _:
            await scene.assemble(2)
            await scene.stream_and_push(2)
    if scene.cell.machine in BETWEEN_NODES:
        await scene.compute(2)
        await scene.deliver(2)
    scene.again = scene.calls[before:]


INCIDENTS: Mapping[Incident, Act] = {
    Incident.KILL: _kill,
    Incident.STOP: _stop,
    Incident.CUT: _cut,
    Incident.DEADLINE: _deadline,
    Incident.CANCEL: _cancel,
    **dict.fromkeys(DEVICE_INCIDENTS, _twist),
    Incident.SLOW: _slow,
}


async def carry_on(scene: Scene) -> None:
    """Whoever lives does what it would have done: the prefill engine computes, the decode engine takes what is whole."""
    if scene.cell.machine not in BETWEEN_NODES:
        return
    made = dict.fromkeys(call for _, call in scene.calls)
    alive = {side for side in ("pe", "de") if scene.engine(side).process.returncode is None}
    if scene.cell.process.is_daemon is False and scene.cell.incident is Incident.STOP:
        alive -= {scene.side}
    if not scene.computing and "push 1" in made and "pe" in alive:
        await scene.compute()
    if not scene.delivering and "assembly 1" in made and "de" in alive:
        await scene.deliver()


async def mend(scene: Scene) -> None:
    """Starts again what was killed, lets go on what was stopped, opens sessions anew where they were cut."""
    stage, side = scene.stage, scene.side
    match scene.cell.incident:
        case Incident.KILL if scene.cell.process.is_daemon:
            node = stage.node(side)
            await asyncio.to_thread(node.start)
            await node.open_control()
            for name in (side, "by") if side != HELPER else ():
                await stage.connect(name)
        case Incident.KILL:
            await stage.start_engine(side)
        case Incident.CUT if not scene.cell.process.is_daemon:
            await stage.connect(side)
        case Incident.SLOW if scene.cell.process.value.endswith("engine"):
            await stage.engines[side].ask("slow", pause_s=0.0)
        case Incident.SLOW:
            await stage.node(side).ask("slow", 0.0)


async def go_on(scene: Scene) -> None:
    """A process that stood still goes on."""
    if scene.cell.process.is_daemon:
        scene.stage.node(scene.side).resume()
    else:
        scene.engine(scene.side).signal(signal.SIGCONT)
