"""Blocks of many sequences in one call, and hints of when blocks will be wanted, over the engine API."""

from __future__ import annotations

from pathlib import Path

from rpc_kit import keys_of, refused, rpc_kit
from test_rpc_requests import INVALID, a_chain, told

from kvmover_proto import common_pb2, engine_pb2


async def test_blocks_of_several_chains_are_stored_by_one_call_each_under_its_own_parent(tmp_path: Path) -> None:
    async with rpc_kit(tmp_path) as kit:
        engine = await kit.engine()
        keys = keys_of(engine.fingerprint, 3)
        request = engine.store_request("r", blocks=3, chains=[a_chain(1, keys[0], 1), a_chain(1, keys[1], 2)])
        events = await told(engine.ask("StoreBlocks", request))
        (result,) = [event.result.blocks for event in events if event.WhichOneof("kind") == "result"]
        assert [block.state for block in result] == [common_pb2.HIT] * 3
        looked = await engine.ask(
            "Lookup", engine_pb2.LookupRequest(fingerprint=engine.fingerprint, block_keys=b"".join(keys))
        )
        assert looked.prefix_blocks == 3
        again = await told(engine.ask("StoreBlocks", engine.store_request("again", blocks=3)))
        assert again[-1].end.moved_bytes == 0, "what is stored is not copied"
        await kit.everything_is_home()


async def test_a_hint_over_an_hour_ahead_is_refused(tmp_path: Path) -> None:
    async with rpc_kit(tmp_path) as kit:
        engine = await kit.engine()
        await engine.store(2)
        keys = engine.fetch_request("r").block_keys

        def hint(in_ms: int) -> engine_pb2.PrefetchRequest:
            return engine_pb2.PrefetchRequest(fingerprint=engine.fingerprint, block_keys=keys, expected_in_ms=in_ms)

        found = await refused(engine.ask("Prefetch", hint(3_600_001)))
        assert (found.code, found.reason) == (INVALID, "BAD_REQUEST")
        assert (await engine.ask("Prefetch", hint(3_600_000))).accepted_blocks == 2
        assert (await kit.status()).prefetch.taken_bytes > 0
