"""The one table of errors: every class has a code, and says the same at both ends of a wire."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import grpc.aio
import pytest
from google.protobuf import any_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc import StatusCode
from grpc_status import rpc_status
from rpc_kit import Refusal, refusal_of, refused, rpc_kit

from kvmover_client import errors as client_errors
from kvmover_proto import engine_pb2, node_pb2
from kvmoverd.core import errors
from kvmoverd.core.errors import KvmoverError
from kvmoverd.core.record import RecordMismatch
from kvmoverd.core.status import Reason
from kvmoverd.rpc.errors import CODES, DOMAIN, PassedOn, code_of, error_info, fault_status, from_call, to_status
from kvmoverd.rpc.scheduler_link import Elsewhere

INTERNAL_ONLY = {RecordMismatch, Elsewhere, PassedOn}
"""Raised and caught below; never an answer, or one in another's very words."""


def all_kinds(kind: type[KvmoverError] = KvmoverError) -> Iterator[type[KvmoverError]]:
    yield kind
    for sub in kind.__subclasses__():
        yield from all_kinds(sub)


KINDS = sorted({kind for kind in all_kinds() if kind.__module__.startswith("kvmoverd.")} - INTERNAL_ONLY, key=str)


def made(kind: type[KvmoverError]) -> KvmoverError:
    if kind is errors.StaleAttempt:
        return errors.StaleAttempt(request_id="r", attempt=1, known=2)
    if kind is errors.PoolExhausted:
        return errors.PoolExhausted(purpose="read", asked=3, free=1)
    if kind is errors.NotLeading:
        return errors.NotLeading(leader="10.0.0.7:9402")
    error = kind("asked for 3, 1 is there", asked=3)
    error.details["message"] = "a peer's facts may bear any name"
    return error


def over_the_wire(status: grpc.Status) -> grpc.aio.AioRpcError:
    """As a client gets it."""
    trailing = grpc.aio.Metadata(*status.trailing_metadata)
    return grpc.aio.AioRpcError(status.code, grpc.aio.Metadata(), trailing, status.details)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_error_has_a_code_and_survives_the_way_to_another_daemon(kind: type[KvmoverError]) -> None:
    error = made(kind)
    assert kind is KvmoverError or any(base in CODES for base in kind.__mro__)
    received = over_the_wire(to_status(error))
    assert received.code() is code_of(error) is not StatusCode.OK
    rebuilt = from_call(received)
    assert type(rebuilt) is kind
    assert str(rebuilt) == str(error)
    assert rebuilt.details == error.details
    assert (rebuilt.reason, rebuilt.retryable, rebuilt.remedy) == (error.reason, error.retryable, error.remedy)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_error_survives_the_way_to_an_engine(kind: type[KvmoverError]) -> None:
    error = made(kind)
    found = client_errors.from_rpc(over_the_wire(to_status(error)))
    assert (found.reason, found.message) == (error.reason, str(error))
    assert (found.retryable, found.remedy, found.details) == (error.retryable, error.remedy, error.details)
    named = {kind.reason_default for kind in client_kinds()}
    if error.reason in named:
        assert type(found).reason_default == error.reason


def client_kinds(kind: type[client_errors.KvmoverError] = client_errors.KvmoverError) -> Iterator[Any]:
    yield kind
    for sub in kind.__subclasses__():
        yield from client_kinds(sub)


def test_reasons_are_unique_and_what_may_be_retried_has_a_code_that_says_so() -> None:
    reasons = [kind.reason for kind in KINDS]
    assert len(set(reasons)) == len(reasons)
    for kind in KINDS:
        if kind.retryable:
            assert code_of(made(kind)) not in (StatusCode.INVALID_ARGUMENT, StatusCode.INTERNAL), kind


def test_long_texts_and_facts_are_clipped_to_what_trailers_may_hold() -> None:
    for letter in ("x", "é", "\U0001f600", "\n"):
        error = errors.BadRequest(letter * 100_000, text=letter * 100_000)
        found = refusal_of(over_the_wire(to_status(error)))
        assert 500 < len(found.message.encode()) <= 512
        assert 120 < len(found.facts["text"].encode()) <= 128
        assert set(found.message) == {letter}


def test_a_lone_surrogate_in_a_text_does_not_break_the_answer() -> None:
    assert refusal_of(over_the_wire(to_status(errors.BadRequest("\ud800", text="\udfff")))).reason == "BAD_REQUEST"


def plain(code: StatusCode, text: str = "so it is") -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), text)


