"""Schedulers that come, go, hang and pass the lead on, under callers that go on: every call ends in time, and well in the end."""

from __future__ import annotations

import asyncio
from random import Random

import pytest
from scheduler_rig import Rig, rigs

from kvmover_proto import scheduler_pb2
from kvmoverd.core.errors import KvmoverError, SchedulerUnreachable
from kvmoverd.rpc.errors import PassedOn
from kvmoverd.rpc.scheduler_link import SchedulerLink

TIMEOUT_S, WAIT_S = 0.1, 0.2
LATE_S = 1.0
"""What a busy machine may add."""
STEPS, STEP_S = 25, 0.02
CALLERS = 24


class Storm:
    """Three schedulers, one of which leads under the highest epoch; any may be dead, hang, or think that it still leads."""

    def __init__(self, found: list[Rig], seed: int) -> None:
        self.random, self.found = Random(seed), found
        self.epoch = 0
        self.heard: list[int] = []
        self.outcomes: list[KvmoverError | None] = []
        self.longest_s = 0.0
        self.stopped: set[int] = set()
        self.elect(found[0])

    def elect(self, leader: Rig) -> None:
        self.epoch += 1
        for rig in self.found:
            if rig is leader:
                rig.refuses, rig.epoch, rig.hold = None, self.epoch, None
                rig.boot_id = f"boot {self.epoch}"
            elif self.random.random() < 0.8:
                rig.leads_not(leader.address if self.random.random() < 0.7 else "")

    async def step(self) -> None:
        rig = self.random.choice(self.found)
        deed = self.random.choice(["elect", "stop", "start", "hang", "wake"])
        if deed == "elect":
            self.elect(rig)
        elif deed == "stop" and rig.port not in self.stopped:
            self.stopped.add(rig.port)
            await rig.stop()
        elif deed == "start" and rig.port in self.stopped:
            await rig.start(rig.port)
            self.stopped.discard(rig.port)
        elif deed == "hang":
            rig.hold = asyncio.Event().wait
        elif deed == "wake":
            rig.hold = None

    async def heal(self) -> None:
        for rig in self.found:
            if rig.port in self.stopped:
                await rig.start(rig.port)
            rig.hold = None
        self.epoch += 1
        leader = self.random.choice(self.found)
        for rig in self.found:
            rig.leads_not(leader.address)
        leader.refuses, leader.epoch = None, self.epoch

    async def call(self, link: SchedulerLink) -> KvmoverError | None:
        """One call, of either kind; how it failed."""
        loop = asyncio.get_running_loop()
        began_s, wait_s = loop.time(), self.random.choice([0.0, WAIT_S])
        request = scheduler_pb2.SubmitRequest(request_id="r")
        try:
            reply = await link.ask(lambda stub, left_s: stub.Submit(request, timeout=left_s), wait_s=wait_s)
        except (SchedulerUnreachable, PassedOn) as error:
            return error
        finally:
            self.longest_s = max(self.longest_s, loop.time() - began_s - wait_s)
        self.heard.append(reply.scheduler.epoch)
        return None

    async def calls(self, link: SchedulerLink, until_s: float) -> None:
        loop = asyncio.get_running_loop()
        while loop.time() < until_s:
            self.outcomes.append(await self.call(link))
            await asyncio.sleep(self.random.random() * STEP_S)


@pytest.mark.parametrize("seed", range(4))
async def test_every_call_ends_in_time_and_epochs_never_fall(seed: int) -> None:
    loop = asyncio.get_running_loop()
    async with rigs(3) as found:
        storm = Storm(found, seed)
        link = SchedulerLink(lambda: [rig.address for rig in found], timeout_s=TIMEOUT_S)
        try:
            callers = [storm.calls(link, loop.time() + STEPS * STEP_S) for _ in range(CALLERS)]
            running = asyncio.gather(*callers)
            for _ in range(STEPS):
                await storm.step()
                await asyncio.sleep(STEP_S)
            await running
            assert storm.longest_s < TIMEOUT_S + LATE_S
            assert storm.heard == sorted(storm.heard), "no word of a lower epoch is taken after one of a higher"
            assert len(storm.outcomes) > CALLERS
            await storm.heal()
            async with asyncio.timeout(10 * LATE_S):
                while await storm.call(link) is not None:  # noqa: ASYNC110 - the link tells nobody when it has found one
                    await asyncio.sleep(STEP_S)
            assert storm.heard[-1] == storm.epoch
            assert link._current is not None and not link._current._calls
        finally:
            await link.close()
        assert not link._closing
