"""AsyncClient against a real gRPC server and a real companion socket: short calls, sessions, and the daemon's death."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from client_kit import ScriptedDaemon

from kvmover_client import (
    AsyncClient,
    BadRegion,
    BadRequest,
    DaemonGone,
    Layout,
    Lease,
    LookupResult,
    Manifest,
    Model,
    Purged,
    QueueFull,
    Refused,
    RegionMemory,
    TimedOut,
    UnknownSession,
    paged_geometry,
)
from kvmover_client import Path as ReadPath
from kvmover_client.words import BlockState, Reason
from kvmover_proto import common_pb2, engine_pb2
from kvmoverd.core import errors as daemon_errors

LAYOUT = Layout(4, ((32,), (16, 16), (32,), (32,)))
MANIFEST = Manifest("m", bytes(32), bytes(16), LAYOUT, "fp8", rope_scaling="yarn", lora_id="l", tenant="t", epoch=3)
KEYS = (bytes(32), bytes([1]) * 32)


@pytest.fixture
async def daemon(tmp_path: Path) -> AsyncIterator[ScriptedDaemon]:
    daemon = await ScriptedDaemon(tmp_path / "s").start()
    yield daemon
    await daemon.stop()


@pytest.fixture
async def client(daemon: ScriptedDaemon) -> AsyncIterator[AsyncClient]:
    async with await AsyncClient.connect(daemon.endpoint, name="test") as client:
        yield client


@pytest.fixture
async def model(client: AsyncClient) -> Model:
    return await client.register_model(MANIFEST)


def test_enums_are_those_of_the_protocol() -> None:
    assert {reason.name: reason.value for reason in Reason} == known(common_pb2.Reason)
    assert {f"PATH_{path.name}": path.value for path in ReadPath} == known(common_pb2.Path)
    states = {state.name.replace("MISS", "BLOCK_MISS"): state.value for state in BlockState}
    assert states == known(common_pb2.BlockState)


def known(enum: type[common_pb2.Reason] | type[common_pb2.Path] | type[common_pb2.BlockState]) -> dict[str, int]:
    return {name: number for name, number in enum.items() if number}


async def test_a_session_lasts_from_connect_to_close(daemon: ScriptedDaemon) -> None:
    client = await AsyncClient.connect(daemon.endpoint, name="test")
    assert list(daemon.sessions.tokens) == [client.session_id] and client.boot_id == daemon.companion.boot_id
    assert not client.is_gone
    await client.close()
    await client.close()
    assert client.is_gone
    await asyncio.sleep(0.05)
    assert daemon.sessions.ended == [(client.session_id, "it closed its socket")]
    with pytest.raises(DaemonGone, match="this client closed its session"):
        await client.node_status()


async def test_the_endpoint_may_come_from_the_environment(
    daemon: ScriptedDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVMOVER_ENDPOINT", daemon.endpoint)
    async with await AsyncClient.connect() as client:
        assert (await client.node_status()).node == "scripted"


async def test_a_model_arrives_with_every_field_of_its_manifest(daemon: ScriptedDaemon, client: AsyncClient) -> None:
    model = await client.register_model(MANIFEST)
    (request,) = daemon.engine.seen
    sent = request.manifest
    assert (sent.model_id, sent.weights_digest, sent.tokenizer_digest) == ("m", bytes(32), bytes(16))
    assert (sent.dtype, sent.rope_scaling, sent.lora_id, sent.tenant, sent.epoch) == ("fp8", "yarn", "l", "t", 3)
    assert sent.parallel_geometry == "replicated" and sent.layout.block_tokens == 4
    assert [list(layer.segment_bytes) for layer in sent.layout.layers] == [[32], [16, 16], [32], [32]]
    assert (model.block_bytes, model.slots_max, model.layout) == (128, 9, LAYOUT) and len(model.fingerprint) == 32


async def test_short_calls_return_their_answers(client: AsyncClient, model: Model) -> None:
    bumped = await client.bump_epoch(model)
    assert (bumped.manifest.epoch, bumped.fingerprint) == (4, model.fingerprint[::-1])
    assert await client.purge_namespace(model) == Purged(2, 4096)
    assert await client.lookup(model, KEYS) == LookupResult(2, 1)
    assert await client.purge_tenant("acme") == Purged(2, 4 * 4096)
    assert await client.prefetch(model, KEYS, expected_in_s=2.5) == 2
    with pytest.raises(BadRequest, match="wanted in 3601 s, must be 0 to 3600"):
        await client.prefetch(model, KEYS, expected_in_s=3601)
    assert [await client.pin(model, KEYS, pin_s=pin_s) for pin_s in (0, 0.0001, 2.5)] == [0, 1, 2500]
    leases = [Lease(1, 2, 1.0), Lease(7, 1, 1.0)]
    assert await client.renew(leases, lease_s=2.5) == [True, False]
    assert await client.release(leases) == 2
    assert await client.cancel("r", 1) == 0
    assert (await client.node_status()).sessions == 1
    assert await client.drain() == 3


async def test_a_region_is_passed_by_its_descriptor(daemon: ScriptedDaemon, client: AsyncClient, model: Model) -> None:
    geometry = paged_geometry(LAYOUT, 5)
    with RegionMemory.create(geometry.size_bytes, "kv") as memory:
        region = await client.register_region(memory, geometry, model)
        assert daemon.sessions.file_sizes == {region.region_id: geometry.size_bytes}
        assert (region.pages, region.pages_per_block) == (5, 1)
        request = daemon.engine.seen[-1]
        assert [len(layer.segments) for layer in request.layers] == [1, 2, 1, 1]
        assert request.gpu_pci_address == "" and not request.HasField("numa_node")
        second = request.layers[1].segments[1]
        assert (second.base_bytes, second.page_stride_bytes, second.page_bytes, second.pages) == (8192, 16, 16, 5)
        assert await client.unregister_region(region)


async def test_a_region_says_where_it_is_used(daemon: ScriptedDaemon, client: AsyncClient, model: Model) -> None:
    geometry = paged_geometry(LAYOUT, 5)
    with RegionMemory.create(geometry.size_bytes, "kv") as memory:
        await client.register_region(memory, geometry, model, gpu_pci_address="0000:3b:00.0", numa_node=0)
        request = daemon.engine.seen[-1]
        assert (request.gpu_pci_address, request.numa_node) == ("0000:3b:00.0", 0) and request.HasField("numa_node")


async def test_a_refused_descriptor_leaves_the_session_usable(
    daemon: ScriptedDaemon, client: AsyncClient, model: Model
) -> None:
    daemon.sessions.fd_refusal = daemon_errors.BadRegion("the file is not sealed")
    geometry = paged_geometry(LAYOUT, 5)
    with RegionMemory.create(geometry.size_bytes, "kv") as memory:
        with pytest.raises(BadRegion, match="the file is not sealed"):
            await client.register_region(memory, geometry, model)
        daemon.sessions.fd_refusal = None
        assert (await client.register_region(memory, geometry, model)).region_id == 100


async def test_an_answer_that_does_not_come_times_out(client: AsyncClient) -> None:
    slow = Manifest("slow", bytes(32), bytes(32), LAYOUT, "fp8")
    began_s = time.monotonic()
    with pytest.raises(TimedOut):
        await client.register_model(slow, timeout_s=0.1)
    assert time.monotonic() - began_s < 2


async def test_a_cancelled_question_is_cancelled_at_once(client: AsyncClient) -> None:
    slow = Manifest("slow", bytes(32), bytes(32), LAYOUT, "fp8")
    asking = asyncio.create_task(client.register_model(slow))
    await asyncio.sleep(0.05)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert await client.drain() == 3


async def test_a_running_question_fails_as_soon_as_the_daemon_goes(daemon: ScriptedDaemon, client: AsyncClient) -> None:
    slow = Manifest("slow", bytes(32), bytes(32), LAYOUT, "fp8")
    asking = asyncio.create_task(client.register_model(slow))
    await asyncio.sleep(0.05)
    began_s = time.monotonic()
    await daemon.companion.stop()
    with pytest.raises(DaemonGone, match="the daemon closed the companion socket"):
        await asking
    with pytest.raises(DaemonGone):
        await client.node_status()
    with pytest.raises(DaemonGone):
        await client.assemble_blocks("r", 1, Model(MANIFEST, bytes(32), 1, 1))
    assert client.is_gone and time.monotonic() - began_s < 1


async def test_questions_that_run_while_another_task_closes_or_reconnects_fail_as_the_session_does(
    client: AsyncClient,
) -> None:
    """Whenever the channel is closed under them, nobody has cancelled the tasks that ask."""
    slow = Manifest("slow", bytes(32), bytes(32), LAYOUT, "fp8")
    for end in (client.reconnect, client.close):
        for turns in range(12):
            if client.is_gone:
                await client.reconnect()
            asking = [asyncio.create_task(client.register_model(slow)) for _ in range(4)]
            for _ in range(turns):
                await asyncio.sleep(0)
            await end()
            ends = await asyncio.gather(*asking, return_exceptions=True)
            assert {type(one) for one in ends} == {DaemonGone}, f"after {turns} turns: {ends}"


async def test_reconnecting_after_a_restart_opens_a_new_session(tmp_path: Path) -> None:
    first = await ScriptedDaemon(tmp_path / "s").start()
    client = await AsyncClient.connect(first.endpoint)
    boot_id = client.boot_id
    await first.stop()
    with pytest.raises(DaemonGone):
        await client.node_status()
    reconnecting = asyncio.create_task(client.reconnect())
    await asyncio.sleep(0.2)
    second = await ScriptedDaemon(tmp_path / "s").start()
    await reconnecting
    assert client.boot_id == second.companion.boot_id != boot_id
    assert (await client.register_model(MANIFEST)).slots_max == 9
    await client.close()
    await second.stop()


async def test_a_session_that_the_daemon_forgot_says_to_connect_again(
    daemon: ScriptedDaemon, client: AsyncClient, model: Model
) -> None:
    daemon.sessions.tokens[client.session_id] = bytes(32)
    with pytest.raises(UnknownSession) as caught:
        await client.lookup(model, KEYS)
    assert isinstance(caught.value, DaemonGone)


async def test_an_absent_daemon_is_waited_for_no_longer_than_asked(tmp_path: Path) -> None:
    began_s = time.monotonic()
    with pytest.raises(DaemonGone, match="no daemon listens at"):
        await AsyncClient.connect(f"unix://{tmp_path}/none", timeout_s=0.2)
    assert 0.1 < time.monotonic() - began_s < 1


@contextmanager
def listening(path: Path) -> Iterator[socket.socket]:
    """Something that listens where a companion socket should be."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as listener:
        listener.bind(f"{path}.companion")
        listener.listen()
        yield listener


