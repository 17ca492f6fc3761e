"""A KV lane that gets too little, over real TCP through a real qdisc: status, log and command line say so, until it is over."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Coroutine, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from statistics import median
from typing import Any, ClassVar

import pytest
from cluster import Cluster, Node, environment
from engine import LAYER_BYTES, LAYERS, Engine, engine, whole_request
from markers import skip_no_queue

from kvmover_client import LookupResult
from kvmover_client import Path as ReadPath

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

BLOCKS = 32
RATE_BYTES_PER_S = 2_500_000
FLOOR_MIB = 8
COMMAND_S = 30.0
PUSHES_MAX = 30
"""Over the wide network: a window of them, and some that a busy machine slows down."""


class Network:
    """A namespace in which the daemons' loopback interface can be made narrow. Raises OSError where there can be none."""

    def __init__(self) -> None:
        self.name = f"kvm{os.getpid()}"
        _run("ip", "netns", "add", self.name)
        try:
            self._inside("ip", "link", "set", "lo", "up")
            self.narrow()
            self.widen()
        except BaseException:
            self.close()
            raise

    def narrow(self) -> None:
        """The queue is longer than what is sent at once: losses would make the rate a matter of chance."""
        rate = f"{8 * RATE_BYTES_PER_S}bit"
        self._inside("tc", "qdisc", "add", "dev", "lo", "root", "tbf", "rate", rate, "burst", "256kb", "limit", "16mb")

    def widen(self) -> None:
        self._inside("tc", "qdisc", "del", "dev", "lo", "root")

    def close(self) -> None:
        _run("ip", "netns", "del", self.name)

    def _inside(self, *command: str) -> None:
        _run("ip", "netns", "exec", self.name, *command)


class NodeInside(Node):
    network: ClassVar[str] = ""

    def command(self) -> list[str]:
        return ["ip", "netns", "exec", self.network, *super().command()]


class NarrowCluster(Cluster):
    node_class = NodeInside
    settings: ClassVar[dict[str, str]] = {
        "lane_floor": f"{FLOOR_MIB}MiB",
        "lane_window": "1s",
        "io_timeout": "10s",
        "silence": "20s",
    }


def _run(*command: str) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=COMMAND_S)
    except subprocess.CalledProcessError as error:
        raise OSError(f"{' '.join(command)}: {error.stderr.strip()}") from None


@pytest.fixture
def network() -> Iterator[Network]:
    try:
        made = Network()
    except OSError as error:
        pytest.skip(skip_no_queue(str(error)))
    yield made
    made.close()


@pytest.fixture
def narrow(network: Network, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    monkeypatch.setattr(NodeInside, "network", network.name)
    with ExitStack() as stack:
        home = Path(tempfile.mkdtemp(prefix="kvme2e-", dir="/tmp"))
        stack.callback(shutil.rmtree, home)
        cluster = NarrowCluster(home, nodes=2, transport="tcp")
        stack.callback(cluster.end)
        stack.callback(_widen, network)
        yield cluster


def _widen(network: Network) -> None:
    """Whatever the test has left: daemons part quicker so."""
    with suppress(OSError):
        network.widen()


def lanes(status: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {lane["kv_class"]: lane for lane in status["lanes"]}


def starves(status: dict[str, Any]) -> bool:
    return bool(lanes(status)["assembly"]["starved_ms"]) and status["peers"][0]["lane_starved"]


async def push(pe: Engine, de: Engine, name: str) -> list[tuple[int, int]]:
    """New blocks from the prefill node to the decode node, 8 MB; what is wrong with them there."""
    return await whole_request(pe, de, pe.plan(name, pe.keys(name, BLOCKS), hit_blocks=0, timeout_s=40.0))


async def while_it_runs(node: Node, work: Coroutine[None, None, list[tuple[int, int]]]) -> list[dict[str, Any]]:
    """What the node says of itself every 50 ms until the work is done, which must find nothing wrong."""
    task = asyncio.ensure_future(work)
    seen: list[dict[str, Any]] = []
    while not task.done():
        seen.append(await node.status())
        await asyncio.wait([task], timeout=0.05)
    assert task.result() == []
    return seen


def words(node: Node) -> str:
    command = [sys.executable, "-m", "kvmoverd", "status", "--socket", str(node.socket)]
    done = subprocess.run(
        command, check=True, capture_output=True, text=True, timeout=COMMAND_S, env=environment(), cwd=node.home
    )
    return done.stdout


async def when_it_starves(node: Node, pe: Engine) -> tuple[str, LookupResult]:
    """What the command line, which may start slowly, and a look-up say then: the node remembers for ten windows."""
    await node.settled(starves, "starving")
    looked = await pe.client.lookup(pe.model, pe.keys("wide", BLOCKS))
    return await asyncio.to_thread(words, node), looked


async def test_a_lane_below_its_floor_starves_until_it_is_wide_again(narrow: Cluster, network: Network) -> None:
    async with engine(narrow.pe.endpoint) as pe, engine(narrow.de.endpoint) as de:
        assert await push(pe, de, "wide") == []
        assert not starves(await narrow.pe.status()) and "warning" not in words(narrow.pe)
        network.narrow()
        told = asyncio.ensure_future(when_it_starves(narrow.pe, pe))
        seen = await while_it_runs(narrow.pe, push(pe, de, "narrow"))
        text, looked = await told
        starved = [lanes(status)["assembly"] for status in seen if starves(status)]
        assert starved, [lanes(status)["assembly"] for status in seen]
        print(f"rates while it starved, in MB/s: {[lane['rate_bytes_per_s'] / 1e6 for lane in starved]}")
        assert all(lane["floor_bytes_per_s"] == FLOOR_MIB << 20 and lane["starved_peers"] == 1 for lane in starved)
        assert 0 < median(lane["rate_bytes_per_s"] for lane in starved) < 1.5 * RATE_BYTES_PER_S
        assert starved[-1]["sent_bytes"] > BLOCKS * LAYERS * LAYER_BYTES and starved[0]["marks"].startswith("DSCP 8")
        assert "to all nodes together" in text and "lane_floor to de" in text
        assert looked.starved_to == ("de",) and looked.path_to("de", ReadPath.PE) is ReadPath.DE
        assert "lane_changed" in narrow.pe.log_text() and "state=starved" in narrow.pe.log_text()
        network.widen()
        for number in range(PUSHES_MAX):
            if not starves((await while_it_runs(narrow.pe, push(pe, de, f"wide again {number}")))[-1]):
                break
            await asyncio.sleep(0.3)
        assert not starves(await narrow.pe.status())
        assert "state=well" in narrow.pe.log_text() and "warning" not in words(narrow.pe)
