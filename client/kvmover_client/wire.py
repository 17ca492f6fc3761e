"""Words to messages and back. Numbers that a newer daemon may send and this library doesn't know are read as INTERNAL."""

from __future__ import annotations

from collections.abc import Sequence

from kvmover_client.cuda import CudaMemory
from kvmover_client.errors import BadRequest
from kvmover_client.keys import packed
from kvmover_client.memory import Geometry
from kvmover_client.progress import ProgressEntry
from kvmover_client.words import (
    BlockResult,
    BlockState,
    End,
    Layout,
    Lease,
    LookupResult,
    Manifest,
    Model,
    Part,
    Path,
    Plan,
    Prefix,
    ReaderDepth,
    Reason,
    RoomUse,
    StoreChain,
)
from kvmover_proto import common_pb2, engine_pb2

MILLISECONDS_MAX = (1 << 32) - 1
DEPTH_MAX = (1 << 32) - 1
EXPECTED_S_MAX = 3600
BLOCKS_MAX = 65_536


def layout_message(layout: Layout) -> common_pb2.Layout:
    layers = [common_pb2.LayerSpec(segment_bytes=segments) for segments in layout.layers]
    return common_pb2.Layout(block_tokens=layout.block_tokens, layers=layers)


def manifest_message(manifest: Manifest) -> common_pb2.Manifest:
    return common_pb2.Manifest(
        model_id=manifest.model_id,
        weights_digest=manifest.weights_digest,
        tokenizer_digest=manifest.tokenizer_digest,
        layout=layout_message(manifest.layout),
        dtype=manifest.dtype,
        rope_scaling=manifest.rope_scaling,
        parallel_geometry=manifest.parallel_geometry,
        lora_id=manifest.lora_id,
        tenant=manifest.tenant,
        epoch=manifest.epoch,
    )


def region_layers(geometry: Geometry) -> list[engine_pb2.RegionLayer]:
    return [
        engine_pb2.RegionLayer(
            segments=[
                engine_pb2.RegionSegment(
                    base_bytes=segment.base_bytes,
                    page_stride_bytes=segment.page_stride_bytes,
                    page_bytes=segment.page_bytes,
                    pages=segment.pages,
                )
                for segment in layer
            ]
        )
        for layer in geometry.layers
    ]


def cuda_message(memory: CudaMemory) -> engine_pb2.CudaMemory:
    return engine_pb2.CudaMemory(
        ipc_handle=memory.ipc_handle,
        offset_bytes=memory.offset_bytes,
        size_bytes=memory.size_bytes,
        pci_address=memory.pci_address,
    )


def plan_message(plan: Plan, entry: ProgressEntry | None = None) -> engine_pb2.RequestPlan:
    return engine_pb2.RequestPlan(
        request_id=plan.request_id,
        attempt=plan.attempt,
        fingerprint=plan.fingerprint,
        block_keys=packed(plan.block_keys),
        tail_tokens=plan.tail_tokens,
        hit_blocks=plan.hit_blocks,
        decode_node=plan.decode_node,
        path=_path_number(plan.path),
        timeout_ms=milliseconds(plan.timeout_s),
        region_id=plan.region_id,
        page_sets=[page_set(pages) for pages in plan.page_sets],
        progress_entry=entry.number if entry is not None else 0,
        progress_generation=entry.generation if entry is not None else 0,
        resident_blocks=plan.resident_blocks,
        parts=[_part_message(part) for part in plan.parts],
        helpers=plan.helpers,
        no_helpers=plan.no_helpers,
    )


def _part_message(part: Part) -> common_pb2.PlannedPart:
    """Raises `BadRequest` for a range that is none; the daemon checks the rest."""
    for first, stop in part.blocks:
        if not 0 <= first < stop <= BLOCKS_MAX:
            raise BadRequest(f"blocks [{first}, {stop}) of {part.node} are refused, must be of [0, {BLOCKS_MAX})")
    firsts = [first for first, _ in part.blocks]
    counts = [stop - first for first, stop in part.blocks]
    return common_pb2.PlannedPart(node=part.node, blocks=common_pb2.BlockRuns(first=firsts, count=counts))


def lookup_result(reply: engine_pb2.LookupReply) -> LookupResult:
    return LookupResult(
        reply.prefix_blocks,
        reply.pooled_blocks,
        tuple(reply.starved_to),
        tuple(reply.starved_from),
        ReaderDepth(reply.reader.queue_bytes, reply.reader.rate_bytes_per_s),
        tuple(_room_use(room) for room in reply.rooms),
    )


