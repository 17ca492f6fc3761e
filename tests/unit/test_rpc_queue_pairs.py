"""Queue pairs are introduced over the node-to-node API: offers, answers, and all that is refused on the way."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from rpc_kit import HERE, OPTIONS, WAIT_S, free_port, refused, rpc_kit

from kvmover_proto import node_pb2, node_pb2_grpc
from kvmoverd.core.errors import KvmoverError, PeerUnreachable, PoolExhausted, ProtocolMismatch, QueueFull
from kvmoverd.core.qos import KV_LANE, KvClass, Marks
from kvmoverd.ports.connection import Answer, Answered, Offer, PathEnd
from kvmoverd.ports.transport import Route, Sender
from kvmoverd.rpc import dialling, node_service, queue_pairs, server
from kvmoverd.rpc.dialling import Dialler
from kvmoverd.rpc.node_service import DataKeys, NodeService

BOOT = "boot"
END = PathEnd(cnic=1, qp_number=17, packet_number=0xFFFFFF, gid=bytes(range(16)), lid=0, mtu_bytes=4096)
OFFER = Offer(
    protocol=1,
    link_id=(1 << 64) - 1,
    generation=3,
    kv_class=KvClass.ASSEMBLY,
    marks=Marks(2, 0x20, 0xFFFFF),
    peer_cnic=2,
    end=END,
    receive_slots=64,
    message_bytes=16_384,
)
ANSWER = Answer(replace(END, cnic=2, qp_number=18, lid=65_535, mtu_bytes=1024), KV_LANE, 32, 8192)


def messages() -> tuple[node_pb2.ConnectQueuePairRequest, node_pb2.ConnectQueuePairReply]:
    return queue_pairs.offer_message(HERE, BOOT, b"k" * 32, OFFER), queue_pairs.answer_message(ANSWER)


def test_offers_and_answers_come_back_as_they_were() -> None:
    request, reply = messages()
    assert queue_pairs.offer_from(request) == OFFER
    assert queue_pairs.answer_from(reply) == ANSWER


WRONG: list[tuple[str, Any, str]] = [
    ("kv_class", "model", "kv_class is 'model', known are layers, assembly, write_back, prefetch"),
    ("kv_class", "", "kv_class is '', known"),
    ("marks.service_level", 16, "service_level is 16, must be 0 to 15"),
    ("marks.traffic_class", 256, "traffic_class is 256, must be 0 to 255"),
    ("marks.traffic_class", 0x21, "two lowest bits are ECN's"),
    ("marks.flow_label", 1 << 20, "flow_label is 1048576"),
    ("end.gid", b"g" * 15, "gid has 15 bytes, must have 16"),
    ("end.gid", b"", "gid has 0 bytes, must have 16"),
    ("end.mtu_bytes", 1500, "mtu_bytes is 1500, must be one of 256, 512"),
    ("end.cnic", 64, "cnic is 64, must be 0 to 63"),
    ("end.qp_number", 0, "qp_number is 0, must be 1"),
    ("end.qp_number", 1 << 24, "qp_number is 16777216"),
    ("end.packet_number", 1 << 24, "packet_number is 16777216"),
    ("end.lid", 1 << 16, "lid is 65536, must be 0 to 65535"),
    ("receive_slots", 0, "receive_slots is 0, must be 1"),
    ("receive_slots", 65_537, "receive_slots is 65537"),
    ("message_bytes", 63, "message_bytes is 63, must be 64"),
    ("message_bytes", (1 << 20) + 1, "message_bytes is 1048577"),
    ("peer_cnic", 64, "peer_cnic is 64"),
]


def spoiled(message: Any, path: str, value: Any) -> Any:
    *parents, last = path.split(".")
    at = message
    for name in parents:
        at = getattr(at, name)
    setattr(at, last, value)
    return message


@pytest.mark.parametrize(("path", "value", "words"), WRONG)
def test_what_no_device_could_mean_is_refused_at_both_ends(path: str, value: Any, words: str) -> None:
    request, reply = messages()
    with pytest.raises(KvmoverError, match=words) as offered:
        queue_pairs.offer_from(spoiled(request, path, value))
    assert offered.value.reason == "BAD_REQUEST"
    if path not in ("kv_class", "peer_cnic"):
        with pytest.raises(KvmoverError, match=words):
            queue_pairs.answer_from(spoiled(reply, path, value))


@pytest.mark.parametrize("field", ["marks", "end"])
def test_an_offer_without_its_parts_is_refused(field: str) -> None:
    request, _ = messages()
    request.ClearField(field)  # type: ignore[arg-type]
    with pytest.raises(KvmoverError, match="an offer needs marks and end"):
        queue_pairs.offer_from(request)


class Acceptor:
    """A transport's side: answers from a thread of its own, as a device's does. `says` None: never."""

    def __init__(self, says: Answer | KvmoverError | None = ANSWER) -> None:
        self.says = says
        self.offers: list[tuple[Sender, Offer]] = []

    def dial_with(self, dial: Any) -> None:
        raise AssertionError("it only accepts")

    def accept(self, sender: Sender, offer: Offer, answered: Answered) -> None:
        self.offers.append((sender, offer))
        if self.says is not None:
            threading.Thread(target=answered, args=(self.says,)).start()

    def peer_gone(self, sender: Sender, message: str) -> None:
        raise AssertionError("nobody is gone")


@asynccontextmanager
async def serving(acceptor: Acceptor | None) -> AsyncIterator[tuple[node_pb2_grpc.NodeAsyncStub, bytes]]:
    """The node API of a node that has a transport of this kind, and a key that it issued to `HERE`."""
    keys = DataKeys()
    service = NodeService(
        None,  # type: ignore[arg-type]
        keys,
        None,  # type: ignore[arg-type]
        transport="verbs" if acceptor is not None else "tcp",
        data_endpoint="verbs:3",
        version="1",
        connects=acceptor,
    )
    address = f"127.0.0.1:{free_port()}"
    started = await server.start(
        address,
        "kvmover.v1.Node",
        lambda made: node_pb2_grpc.add_NodeServicer_to_server(service, made),
        streams_max=16,
        always=node_service.ALWAYS,
    )
    try:
        async with grpc.aio.insecure_channel(address, options=OPTIONS) as channel:
            yield node_pb2_grpc.NodeStub(channel), keys.issue(HERE, BOOT)
    finally:
        await started.stop(0.0)


def asked(stub: Any, key: bytes, **changed: Any) -> Any:
    request = queue_pairs.offer_message(HERE, BOOT, key, OFFER)
    for name, value in changed.items():
        setattr(request, name, value)
    return stub.ConnectQueuePair(request, timeout=WAIT_S)


async def test_an_offer_with_its_key_reaches_the_transport_and_its_answer_comes_back() -> None:
    acceptor = Acceptor()
    async with serving(acceptor) as (stub, key):
        assert queue_pairs.answer_from(await asked(stub, key)) == ANSWER
    assert acceptor.offers == [((HERE, BOOT), OFFER)]


async def test_strangers_never_reach_the_transport() -> None:
    acceptor = Acceptor()
    async with serving(acceptor) as (stub, key):
        for changed in (
            {"data_key": b""},
            {"data_key": b"x" * 32},
            {"data_key": key[:-1]},
            {"boot_id": "another"},
            {"node": "another"},
        ):
            refusal = await refused(asked(stub, key, **changed))
            assert (refusal.code, refusal.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "PROTOCOL_MISMATCH")
            assert "the data key is none that this boot issued" in refusal.message
    assert acceptor.offers == []


async def test_a_bad_offer_never_reaches_the_transport() -> None:
    acceptor = Acceptor()
    async with serving(acceptor) as (stub, key):
        for changed in ({"kv_class": "model"}, {"receive_slots": 0}, {"peer_cnic": 64}):
            refusal = await refused(asked(stub, key, **changed))
            assert (refusal.code, refusal.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "BAD_REQUEST")
        request = queue_pairs.offer_message(HERE, BOOT, key, OFFER)
        request.marks.traffic_class = 255
        assert (await refused(stub.ConnectQueuePair(request, timeout=WAIT_S))).reason == "BAD_REQUEST"
    assert acceptor.offers == []


async def test_what_the_transport_refuses_is_told_with_its_reason_and_numbers() -> None:
    says = PoolExhausted(purpose="queue pairs", asked=1, free=0, unit="of transport.verbs.qps_max")
    async with serving(Acceptor(says)) as (stub, key):
        refusal = await refused(asked(stub, key))
    assert (refusal.code, refusal.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "POOL_EXHAUSTED")
    assert refusal.facts["free"] == "0" and refusal.retryable


async def test_a_transport_that_says_nothing_is_not_waited_for_longer_than_the_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(node_service, "ACCEPT_S", 0.05)
    async with serving(Acceptor(None)) as (stub, key):
        refusal = await refused(asked(stub, key))
    assert refusal.reason == "QUEUE_FULL" and "took no offer within 0.05 s" in refusal.message


async def test_a_node_without_queue_pairs_says_what_it_listens_with(tmp_path: Path) -> None:
    async with rpc_kit(tmp_path) as kit:
        key = (await kit.hello()).data_key
        refusal = await refused(asked(kit.node_stub, key))
    assert (refusal.code, refusal.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "TRANSPORT_MISMATCH")
    assert "listens with tcp" in refusal.message


class Far:
    """Another node, as the dialler sees it."""

    def __init__(self, says: Answer | BaseException | None) -> None:
        self.says = says
        self.asked = 0

    async def connect_queue_pair(self, route: Route, offer: Offer) -> Answer:
        self.asked += 1
        if self.says is None:
            await asyncio.Event().wait()
        if isinstance(self.says, BaseException):
            raise self.says
        assert self.says is not None
        return self.says


ROUTE = Route("far", BOOT, "verbs:3", b"k" * 32)
Found = Answer | KvmoverError


class Answers:
    """What a dial was answered, from whatever thread."""

    def __init__(self) -> None:
        self.found: list[Found] = []
        self._told = threading.Event()

    def __call__(self, found: Found) -> None:
        self.found.append(found)
        self._told.set()

    async def one(self) -> Found:
        assert await asyncio.to_thread(self._told.wait, WAIT_S), "no answer"
        (found,) = self.found
        return found


@pytest.mark.parametrize(
    ("says", "wanted"),
    [
        (ANSWER, Answer),
        (PeerUnreachable("gone"), PeerUnreachable),
        (ProtocolMismatch("restarted"), ProtocolMismatch),
        (RuntimeError("a fault"), KvmoverError),
    ],
)
async def test_an_offer_from_any_thread_is_answered_once(says: Any, wanted: type) -> None:
    far, answers = Far(says), Answers()
    dial = Dialler({"far": far}.get)
    threading.Thread(target=dial, args=(ROUTE, OFFER, answers)).start()
    assert type(await answers.one()) is wanted
    dial.stop()
    assert len(answers.found) == 1 and far.asked == 1


async def test_an_offer_to_a_node_that_is_no_peer_is_refused() -> None:
    answers = Answers()
    Dialler({}.get)(ROUTE, OFFER, answers)
    assert "far is no peer of this node" in str(await answers.one())


async def test_a_stop_answers_all_that_wait_and_refuses_what_comes_later() -> None:
    far, under_way, not_begun, late = Far(None), Answers(), Answers(), Answers()
    dial = Dialler({"far": far}.get)
    dial(ROUTE, OFFER, under_way)
    while not far.asked:  # noqa: ASYNC110 - it tells nobody
        await asyncio.sleep(0)
    dial(ROUTE, OFFER, not_begun)
    dial.stop()
    dial(ROUTE, OFFER, late)
    for answers in (under_way, not_begun, late):
        assert [type(found) for found in answers.found] == [PeerUnreachable]
    await asyncio.sleep(0.01)
    assert far.asked == 1 and all(len(answers.found) == 1 for answers in (under_way, not_begun, late))


def test_an_offer_after_the_loop_has_ended_is_answered_all_the_same() -> None:
    async def made() -> Dialler:
        return Dialler({}.get)

    dial, answers = asyncio.run(made()), Answers()
    dial(ROUTE, OFFER, answers)
    assert [str(found) for found in answers.found] == ["the daemon has stopped"]


async def test_no_more_offers_are_under_way_than_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dialling, "DIALS_MAX", 2)
    dial, waiting, refused_one = Dialler({"far": Far(None)}.get), Answers(), Answers()
    dial(ROUTE, OFFER, waiting)
    dial(ROUTE, OFFER, waiting)
    dial(ROUTE, OFFER, refused_one)
    assert isinstance(refused_one.found[0], QueueFull) and not waiting.found
    dial.stop()
    assert len(waiting.found) == 2


async def test_a_node_that_does_not_answer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dialling, "ANSWER_S", 0.05)
    answers = Answers()
    Dialler({"far": Far(None)}.get)(ROUTE, OFFER, answers)
    assert "did not answer an offer within 0.05 s" in str(await answers.one())
