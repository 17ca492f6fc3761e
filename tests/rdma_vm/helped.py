"""Three daemons over real verbs: requests that all of them read, and one whose helper is killed while it sends.

Prefill and decode node share one device, the helper has the other end of the cable, and that end is slow: when the helper is
killed, layers of its part have come, others are on the wire, and packets of a process that is gone still arrive. All pages
are watched, also after they are the engines' own again.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

import numpy as np

from kvmover_client import Part, Plan
from kvmover_client import Path as Way
from kvmoverd import config, serve
from kvmoverd.rpc.status_client import node_status
from tests.e2e.cluster import DECODE, PREFILL, Node, free_ports
from tests.e2e.engine import LAYERS, LAYOUT, SCRUB, Engine, engine
from tests.rdma_vm.model import FAR, NEAR

HELPER = "h0"
DEVICES = {PREFILL: NEAR, DECODE: NEAR, HELPER: FAR}
CABLE = "veth1"
"""What the helper sends goes out here."""
CABLE_RATE = "8mbit"
"""A layer of its part takes it 168 ms, and it sends each twice."""
BLOCKS, HITS = 14, 12
SHARES = ((PREFILL, 0, 4), (HELPER, 4, 8), (DECODE, 8, HITS))
READ_RATE_BYTES = 2 << 20
SETTINGS = {
    "write_back_bytes": "8MiB",
    "more_pool": 'help_bytes = "12MiB"',
    "more_storage": f"read_rate_max = {READ_RATE_BYTES}\nthreads = 2\nops_max = 2",
    "io_timeout": "10s",
    "silence": "15s",
    "admission_wait": "10s",
    "attach_timeout": "20s",
    "split": 'stall = "20s"',
}
"""Reading is slow, so that it pays to share it; and everything takes its time in emulation."""
ACK_TIMEOUT = 20
"""4.3 s: acknowledgements wait on the slow cable for a second or two."""
KILL_AFTER_S = 0.1
"""The first layer is there, and of the twelve that the helper sends most are not."""
START_S = STOP_S = 120.0
WAIT_S = 60.0
WATCH_S = 2.0
"""For pages that nobody may write any more; packets wait on the cable for less."""


class VerbsNode(Node):
    """A daemon of a CNIC, or of its share of one, forked: importing it anew would take 20 s here, in each of them."""

    child: ForkProcess

    def write_config(self) -> None:
        super().write_config()
        verbs = f'\n[transport.verbs]\ndevices = ["{DEVICES[self.name]}"]\ntimeout = {ACK_TIMEOUT}\n'
        self.config.write_text(self.config.read_text() + verbs)

    def start(self) -> None:
        """To be called before this process has threads; it does not wait until the daemon answers."""
        self.write_config()
        self.child = multiprocessing.get_context("fork").Process(target=_serve, args=(self.config, self.log))
        self.child.start()

    async def until_up(self) -> None:
        until_s = time.monotonic() + START_S
        while not self.socket.exists() or await asyncio.to_thread(node_status, str(self.socket), timeout_s=5.0) is None:
            assert self.child.is_alive() and time.monotonic() < until_s, f"{self.name}:\n{self.log_text()}"
            await asyncio.sleep(0.2)

    def kill(self) -> None:
        """SIGKILL."""
        self.child.kill()
        self.child.join(STOP_S)

    def terminate(self) -> int:
        self.child.terminate()
        self.child.join(STOP_S)
        code = self.child.exitcode
        assert code is not None, f"{self.name} outlived SIGTERM by {STOP_S} s:\n{self.log_text()}"
        return code


def _serve(config_path: Path, log: Path) -> None:
    with log.open("ab") as out:
        for stream in (1, 2):
            os.dup2(out.fileno(), stream)
    sys.exit(serve.run(config.load(config_path)))


@contextmanager
def nodes() -> Iterator[dict[str, VerbsNode]]:
    """All have started, none may be up yet. Killed at the end."""
    with tempfile.TemporaryDirectory(prefix="kvmvm-", dir="/tmp") as name:
        home = Path(name)
        (home / "store").mkdir()
        ports = zip(DEVICES, free_ports(len(DEVICES)), strict=True)
        made = {node: VerbsNode(node, home, port, "verbs", SETTINGS) for node, port in ports}
        for node in made.values():
            node.peers = [peer for peer in made.values() if peer is not node]
            node.start()
        try:
            yield made
        finally:
            for node in made.values():
                node.kill()


@contextmanager
def slow_cable() -> Iterator[None]:
    shaper = ["tbf", "rate", CABLE_RATE, "burst", "20000", "limit", "4000000"]
    subprocess.run(["tc", "qdisc", "add", "dev", CABLE, "root", *shaper], check=True, timeout=60)
    try:
        yield
    finally:
        subprocess.run(["tc", "qdisc", "del", "dev", CABLE, "root"], check=True, timeout=60)


async def request(
    pe: Engine, de: Engine, plan: Plan, *, first_layer: Callable[[], Awaitable[None]] | None = None
) -> list[tuple[int, int]]:
    """A whole request, `first_layer` called when that is ready; what is wrong in either engine's pages."""
    pe.scrub()
    de.scrub()
    assembly = await de.client.assemble_blocks(plan.request_id, plan.attempt, de.model, plan.timeout_s)
    stream, push = await pe.client.stream_layers(plan), await pe.client.push_layers(plan)
    for layer in range(LAYERS):
        await stream.wait_layer(layer, WAIT_S)
        if layer == 0 and first_layer is not None:
            await first_layer()
        pe.fill(plan.block_keys[plan.hit_blocks :], plan.hit_blocks, [layer])
        await push.computed(layer + 1)
    await assembly.whole(WAIT_S)
    deliver = await de.client.deliver(plan.request_id, plan.attempt, de.region, range(len(plan.block_keys)))
    for call in (stream, push, deliver, assembly):
        end = await call.end(WAIT_S)
        assert end.reason.name == "OK", end
    assert (await stream.prefix()).prefix_blocks == plan.hit_blocks
    return de.wrong_blocks(plan.block_keys) + pe.wrong_blocks(plan.block_keys)


