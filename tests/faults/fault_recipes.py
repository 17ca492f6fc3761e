"""How a request is brought into each state of each machine, and held there. A state without a recipe has no way in."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from fault_cells import HELPER
from fault_scene import Scene

QUIESCE_S, DRAINING_S = 0.3, 1.0
"""How long a drain may take: the incident has to come within it where it is the state of the cell."""

RANGE_BYTES, WHOLE_BYTES = 1, 1 << 30
"""Of a block: layer by layer where the cell is about layers of which some are not begun, whole else."""
REST_BLOCKS = 4
"""What a third node, or the decode node beside its buffer, has room for."""

Recipe = Callable[[Scene], Awaitable[None]]


class NoRecipe(Exception):
    """Nobody has said how to come into this state."""


def _sends(scene: Scene) -> str:
    """The gate that layers on their way from the reader to the prefill engine's pages pass."""
    return "local" if scene.reader == "pe" else "remote"


async def _fetch_waiting(scene: Scene) -> None:
    await scene.forget()
    await scene.fill_read_room(scene.side)
    await scene.fetch()


async def _fetch_reading(scene: Scene) -> None:
    await scene.forget()
    await scene.shut(scene.side, "reads")
    await scene.fetch()


async def _fetch_copying(scene: Scene) -> None:
    await scene.shut(scene.side, "local")
    await scene.fetch()
    await scene.held(scene.side, "local")


async def _fetch_draining(scene: Scene) -> None:
    await _fetch_copying(scene)
    await scene.stop(scene.side)


async def _fetch_ended(scene: Scene) -> None:
    await scene.fetch()
    await scene.ended(scene.side, "fetch 1")


async def _reserving(scene: Scene) -> None:
    await scene.shut("pe", "reserve")
    await scene.prompt()


async def _reading(scene: Scene) -> None:
    await scene.forget()
    await scene.shut(scene.reader, "reads")
    await scene.prompt()


async def _streaming(scene: Scene) -> None:
    """Two page sets, and nobody computes: the third layer waits."""
    await scene.prompt(ring=True)
    await scene.engine("pe").ask("layer", call="stream 1", layer=1, timeout_s=4.0)


async def _sending(scene: Scene) -> None:
    await scene.shut(scene.reader, _sends(scene))
    await scene.prompt()
    await scene.held(scene.reader, _sends(scene))


async def _part_draining(scene: Scene) -> None:
    await _sending(scene)
    await scene.stop("pe")


async def _stream_draining(scene: Scene) -> None:
    """Another node's word is not waited for, only that nothing lands any more."""
    if scene.reader != "pe":
        await scene.shut("pe", "quiet")
    await _part_draining(scene)


async def _stream_ended(scene: Scene) -> None:
    await scene.prompt()
    await scene.compute()
    await scene.ended("pe", "stream 1")


async def _holding(scene: Scene) -> None:
    """One part has read its first layers, another has not: nobody knows the prefix."""
    await scene.forget()
    await scene.shut("pe", "reads")
    await scene.prompt()


async def _giving_up(scene: Scene) -> None:
    """The reader is asked for what it has not begun; the question does not get there."""
    await scene.forget()
    await scene.shut(scene.reader, "reads")
    await scene.shut("pe", "give_up")
    await scene.prompt()
    await scene.reached(scene.reader, "part", "READING")
    await scene.stage.node("pe").ask("move", scene.request, scene.reader, "de" if scene.reader == HELPER else "pe")


async def _fencing(scene: Scene) -> None:
    """The reader's part is taken away from it; its sink does not get quiet."""
    await scene.forget()
    await scene.shut(scene.reader, "reads")
    await scene.shut("pe", "quiet")
    await scene.prompt()
    await scene.reached(scene.reader, "part", "READING")
    await scene.stage.node("pe").ask("stall", scene.request, scene.reader)


def _giver_and_taker(scene: Scene) -> tuple[str, str]:
    """Of a rest. A third node's part gives none; it takes one where there is a third node."""
    giver = "de" if scene.reader == HELPER else scene.reader
    return giver, HELPER if scene.reader == HELPER else "pe" if giver == "de" else "de"


async def _in_mid_stream(scene: Scene) -> None:
    """The prefix is known, and later layers wait on every node."""
    await scene.forget()
    for node in scene.stage.nodes:
        await node.ask("ranges", RANGE_BYTES)
    for side in ("pe", "de", HELPER):
        await scene.shut(side, "later")
    await scene.prompt()
    await scene.reached("pe", "stream", "STREAMING")


async def _giving_rest(scene: Scene) -> None:
    """The reader is asked for the layers that it has not begun; the question does not get there."""
    await scene.shut("pe", "give_up")
    await _in_mid_stream(scene)
    await scene.stage.node("pe").ask("rest", scene.request, *_giver_and_taker(scene), REST_BLOCKS)


async def _resting(scene: Scene) -> None:
    """Another reads them, and has none of them yet."""
    await _in_mid_stream(scene)
    await scene.stage.node("pe").ask("rest", scene.request, *_giver_and_taker(scene), REST_BLOCKS)


async def _part_waiting(scene: Scene) -> None:
    """Only a part without a decode node waits for room: otherwise the request has taken it before, or the DE buffer is it.

    A third node has room for one part.
    """
    await scene.forget()
    if scene.reader == HELPER:
        await scene.fill_help_room()
        await scene.prompt()
        return
    await scene.fill_read_room("pe")
    await scene.stream_alone()


async def _push_waiting(scene: Scene) -> None:
    await scene.shut("pe", "set_prefix")
    await scene.prompt()