async def test_a_daemon_that_says_nothing_is_waited_for_no_longer_than_asked(tmp_path: Path) -> None:
    with listening(tmp_path / "s"), pytest.raises(TimedOut, match="no answer on the companion socket within 0"):
        await AsyncClient.connect(f"unix://{tmp_path}/s", timeout_s=0.2)


async def test_a_daemon_without_its_engine_api_is_waited_for_no_longer_than_asked(daemon: ScriptedDaemon) -> None:
    os.unlink(daemon.path)
    with pytest.raises(TimedOut, match="connecting: no answer within"):
        await AsyncClient.connect(daemon.endpoint, timeout_s=0.3)
    await asyncio.sleep(0.05)
    assert not daemon.sessions.tokens


@pytest.mark.parametrize("reply", [b"\xff\xff\xff\xff", b"\x02\x00\x00\x00\xff\xff", b"\x00\x00\x00\x00" * 2])
async def test_nonsense_on_the_companion_socket_ends_the_session(tmp_path: Path, reply: bytes) -> None:
    with listening(tmp_path / "s") as listener:
        connecting = asyncio.create_task(AsyncClient.connect(f"unix://{tmp_path}/s", timeout_s=2))
        sock, _ = await asyncio.get_running_loop().sock_accept(listener)
        with sock:
            sock.send(reply)
            with pytest.raises(DaemonGone):
                await connecting


