"""Writers are killed in a loop, anywhere in their work; then every block that was told durable, or can be seen, is compared.

The quick suite kills a few. A long run, which prints its count: `python tests/contract/test_storage_kills.py ROOT --shop
"segments threads" --kills 200`, or KVMOVER_KILLS=200 for pytest.
"""

from __future__ import annotations

import argparse
import os
import random
import select
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from files_kit import NAMES, SEGMENTS, SPACE, payload_of
from fuse_kit import fuse_mount
from storage_kit import UNEVEN, Driver, Slots, new_key, open_shop, until

from kvmoverd.core.status import Reason

KILLS = int(os.environ.get("KVMOVER_KILLS", "3"))
BATCH = 16
_SEEN_S = 10.0
_ADOPTED_S = 30.0


@dataclass(slots=True)
class Told:
    """What a killed writer had begun, and what it was told to be durable."""

    begun: list[bytes] = field(default_factory=list)
    durable: list[bytes] = field(default_factory=list)

    @classmethod
    def by(cls, lines: list[str]) -> Told:
        """From its output; a last line that was cut off says nothing."""
        told = cls()
        for line in lines:
            what, _, key = line.partition(" ")
            if len(key) == 64 + 1:
                (told.begun if what == "begin" else told.durable).append(bytes.fromhex(key))
        return told


@dataclass(slots=True)
class Tally:
    """Of all rounds."""

    kills: int = 0
    durable: int = 0
    reasons: Counter[Reason] = field(default_factory=Counter)
    wrong: int = 0
    lost: int = 0

    def __str__(self) -> str:
        ends = ", ".join(f"{count} {reason.name}" for reason, count in sorted(self.reasons.items(), key=str))
        return (
            f"{self.kills} kills, {self.durable} durable blocks, {self.lost} of them lost, {self.wrong} wrong ({ends})"
        )


def write_for_ever(name: str, root: Path) -> None:
    """The writer. It says what it begins and what it is told; several blocks are always on their way."""
    slots, keys, free = Slots(UNEVEN, BATCH), {}, list(range(BATCH))
    with open_shop(name, root, SPACE) as shop:
        driver = Driver(shop.storage)
        while True:
            while free:
                key, slot = new_key(), free.pop()
                op = driver.write_op(SPACE, key, slots.fill(slot, payload_of(key)))
                print("begin", key.hex())
                keys[op.op_id] = key, slot
                shop.storage.submit([op])
            sys.stdout.flush()
            select.select([shop.storage.fileno()], [], [], _SEEN_S)
            for done in shop.storage.poll(BATCH):
                key, slot = keys.pop(done.op_id)
                assert done.reason is Reason.OK, done
                free.append(slot)
                print("durable", key.hex(), flush=True)


def start_writer(name: str, root: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, __file__, str(root), "--shop", name, "--write"]
    # What it says when its filesystem goes is of no use to anybody.
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment, text=True)


def killed(writer: subprocess.Popen[str], after_s: float, *, early: bool) -> Told:
    """Kills it so long after its first word, or after its start; gives all it said."""
    assert writer.stdout is not None
    lines = [] if early else [writer.stdout.readline()]
    time.sleep(after_s)
    writer.send_signal(signal.SIGKILL)
    lines += writer.stdout.readlines()
    writer.stdout.close()
    assert writer.wait(10.0) == -signal.SIGKILL, "it ended before it was killed"
    return Told.by(lines)


def check(name: str, root: Path, told: Told, tally: Tally) -> None:
    """Opens the root anew and compares: durable blocks are there, begun ones are right or not there."""
    slots = Slots(UNEVEN, 1)
    with open_shop(name, root, SPACE) as shop:
        driver = Driver(shop.storage)
        ends_s = time.monotonic() + _SEEN_S
        while driver.present(SPACE, *told.durable) < len(told.durable) and time.monotonic() < ends_s:
            time.sleep(0.01)
        durable = set(told.durable)
        for key in told.begun:
            reason = driver.read(SPACE, key, slots.fill(0, b"")).reason
            tally.reasons[reason] += 1
            tally.wrong += reason is Reason.OK and slots.payload(0) != payload_of(key)
            tally.lost += key in durable and reason is not Reason.OK
        tally.wrong += shop.storage.counters.corrupt_blocks
    tally.durable += len(durable)


def kill_in_a_loop(name: str, root: Path, kills: int, *, seed: int) -> Tally:
    """The store stays and grows, killed writers and all; so later rounds begin on what earlier ones have left."""
    draw, tally = random.Random(seed), Tally()
    everything = Told()
    for _ in range(kills):
        early = draw.random() < 0.25
        told = killed(start_writer(name, root), draw.uniform(0.2, 0.8) if early else draw.uniform(0, 0.3), early=early)
        tally.kills += 1
        check(name, root, told, tally)
        everything.begun += told.begun
        everything.durable += told.durable
        assert not tally.wrong and not tally.lost, f"{tally}; seed {seed}"
    again = Tally(kills)
    check(name, root, everything, again)
    assert not again.wrong and not again.lost, f"at the end: {again}; seed {seed}"
    return again


