"""The least that waking another process costs here: a byte stamp over a Unix socket to one that blocks in `recv`."""

from __future__ import annotations

import os
import random
import socket
import struct
import subprocess
import sys
import time
from contextlib import suppress

PERIOD_S = 0.002
"""Mean time between two stamps, as that of layers in the row beside which this is measured."""
END_S = 10.0
_STAMP = struct.Struct("<Q")


def measure(samples: int, seed: int = 0) -> list[float]:
    """Microseconds from each send to the receiver awake; sent one by one to a process that sleeps."""
    chance = random.Random(seed)
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [sys.executable, __file__, str(there.fileno())]
    with here, subprocess.Popen(command, pass_fds=[there.fileno()], stdout=subprocess.PIPE) as receiver:
        there.close()
        here.settimeout(END_S)
        here.recv(1)  # it is ready
        try:
            for _ in range(samples):
                time.sleep(chance.uniform(0, 2 * PERIOD_S))
                here.send(_STAMP.pack(time.monotonic_ns()))
            here.send(b"e")
            out, _ = receiver.communicate(timeout=END_S)
        except BaseException:
            with suppress(ProcessLookupError):
                receiver.kill()
            raise
    return [int(line) / 1000 for line in out.split()]


def _receive(fd: int) -> None:
    """Prints, at the end, how many ns each stamp was old when this process ran."""
    ages = []
    with socket.socket(fileno=fd) as sock:
        sock.send(b"r")
        while len(stamp := sock.recv(_STAMP.size)) == _STAMP.size:
            ages.append(time.monotonic_ns() - _STAMP.unpack(stamp)[0])
    os.write(1, "\n".join(map(str, ages)).encode())


if __name__ == "__main__":
    _receive(int(sys.argv[1]))
