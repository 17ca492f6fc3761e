"""What status says of each storage root."""

from __future__ import annotations

import threading

from node_kit import node_kit
from roots_kit import SPACE, keys, rig

from kvmover_proto import engine_pb2
from kvmoverd.adapters.storage.roots_absent import AbsentStorage, left_out
from kvmoverd.adapters.storage.roots_open import Opening
from kvmoverd.ports.storage import StorageFacts
from kvmoverd.rpc.node_status import status_reply

FACTS = dict.fromkeys(("version", "transport", "lane", "local_copies"), "x") | dict.fromkeys(
    ("uptime_ms", "loop_lag_us_max", "loop_lag_us_p99", "loop_lags_over_1ms"), "1"
)


async def test_each_root_has_an_entry_and_what_waits_at_the_desk_is_told_of_the_first() -> None:
    async with node_kit() as kit:
        with rig("near", "gone", "far") as made:
            opening = Opening("gone", lambda: made.main)
            facts = StorageFacts("gone", "uring", "none", "", {"role": "copy"})
            gone_root, made.set.roots[1].storage = (
                made.set.roots[1].storage,
                AbsentStorage(opening, left_out(facts, "EIO"), stay=threading.Event()),
            )
            made.set.roots[1].opened.clear()
            kit.services.desk.storage = made.set
            kit.services.desk.read_queue_bytes = 77
            made.set.roots[0].trip("EIO in near", made.set._now_s())
            near, gone, far = status_reply(kit.node, FACTS, {}).storage
            assert (near.root, near.role, near.state, near.read_queue_bytes) == ("near", "copy", "open", 77)
            assert "EIO in near" in near.why and near.last_good_write_ms_ago == -1
            assert (far.root, far.role, far.state, far.why) == ("far", "main", "ok", "")
            assert (gone.root, gone.state, gone.why) == ("gone", "refused", "EIO")
            made.run(made.write_op(keys(1)[0]))
            assert status_reply(kit.node, FACTS, {}).storage[2].last_good_write_ms_ago >= 0
            made.set.roots[1].storage = gone_root
            kit.services.desk.storage, kit.services.desk.read_queue_bytes = kit.disk, 0


def test_every_detail_of_a_root_has_a_field() -> None:
    fields = {field.name for field in engine_pb2.StorageStatus.DESCRIPTOR.fields}
    with rig("disk") as made:
        assert set(made.details("disk")) <= fields
        assert made.set.index.known(SPACE, []).tolist() == []