@pytest.mark.slow
@pytest.mark.timeout(60 + 5 * KILLS)
@pytest.mark.parametrize("name", NAMES)
def test_no_durable_block_is_lost_and_none_is_wrong_however_its_writers_are_killed(tmp_path: Path, name: str) -> None:
    seed = random.randrange(1 << 32)
    tally = kill_in_a_loop(name, tmp_path, KILLS, seed=seed)
    print(f"{name}: {tally}; seed {seed}")
    assert tally.durable or KILLS < 4


@pytest.mark.slow
@pytest.mark.timeout(60 + 5 * KILLS)
@pytest.mark.parametrize("name", NAMES)
def test_no_durable_block_is_lost_when_the_power_fails_at_any_moment_and_some_unsynced_pages_are_there(
    tmp_path: Path, name: str
) -> None:
    seed = random.randrange(1 << 32)
    draw, tally, everything = random.Random(seed), Tally(), Told()
    with fuse_mount(tmp_path / "place", tmp_path / "backing", volatile=True, life_s=60.0 + 5 * KILLS) as fuse:
        for number in range(KILLS):
            writer = start_writer(name, fuse.place)
            assert writer.stdout is not None
            lines = [writer.stdout.readline()]
            # Lives may all be too short for anything to become durable; the first is not.
            while number == 0 and lines[-1] and not lines[-1].startswith("durable"):
                lines.append(writer.stdout.readline())
            time.sleep(draw.uniform(0, 0.3))
            fuse.power_cut(keep=draw.choice((0.0, 0.5, 0.9)), seed=draw.randrange(1 << 32))
            writer.kill()
            lines += writer.stdout.readlines()
            writer.stdout.close()
            writer.wait(10.0)
            told = Told.by(lines)
            tally.kills += 1
            everything.begun += told.begun
            everything.durable += told.durable
            check(name, fuse.place, told, tally)
            assert not tally.wrong and not tally.lost, f"{tally}; seed {seed}"
        check(name, fuse.place, everything, tally)
    print(f"{name}: {tally}; seed {seed}")
    assert not tally.wrong and not tally.lost and tally.durable, f"{tally}; seed {seed}"


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_of_two_on_one_directory_the_other_sees_the_blocks_at_once_and_serves_on_when_one_is_killed(
    tmp_path: Path, name: str
) -> None:
    slots = Slots(UNEVEN, 1)
    with open_shop(name, tmp_path, SPACE) as shop:
        driver = Driver(shop.storage)
        writer = start_writer(name, tmp_path)
        assert writer.stdout is not None
        said = [writer.stdout.readline() for _ in range(3 * BATCH)]
        while_alive = Told.by(said).durable
        until(lambda: driver.present(SPACE, *while_alive) == len(while_alive))
        told = killed(writer, 0.1, early=True)
        durable = while_alive + told.durable
        assert len(durable) > BATCH
        until(lambda: driver.present(SPACE, *durable) == len(durable))
        for key in durable:
            assert driver.read(SPACE, key, slots.fill(0, b"")).reason is Reason.OK
            assert slots.payload(0) == payload_of(key)
        mine = new_key()
        assert driver.write(SPACE, mine, slots.fill(0, payload_of(mine))).reason is Reason.OK
        assert driver.read(SPACE, mine, slots.fill(0, b"")).reason is Reason.OK
        known = driver.write(SPACE, durable[0], slots.fill(0, payload_of(durable[0])))
        assert (known.reason, known.moved_bytes) == (Reason.OK, 0), "what the dead one stored is not stored again"
        assert shop.storage.counters.corrupt_blocks == 0
        if name == SEGMENTS[0]:
            # Seconds, and the same whatever moves the bytes.
            authors = tmp_path / "kvm1" / "authors"
            ends_s = time.monotonic() + _ADOPTED_S
            while not list(authors.glob("*/adopt.*")):
                assert time.monotonic() < ends_s, f"nobody took over the dead one's directory within {_ADOPTED_S:g} s"
                time.sleep(0.05)
            assert len(list(authors.glob("*/adopt.*"))) == 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", type=Path, help="an empty directory")
    parser.add_argument("--shop", default="direct", choices=NAMES)
    parser.add_argument("--kills", type=int, default=KILLS)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32))
    parser.add_argument("--write", action="store_true", help="be the writer, until killed")
    arguments = parser.parse_args()
    if arguments.write:
        write_for_ever(arguments.shop, arguments.root)
    else:
        arguments.root.mkdir(parents=True, exist_ok=True)
        print(kill_in_a_loop(arguments.shop, arguments.root, arguments.kills, seed=arguments.seed))


if __name__ == "__main__":
    main()
