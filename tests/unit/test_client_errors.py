"""Errors of the daemon as the client sees them, over a real gRPC call, and errors that gRPC itself makes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import grpc.aio
import pytest
from client_kit import ScriptedDaemon

import kvmover_client as client_words
from kvmover_client import AsyncClient, End, KvmoverError, Layout, Manifest, Reason, RequestEnded
from kvmover_client.errors import from_companion, from_rpc
from kvmoverd.core import errors as daemon_errors
from kvmoverd.rpc.errors import CODES

MANIFEST = Manifest("m", bytes(32), bytes(32), Layout.uniform(layers=4, tokens=4, token_bytes=8), "fp8")

DECISIONS = {
    "BAD_REQUEST": client_words.BadRequest,
    "BAD_LAYOUT": client_words.BadLayout,
    "BAD_MANIFEST": client_words.BadManifest,
    "BAD_KEYS": client_words.BadKeys,
    "BAD_REGION": client_words.BadRegion,
    "BAD_PAGES": client_words.BadPages,
    "BAD_PLAN": client_words.BadPlan,
    "UNKNOWN_PEER": client_words.UnknownPeer,
    "UNKNOWN_MODEL": client_words.UnknownModel,
    "UNKNOWN_REGION": client_words.UnknownRegion,
    "UNKNOWN_REQUEST": client_words.UnknownRequest,
    "UNKNOWN_SESSION": client_words.UnknownSession,
    "NOT_WHOLE": client_words.NotWhole,
    "PAGES_BUSY": client_words.PagesBusy,
    "TICKET_EXPIRED": client_words.TicketExpired,
    "STALE_EPOCH": client_words.StaleEpoch,
    "STALE_ATTEMPT": client_words.StaleAttempt,
    "REQUEST_TAKEN": client_words.RequestTaken,
    "MANIFEST_MISMATCH": client_words.ManifestMismatch,
    "STORAGE_UNUSABLE": client_words.StorageUnusable,
    "POOL_EXHAUSTED": client_words.PoolExhausted,
    "QUEUE_FULL": client_words.QueueFull,
    "DRAINING": client_words.Draining,
    "PEER_LOST": client_words.PeerLost,
    "TOO_BIG": client_words.TooBig,
    "NO_SCHEDULER": client_words.NoScheduler,
    "SCHEDULER_UNREACHABLE": client_words.SchedulerUnreachable,
}


def of(kind: type[daemon_errors.KvmoverError]) -> daemon_errors.KvmoverError:
    """An error of this class, past constructors that take numbers."""
    error = kind.__new__(kind)
    daemon_errors.KvmoverError.__init__(error, f"{kind.__name__}: 3 of 7", asked=3, free=7)
    return error


@pytest.fixture
async def daemon(tmp_path: Path) -> AsyncIterator[ScriptedDaemon]:
    daemon = await ScriptedDaemon(tmp_path / "s").start()
    yield daemon
    await daemon.stop()


@pytest.fixture
async def client(daemon: ScriptedDaemon) -> AsyncIterator[AsyncClient]:
    async with await AsyncClient.connect(daemon.endpoint) as client:
        yield client


async def test_every_error_of_the_daemon_arrives_whole(daemon: ScriptedDaemon, client: AsyncClient) -> None:
    for kind in CODES:
        daemon.engine.refusal = of(kind)
        with pytest.raises(KvmoverError) as caught:
            await client.register_model(MANIFEST)
        error = caught.value
        assert (error.reason, error.retryable, error.remedy) == (kind.reason, kind.retryable, kind.remedy)
        assert str(error) == error.message == f"{kind.__name__}: 3 of 7"
        assert error.details == {"asked": "3", "free": "7"}


@pytest.mark.parametrize("reason", DECISIONS)
async def test_a_reason_becomes_the_class_of_its_decision(
    daemon: ScriptedDaemon, client: AsyncClient, reason: str
) -> None:
    (kind,) = [kind for kind in subclasses(daemon_errors.KvmoverError) if kind.reason == reason]
    daemon.engine.refusal = of(kind)
    with pytest.raises(KvmoverError) as caught:
        await client.register_model(MANIFEST)
    assert type(caught.value) is DECISIONS[reason]
    assert caught.value.retryable_default == kind.retryable or reason == "UNKNOWN_SESSION"


async def test_a_reason_of_a_newer_daemon_keeps_the_decision_of_its_code(
    daemon: ScriptedDaemon, client: AsyncClient
) -> None:
    class Novel(daemon_errors.PoolExhausted):
        reason = "NOVEL"

    daemon.engine.refusal = of(Novel)
    with pytest.raises(client_words.Unavailable) as caught:
        await client.register_model(MANIFEST)
    assert (caught.value.reason, caught.value.retryable) == ("NOVEL", True)


@pytest.mark.parametrize(
    ("code", "details", "kind"),
    [
        (grpc.StatusCode.UNAVAILABLE, "connection reset", client_words.DaemonGone),
        (grpc.StatusCode.UNAUTHENTICATED, "", client_words.DaemonGone),
        (grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded", client_words.TimedOut),
        (grpc.StatusCode.CANCELLED, "", client_words.Unavailable),
        (grpc.StatusCode.INTERNAL, "Internal error from Core", client_words.Unavailable),
        (grpc.StatusCode.INTERNAL, "Received RST_STREAM with error code 2", client_words.Unavailable),
        (grpc.StatusCode.INTERNAL, "Exception deserializing response!", KvmoverError),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "Concurrent RPC limit exceeded!", client_words.QueueFull),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "Sent message larger than max (9 vs. 8)", client_words.TooBig),
        (grpc.StatusCode.INVALID_ARGUMENT, "", client_words.BadRequest),
        (grpc.StatusCode.INTERNAL, "boom", KvmoverError),
        (grpc.StatusCode.UNIMPLEMENTED, "", KvmoverError),
    ],
)
def test_a_bare_code_still_says_what_to_do(code: grpc.StatusCode, details: str, kind: type[KvmoverError]) -> None:
    error = from_rpc(grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details))
    assert type(error) is kind
    assert str(error) == f"{code.name}: {details}"


def test_details_that_contradict_the_status_are_not_believed() -> None:
    trailing = grpc.aio.Metadata(("grpc-status-details-bin", b"\xff\xff"))
    error = from_rpc(grpc.aio.AioRpcError(grpc.StatusCode.INTERNAL, grpc.aio.Metadata(), trailing, "boom"))
    assert (type(error), error.reason) == (KvmoverError, "INTERNAL")


def test_words_of_the_companion_socket_become_errors() -> None:
    full = from_companion("QUEUE_FULL: 8 sessions are open")
    assert isinstance(full, client_words.QueueFull) and str(full) == "8 sessions are open" and full.retryable
    other = from_companion("SOMETHING: else")
    assert type(other) is client_words.Refused and str(other) == "SOMETHING: else"


def test_an_ended_request_says_why_and_what_of_it_is_good() -> None:
    end = End(Reason.PREFIX_CUT, "disk lost", prefix_blocks=5, retryable=True, remedy="recompute")
    error = RequestEnded(end, "layer 7")
    assert str(error) == "ended with PREFIX_CUT before layer 7: disk lost"
    assert (error.reason, error.retryable, error.remedy, error.end) == ("PREFIX_CUT", True, "recompute", end)
    assert error.details == {"prefix_blocks": "5"}


def test_time_that_ran_out_is_also_pythons_own_timeout() -> None:
    assert issubclass(client_words.TimedOut, TimeoutError)


def subclasses(kind: type[daemon_errors.KvmoverError]) -> set[type[daemon_errors.KvmoverError]]:
    found = {sub for sub in kind.__subclasses__() if sub.__module__ == daemon_errors.__name__}
    return found.union(*(subclasses(sub) for sub in found))