def say(what: str) -> None:
    print(f"{time.monotonic():.1f} s: {what}", flush=True)


async def late_bytes(*engines: Engine) -> int:
    """Bytes that change in pages which are the engines' own."""
    for one in engines:
        one.scrub()
    await asyncio.sleep(WATCH_S)
    return sum(int(np.count_nonzero(memory.array() != SCRUB)) for one in engines for memory in one.memory)


async def read_blocks(node: Node) -> int:
    return sum(int(root["read_blocks"]) for root in (await node.status())["storage"])


async def at_rest(node: Node) -> dict[str, Any]:
    """Waits until nothing is in use on it."""
    until_s = time.monotonic() + WAIT_S
    while True:
        status = await node.status()
        busy = [slots for slots in status["slots"] if slots["leased"] or slots["filling"] or slots["quarantined"]]
        if not busy and not sum(status["requests"].values()):
            return status
        assert time.monotonic() < until_s, f"{node.name} is not at rest: {status}\n{node.log_text()}"
        await asyncio.sleep(0.2)


async def requests(
    made: dict[str, VerbsNode], pe: Engine, de: Engine, chains: dict[str, list[bytes]]
) -> dict[str, Any]:
    found: dict[str, Any] = {}

    def plan(name: str, **changed: Any) -> Plan:
        parts = [Part(node, ((first, stop),)) for node, first, stop in SHARES] if "path" not in changed else []
        fields: dict[str, Any] = {"path": Way.PARTS, "parts": parts, "timeout_s": WAIT_S} | changed
        return pe.plan(name, chains[name], hit_blocks=HITS, **fields)

    async def kill() -> None:
        # Some layers of the helper are there, some are on the cable, some are not asked for.
        await asyncio.sleep(KILL_AFTER_S)
        made[HELPER].kill()

    say("a request in given parts")
    wrong = {"parts": await request(pe, de, plan("parts"))}
    found["read_blocks"] = {node.name: await read_blocks(node) for node in made.values()}
    sent = (await made[HELPER].status())["peers"]
    found["sent_blocks"] = {peer["node"]: int(peer["sent_bytes"]) / LAYOUT.block_bytes for peer in sent}
    say("one that the nodes share out")
    # By now it is known how slowly each of them reads.
    wrong["auto"] = await request(pe, de, plan("auto", path=Way.AUTO))
    found["read_plans"] = (await made[PREFILL].status())["read_plans"]
    moved = (await made[PREFILL].status())["moved_parts"]
    say("one whose helper is killed")
    with slow_cable():
        wrong["killed"] = await request(pe, de, plan("killed"), first_layer=kill)
        found["late_bytes"] = await late_bytes(pe, de)
    say("nothing is to be in use")
    told = [await at_rest(made[name]) for name in (PREFILL, DECODE)]
    found["moved_before"], found["moved_parts"] = moved, told[0]["moved_parts"]
    found["fences"] = [int(status["rdma"]["counters"]["fences"]) for status in told]
    return found | {"wrong": wrong}


async def run(made: dict[str, VerbsNode]) -> dict[str, Any]:
    await asyncio.gather(*(node.until_up() for node in made.values()))
    say("all daemons are up")
    chains = {}
    # What the helper stores lies in its pool, and in nobody else's.
    async with engine(made[HELPER].endpoint) as helping:
        for name in ("auto", "parts", "killed"):
            chains[name] = helping.keys(name, BLOCKS)
            await helping.store(f"store-{name}", chains[name][:HITS])
    async with engine(made[PREFILL].endpoint) as pe, engine(made[DECODE].endpoint) as de:
        found = await requests(made, pe, de, chains)
    for name in (PREFILL, DECODE):
        assert made[name].terminate() == 0, made[name].log_text()
    return found


def main() -> int:
    began_s = time.monotonic()
    with nodes() as made:
        found = asyncio.run(run(made))
    print(json.dumps(found | {"seconds": round(time.monotonic() - began_s, 1)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
