"""A real daemon with gates around its devices: `gated_daemon.py CONFIG CONTROL_SOCKET`.

The control socket takes one question a line, as JSON, and answers each with one line. What is shortened here beside the
config are waits that only cost a test's time: how long a drain may take before pages are said not to be quiet, how long a
node that did not answer is left alone, and how long a channel without work is kept.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import json
import os
import socket
import sys
import threading
import weakref
from collections import Counter, deque
from functools import partial
from pathlib import Path
from typing import Any

from fault_gates import GATES, Gate, StorageGate, TransportGate

from kvmoverd import daemon as composition
from kvmoverd import serve
from kvmoverd.adapters.transport import outgoing
from kvmoverd.config import Config, load
from kvmoverd.core.admission import Purpose
from kvmoverd.devices import Devices
from kvmoverd.node import driver, reading, storing
from kvmoverd.node.streaming import StreamDriver
from kvmoverd.rpc import peer_client

SHORTER_S = (
    (driver, "QUIESCE_S", 0.3),
    (peer_client, "PAUSE_S", 0.1),
    (peer_client, "PAUSE_S_MAX", 0.2),
    (outgoing, "LINGER_S", 1.0),
    (reading, "HELP_WAIT_S", 2.0),
)
GONE_MAX = 256

DRIVERS: weakref.WeakSet[driver.Driver] = weakref.WeakSet()
GONE: deque[dict[str, Any]] = deque(maxlen=GONE_MAX)


def _watch_drivers() -> None:
    """Every driver is known from its construction, also parts that no book of the node lists."""
    made = driver.Driver.__init__

    def noted(self: driver.Driver, *arguments: Any, **options: Any) -> None:
        made(self, *arguments, **options)
        DRIVERS.add(self)
        self.on_gone.append(lambda: GONE.append(_state_of(self)))

    driver.Driver.__init__ = noted  # type: ignore[method-assign]


def _state_of(running: driver.Driver) -> dict[str, Any]:
    return {
        "kind": type(running.machine).__name__.removesuffix("Machine").lower(),
        "request": running.call.request_id,
        "attempt": running.call.attempt,
        "state": running.machine.state.name,
    }


def _moves_of(stream: StreamDriver) -> list[dict[str, Any]]:
    """Its parts that are changing their readers."""
    states = []
    for part in stream.machine.parts.values():
        states += ["FENCING"] if part.fenced else ["GIVING_UP"] if part.moving_to else []
        states += ["GIVING_REST"] if part.rest_to else ["RESTING"] if part.rest and not part.ended else []
    return [_state_of(stream) | {"kind": "move", "state": state} for state in states]


class GatedPeer(peer_client.GrpcPeer):
    """Another node whose answers can be held back."""

    gates: dict[str, Gate]

    async def reserve(self, *arguments: Any) -> Any:
        await self.gates["reserve"].wait()
        return await super().reserve(*arguments)

    async def set_prefix(self, *arguments: Any) -> Any:
        await self.gates["set_prefix"].wait()
        return await super().set_prefix(*arguments)

    def read_part(self, *arguments: Any) -> Any:
        part = super().read_part(*arguments)
        give_up = part.give_up
        give_rest = part.give_rest
        part.give_up = lambda kept: self.gates["give_up"].passing(lambda: give_up(kept))  # type: ignore[method-assign]
        part.give_rest = lambda kept: self.gates["give_up"].passing(lambda: give_rest(kept))  # type: ignore[method-assign]
        return part

    async def release_ticket(self, *arguments: Any) -> None:
        await self.gates["release_ticket"].wait()
        await super().release_ticket(*arguments)

    async def stop_part(self, *arguments: Any) -> None:
        await self.gates["stop_part"].wait()
        await super().stop_part(*arguments)


def _find_stored(*arguments: Any) -> None:
    """Whoever stores blocks waits for what is known of them."""
    GatedPeer.gates["find"].passing(lambda: _found_stored(*arguments))


_found_stored = storing.find_stored


class GatedDaemon(composition.Daemon):
    """The composition root's own daemon and, beside it, the control socket."""

    def __init__(self, control: Path, config: Config) -> None:
        super().__init__(config)
        self.control = control
        self.gates = {name: Gate() for name in GATES}
        self.loop_errors: list[str] = []
        GatedPeer.gates = self.gates
        composition.open_devices = self._open_devices  # type: ignore[assignment]

    async def start(self) -> None:
        asyncio.get_running_loop().set_exception_handler(self._loop_error)
        await super().start()
        server = await asyncio.start_unix_server(self._serve_control, str(self.control))
        self._built.callback(server.close)

    def _open_devices(self, *arguments: Any) -> Devices:
        found = _open_devices(*arguments)
        return dataclasses.replace(
            found,
            storage=StorageGate(found.storage, self.gates, self._pump),
            local=TransportGate(found.local, self.gates["local"], Gate(), self._pump, is_local=True),
            remote=TransportGate(found.remote, self.gates["remote"], self.gates["quiet"], self._pump, is_local=False),
        )

    def _loop_error(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self.loop_errors.append(f"{context.get('message')}: {context.get('exception')!r}")

    async def _serve_control(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while line := await reader.readline():
                name, *arguments = json.loads(line)
                try:
                    answer = {"ok": getattr(self, f"do_{name}")(*arguments)}
                except Exception as error:  # noqa: BLE001 - whoever asked has to hear of it
                    answer = {"error": f"{name}: {error!r}"}
                writer.write(json.dumps(answer).encode() + b"\n")
        writer.close()

    def do_shut(self, *names: str) -> None:
        for name in names:
            self.gates[name].shut()

    def do_open(self, *names: str) -> dict[str, int]:
        """Opens these gates, or all; how much had waited at each."""
        waited = {name: len(self.gates[name]) for name in names or GATES}
        for name in names or GATES:
            self.gates[name].open()
        self._pump()
        return waited

    def do_held(self, name: str) -> int:
        """How much waits at a gate."""
        return len(self.gates[name])

    def do_quiesce(self, quiesce_s: float) -> None:
        """How long what is under way may take after a stop, from the next stop on."""
        driver.QUIESCE_S = quiesce_s

    def do_twist(self, device: str, twist: str, count: int) -> None:
        """The next completions of "storage", "local" or "remote"."""
        getattr(self.devices, device).twist.due[twist] = count

    def do_twisted(self) -> dict[str, int]:
        """Completions that were twisted so far; what is still due is called off."""
        done: dict[str, int] = {}
        for device in (self.devices.storage, self.devices.local, self.devices.remote):
            for name, count in device.twist.done.items():
                done[name] = done.get(name, 0) + count
                device.twist.due[name] = 0
        return done

    def do_states(self) -> list[dict[str, Any]]:
        """Every request's machine that runs, and the last that ended."""
        live = [running for running in DRIVERS if not running.is_gone]
        moving = [told for running in live if isinstance(running, StreamDriver) for told in _moves_of(running)]
        return [_state_of(running) for running in live] + moving + list(GONE)

    def _part_of(self, request_id: str, node: str) -> tuple[StreamDriver, int]:
        """The request's stream, and the first part that this node reads."""
        for running in list(DRIVERS):
            if isinstance(running, StreamDriver) and running.call.request_id == request_id and not running.is_gone:
                parts = running.machine.parts.values()
                return running, next(part.part for part in parts if part.share.node == node)
        raise LookupError(f"no stream of {request_id}")

    def do_move(self, request_id: str, node: str, to_node: str) -> None:
        """What the balancing decides in its own time: that reader is to keep one block, and another gets the others."""
        stream, part = self._part_of(request_id, node)
        stream.run(stream.machine.on_move(part, 1, to_node))

    def do_rest(self, request_id: str, node: str, to_node: str, blocks: int) -> None:
        """The same in mid-stream: of its last blocks another gets the layers that are not begun."""
        stream, part = self._part_of(request_id, node)
        kept = max(0, stream.machine.parts[part].count - blocks)
        asked = stream.machine.on_move(part, kept, to_node)
        assert asked, f"part {part} of {node} is not asked for its rest"
        stream.run(asked)

    def do_ranges(self, range_bytes: int) -> None:
        """How short ranges of layers are, from the next read on."""
        self.node.services.reader._range_bytes = range_bytes

    def do_stall(self, request_id: str, node: str) -> None:
        """That reader stands still for too long, and does not say that it is there."""
        stream, part = self._part_of(request_id, node)
        stream.run(stream.machine.on_part_stalled(part))

    def do_slow(self, slow_s: float) -> None:
        """What each read of storage takes, beside its own time."""
        self.devices.storage.slow_s = slow_s

    def do_live(self) -> list[str]:
        """Ids of the requests that the node counts as live."""
        return [running.call.request_id for running in self.node.requests.live()]

    def do_forget(self) -> None:
        """Blocks in the pool that nobody uses are forgotten: they will be read again."""
        for size_class in self.node.services.pool._classes.values():
            for fingerprint in {fingerprint for fingerprint, _ in size_class.cache._by_key}:
                size_class.cache.forget_namespace(fingerprint)

    def do_books(self) -> dict[str, Any]:
        """Whatever must be nothing when all is quiet, and the slots, which must add up."""
        gc.collect(0)
        node, services = self.node, self.node.services
        regions = [region for session in node.sessions.all() for region in session.regions.values()]
        admission = services.room._admission
        return {
            "slots": services.pool.slot_counts(),
            "owed": {
                "requests": len(node.requests.live()),
                "leases": len(node.leases),
                "sends": services.mover.sends_under_way(),
                "sinks": len(services.mover._sinks),
                "room bytes": sum(admission.taken_bytes(purpose) for purpose in Purpose),
                "waiting for room": sum(admission.waiting(purpose) for purpose in Purpose),
                "region uses": sum(region.users for region in regions),
                "pages being written": sum(int(region.written.sum()) for region in regions),
                "prefills": len(node.prefills),
                "waiting engines": len(node.decode_side._waiting),
                "storage ops": 0 if services.desk.idle() else 1,
                "gated": sum(len(gate) for gate in self.gates.values()),
            },
            "sessions": len(node.sessions),
            "regions": len(regions),
            "loop_errors": self.loop_errors,
            "tasks": len(asyncio.all_tasks()),
        }

    def do_threads(self) -> dict[str, int]:
        """Threads of this process by the stem of their names, those that Python does not know as "other"."""
        found = Counter(thread.name.rstrip("0123456789_-") for thread in threading.enumerate())
        found["other"] = len(os.listdir("/proc/self/task")) - found.total()
        return dict(found)

    def do_cut(self, what: str) -> int:
        """Shuts down this process's connections with other nodes ("nodes") or with engines' calls ("engines"); how many."""
        cut = 0
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                    continue
                with socket.socket(fileno=os.dup(int(name))) as found:
                    if self._is_cut(found, what):
                        found.shutdown(socket.SHUT_RDWR)
                        cut += 1
        return cut

    def _is_cut(self, found: socket.socket, what: str) -> bool:
        if found.family in (socket.AF_INET, socket.AF_INET6):
            found.getpeername()
            return what == "nodes"
        ends = {str(found.getsockname()), str(found.getpeername())}
        if str(self.config.engine_api.socket) in ends:
            return what == "engines"
        return what == "nodes" and any(end.endswith(".data") for end in ends)


_open_devices = composition.open_devices


def main() -> int:
    for module, name, value_s in SHORTER_S:
        assert hasattr(module, name), f"{module.__name__} has no {name}"
        setattr(module, name, value_s)
    _watch_drivers()
    composition.GrpcPeer = GatedPeer  # type: ignore[misc]
    storing.find_stored = _find_stored
    serve.Daemon = partial(GatedDaemon, Path(sys.argv[2]))  # type: ignore[misc, assignment]
    return serve.run(load(Path(sys.argv[1])))


if __name__ == "__main__":
    sys.exit(main())