def _room_use(message: engine_pb2.RoomStatus) -> RoomUse:
    return RoomUse(
        purpose=message.purpose,
        limit_bytes=message.limit_bytes,
        taken_bytes=message.taken_bytes,
        waiting=message.waiting,
        waiting_bytes=message.waiting_bytes,
        oldest_wait_s=message.oldest_wait_ms / 1000,
        refused=message.refused,
    )


def deliver_message(
    request_id: str, attempt: int, region_id: int, pages: Sequence[int], entry: ProgressEntry | None = None
) -> engine_pb2.DeliverRequest:
    return engine_pb2.DeliverRequest(
        request_id=request_id,
        attempt=attempt,
        region_id=region_id,
        pages=page_set(pages),
        progress_entry=entry.number if entry is not None else 0,
        progress_generation=entry.generation if entry is not None else 0,
    )


def store_message(
    request_id: str,
    attempt: int,
    model: Model,
    chains: Sequence[StoreChain],
    region_id: int,
    pages: Sequence[int],
    timeout_s: float,
) -> engine_pb2.StoreBlocksRequest:
    """Raises `BadRequest` when a chain has no blocks, but for a call of one chain."""
    if not chains or (len(chains) > 1 and not all(chain.keys for chain in chains)):
        raise BadRequest(f"{len(chains)} chains are given: there must be one or more, with one block or more each")
    first, *others = chains
    return engine_pb2.StoreBlocksRequest(
        request_id=request_id,
        attempt=attempt,
        fingerprint=model.fingerprint,
        block_keys=packed([key for chain in chains for key in chain.keys]),
        parent_key=packed([first.parent_key]),
        first_depth=depth(first.first_depth),
        region_id=region_id,
        pages=page_set(pages),
        timeout_ms=milliseconds(timeout_s),
        chains=[
            engine_pb2.StoreChain(
                blocks=len(chain.keys), parent_key=packed([chain.parent_key]), first_depth=depth(chain.first_depth)
            )
            for chain in others
        ],
    )


def page_set(pages: Sequence[int]) -> common_pb2.PageSet:
    return common_pb2.PageSet(pages=pages)


def lease_refs(leases: Sequence[Lease]) -> list[engine_pb2.LeaseRef]:
    return [engine_pb2.LeaseRef(lease_id=lease.lease_id, lease_generation=lease.lease_generation) for lease in leases]


def milliseconds(duration_s: float) -> int:
    """At least 1: a 0 on the wire would ask for the daemon's default. Raises `BadRequest` unless above 0 s and within 49 days."""
    if not 0 < duration_s * 1000 <= MILLISECONDS_MAX:
        most_s = MILLISECONDS_MAX // 1000
        raise BadRequest(f"a duration of {duration_s} s is refused, must be above 0 and at most {most_s}")
    return max(1, round(duration_s * 1000))


def expected(in_s: float) -> int:
    """In milliseconds; 0: now. Raises `BadRequest` unless within an hour."""
    if not 0 <= in_s <= EXPECTED_S_MAX:
        raise BadRequest(f"blocks are expected to be wanted in {in_s} s, must be 0 to {EXPECTED_S_MAX}")
    return round(in_s * 1000)


def depth(first_depth: int) -> int:
    """Raises `BadRequest` for what is no position in a chain."""
    if not 0 <= first_depth <= DEPTH_MAX:
        raise BadRequest(f"first_depth is {first_depth}, must be 0 to {DEPTH_MAX}")
    return first_depth


def end_from(message: common_pb2.Terminal) -> End:
    status = message.status
    return End(
        reason=_reason(status.reason),
        message=status.message,
        pages_quiet=message.pages_quiet,
        prefix_blocks=message.prefix_blocks,
        moved_bytes=message.moved_bytes,
        storage_read_bytes=message.storage_read_bytes,
        retryable=status.retryable,
        remedy=status.remedy,
    )


def block_result(message: common_pb2.BlockStatus) -> BlockResult:
    try:
        state = BlockState(message.state)
    except ValueError:
        state = BlockState.FAILED
    return BlockResult(state, _reason(message.reason))


def prefix_from(message: engine_pb2.Prefix) -> Prefix:
    lost = block_result(message.first_lost) if message.HasField("first_lost") else None
    return Prefix(message.prefix_blocks, lost)


def _path_number(path: Path | None) -> common_pb2.Path.ValueType:
    return common_pb2.Path.ValueType(path.value) if path is not None else common_pb2.PATH_UNSPECIFIED


def _reason(number: int) -> Reason:
    try:
        return Reason(number)
    except ValueError:
        return Reason.INTERNAL
