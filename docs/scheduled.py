"""A router and the leaders of two engines, each with its own node's daemon; the scheduler of those daemons says who works.

scheduled.py ROUTER_SOCKET PREFILL_SOCKET DECODE_SOCKET MODEL: sockets of daemons with a [scheduler] section, and the name of one
of the scheduler's [[models]]. Nothing is computed here: `docs/two_nodes.py` is what engines do with a plan.
"""

import asyncio
import sys
import uuid

from kvmover_client import (
    Assignment,
    AsyncClient,
    EngineLoad,
    Leader,
    Revoked,
    Role,
    SchedulerUnreachable,
    TimedOut,
)

router_socket, prefill_socket, decode_socket, model = sys.argv[1:]
pushed = asyncio.Event()


async def lead(leader, engine, work):
    """Pulls for a group of one engine, for as long as it runs."""
    while True:
        held = [held.assignment for held in leader.held]
        tokens = sum(assignment.prompt_tokens for assignment in held)
        try:
            news = await leader.pull([EngineLoad(engine, len(held), tokens, free_hbm_tokens=1_000_000 - tokens)])
        except (SchedulerUnreachable, TimedOut):
            news = []  # what it has goes on; the next pull says the same
        for told in news:
            match told:
                case Assignment():
                    await work(leader, told)  # an engine with more than one request begins it here, and goes on
                case Revoked():
                    pass  # whoever runs it stops; the daemon refuses its calls anyhow
        await asyncio.sleep(leader.pull_again_s)


async def prefill(leader, given):
    shares = given.read.shares(0, given.hit_tokens // 64)  # for Plan(path=shares.path, parts=shares.parts)
    print(f"{given.request_id}: prefilled by {given.prefill_engine}, path {shares.path.name}")
    leader.prefilled(given.request_id, given.attempt)  # when stream_layers and push_layers have ended
    pushed.set()


async def decode(leader, given):
    await pushed.wait()  # in place of assemble_blocks: when it is whole
    leader.whole(given.request_id, given.attempt)
    print(f"{given.request_id}: decoded by {given.decode_engine}")
    leader.finished(given.request_id, given.attempt)  # when the last token is out


async def route(client, run):
    submitted = await client.submit(f"{run}/1", model, prompt_tokens=8 * 64, hit_tokens=6 * 64, timeout_s=30.0)
    given = await submitted.assigned()
    print(f"{given.request_id}: attempt {given.attempt}, because {given.rules}")
    print(f"{given.request_id}: {(await submitted.done()).state.name}")


async def main():
    run = uuid.uuid4().hex  # the names of requests, groups and engines are unique in the cluster
    async with (
        await AsyncClient.connect(f"unix://{router_socket}", name="router") as router,
        await AsyncClient.connect(f"unix://{prefill_socket}", name="prefill") as one,
        await AsyncClient.connect(f"unix://{decode_socket}", name="decode") as other,
    ):
        leaders = [
            asyncio.create_task(lead(Leader(one, f"p-{run}", model, Role.PREFILL), f"p-{run}.0", prefill)),
            asyncio.create_task(lead(Leader(other, f"d-{run}", model, Role.DECODE), f"d-{run}.0", decode)),
        ]
        await route(router, run)
        for leader in leaders:
            leader.cancel()


asyncio.run(main())
