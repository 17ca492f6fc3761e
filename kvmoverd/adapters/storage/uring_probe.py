"""Can this process use io_uring? Found out in another one: a wrong instruction or a filter of system calls may kill it."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys

PROBE_S = 5.0
PROBE = (sys.executable, "-c", "from kvmoverd.adapters.storage.uring_ring import try_ring; try_ring()")
_MESSAGE_CHARACTERS_MAX = 200


@functools.cache
def uring_refusal(command: tuple[str, ...] = PROBE, timeout_s: float = PROBE_S) -> str:
    """Why io_uring can't be used here; empty when it can. Blocks while a child tries, once per process and command."""
    # The child finds the same modules as this process, however this one came to them.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    try:
        child = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, env=environment, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        return f"the trial was not done within {timeout_s:g} s"
    except OSError as error:
        return f"the trial could not be run: {error}"
    if child.returncode < 0:
        return f"the trial was ended by signal {-child.returncode} ({signal.strsignal(-child.returncode)})"
    if child.returncode:
        lines = child.stderr.decode(errors="replace").strip().splitlines() or ["no message"]
        remedy = "; install the package's extra [uring]" if "No module named 'liburing'" in lines[-1] else ""
        return f"the trial failed: {lines[-1][:_MESSAGE_CHARACTERS_MAX]}{remedy}"
    return ""