async def test_endpoints_that_are_no_unix_socket_are_refused(tmp_path: Path) -> None:
    for endpoint in ("localhost:9401", "unix:", "/run/x"):
        with pytest.raises(BadRequest, match="must be unix:///PATH"):
            await AsyncClient.connect(endpoint)
    with pytest.raises(Refused, match="can't connect to"):
        await AsyncClient.connect(f"unix://{tmp_path}/{'x' * 200}")


async def test_questions_on_the_companion_socket_are_bounded(
    daemon: ScriptedDaemon, client: AsyncClient, model: Model
) -> None:
    geometry = paged_geometry(LAYOUT, 1)
    with RegionMemory.create(geometry.size_bytes, "kv") as memory:
        registering = [client.register_region(memory, geometry, model) for _ in range(70)]
        outcomes = await asyncio.gather(*registering, return_exceptions=True)
    refused = [outcome for outcome in outcomes if isinstance(outcome, QueueFull)]
    assert len(refused) == 70 - 64 and len(daemon.sessions.file_sizes) == 64


async def test_durations_must_be_above_zero(client: AsyncClient, model: Model) -> None:
    for timeout_s in (0.0, -1.0, float("nan")):
        with pytest.raises(BadRequest, match="must be above 0"):
            await client.assemble_blocks("r", 1, model, timeout_s)


async def test_a_lease_asks_for_its_own_length(daemon: ScriptedDaemon, client: AsyncClient) -> None:
    await client.renew([Lease(1, 2, 1.0)], lease_s=0.0001)
    assert daemon.engine.seen[-1] == engine_pb2.RenewRequest(
        leases=[engine_pb2.LeaseRef(lease_id=1, lease_generation=2)], lease_ms=1
    )
