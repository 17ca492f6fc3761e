"""Errors a caller can cause or act on: one class per decision. `rpc.errors` maps them to gRPC codes in one table."""

from __future__ import annotations

from typing import ClassVar


class KvmoverError(Exception):
    """Base: `reason` is stable and machine-readable, `retryable` says whether the same call may succeed later.

    The message says what happened, with numbers; `remedy` says what to do. `details` carries the numbers by name.
    """

    reason: ClassVar[str] = "INTERNAL"
    retryable: ClassVar[bool] = False
    remedy: ClassVar[str] = ""

    def __init__(self, message: str, **details: object) -> None:
        super().__init__(message)
        self.details = {name: str(value) for name, value in details.items()}


class BadRequest(KvmoverError):
    """A value outside its bounds."""

    reason = "BAD_REQUEST"


class BadLayout(BadRequest):
    reason = "BAD_LAYOUT"


class BadManifest(BadRequest):
    reason = "BAD_MANIFEST"


class BadKeys(BadRequest):
    reason = "BAD_KEYS"


class BadRegion(BadRequest):
    reason = "BAD_REGION"


class BadPages(BadRequest):
    reason = "BAD_PAGES"


class BadPlan(BadRequest):
    reason = "BAD_PLAN"


class UnknownPeer(BadRequest):
    reason = "UNKNOWN_PEER"
    remedy = "name a node of the daemon's [[peers]], or the daemon's own name"


class PagesBusy(KvmoverError):
    """Another live request writes some of these pages."""

    reason = "PAGES_BUSY"
    remedy = "wait for the Terminal with pages_quiet of the request that uses them"


class UnknownModel(KvmoverError):
    reason = "UNKNOWN_MODEL"
    remedy = "call RegisterModel first"


class UnknownRegion(KvmoverError):
    reason = "UNKNOWN_REGION"
    remedy = "pass the descriptor over the companion socket and call RegisterRegion first"


class UnknownRequest(KvmoverError):
    reason = "UNKNOWN_REQUEST"


class UnknownSession(KvmoverError):
    reason = "UNKNOWN_SESSION"
    remedy = "open the companion socket again: the daemon restarted, or it saw this session end"


class NotWhole(KvmoverError):
    """Deliver before every layer of every part arrived."""

    reason = "NOT_WHOLE"
    retryable = True
    remedy = "wait for the Whole event of AssembleBlocks"


class NotRead(KvmoverError):
    """A caller that does not read what it is told."""

    reason = "DEADLINE"
    retryable = True
    remedy = "read the events of a call as they come, and try again under the next attempt"


class TicketExpired(KvmoverError):
    reason = "TICKET_EXPIRED"
    retryable = True
    remedy = "start again under a higher attempt"


class ProtocolMismatch(KvmoverError):
    reason = "PROTOCOL_MISMATCH"
    remedy = "run the same minor version of kvmoverd on both nodes, and repeat Hello after a restart"


class TransportMismatch(KvmoverError):
    reason = "TRANSPORT_MISMATCH"
    remedy = "set the same transport.kind on both nodes"


class ManifestMismatch(KvmoverError):
    """The store holds another manifest under this fingerprint."""

    reason = "MANIFEST_MISMATCH"
    remedy = "the field named differs between what is stored and what was registered; do not share this root"


class StaleEpoch(KvmoverError):
    reason = "STALE_EPOCH"
    remedy = "register the model with the epoch named"


class StaleAttempt(KvmoverError):
    """The fence: a higher attempt of this request is known."""

    reason = "STALE_ATTEMPT"
    remedy = "a name and attempt open each kind of call once: try again under a higher attempt, or a new request_id"

    def __init__(self, *, request_id: str, attempt: int, known: int) -> None:
        super().__init__(
            f"request {request_id!r}: attempt {attempt} is not above attempt {known}, which is known here",
            request_id=request_id,
            attempt=attempt,
            known=known,
        )


class RequestTaken(KvmoverError):
    """A live call of another session or node has this name: a stranger's higher attempt does not end it."""

    reason = "REQUEST_TAKEN"
    remedy = "choose a new request_id"


class PoolExhausted(KvmoverError):
    reason = "POOL_EXHAUSTED"
    retryable = True
    remedy = "retry later, or raise the limit that is named: one of [pool], or transport.verbs.qps_max"

    def __init__(self, *, purpose: str, asked: int, free: int, unit: str = "slots") -> None:
        super().__init__(
            f"{purpose}: asked for {asked} {unit}, {free} can be had", purpose=purpose, asked=asked, free=free
        )


class TooBig(KvmoverError):
    """A request that could never fit, however long it waits."""

    reason = "TOO_BIG"
    remedy = "send a shorter request, or raise the limit named"


class QueueFull(KvmoverError):
    reason = "QUEUE_FULL"
    retryable = True
    remedy = "retry after a pause"


class Draining(KvmoverError):
    reason = "DRAINING"
    retryable = True
    remedy = "send new requests to another node"


class ShuttingDown(KvmoverError):
    """A call that waited, on a process that stops."""

    reason = "SHUTTING_DOWN"
    retryable = True
    remedy = "ask again: of another one, or of this one when it is back"


class NotLeading(KvmoverError):
    """A scheduler that does not decide; `leader`: the address of the one that does, empty when it is not known."""

    reason = "NOT_LEADING"
    retryable = True
    remedy = "ask the leader, or where none is named another scheduler, after a pause"

    def __init__(self, *, leader: str) -> None:
        super().__init__(f"this scheduler does not lead; {leader or 'nobody known'} does", leader=leader)


class NoScheduler(KvmoverError):
    """This node belongs to no scheduler."""

    reason = "NO_SCHEDULER"
    remedy = "set scheduler.addresses in the daemon's config, or choose engines yourself"


class SchedulerUnreachable(KvmoverError):
    """None answers that leads, or whoever does is known to lead no more."""

    reason = "SCHEDULER_UNREACHABLE"
    retryable = True
    remedy = "ask again after a pause; check that kvmoverd scheduler runs and that scheduler.addresses names it"


class PeerUnreachable(KvmoverError):
    reason = "PEER_LOST"
    retryable = True
    remedy = "check that kvmoverd runs on that node and that [[peers]] names its address"


class PeerMismatch(KvmoverError):
    """Another node than the one that was meant listens at a peer's address."""

    reason = "PEER_MISMATCH"
    remedy = "correct the name or the address in [[peers]]"


class StorageUnusable(KvmoverError):
    reason = "STORAGE_UNUSABLE"
    remedy = "check the directory of the storage root named"


class TransportRefused(KvmoverError):
    """A transport that this build or machine can't run."""

    reason = "TRANSPORT_REFUSED"


class NoCuda(KvmoverError):
    """GPU memory, and no CUDA here that could open it."""

    reason = "NO_CUDA"
    remedy = (
        "start kvmoverd where it sees the GPU, its driver and libcudart (in a container: --gpus, "
        "NVIDIA_DRIVER_CAPABILITIES=compute,utility), or register host memory by a descriptor"
    )


class ConfigError(KvmoverError):
    """The configuration is refused; the message names the key."""

    reason = "CONFIG"
