"""Bounds of models, regions and short calls: just outside is refused with its reason, just inside is taken."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from grpc import StatusCode
from rpc_kit import LAYERS, SEGMENTS, TOKENS, Case, Engine, check_refusals, manifest, refused, rpc_kit

from kvmover_proto import common_pb2, engine_pb2

UINT32_MAX, INT64_MAX, INT64_MIN = (1 << 32) - 1, (1 << 63) - 1, -(1 << 63)
INVALID = StatusCode.INVALID_ARGUMENT


def layers(*sizes: list[int], tokens: int = TOKENS) -> common_pb2.Layout:
    return common_pb2.Layout(block_tokens=tokens, layers=[common_pb2.LayerSpec(segment_bytes=size) for size in sizes])


def empty_layers(count: int) -> common_pb2.Layout:
    """Made of bytes: so many messages would take seconds."""
    made = layers()
    made.MergeFromString(common_pb2.Layout(layers=[common_pb2.LayerSpec()]).SerializeToString() * count)
    return made


BAD_MANIFESTS = {
    "no model id": {"model_id": ""},
    "a model id of 257 characters": {"model_id": "m" * 257},
    "a model id of 1 MB": {"model_id": "m" * (1 << 20)},
    "no weights digest": {"weights_digest": None},
    "a weights digest of 15 bytes": {"weights_digest": b"w" * 15},
    "a weights digest of 65 bytes": {"weights_digest": b"w" * 65},
    "no tokenizer digest": {"tokenizer_digest": None},
    "a tokenizer digest of 15 bytes": {"tokenizer_digest": b"t" * 15},
    "a tokenizer digest of 65 bytes": {"tokenizer_digest": b"t" * 65},
    "no dtype": {"dtype": ""},
    "a dtype of 65 characters": {"dtype": "d" * 65},
    "rope scaling of 257 characters": {"rope_scaling": "r" * 257},
    "no parallel geometry": {"parallel_geometry": ""},
    "a parallel geometry of 65 characters": {"parallel_geometry": "p" * 65},
    "a LoRA id of 257 characters": {"lora_id": "l" * 257},
    "a tenant of 129 characters": {"tenant": "t" * 129},
}
BAD_LAYOUTS = {
    "no layout": None,
    "no tokens": layers([8], tokens=0),
    "4,097 tokens": layers([8], tokens=4097),
    "uint32 max tokens": layers([8], tokens=UINT32_MAX),
    "no layers": layers(),
    "513 layers": layers(*[[8]] * 513),
    "a million layers": empty_layers(1_000_000),
    "a layer without segments": layers([8], []),
    "a layer of 9 segments": layers([8] * 9),
    "an empty segment": layers([8, 0]),
    "a negative segment": layers([-1]),
    "the most negative segment": layers([INT64_MIN]),
    "a segment of 2^30 + 1 bytes": layers([(1 << 30) + 1]),
    "the largest segment": layers([INT64_MAX]),
}
GOOD_MANIFESTS = [
    {"model_id": "m" * 256},
    {"model_id": "é" * 256, "tenant": "t" * 128},
    {"weights_digest": b"w" * 16, "tokenizer_digest": b"t" * 64},
    {"dtype": "d" * 64, "parallel_geometry": "p" * 64, "rope_scaling": "r" * 256, "lora_id": "l" * 256},
    {"layout": layers([1], tokens=1)},
    {"layout": layers([8], tokens=4096)},
    {"layout": layers(*[[8]] * 512)},
    {"layout": layers([1] * 8)},
]


async def test_every_bound_of_a_manifest_and_its_layout_is_kept(tmp_path: Path) -> None:
    async with rpc_kit(tmp_path) as kit:
        engine = await kit.connect()

        def register(**changed: Any) -> Callable[[], Any]:
            return lambda: engine.ask("RegisterModel", engine_pb2.RegisterModelRequest(manifest=manifest(**changed)))

        cases: list[Case] = [
            (name, register(**changed), INVALID, "BAD_MANIFEST") for name, changed in BAD_MANIFESTS.items()
        ]
        cases += [(name, register(layout=shape), INVALID, "BAD_LAYOUT") for name, shape in BAD_LAYOUTS.items()]
        huge = layers([1 << 30])
        cases.append(("a record beyond a piece", register(layout=huge), StatusCode.OUT_OF_RANGE, "TOO_BIG"))
        nothing = engine_pb2.RegisterModelRequest()
        cases.append(("no manifest", lambda: engine.ask("RegisterModel", nothing), INVALID, "BAD_LAYOUT"))
        await check_refusals(kit, cases)
        for changed in GOOD_MANIFESTS:
            reply = await register(**changed)()
            assert len(reply.fingerprint) == 32, changed
            assert reply.block_bytes > 0
            assert reply.slots_max > 0


async def test_a_model_registered_again_has_the_same_fingerprint_and_an_older_epoch_is_refused(tmp_path: Path) -> None:
    async with rpc_kit(tmp_path) as kit:
        engine = await kit.connect()
        request = engine_pb2.RegisterModelRequest(manifest=manifest())
        first, second = await engine.ask("RegisterModel", request), await engine.ask("RegisterModel", request)
        assert first == second
        bumped = await engine.ask("BumpEpoch", engine_pb2.BumpEpochRequest(fingerprint=first.fingerprint))
        assert bumped.epoch == 1
        assert bumped.fingerprint != first.fingerprint
        stale = await refused(engine.ask("RegisterModel", request))
        assert (stale.code, stale.reason) == (StatusCode.FAILED_PRECONDITION, "STALE_EPOCH")
        gone = await refused(engine.ask("BumpEpoch", engine_pb2.BumpEpochRequest(fingerprint=first.fingerprint)))
        assert (gone.code, gone.reason) == (StatusCode.NOT_FOUND, "UNKNOWN_MODEL")


async def test_the_last_epoch_has_no_successor(tmp_path: Path) -> None:
    async with rpc_kit(tmp_path) as kit:
        engine = await kit.connect()
        last = engine_pb2.RegisterModelRequest(manifest=manifest(epoch=UINT32_MAX))
        model = await engine.ask("RegisterModel", last)
        found = await refused(engine.ask("BumpEpoch", engine_pb2.BumpEpochRequest(fingerprint=model.fingerprint)))
        assert (found.code, found.reason) == (INVALID, "BAD_MANIFEST")
        assert await engine.ask("RegisterModel", last) == model


async def test_a_fingerprint_that_names_no_registered_model_is_not_found_in_every_call(tmp_path: Path) -> None:
    async with rpc_kit(tmp_path) as kit:
        engine = await kit.engine()
        wrong = {
            "no": b"",
            "a short": engine.fingerprint[:31],
            "a long": engine.fingerprint + b"x",
            "an unknown": b"u" * 32,
        }
        calls: dict[str, Callable[[bytes], Any]] = {
            "BumpEpoch": lambda f: engine.ask("BumpEpoch", engine_pb2.BumpEpochRequest(fingerprint=f)),
            "PurgeNamespace": lambda f: engine.ask("PurgeNamespace", engine_pb2.PurgeNamespaceRequest(fingerprint=f)),
            "RegisterRegion": lambda f: engine.ask("RegisterRegion", engine_pb2.RegisterRegionRequest(fingerprint=f)),
            "Lookup": lambda f: engine.ask("Lookup", engine_pb2.LookupRequest(fingerprint=f)),
            "Prefetch": lambda f: engine.ask("Prefetch", engine_pb2.PrefetchRequest(fingerprint=f)),
            "Pin": lambda f: engine.ask("Pin", engine_pb2.PinRequest(fingerprint=f)),
            "FetchBlocks": lambda f: engine.ask("FetchBlocks", engine.fetch_request("r", fingerprint=f)),
            "StoreBlocks": lambda f: engine.ask("StoreBlocks", engine.store_request("r", fingerprint=f)),
            "AssembleBlocks": lambda f: engine.assemble("r", fingerprint=f),
            "StreamLayers": lambda f: engine.stream(engine.plan("r", fingerprint=f)),
            "PushLayers": lambda f: engine.push(engine.plan("r", fingerprint=f)),
        }
        cases: list[Case] = [
            (f"{name} with {what} fingerprint", lambda c=call, f=value: c(f), StatusCode.NOT_FOUND, "UNKNOWN_MODEL")
            for name, call in calls.items()
            for what, value in wrong.items()
        ]
        await check_refusals(kit, cases)


async def test_block_keys_of_a_broken_length_and_too_many_are_refused_in_every_call(tmp_path: Path) -> None:
    async with rpc_kit(tmp_path) as kit:
        engine = await kit.engine()
        fingerprint = engine.fingerprint
        wrong = {"31 bytes": b"k" * 31, "33 bytes": b"k" * 33, "65,537 keys": b"k" * 32 * 65_537}
        calls: dict[str, Callable[[bytes], Any]] = {
            "Lookup": lambda k: engine.ask("Lookup", engine_pb2.LookupRequest(fingerprint=fingerprint, block_keys=k)),
            "Prefetch": lambda k: engine.ask(
                "Prefetch", engine_pb2.PrefetchRequest(fingerprint=fingerprint, block_keys=k)
            ),
            "Pin": lambda k: engine.ask("Pin", engine_pb2.PinRequest(fingerprint=fingerprint, block_keys=k)),
            "FetchBlocks": lambda k: engine.ask("FetchBlocks", engine.fetch_request("r", block_keys=k)),
            "StoreBlocks": lambda k: engine.ask("StoreBlocks", engine.store_request("r", block_keys=k)),
            "StreamLayers": lambda k: engine.stream(engine.plan("r", block_keys=k)),
            "PushLayers": lambda k: engine.push(engine.plan("r", block_keys=k)),
        }
        cases: list[Case] = [
            (f"{name} with {what}", lambda c=call, k=value: c(k), INVALID, "BAD_KEYS")
            for name, call in calls.items()
            for what, value in wrong.items()
        ]
        await check_refusals(kit, cases)
        for keys in (b"", b"k" * 32 * 65_536):
            request = engine_pb2.LookupRequest(fingerprint=fingerprint, block_keys=keys)
            assert (await engine.ask("Lookup", request)).prefix_blocks == 0


def region_layers(
    count: int = LAYERS, *, first: tuple[int, int, int, int] | None = None, every: tuple[int, int] | None = None
) -> list[engine_pb2.RegionLayer]:
    """Layers one after the other, 4 pages each; `first` replaces the first segment, `every` (page, stride) all sizes."""
    found, at = [], 0
    for _ in range(count):
        segments = []
        for size in SEGMENTS:
            page, stride = every or (size, size)
            segments.append((at, stride, page, 4))
            at += 4 * size
        found.append(segments)
    if first is not None:
        found[0][0] = first
    return [engine_pb2.RegionLayer(segments=[segment_of(values) for values in segments]) for segments in found]


def segment_of(values: tuple[int, int, int, int]) -> engine_pb2.RegionSegment:
    base, stride, page, pages = values
    return engine_pb2.RegionSegment(base_bytes=base, page_stride_bytes=stride, page_bytes=page, pages=pages)


REGION_BYTES = LAYERS * 4 * sum(SEGMENTS)
FIRST = SEGMENTS[0]
BAD_REGIONS = {
    "no layers": [],
    "a layer too few": region_layers(LAYERS - 1),
    "a layer too many": region_layers(LAYERS + 1),
    "513 layers": [engine_pb2.RegionLayer()] * 513,
    "a layer without segments": [engine_pb2.RegionLayer()] * LAYERS,
    "nine segments": [engine_pb2.RegionLayer(segments=[segment_of((0, 1, 1, 1))] * 9)] * LAYERS,
    "half a million segments": [engine_pb2.RegionLayer(segments=[engine_pb2.RegionSegment()] * 500_000)],
    "a segment too few": [engine_pb2.RegionLayer(segments=[segment_of((0, FIRST, FIRST, 4))])] * LAYERS,
    "a negative base": region_layers(first=(-1, FIRST, FIRST, 4)),
    "the most negative base": region_layers(first=(INT64_MIN, FIRST, FIRST, 4)),
    "a base near 2^63": region_layers(first=(INT64_MAX - 8, FIRST, FIRST, 4)),
    "a base beyond the end": region_layers(first=(REGION_BYTES, FIRST, FIRST, 4)),
    "a zero stride": region_layers(first=(0, 0, FIRST, 4)),
    "a stride below a page": region_layers(first=(0, FIRST - 1, FIRST, 4)),
    "a negative stride": region_layers(first=(0, -FIRST, FIRST, 4)),
    "a huge stride": region_layers(first=(0, INT64_MAX, FIRST, 4)),
    "a stride that ends a byte beyond": region_layers(1, first=(1, REGION_BYTES - FIRST, FIRST, 2)) * LAYERS,
    "no page bytes": region_layers(first=(0, FIRST, 0, 4)),
    "negative page bytes": region_layers(first=(0, FIRST, -FIRST, 4)),
    "the most negative page bytes": region_layers(first=(0, FIRST, INT64_MIN, 4)),
    "page bytes that do not divide": region_layers(first=(0, FIRST, FIRST - 1, 4)),
    "page bytes beyond the segment": region_layers(first=(0, 2 * FIRST, 2 * FIRST, 4)),
    "half pages in one segment only": region_layers(first=(0, FIRST // 2, FIRST // 2, 4)),
    "no pages": region_layers(first=(0, FIRST, FIRST, 0)),
    "a page too many": region_layers(first=(REGION_BYTES - FIRST, FIRST, FIRST, 2)),
    "uint32 max pages": region_layers(first=(0, FIRST, FIRST, UINT32_MAX)),
    "uint32 max pages of a huge stride": region_layers(first=(INT64_MAX, INT64_MAX, FIRST, UINT32_MAX)),
    "overlapping segments": region_layers(first=(4 * FIRST - 1, FIRST, FIRST, 1)),
    "the same layer thrice": region_layers(1) * LAYERS,
}


async def test_every_bound_of_a_regions_geometry_is_kept(tmp_path: Path) -> None:
    async with rpc_kit(tmp_path) as kit:
        engine = await kit.engine()
        ticket = await engine.pass_fd(REGION_BYTES)

        def register(shape: list[engine_pb2.RegionLayer]) -> Any:
            request = engine_pb2.RegisterRegionRequest(fd_ticket=ticket, fingerprint=engine.fingerprint, layers=shape)
            return engine.ask("RegisterRegion", request)

        cases: list[Case] = [
            (name, lambda shape=shape: register(shape), INVALID, "BAD_REGION") for name, shape in BAD_REGIONS.items()
        ]
        await check_refusals(kit, cases)
        assert (await kit.status()).regions == 1
        reply = await register(region_layers())
        assert (reply.pages, reply.pages_per_block) == (4, 1)


async def test_a_ring_needs_equal_layers(tmp_path: Path) -> None:
    async with rpc_kit(tmp_path) as kit:
        engine = await kit.engine()
        unequal = engine_pb2.RegisterModelRequest(manifest=manifest(model_id="other", layout=layers([8, 4], [8, 8])))
        fingerprint = (await engine.ask("RegisterModel", unequal)).fingerprint
        ticket = await engine.pass_fd(REGION_BYTES)
        shape = [engine_pb2.RegionLayer(segments=[segment_of((0, 8, 8, 4)), segment_of((64, 4, 4, 4))])]
        request = engine_pb2.RegisterRegionRequest(fd_ticket=ticket, fingerprint=fingerprint, layers=shape)
        cases: list[Case] = [("a ring", lambda: engine.ask("RegisterRegion", request), INVALID, "BAD_REGION")]
        await check_refusals(kit, cases)
        ring = engine_pb2.RegisterRegionRequest(
            fd_ticket=ticket, fingerprint=engine.fingerprint, layers=region_layers(1)
        )
        assert (await engine.ask("RegisterRegion", ring)).pages == 4


async def test_a_descriptor_is_registered_once_and_only_by_its_own_session(tmp_path: Path) -> None:
    async with rpc_kit(tmp_path) as kit:
        engine, other = await kit.engine(), await kit.engine()
        ticket = await engine.pass_fd(REGION_BYTES)

        def register(who: Engine, fd_ticket: int) -> Any:
            request = engine_pb2.RegisterRegionRequest(
                fd_ticket=fd_ticket, fingerprint=engine.fingerprint, layers=region_layers()
            )
            return who.ask("RegisterRegion", request)

        unknown = (StatusCode.NOT_FOUND, "UNKNOWN_REGION")
        cases: list[Case] = [
            ("no ticket", lambda: register(engine, 0), *unknown),
            ("the largest ticket", lambda: register(engine, (1 << 64) - 1), *unknown),
            ("another session's ticket", lambda: register(other, ticket), *unknown),
        ]
        await check_refusals(kit, cases)
        region = await register(engine, ticket)
        await check_refusals(kit, [("a ticket used twice", lambda: register(engine, ticket), *unknown)])

        def unregister(who: Engine, region_id: int) -> Any:
            return who.ask("UnregisterRegion", engine_pb2.UnregisterRegionRequest(region_id=region_id))

        cases = [
            ("another session's region", lambda: unregister(other, region.region_id), *unknown),
            ("region 0", lambda: unregister(engine, 0), *unknown),
        ]
        await check_refusals(kit, cases)
        assert (await unregister(engine, region.region_id)).pages_quiet
        await check_refusals(kit, [("a region gone", lambda: unregister(engine, region.region_id), *unknown)])


async def test_lists_of_leases_and_their_times_are_bounded(tmp_path: Path) -> None:
    async with rpc_kit(tmp_path) as kit:
        engine = await kit.engine()
        refs = [engine_pb2.LeaseRef(lease_id=number) for number in range(4097)]
        most = 3_600_000

        def renew(count: int, lease_ms: int) -> Any:
            return engine.ask("Renew", engine_pb2.RenewRequest(leases=refs[:count], lease_ms=lease_ms))

        def release(count: int) -> Any:
            return engine.ask("Release", engine_pb2.ReleaseRequest(leases=refs[:count]))

        def fetch(lease_ms: int) -> Any:
            return engine.ask("FetchBlocks", engine.fetch_request("r", lease_ms=lease_ms))

        cases: list[Case] = [
            ("4,097 renewed", lambda: renew(4097, 0), INVALID, "BAD_REQUEST"),
            ("4,097 released", lambda: release(4097), INVALID, "BAD_REQUEST"),
            ("renewed for too long", lambda: renew(1, most + 1), INVALID, "BAD_REQUEST"),
            ("renewed for uint32 max", lambda: renew(1, UINT32_MAX), INVALID, "BAD_REQUEST"),
            ("leased for too long", lambda: fetch(most + 1), INVALID, "BAD_REQUEST"),
        ]
        await check_refusals(kit, cases)
        assert list((await renew(4096, most)).renewed) == [False] * 4096
        assert (await release(4096)).released == 0
        assert list((await renew(0, 0)).renewed) == []


async def test_two_engines_of_one_model_share_its_namespace_and_no_region(tmp_path: Path) -> None:
    async with rpc_kit(tmp_path) as kit:
        first, second = await kit.engine(), await kit.engine()
        assert first.fingerprint == second.fingerprint
        assert first.region_id != second.region_id


async def test_the_loop_goes_on_while_a_region_of_thousands_of_segments_is_checked(tmp_path: Path) -> None:
    async with rpc_kit(tmp_path) as kit:
        engine = await kit.engine()
        layer_count, per_layer, pages = 512, 8, 2
        stride = layer_count * per_layer
        layout = layers(*[[1] * per_layer] * layer_count, tokens=1)
        model = await engine.ask("RegisterModel", engine_pb2.RegisterModelRequest(manifest=manifest(layout=layout)))
        segments = [
            engine_pb2.RegionSegment(base_bytes=base, page_stride_bytes=stride, page_bytes=1, pages=pages)
            for base in range(stride)
        ]
        rows = [engine_pb2.RegionLayer(segments=segments[at : at + per_layer]) for at in range(0, stride, per_layer)]
        ticket = await engine.pass_fd(stride * pages)
        request = engine_pb2.RegisterRegionRequest(fd_ticket=ticket, fingerprint=model.fingerprint, layers=rows)
        registering = asyncio.ensure_future(engine.ask("RegisterRegion", request))
        twice = asyncio.ensure_future(refused(engine.ask("RegisterRegion", request)))
        rounds = 0
        while not registering.done():
            await engine.ask("Renew", engine_pb2.RenewRequest())
            rounds += 1
        assert (await registering).pages == pages
        assert rounds >= 3, "a region that is checked on the loop lets one call or two through"
        assert (await twice).reason == "UNKNOWN_REGION", "one ticket, one region"