async def _pushing(scene: Scene) -> None:
    await scene.shut("pe", "remote")
    await scene.prompt()
    await scene.compute()
    await scene.held("pe", "remote")


async def _push_draining(scene: Scene) -> None:
    await _pushing(scene)
    await scene.stop("pe")


async def _push_ended(scene: Scene) -> None:
    await scene.prompt()
    await scene.compute()
    await scene.ended("pe", "push 1")


async def _waiting_engine(scene: Scene) -> None:
    await scene.prompt(assemble=False)


async def _filling(scene: Scene) -> None:
    await scene.prompt()
    await scene.event("de", "assembly 1", "attached")


async def _whole(scene: Scene) -> None:
    await scene.shut("de", "writes")
    await scene.prompt()
    await scene.compute()
    await scene.event("de", "assembly 1", "whole")


async def _delivering(scene: Scene) -> None:
    await scene.prompt()
    if scene.reader != "pe":
        # The decode node's own copies are held only once its part has sent everything.
        await scene.engine("pe").ask("layer", call="stream 1", layer=5, timeout_s=4.0)
    await scene.shut("de", "local")
    await scene.compute()
    await scene.deliver()
    await scene.held("de", "local")


async def _delivered(scene: Scene) -> None:
    await scene.shut("de", "writes")
    await scene.prompt()
    await scene.compute()
    await scene.deliver()
    await scene.ended("de", "deliver 1")


async def _assemble_draining(scene: Scene) -> None:
    await _delivering(scene)
    await scene.stop("de")


async def _storing(scene: Scene) -> None:
    await _whole(scene)
    await scene.stop("de")


async def _assemble_ended(scene: Scene) -> None:
    await scene.prompt()
    await scene.compute()
    await scene.deliver()
    await scene.ended("de", "assembly 1")


async def _store_looking(scene: Scene) -> None:
    await scene.shut(scene.side, "find")
    await scene.store()


async def _store_waiting(scene: Scene) -> None:
    await scene.fill_write_room(scene.side)
    await scene.store()


async def _store_copying(scene: Scene) -> None:
    await scene.shut(scene.side, "local")
    await scene.store()
    await scene.held(scene.side, "local")


async def _store_writing(scene: Scene) -> None:
    await scene.shut(scene.side, "writes")
    await scene.store()
    await scene.held(scene.side, "writes")


async def _store_lingering(scene: Scene) -> None:
    await _store_writing(scene)
    await scene.stop(scene.side)


async def _store_draining(scene: Scene) -> None:
    await _store_copying(scene)
    await scene.stop(scene.side)


async def _store_ended(scene: Scene) -> None:
    await scene.store()
    await scene.ended(scene.side, "store 1")


RECIPES: Mapping[str, Mapping[str, Recipe]] = {
    "fetch": {
        "WAITING": _fetch_waiting,
        "READING": _fetch_reading,
        "COPYING": _fetch_copying,
        "DRAINING": _fetch_draining,
        "UNQUIET": _fetch_draining,
        "ENDED": _fetch_ended,
    },
    "stream": {
        "RESERVING": _reserving,
        "READING": _reading,
        "STREAMING": _streaming,
        "DRAINING": _stream_draining,
        "UNQUIET": _stream_draining,
        "ENDED": _stream_ended,
    },
    "part": {
        "WAITING": _part_waiting,
        "READING": _reading,
        "HOLDING": _holding,
        "SENDING": _sending,
        "DRAINING": _part_draining,
        "ENDED": _stream_ended,
    },
    "move": {
        "GIVING_UP": _giving_up,
        "FENCING": _fencing,
        "GIVING_REST": _giving_rest,
        "RESTING": _resting,
    },
    "push": {
        "WAITING": _push_waiting,
        "PUSHING": _pushing,
        "DRAINING": _push_draining,
        "UNQUIET": _push_draining,
        "ENDED": _push_ended,
    },
    "assemble": {
        "WAITING_ENGINE": _waiting_engine,
        "FILLING": _filling,
        "WHOLE": _whole,
        "DELIVERING": _delivering,
        "DELIVERED": _delivered,
        "DRAINING": _assemble_draining,
        "STORING": _storing,
        "UNQUIET": _assemble_draining,
        "ENDED": _assemble_ended,
    },
    "store": {
        "LOOKING": _store_looking,
        "WAITING": _store_waiting,
        "COPYING": _store_copying,
        "WRITING": _store_writing,
        "LINGERING": _store_lingering,
        "DRAINING": _store_draining,
        "UNQUIET": _store_draining,
        "ENDED": _store_ended,
    },
}
"""By kind of machine and state. After a recipe the scene waits until the machine is in the state."""


def recipe_for(machine: str, state: str) -> Recipe:
    """Raises `NoRecipe`."""
    found = RECIPES.get(machine, {}).get(state)
    if found is None:
        raise NoRecipe(f"no recipe for state {state} of {machine}")
    return found


def host_of(scene: Scene) -> str:
    """The node whose machine the cell is about."""
    machine = scene.cell.machine
    if machine in ("fetch", "store"):
        return scene.side
    return {"assemble": "de", "part": scene.reader}.get(machine, "pe")


async def bring_about(scene: Scene) -> None:
    """Brings the victim into the state of the cell. Raises `NoRecipe`, `NotReached`."""
    quiesce_s = DRAINING_S if scene.cell.state == "DRAINING" else QUIESCE_S
    for node in scene.stage.nodes:
        await node.ask("quiesce", quiesce_s)
        await node.ask("ranges", WHOLE_BYTES)
    await recipe_for(scene.cell.machine, scene.cell.state)(scene)
    await scene.reached(host_of(scene), scene.cell.machine, scene.cell.state)
