"""A process under hard conditions that uses a storage and says how it went: `storage_ordeal.py ORDEAL LAYOUT ENGINE ROOT`.

The last line is a JSON object: how it opened, how many blocks were stored, read back and right, and what was refused.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import resource
import signal
import struct
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from files_kit import SPACE, payload_of
from ordeal_kit import LAYOUTS
from storage_kit import UNEVEN, Driver, Slots, new_key

from kvmoverd.adapters.memory.arena import Arena
from kvmoverd.adapters.storage.threads import ThreadsStorage
from kvmoverd.adapters.storage.uring_open import open_uring
from kvmoverd.core.errors import StorageUnusable
from kvmoverd.core.status import Reason
from kvmoverd.ports.storage import Storage

BLOCKS = 16
NOBODY = 65534
STORM_S = 0.0005
_IO_URING = range(425, 428)
_libc = ctypes.CDLL(None, use_errno=True)


def forbid_io_uring(number: int) -> None:
    """A filter of system calls as containers have it: the three of io_uring fail with this errno."""
    lines = [
        (0x20, 0, 0, 0),  # load the number of the system call
        (0x35, 0, 2, _IO_URING.start),  # below the three: pass
        (0x35, 1, 0, _IO_URING.stop),  # above them: pass
        (0x06, 0, 0, 0x00050000 | number),
        (0x06, 0, 0, 0x7FFF0000),
    ]
    held = ctypes.create_string_buffer(b"".join(struct.pack("<HBBI", *line) for line in lines))
    program = struct.pack("<HxxxxxxQ", len(lines), ctypes.addressof(held))
    no_new_privileges, set_seccomp, filter_mode = 38, 22, 2
    if _libc.prctl(no_new_privileges, 1, 0, 0, 0) or _libc.prctl(set_seccomp, filter_mode, program, 0, 0):
        say(skipped=f"no filter of system calls can be set here: {os.strerror(ctypes.get_errno())}")


def limit_memlock() -> None:
    """Whoever starts this has taken CAP_IPC_LOCK from it, which would make the limit void."""
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (64 << 10, 64 << 10))


def begin_signal_storm() -> None:
    """A signal every half millisecond, to whatever thread; its handler does nothing, and restarts nothing."""
    signal.signal(signal.SIGALRM, lambda number, frame: None)
    signal.siginterrupt(signal.SIGALRM, True)
    signal.setitimer(signal.ITIMER_REAL, STORM_S, STORM_S)


def become_nobody() -> None:
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)


ORDEALS: dict[str, Callable[[], None]] = {
    "none": lambda: None,
    "io_uring forbidden": lambda: forbid_io_uring(errno.EPERM),
    "io_uring unknown": lambda: forbid_io_uring(errno.ENOSYS),
    "memlock": limit_memlock,
    "signals": begin_signal_storm,
    "nobody": become_nobody,
    "no permission later": become_nobody,
}


def open_storage(layout: str, engine: str, root: Path) -> Storage:
    blocks = LAYOUTS[layout](root)
    if engine == "threads":
        return ThreadsStorage(blocks, name="root", threads=4, ops_max=64)
    arena = Arena(4 << 20, 2 << 20)
    return open_uring(blocks, arena, 2 << 20, name="root", threads=4, ops_max=64)


def write_all(driver: Driver, slots: Slots, keys: Sequence[bytes]) -> list[Reason]:
    ops = [driver.write_op(SPACE, key, slots.fill(slot, payload_of(key))) for slot, key in enumerate(keys)]
    return [done.reason for done in driver.run(ops)]


def read_all(driver: Driver, slots: Slots, keys: Sequence[bytes]) -> list[Reason]:
    """How the reads ended; CORRUPT where one is OK and its bytes are wrong."""
    done = driver.run([driver.read_op(SPACE, key, slots.fill(slot, b"")) for slot, key in enumerate(keys)])
    return [
        Reason.CORRUPT if d.reason is Reason.OK and slots.payload(slot) != payload_of(key) else d.reason
        for slot, (key, d) in enumerate(zip(keys, done, strict=True))
    ]


def say(**words: object) -> None:
    print(json.dumps(words), flush=True)
    os._exit(0)


def main(ordeal: str, layout: str, engine: str, root: Path) -> None:
    ORDEALS[ordeal]()
    try:
        storage = open_storage(layout, engine, root)
        storage.open_namespace(SPACE)
    except StorageUnusable as error:
        say(unusable=str(error))
    driver, slots = Driver(storage), Slots(UNEVEN, BLOCKS)
    keys = [new_key() for _ in range(BLOCKS)]
    written = write_all(driver, slots, keys)
    read = read_all(driver, slots, keys)
    refused: list[Reason] = []
    if ordeal == "no permission later":
        (root / "kvm1").chmod(0)
        refused = read_all(driver, slots, keys[:1]) + write_all(driver, slots, [new_key()])
        (root / "kvm1").chmod(0o750)
        read += read_all(driver, slots, keys) + write_all(driver, slots, [new_key()])
    facts, started_s = storage.facts, time.monotonic()
    say(
        kind=facts.kind,
        io_mode=facts.io_mode,
        note=facts.note,
        written=[reason.name for reason in written],
        read=[reason.name for reason in read],
        refused=[reason.name for reason in refused],
        failed_ops=storage.counters.failed_ops,
        quiet=storage.close(10.0),
        close_s=time.monotonic() - started_s,
        keys=[key.hex() for key in keys],
    )


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], Path(sys.argv[4]))
