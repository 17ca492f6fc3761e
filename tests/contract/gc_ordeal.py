"""Two nodes on one directory that write, read each other's blocks and collect under tiny budgets, killed again and again.

`gc_ordeal.py ROOT NODE BOOT_ID` is one node, until it is killed; `gc_ordeal.py ROOT SECONDS` is all of it, and says what came.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

from gc_writer import MIB, SPACE, Filling, payload_of
from storage_kit import UNEVEN

from kvmoverd.adapters.storage.segments.settings import SegmentSettings
from kvmoverd.core.status import Reason
from kvmoverd.ports.storage import StorageDone

NODES = ("node-0", "node-1")
BUDGET_BYTES = 64 * MIB
ORDEAL = SegmentSettings(
    segment_bytes=8 * MIB,
    log_pages=64,
    bytes_max=BUDGET_BYTES,
    grace_s=1.0,
    heartbeat_s=0.3,
    dead_s=3.0,
    commit_wait_s=0.002,
)
YOUNG = 8 * MIB // UNEVEN.record_bytes
"""A node's last so many blocks are not what its budget drops first."""
SEEN_S = 5.0
LIFE_S = 5.0
"""How long a start lives at most, from its first batch on."""
READS = 8
KEY_BYTES = 32


class Ordeal:
    """One node. `told`: a file for each start of each node, of the keys that it was told to be durable, in order."""

    def __init__(self, root: Path, node: str, boot_id: str) -> None:
        self.root, self.node = root, node
        self.began_s = time.monotonic()
        self.filling = Filling(root / "store", boot_id, ORDEAL, node=node)
        self.told = os.open(root / f"told.{node}.{boot_id}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self.chance = random.Random(boot_id)
        self.counts: Counter[str] = Counter()
        self.others: list[str] = []

    def run(self) -> None:
        self.look_back()
        while True:
            keys, ended = self.filling.write()
            durable = [key for key, done in zip(keys, ended, strict=True) if done.reason is Reason.OK]
            os.write(self.told, b"".join(durable))
            self.counts["durable"] += len(durable)
            self.counts["refused"] += len(keys) - len(durable)
            for _ in range(READS):
                self.read_any()
            self.say()

    def look_back(self) -> None:
        """What the start before was told last must be there: it is given some seconds, for logs to be read and tails scanned."""
        for key in self.keys_of(self.node)[-YOUNG // 4 :]:
            deadline_s = self.began_s + SEEN_S
            while (done := self.read(key)).reason is Reason.MISS and time.monotonic() < deadline_s:
                time.sleep(0.02)
            self.counts["kept" if done.reason is Reason.OK else "lost"] += 1
        self.counts["look_back_ms"] = round((time.monotonic() - self.began_s) * 1000)

    def read_any(self) -> None:
        node = self.chance.choice(NODES)
        known = self.keys_of(node)
        if not known:
            return
        key = self.chance.choice(known[-2 * YOUNG * BUDGET_BYTES // (8 * MIB) :])
        reason = self.read(key).reason
        self.counts[f"{'own' if node == self.node else 'other'}_{reason.name}"] += 1

    def read(self, key: bytes) -> StorageDone:
        op = self.filling.driver.read_op(SPACE, key, self.filling.slots.address(0))
        done = self.filling.driver.run([op])[0]
        if done.reason is Reason.OK and self.filling.slots.payload(0) != payload_of(key):
            self.counts["wrong"] += 1
        if done.reason not in (Reason.OK, Reason.MISS):
            self.others.append(done.message[:300])
        return done

    def keys_of(self, node: str) -> list[bytes]:
        files = sorted(self.root.glob(f"told.{node}.*"), key=lambda path: int(path.suffix[1:]))[-4:]
        raw = [file.read_bytes() for file in files]
        return [one[at : at + KEY_BYTES] for one in raw for at in range(0, len(one) - KEY_BYTES + 1, KEY_BYTES)]

    def say(self) -> None:
        collector = self.filling.store.background.collecting.collector.counters  # type: ignore[attr-defined]
        said = {**self.counts, "evicted": collector.evicted_segments, "others": self.others[-3:]}
        print(json.dumps(said), flush=True)


def run(root: Path, for_s: float) -> Counter[str]:
    """Kills each of the nodes every few seconds, until the time is over; sums of what all starts have said."""
    (root / "store").mkdir(exist_ok=True)
    chance, sums = random.Random(7), Counter[str]()
    deadline_s = time.monotonic() + for_s
    running: dict[str, tuple[subprocess.Popen[str], float]] = {}
    starts = 0
    while time.monotonic() < deadline_s:
        for node in NODES:
            if node not in running:
                starts += 1
                running[node] = _start(root, node, starts), 0.0
            child, until_s = running[node]
            if not until_s and child.said.stat().st_size:  # type: ignore[attr-defined]
                until_s = time.monotonic() + LIFE_S * chance.random()
                running[node] = child, until_s
            if 0 < until_s <= time.monotonic() or child.poll() is not None:
                child.send_signal(signal.SIGKILL)
                _sum_up(child, sums)
                del running[node]
        time.sleep(0.05)
    for child, _ in running.values():
        child.kill()
        _sum_up(child, sums)
    sums["starts"] = starts
    return sums


def _start(root: Path, node: str, boot: int) -> subprocess.Popen[str]:
    command = [sys.executable, __file__, str(root), node, str(boot)]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with open(root / f"said.{boot}", "w") as out, open(root / f"failed.{boot}", "w") as failed:
        child = subprocess.Popen(command, stdout=out, stderr=failed, text=True, env=environ)
    child.said, child.failed = root / f"said.{boot}", root / f"failed.{boot}"  # type: ignore[attr-defined]
    return child


def _sum_up(child: subprocess.Popen[str], sums: Counter[str]) -> None:
    ended = child.wait()
    lines = [line for line in child.said.read_text().splitlines() if line.endswith("}")]  # type: ignore[attr-defined]
    sums["died"] += ended != -signal.SIGKILL
    if ended != -signal.SIGKILL:
        print(child.failed.read_text()[-2000:], file=sys.stderr)  # type: ignore[attr-defined]
    last = json.loads(lines[-1]) if lines else {"silent": 1}
    for message in last.pop("others", []):
        print(message, file=sys.stderr)
    sums["look_back_ms_max"] = max(sums["look_back_ms_max"], last.pop("look_back_ms", 0))
    sums.update(last)


if __name__ == "__main__":
    if len(sys.argv) == 4:
        Ordeal(Path(sys.argv[1]), sys.argv[2], sys.argv[3]).run()
    print(dict(run(Path(sys.argv[1]), float(sys.argv[2]))))
