"""Bounds of requests: ids, attempts, times, pages, plans; and who may call at all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from grpc import StatusCode
from rpc_kit import (
    HERE,
    TOKENS,
    Case,
    Engine,
    Kit,
    check_refusals,
    end_of,
    events_of,
    keys_of,
    manifest,
    refused,
    rpc_kit,
)

from kvmover_proto import common_pb2, engine_pb2
from kvmoverd.core.keys import ROOT

UINT32_MAX, UINT64_MAX = (1 << 32) - 1, (1 << 64) - 1
INVALID = StatusCode.INVALID_ARGUMENT
TIMEOUT_MS_MAX = 3_600_000


def openings(engine: Engine) -> dict[str, Callable[..., Any]]:
    """The calls that begin something, each by its fields."""
    return {
        "FetchBlocks": lambda **f: engine.ask("FetchBlocks", engine.fetch_request(**{"request_id": "r"} | f)),
        "StoreBlocks": lambda **f: engine.ask("StoreBlocks", engine.store_request(**{"request_id": "r"} | f)),
        "AssembleBlocks": lambda **f: engine.assemble(**{"request_id": "r"} | f),
        "StreamLayers": lambda **f: engine.stream(engine.plan(**{"request_id": "r"} | f)),
        "PushLayers": lambda **f: engine.push(engine.plan(**{"request_id": "r"} | f)),
    }


def deliver(engine: Engine, **changed: Any) -> Any:
    fields = {"request_id": "r", "attempt": 1, "region_id": engine.region_id, "pages": pages(0, 1)}
    return engine.ask("Deliver", engine_pb2.DeliverRequest(**(fields | changed)))


def cancel(engine: Engine, **changed: Any) -> Any:
    return engine.ask("Cancel", engine_pb2.CancelRequest(**({"request_id": "r", "attempt": 1} | changed)))


def pages(*numbers: int) -> common_pb2.PageSet:
    return common_pb2.PageSet(pages=numbers)


async def test_ids_attempts_and_times_outside_their_bounds_are_refused_in_every_call(tmp_path: Path) -> None:
    async with rpc_kit(tmp_path) as kit:
        engine = await kit.engine()
        calls = openings(engine) | {
            "Deliver": lambda **f: deliver(engine, **f),
            "Cancel": lambda **f: cancel(engine, **f),
        }
        named = {"no id": "", "an id of 129": "r" * 129, "an id of 1 MB": "r" * (1 << 20)}
        wrong: dict[str, dict[str, Any]] = {name: {"request_id": value} for name, value in named.items()}
        wrong["attempt 0"] = {"attempt": 0}
        late = {"an hour and a bit": TIMEOUT_MS_MAX + 1, "uint32 max": UINT32_MAX}
        cases: list[Case] = [
            (f"{name} with {what}", lambda c=call, f=fields: c(**f), INVALID, "BAD_REQUEST")
            for name, call in calls.items()
            for what, fields in wrong.items()
        ]
        cases += [
            (f"{name} for {what}", lambda c=call, ms=value: c(timeout_ms=ms), INVALID, "BAD_REQUEST")
            for name, call in openings(engine).items()
            for what, value in late.items()
        ]
        await check_refusals(kit, cases)


async def test_the_longest_id_attempt_and_time_are_taken(tmp_path: Path) -> None:
    async with rpc_kit(tmp_path) as kit:
        engine = await kit.engine()
        await engine.store(2)
        longest = {"attempt": UINT32_MAX, "timeout_ms": TIMEOUT_MS_MAX}
        end = await end_of(engine.ask("FetchBlocks", engine.fetch_request("é" * 128, **longest)))
        assert end.status.reason == common_pb2.OK
        assert (await cancel(engine, request_id="r" * 128, attempt=UINT32_MAX)).cancelled_calls == 0
        await refused_again(engine, "é" * 128)


async def refused_again(engine: Engine, request_id: str) -> None:
    stale = await refused(engine.ask("FetchBlocks", engine.fetch_request(request_id, attempt=UINT32_MAX - 1)))
    assert (stale.code, stale.reason) == (StatusCode.ABORTED, "STALE_ATTEMPT")


async def test_a_lower_attempt_and_the_same_call_of_an_attempt_again_are_fenced(tmp_path: Path) -> None:
    async with rpc_kit(tmp_path) as kit:
        engine = await kit.engine()
        waiting = engine.assemble("asm", attempt=5)
        await kit.until_live(lambda: "asm" in kit.node.decode_side._waiting)
        begun = {
            "FetchBlocks": engine.ask("FetchBlocks", engine.fetch_request("fetch", attempt=5)),
            "StoreBlocks": engine.ask("StoreBlocks", engine.store_request("store", attempt=5)),
        }
        for call in begun.values():
            assert (await end_of(call)).status.reason in (common_pb2.OK, common_pb2.MISS)
        calls = openings(engine)
        names = {"FetchBlocks": "fetch", "StoreBlocks": "store", "AssembleBlocks": "asm"}
        fenced = (StatusCode.ABORTED, "STALE_ATTEMPT")
        cases: list[Case] = [
            (f"{kind} attempt {n}", lambda k=kind, i=name, n=n: calls[k](request_id=i, attempt=n), *fenced)
            for kind, name in names.items()
            for n in (1, 4, 5)
        ]
        cases.append(("a plan of a lower attempt", lambda: calls["PushLayers"](request_id="asm", attempt=4), *fenced))
        waiting_still = kit.node.decode_side._waiting["asm"]
        for name, begin, code, reason in cases:
            found = await refused(begin())
            assert (found.code, found.reason, found.facts["known"]) == (code, reason, "5"), name
        assert kit.node.decode_side._waiting["asm"] is waiting_still
        assert (await cancel(engine, request_id="asm", attempt=5)).cancelled_calls == 1
        assert (await end_of(waiting)).status.reason == common_pb2.CANCELLED
        await kit.everything_is_home()


async def told(call: Any) -> list[Any]:
    return [event async for event in events_of(call)]


def a_chain(blocks: int, parent_key: bytes = ROOT, first_depth: int = 0) -> engine_pb2.StoreChain:
    return engine_pb2.StoreChain(blocks=blocks, parent_key=parent_key, first_depth=first_depth)


async def test_a_refused_call_may_be_made_again_under_the_same_attempt(tmp_path: Path) -> None:
    async with rpc_kit(tmp_path) as kit:
        engine = await kit.engine()
        bad = engine.store_request("r", pages=pages(0, 99))
        assert (await refused(engine.ask("StoreBlocks", bad))).reason == "BAD_PAGES"
        end = await end_of(engine.ask("StoreBlocks", engine.store_request("r")))
        assert end.status.reason == common_pb2.OK
        await kit.everything_is_home()


async def test_pages_that_are_not_those_of_the_blocks_are_refused_in_every_call(tmp_path: Path) -> None:
    async with rpc_kit(tmp_path) as kit:
        engine = await kit.engine(pages=32)
        wrong = {
            "no pages": pages(),
            "a page too few": pages(0),
            "a page too many": pages(0, 1, 2),
            "a page twice": pages(3, 3),
            "a page beyond the end": pages(0, 32),
            "uint32 max": pages(UINT32_MAX, 0),
            "more pages than there are": pages(*range(33)),
            "a million pages": pages(*range(1_000_000)),
        }
        calls: dict[str, Callable[[common_pb2.PageSet], Any]] = {
            "FetchBlocks": lambda p: engine.ask(
                "FetchBlocks", engine.fetch_request("r", region_id=engine.region_id, pages=p)
            ),
            "StoreBlocks": lambda p: engine.ask("StoreBlocks", engine.store_request("r", pages=p)),
            "StreamLayers": lambda p: engine.stream(engine.plan("r", page_sets=[p])),
            "PushLayers": lambda p: engine.push(engine.plan("r", page_sets=[p])),
        }
        cases: list[Case] = [
            (f"{name} with {what}", lambda c=call, p=value: c(p), INVALID, "BAD_PAGES")
            for name, call in calls.items()
            for what, value in wrong.items()
        ]
        await check_refusals(kit, cases)


async def test_page_sets_are_bounded_and_share_no_page(tmp_path: Path) -> None:
    async with rpc_kit(tmp_path) as kit:
        engine = await kit.engine(pages=128)
        sets = [pages(2 * n, 2 * n + 1) for n in range(64)]
        wrong = {
            "no set": [],
            "65 sets": [*sets, pages(0, 1)],
            "a million empty sets": [pages()] * 1_000_000,
            "overlapping sets": [pages(0, 1), pages(1, 2)],
            "the same set twice": [pages(0, 1), pages(0, 1)],
            "one set too short": [pages(0, 1), pages(2)],
        }
        cases: list[Case] = [
            (what, lambda s=value: engine.push(engine.plan("r", page_sets=s)), INVALID, "BAD_PAGES")
            for what, value in wrong.items()
        ]
        await check_refusals(kit, cases)
        pushed = engine.push(engine.plan("r", page_sets=sets), 3)
        assembled = engine.assemble("r")
        assert (await end_of(pushed)).status.reason == common_pb2.OK
        assembled.cancel()
        await kit.everything_is_home()


def bad_readers() -> dict[str, tuple[StatusCode, str, dict[str, Any]]]:
    def parts(*planned: tuple[str, int, int], **changed: Any) -> dict[str, Any]:
        """(node, first, stop) each."""
        messages = [
            common_pb2.PlannedPart(node=node, blocks=common_pb2.BlockRuns(first=[first], count=[stop - first]))
            for node, first, stop in planned
        ]
        return {"hit_blocks": 2, "path": common_pb2.PATH_PARTS, "parts": messages} | changed

    auto: dict[str, Any] = {"hit_blocks": 2, "path": common_pb2.PATH_AUTO}
    return {
        "more resident blocks than hits": (INVALID, "BAD_REQUEST", {"hit_blocks": 1, "resident_blocks": 2}),
        "uint32 max resident blocks": (INVALID, "BAD_REQUEST", {"resident_blocks": UINT32_MAX}),
        "no parts": (INVALID, "BAD_PLAN", parts()),
        "parts that lack a block": (INVALID, "BAD_PLAN", parts((HERE, 0, 1))),
        "parts with a block twice": (INVALID, "BAD_PLAN", parts((HERE, 0, 2), ("x", 1, 2))),
        "parts with a resident block": (INVALID, "BAD_PLAN", parts((HERE, 0, 2), resident_blocks=1)),
        "parts beyond the hits": (INVALID, "BAD_PLAN", parts((HERE, 0, 3))),
        "an empty part": (INVALID, "BAD_PLAN", parts((HERE, 0, 2), ("x", 2, 2))),
        "a node with two parts": (INVALID, "BAD_PLAN", parts((HERE, 0, 1), (HERE, 1, 2))),
        "a part of nobody": (INVALID, "BAD_REQUEST", parts(("", 0, 2))),
        "a part of a stranger": (INVALID, "UNKNOWN_PEER", parts(("nowhere", 0, 2))),
        "65 parts": (INVALID, "BAD_PLAN", parts(*[(HERE, 0, 2)] * 65)),
        "parts beside another path": (INVALID, "BAD_PLAN", parts((HERE, 0, 2), path=common_pb2.PATH_PE)),
        "a stranger that helps": (INVALID, "UNKNOWN_PEER", auto | {"helpers": ["nowhere"]}),
        "a helper of 129 characters": (INVALID, "BAD_REQUEST", auto | {"helpers": ["n" * 129]}),
        "65 helpers": (INVALID, "BAD_REQUEST", auto | {"helpers": [HERE] * 65}),
        "helpers and none": (INVALID, "BAD_PLAN", auto | {"helpers": [HERE], "no_helpers": True}),
        "helpers beside another path": (INVALID, "BAD_PLAN", {"hit_blocks": 2, "helpers": [HERE]}),
        "no helpers beside another path": (INVALID, "BAD_PLAN", {"hit_blocks": 2, "no_helpers": True}),
    }


def bad_plans(engine: Engine) -> dict[str, tuple[StatusCode, str, dict[str, Any]]]:
    no_keys: dict[str, Any] = {"block_keys": b"", "page_sets": [pages()]}
    one_page = [pages(0)]
    return {
        "neither blocks nor a tail": (INVALID, "BAD_REQUEST", no_keys),
        "a tail of a whole block": (INVALID, "BAD_REQUEST", {"tail_tokens": TOKENS, "page_sets": [pages(0, 1, 2)]}),
        "a tail of uint32 max": (INVALID, "BAD_REQUEST", {"tail_tokens": UINT32_MAX, "page_sets": [pages(0, 1, 2)]}),
        "more hits than keys": (INVALID, "BAD_REQUEST", {"hit_blocks": 3}),
        "uint32 max hits": (INVALID, "BAD_REQUEST", {"hit_blocks": UINT32_MAX}),
        "a tail counted as a hit": (
            INVALID,
            "BAD_REQUEST",
            no_keys | {"tail_tokens": 1, "hit_blocks": 1, "page_sets": one_page},
        ),
        "an unknown path": (INVALID, "BAD_PLAN", {"path": 7}),
        "a negative path": (INVALID, "BAD_PLAN", {"path": -1}),
        "an unknown path with hits": (INVALID, "BAD_PLAN", {"path": 7, "hit_blocks": 2}),
        "no path with hits": (INVALID, "BAD_PLAN", {"path": 0, "hit_blocks": 2}),
        "a DE read without a decode node": (
            INVALID,
            "BAD_PLAN",
            {"path": common_pb2.PATH_DE, "hit_blocks": 2, "decode_node": ""},
        ),
        "an unknown decode node": (INVALID, "UNKNOWN_PEER", {"decode_node": "nowhere"}),
        "a decode node of 1 MB": (INVALID, "UNKNOWN_PEER", {"decode_node": "n" * (1 << 20)}),
        "a decode node of strange letters": (INVALID, "UNKNOWN_PEER", {"decode_node": "\U0001f600\n\x00" * 2000}),
        **bad_readers(),
        "no region": (StatusCode.NOT_FOUND, "UNKNOWN_REGION", {"region_id": 0}),
        "the largest region": (StatusCode.NOT_FOUND, "UNKNOWN_REGION", {"region_id": UINT64_MAX}),
    }


async def test_a_plan_that_contradicts_itself_is_refused_in_both_calls(tmp_path: Path) -> None:
    async with rpc_kit(tmp_path) as kit:
        engine = await kit.engine()
        cases: list[Case] = []
        for what, (code, reason, changed) in bad_plans(engine).items():
            cases.append((f"stream, {what}", lambda c=changed: engine.stream(engine.plan("r", **c)), code, reason))
            cases.append((f"push, {what}", lambda c=changed: engine.push(engine.plan("r", **c)), code, reason))
        alone = engine.plan("r", decode_node="")
        cases.append(("push to nobody", lambda: engine.push(alone), INVALID, "BAD_PLAN"))
        await check_refusals(kit, cases)


async def test_regions_and_parents_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    async with rpc_kit(tmp_path) as kit:
        engine, other = await kit.engine(), await kit.engine()
        model = engine_pb2.RegisterModelRequest(manifest=manifest(model_id="other"))
        alien = (await engine.ask("RegisterModel", model)).fingerprint
        foreign, unknown = {"region_id": other.region_id}, (StatusCode.NOT_FOUND, "UNKNOWN_REGION")
        two = pages(0, 1)

        def through(**changed: Any) -> Any:
            fields = {"region_id": engine.region_id, "pages": two}
            return engine.ask("FetchBlocks", engine.fetch_request("r", **(fields | changed)))

        def store(**changed: Any) -> Any:
            return engine.ask("StoreBlocks", engine.store_request("r", **changed))

        cases: list[Case] = [
            ("fetch into another's region", lambda: through(**foreign), *unknown),
            ("store out of another's region", lambda: store(**foreign), *unknown),
            ("stream into another's region", lambda: engine.stream(engine.plan("r", **foreign)), *unknown),
            ("deliver into another's region", lambda: deliver(engine, **foreign), *unknown),
            ("store out of no region", lambda: store(region_id=0), *unknown),
            ("fetch for another model", lambda: through(fingerprint=alien), INVALID, "BAD_REQUEST"),
            ("store for another model", lambda: store(fingerprint=alien), INVALID, "BAD_REQUEST"),
            (
                "plan for another model",
                lambda: engine.push(engine.plan("r", fingerprint=alien)),
                INVALID,
                "BAD_REQUEST",
            ),
            ("no parent", lambda: store(parent_key=b""), INVALID, "BAD_KEYS"),
            ("a short parent", lambda: store(parent_key=b"p" * 31), INVALID, "BAD_KEYS"),
            ("a long parent", lambda: store(parent_key=b"p" * 33), INVALID, "BAD_KEYS"),
            ("a chain without blocks", lambda: store(chains=[a_chain(0)]), INVALID, "BAD_KEYS"),
            ("chains with more blocks than keys", lambda: store(chains=[a_chain(2), a_chain(1)]), INVALID, "BAD_KEYS"),
            ("a chain without a parent", lambda: store(chains=[a_chain(1, parent_key=b"")]), INVALID, "BAD_KEYS"),
            ("a chain too deep", lambda: store(chains=[a_chain(1, first_depth=UINT32_MAX)]), INVALID, "BAD_REQUEST"),
            ("too deep", lambda: store(first_depth=(1 << 32) - 2), INVALID, "BAD_REQUEST"),
        ]
        await check_refusals(kit, cases)


async def test_a_call_without_a_live_session_is_unauthenticated(tmp_path: Path) -> None:
    async with rpc_kit(tmp_path) as kit:
        engine, gone = await kit.engine(), await kit.engine()
        token = gone.welcome.session_token
        gone.close()
        await kit.until_live(lambda: len(kit.node.sessions) == 1)
        tokens = {"no": None, "an empty": b"", "a foreign": b"x" * 32, "a long": b"x" * 4096, "a dead session's": token}
        cases: list[Case] = []
        for method, request in requests_of(engine).items():
            for what, value in tokens.items():
                metadata = () if value is None else (("kvmover-session-bin", value),)
                begin = lambda m=method, r=request, t=metadata: begun(kit, m, r, t)  # noqa: E731
                cases.append((f"{method} with {what} token", begin, StatusCode.UNAUTHENTICATED, "UNKNOWN_SESSION"))
        await check_refusals(kit, cases)


def requests_of(engine: Engine) -> dict[str, Any]:
    """One request of each call that needs a session."""
    fingerprint, plan = engine.fingerprint, engine.plan("r")
    keys = b"".join(keys_of(fingerprint, 1))
    return {
        "RegisterModel": engine_pb2.RegisterModelRequest(manifest=manifest()),
        "BumpEpoch": engine_pb2.BumpEpochRequest(fingerprint=fingerprint),
        "PurgeNamespace": engine_pb2.PurgeNamespaceRequest(fingerprint=fingerprint),
        "PurgeTenant": engine_pb2.PurgeTenantRequest(tenant="tenant"),
        "RegisterRegion": engine_pb2.RegisterRegionRequest(fingerprint=fingerprint),
        "UnregisterRegion": engine_pb2.UnregisterRegionRequest(region_id=engine.region_id),
        "Lookup": engine_pb2.LookupRequest(fingerprint=fingerprint, block_keys=keys),
        "FetchBlocks": engine.fetch_request("r"),
        "StreamLayers": [engine_pb2.StreamLayersRequest(plan=plan)],
        "PushLayers": [engine_pb2.PushLayersRequest(plan=plan)],
        "AssembleBlocks": engine_pb2.AssembleBlocksRequest(request_id="r", attempt=1, fingerprint=fingerprint),
        "Deliver": engine_pb2.DeliverRequest(request_id="r", attempt=1),
        "StoreBlocks": engine.store_request("r"),
        "Prefetch": engine_pb2.PrefetchRequest(fingerprint=fingerprint, block_keys=keys),
        "Pin": engine_pb2.PinRequest(fingerprint=fingerprint, block_keys=keys),
        "Renew": engine_pb2.RenewRequest(),
        "Release": engine_pb2.ReleaseRequest(),
        "Cancel": engine_pb2.CancelRequest(request_id="r", attempt=1),
    }


def begun(kit: Kit, method: str, request: Any, metadata: tuple[tuple[str, bytes], ...]) -> Any:
    sent = iter(request) if isinstance(request, list) else request
    return getattr(kit.engine_stub, method)(sent, timeout=5.0, metadata=metadata)


async def test_a_session_may_not_cancel_what_another_asked_for(tmp_path: Path) -> None:
    async with rpc_kit(tmp_path) as kit:
        engine, other = await kit.engine(), await kit.engine()
        call = engine.push(engine.plan("r"))
        await kit.until_live(lambda: kit.node.requests.by_kind()["push"] == 1)
        assert (await cancel(other)).cancelled_calls == 0
        assert kit.node.requests.by_kind()["push"] == 1
        assert (await cancel(engine)).cancelled_calls >= 1
        assert (await end_of(call)).status.reason == common_pb2.CANCELLED
        await kit.everything_is_home()


async def test_a_whole_request_within_its_bounds_is_served(tmp_path: Path) -> None:
    async with rpc_kit(tmp_path) as kit:
        engine = await kit.engine()
        await engine.store(2)
        plan = engine.plan("r", blocks=3, hit_blocks=2, tail_tokens=1, page_sets=[pages(4, 5, 6, 7)])
        assembled, streamed, pushed = engine.assemble("r"), engine.stream(plan), engine.push(plan, 0)
        assert (await end_of(streamed)).prefix_blocks == 2
        pushed.cancel()
        assembled.cancel()
        await kit.everything_is_home()
