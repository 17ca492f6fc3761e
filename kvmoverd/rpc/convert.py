"""Messages to the core's words and back. Unknown enum numbers and broken lengths are refused here."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

from kvmover_proto import common_pb2, engine_pb2, node_pb2
from kvmoverd.core.errors import BadLayout, BadPages, BadPlan, BadRegion, BadRequest, UnknownModel
from kvmoverd.core.geometry import Segment
from kvmoverd.core.layout import LAYERS_MAX, SEGMENTS_MAX, Layout
from kvmoverd.core.machines.actions import (
    AnnounceAccepted,
    AnnounceBlocks,
    AnnounceLayers,
    AnnouncePrefix,
    AnnounceProgress,
    AnnounceQuiet,
    AnnounceStored,
    AnnounceWhole,
    Finish,
    FinishDelivery,
)
from kvmoverd.core.manifest import Manifest
from kvmoverd.core.pci import pci_address
from kvmoverd.core.status import RETRYABLE, BlockOutcome, End, Path, Reason
from kvmoverd.node.outbox import Attached, Fetched, Told
from kvmoverd.node.peer import Ticket
from kvmoverd.node.plan_checks import PAGE_SETS_MAX
from kvmoverd.node.sessions import Pages, Region
from kvmoverd.ports.memory import GpuShare, Near
from kvmoverd.rpc.remedies import REMEDIES

REQUEST_ID_MAX = 128
FINGERPRINT_BYTES = 32
TIMEOUT_MS_MAX = 3_600_000
TEXT_MAX = 512
NUMA_NODE_MAX = 1_023


def layout_of(message: common_pb2.Layout) -> Layout:
    """Raises `BadLayout`."""
    if len(message.layers) > LAYERS_MAX:
        raise BadLayout(f"the layout has {len(message.layers)} layers, must be 1 to {LAYERS_MAX}")
    return Layout(message.block_tokens, tuple(tuple(layer.segment_bytes) for layer in message.layers))


def manifest_of(message: common_pb2.Manifest) -> Manifest:
    """Raises `BadManifest`, `BadLayout`."""
    return Manifest(
        model_id=message.model_id,
        weights_digest=message.weights_digest,
        tokenizer_digest=message.tokenizer_digest,
        layout=layout_of(message.layout),
        dtype=message.dtype,
        rope_scaling=message.rope_scaling,
        parallel_geometry=message.parallel_geometry,
        lora_id=message.lora_id,
        tenant=message.tenant,
        epoch=message.epoch,
    )


def manifest_message(manifest: Manifest) -> common_pb2.Manifest:
    layout = manifest.layout
    return common_pb2.Manifest(
        model_id=manifest.model_id,
        weights_digest=manifest.weights_digest,
        tokenizer_digest=manifest.tokenizer_digest,
        layout=common_pb2.Layout(
            block_tokens=layout.block_tokens,
            layers=[common_pb2.LayerSpec(segment_bytes=segments) for segments in layout.layers],
        ),
        dtype=manifest.dtype,
        rope_scaling=manifest.rope_scaling,
        parallel_geometry=manifest.parallel_geometry,
        lora_id=manifest.lora_id,
        tenant=manifest.tenant,
        epoch=manifest.epoch,
    )


def region_layers_of(layers: Sequence[engine_pb2.RegionLayer]) -> tuple[tuple[Segment, ...], ...]:
    """Raises `BadRegion` for more layers or segments than any layout has, before it looks at each of them."""
    if len(layers) > LAYERS_MAX:
        raise BadRegion(f"the region has {len(layers)} layers, at most {LAYERS_MAX} are taken")
    for layer, message in enumerate(layers):
        if len(message.segments) > SEGMENTS_MAX:
            raise BadRegion(f"layer {layer} has {len(message.segments)} segments, at most {SEGMENTS_MAX} are taken")
    return tuple(tuple(_segment(segment) for segment in layer.segments) for layer in layers)


def gpu_share_of(request: engine_pb2.RegisterRegionRequest) -> GpuShare | None:
    """None for a region by descriptor. Raises `BadRegion` for both at once."""
    if not request.HasField("cuda"):
        return None
    if request.fd_ticket:
        raise BadRegion(f"a region is either fd_ticket {request.fd_ticket} or memory of a GPU, not both")
    cuda = request.cuda
    return GpuShare(cuda.ipc_handle, cuda.offset_bytes, cuda.size_bytes, cuda.pci_address)


def near_of(request: engine_pb2.RegisterRegionRequest) -> Near:
    """Raises `BadRegion`."""
    text = request.gpu_pci_address or (request.cuda.pci_address if request.HasField("cuda") else "")
    numa_node = request.numa_node if request.HasField("numa_node") else None
    if numa_node is not None and numa_node > NUMA_NODE_MAX:
        raise BadRegion(f"numa_node is {numa_node}, must be 0 to {NUMA_NODE_MAX}")
    try:
        return Near(pci_address(text) if text else None, numa_node)
    except ValueError as error:
        raise BadRegion(f"gpu_pci_address: {error}") from None


def _segment(message: engine_pb2.RegionSegment) -> Segment:
    return Segment(message.base_bytes, message.page_stride_bytes, message.page_bytes, message.pages)


def pages_of(message: common_pb2.PageSet, region: Region) -> Pages:
    """Raises `BadPages` for more pages than the region has, before it looks at each of them."""
    if len(message.pages) > region.geometry.pages:
        raise BadPages(f"{len(message.pages)} pages are given, the region has {region.geometry.pages}")
    return np.asarray(message.pages, dtype=np.uint32)


def page_sets_of(messages: Sequence[common_pb2.PageSet], region: Region) -> tuple[Pages, ...]:
    """Raises `BadPages`."""
    if len(messages) > PAGE_SETS_MAX:
        raise BadPages(f"{len(messages)} page sets are given, must be 1 to {PAGE_SETS_MAX}")
    return tuple(pages_of(message, region) for message in messages)


def checked_request(request_id: str, attempt: int) -> None:
    if not 1 <= len(request_id) <= REQUEST_ID_MAX:
        raise BadRequest(f"request_id has {len(request_id)} characters, must have 1 to {REQUEST_ID_MAX}")
    if attempt < 1:
        raise BadRequest(f"attempt is {attempt}, must be 1 or more")


def checked_fingerprint(fingerprint: bytes) -> bytes:
    if len(fingerprint) != FINGERPRINT_BYTES:
        raise UnknownModel(f"the fingerprint has {len(fingerprint)} bytes, must have {FINGERPRINT_BYTES}")
    return fingerprint


def seconds(name: str, milliseconds: int, default_s: float, max_s: float) -> float:
    """A duration of a request in seconds, 0 meaning the default. Raises `BadRequest` beyond the bound."""
    if milliseconds > min(TIMEOUT_MS_MAX, max_s * 1000):
        raise BadRequest(f"{name} is {milliseconds} ms, at most {min(TIMEOUT_MS_MAX, int(max_s * 1000))} are taken")
    return milliseconds / 1000 if milliseconds else default_s


def path_of(number: int, *, needed: bool) -> Path | None:
    """Raises `BadPlan` for an unknown path, or for none where blocks are hit."""
    if number == common_pb2.PATH_UNSPECIFIED and not needed:
        return None
    try:
        return Path(number)
    except ValueError:
        known = ", ".join(f"{path.value} (PATH_{path.name})" for path in Path)
        raise BadPlan(f"path is {number}, known are {known}") from None


def path_number(path: Path | None) -> common_pb2.Path.ValueType:
    return common_pb2.Path.ValueType(path.value if path is not None else common_pb2.PATH_UNSPECIFIED)


def reason_number(reason: Reason) -> common_pb2.Reason.ValueType:
    return common_pb2.Reason.ValueType(reason.value)


def reason_from(number: int) -> Reason:
    """An unknown reason, of a newer peer, is INTERNAL."""
    try:
        return Reason(number)
    except ValueError:
        return Reason.INTERNAL


def terminal(end: End) -> common_pb2.Terminal:
    status = common_pb2.Status(
        reason=reason_number(end.reason),
        message=end.message[:TEXT_MAX],
        retryable=end.reason in RETRYABLE,
        remedy=REMEDIES[end.reason],
    )
    return common_pb2.Terminal(
        status=status,
        pages_quiet=end.pages_quiet,
        prefix_blocks=end.prefix_blocks,
        moved_bytes=end.moved_bytes,
        storage_read_bytes=end.storage_read_bytes,
    )


def end_from(message: common_pb2.Terminal) -> End:
    return End(
        reason=reason_from(message.status.reason),
        message=message.status.message,
        pages_quiet=message.pages_quiet,
        prefix_blocks=message.prefix_blocks,
        moved_bytes=message.moved_bytes,
        storage_read_bytes=message.storage_read_bytes,
    )


@functools.cache
def block_status(outcome: BlockOutcome) -> common_pb2.BlockStatus:
    return common_pb2.BlockStatus(
        state=common_pb2.BlockState.ValueType(outcome.state.value), reason=reason_number(outcome.reason)
    )


def outcome_from(message: common_pb2.BlockStatus) -> BlockOutcome:
    reason = reason_from(message.reason)
    return BlockOutcome.of(reason if reason is not Reason.OK else Reason.INTERNAL)


def ticket_message(ticket: Ticket) -> node_pb2.Ticket:
    return node_pb2.Ticket(boot_id=ticket.boot_id, ticket_id=ticket.ticket_id, generation=ticket.generation)


def ticket_from(message: node_pb2.Ticket) -> Ticket:
    return Ticket(message.boot_id, message.ticket_id, message.generation)


def _prefix(action: AnnouncePrefix) -> engine_pb2.Prefix:
    lost = block_status(action.first_lost) if action.first_lost is not None else None
    return engine_pb2.Prefix(prefix_blocks=action.prefix_blocks, first_lost=lost)


def stream_event(action: Told) -> engine_pb2.StreamEvent:
    match action:
        case AnnouncePrefix():
            return engine_pb2.StreamEvent(prefix=_prefix(action))
        case AnnounceLayers(first, last):
            return engine_pb2.StreamEvent(ready=engine_pb2.Ready(first_layer=first, last_layer=last))
        case Finish(end):
            return engine_pb2.StreamEvent(end=terminal(end))
        case AnnounceQuiet():
            return engine_pb2.StreamEvent(quiet=common_pb2.Quiet())
        case _:
            raise AssertionError(f"a stream does not tell {action}")


def push_event(action: Told) -> engine_pb2.PushEvent:
    match action:
        case AnnounceLayers(_, last):
            return engine_pb2.PushEvent(pushed=engine_pb2.Pushed(layers=last + 1))
        case Finish(end):
            return engine_pb2.PushEvent(end=terminal(end))
        case AnnounceQuiet():
            return engine_pb2.PushEvent(quiet=common_pb2.Quiet())
        case _:
            raise AssertionError(f"a push does not tell {action}")


def deliver_event(action: Told) -> engine_pb2.DeliverEvent:
    match action:
        case AnnounceLayers(first, last):
            return engine_pb2.DeliverEvent(ready=engine_pb2.Ready(first_layer=first, last_layer=last))
        case FinishDelivery(end):
            return engine_pb2.DeliverEvent(end=terminal(end))
        case AnnounceQuiet():
            return engine_pb2.DeliverEvent(quiet=common_pb2.Quiet())
        case _:
            raise AssertionError(f"a delivery does not tell {action}")


def store_event(action: Told, blocks: int) -> engine_pb2.StoreEvent:
    match action:
        case AnnounceAccepted():
            return engine_pb2.StoreEvent(accepted=engine_pb2.Accepted(blocks=blocks))
        case AnnounceBlocks(outcomes):
            return engine_pb2.StoreEvent(result=engine_pb2.StoreResult(blocks=[block_status(o) for o in outcomes]))
        case Finish(end):
            return engine_pb2.StoreEvent(end=terminal(end))
        case AnnounceQuiet():
            return engine_pb2.StoreEvent(quiet=common_pb2.Quiet())
        case _:
            raise AssertionError(f"a store does not tell {action}")


def assemble_event(action: Told) -> engine_pb2.AssembleEvent:
    match action:
        case Attached(blocks, tail_tokens, prefill_node):
            attached = engine_pb2.Attached(blocks=blocks, tail_tokens=tail_tokens, prefill_node=prefill_node)
            return engine_pb2.AssembleEvent(attached=attached)
        case AnnounceWhole(prefix_blocks):
            return engine_pb2.AssembleEvent(whole=engine_pb2.Whole(prefix_blocks=prefix_blocks))
        case AnnounceStored(durable, dropped):
            return engine_pb2.AssembleEvent(stored=engine_pb2.Stored(durable_blocks=durable, dropped_blocks=dropped))
        case Finish(end):
            return engine_pb2.AssembleEvent(end=terminal(end))
        case _:
            raise AssertionError(f"an assembly does not tell {action}")


def fetch_event(action: Told) -> engine_pb2.FetchEvent:
    match action:
        case AnnounceProgress(done_blocks):
            return engine_pb2.FetchEvent(progress=engine_pb2.FetchProgress(done_blocks=done_blocks))
        case Fetched(outcomes, lease_id, lease_generation, lease_s):
            result = engine_pb2.FetchResult(
                blocks=[block_status(outcome) for outcome in outcomes],
                lease_id=lease_id,
                lease_generation=lease_generation,
                lease_ms=int(lease_s * 1000),
            )
            return engine_pb2.FetchEvent(result=result)
        case Finish(end):
            return engine_pb2.FetchEvent(end=terminal(end))
        case AnnounceQuiet():
            return engine_pb2.FetchEvent(quiet=common_pb2.Quiet())
        case _:
            raise AssertionError(f"a fetch does not tell {action}")