@pytest.mark.parametrize(
    ("code", "text", "kind"),
    [
        (StatusCode.UNAVAILABLE, "connection refused", errors.PeerUnreachable),
        (StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded", errors.PeerUnreachable),
        (StatusCode.RESOURCE_EXHAUSTED, "Concurrent RPC limit exceeded!", errors.QueueFull),
        (StatusCode.RESOURCE_EXHAUSTED, "Received message larger than max (9 vs. 8)", errors.TooBig),
        (StatusCode.UNIMPLEMENTED, "Method not found!", errors.ProtocolMismatch),
    ],
)
def test_what_grpc_itself_ended_is_judged_by_its_code(code: StatusCode, text: str, kind: type[KvmoverError]) -> None:
    rebuilt = from_call(plain(code, text))
    assert type(rebuilt) is kind
    assert text in str(rebuilt)


def of_a_newer_daemon(domain: str, code: StatusCode, claimed: int) -> grpc.aio.AioRpcError:
    detail = any_pb2.Any()
    detail.Pack(error_details_pb2.ErrorInfo(reason="NEW_REASON", domain=domain, metadata={"retryable": "true"}))
    status = rpc_status.to_status(status_pb2.Status(code=claimed, message="new", details=[detail]))
    trailing = grpc.aio.Metadata(*status.trailing_metadata)
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailing, "new")


def test_an_unknown_reason_is_judged_by_its_code_and_a_foreign_or_broken_one_not_believed() -> None:
    busy = code_pb2.Code.Value("RESOURCE_EXHAUSTED")
    newer = of_a_newer_daemon(DOMAIN, StatusCode.RESOURCE_EXHAUSTED, busy)
    assert type(from_call(newer)) is errors.QueueFull
    foreign = of_a_newer_daemon("elsewhere", StatusCode.RESOURCE_EXHAUSTED, busy)
    assert error_info(foreign) is None
    contradicting = of_a_newer_daemon(DOMAIN, StatusCode.UNAVAILABLE, busy)
    assert error_info(contradicting) is None
    assert type(from_call(contradicting)) is errors.PeerUnreachable


def test_a_fault_says_that_there_is_one_and_nothing_more() -> None:
    found = refusal_of(over_the_wire(fault_status("Lookup", RuntimeError("secret"))))
    assert (found.code, found.reason, found.retryable) == (StatusCode.INTERNAL, "INTERNAL", False)
    assert "RuntimeError" in found.message
    assert "secret" not in found.message


def broken(*_: object, **__: object) -> None:
    raise RuntimeError("a secret of the daemon")


def assert_internal(found: Refusal, caplog: pytest.LogCaptureFixture, method: str) -> None:
    assert (found.code, found.reason) == (StatusCode.INTERNAL, "INTERNAL")
    assert "secret" not in found.message
    assert "Traceback" not in found.message
    (record,) = [record for record in caplog.records if record.name == "kvmoverd.rpc.guard"]
    assert record.levelno == logging.ERROR
    assert method in record.getMessage()
    assert record.exc_info is not None
    caplog.clear()


async def test_a_fault_in_a_handler_is_internal_to_the_caller_and_whole_in_the_log(
    tmp_path: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with rpc_kit(tmp_path) as kit:
        engine = await kit.engine()
        hello = await kit.hello()
        monkeypatch.setattr(kit.node.namespaces, "lookup", broken)
        monkeypatch.setattr(kit.node, "fetch", broken)
        monkeypatch.setattr(kit.node, "push", broken)
        monkeypatch.setattr(kit.node.decode_side, "release_ticket", broken)
        found = await refused(engine.ask("Lookup", engine_pb2.LookupRequest(fingerprint=engine.fingerprint)))
        assert_internal(found, caplog, "Lookup")
        assert_internal(await refused(engine.ask("FetchBlocks", engine.fetch_request("r"))), caplog, "FetchBlocks")
        assert_internal(await refused(engine.push(engine.plan("r"))), caplog, "PushLayers")
        released = await refused(kit.ask_node("ReleaseTicket", node_pb2.ReleaseTicketRequest()))
        assert_internal(released, caplog, "ReleaseTicket")
        assert hello.boot_id == kit.daemon.boot_id
        await kit.everything_is_home()


async def test_a_fault_in_mid_stream_ends_the_request_and_the_call(
    tmp_path: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with rpc_kit(tmp_path) as kit:
        engine = await kit.engine()
        call = engine.ask("PushLayers")
        await call.write(engine_pb2.PushLayersRequest(plan=engine.plan("r")))
        await kit.until_live(lambda: kit.node.requests.by_kind()["push"] == 1)
        (driver,) = [driver for driver in kit.node.requests.live() if driver.kind == "push"]
        monkeypatch.setattr(driver.request, "computed", broken)
        await call.write(engine_pb2.PushLayersRequest(computed=engine_pb2.Computed(layers=1)))
        end = (await call.read()).end
        assert (end.status.reason, end.pages_quiet) == (Reason.INTERNAL.value, True)
        assert_internal(await refused(call), caplog, "PushLayers")
        await kit.everything_is_home()
