"""What runs in the VM, one part after another: python -m tests.rdma_vm.inside FOLDER [PART ...]

Of each part FOLDER gets NAME.out (what it said) and NAME.json (command, exit code, seconds). A part that fails stops no other.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

TIME_LIMIT = 124
LOCALS = ("verbs", "shm")
"""How the demo's nodes move what stays within them."""


@dataclass(frozen=True, slots=True)
class Part:
    name: str
    command: Sequence[str]
    limit_s: float


@dataclass(frozen=True, slots=True)
class Ended:
    """How a part ended; exit code 124 past its limit."""

    name: str
    command: Sequence[str]
    code: int
    seconds: float
    limit_s: float


def parts(folder: Path) -> list[Part]:
    """All, in their order; limits are several times what they take where nothing else runs."""
    python = (sys.executable, "-m")
    suites = sorted(str(path) for path in Path("tests/contract").glob("test_*.py") if _of_transports(path.name))
    contract = (
        "pytest",
        "-q",
        "-m",
        "",
        "-k",
        "verbs and not fake and not test_verbs_memory",
        "-p",
        "no:cacheprovider",
        "--timeout=120",
    )
    demo = ("kvmoverd", "demo", "--transport", "verbs", "--json", "--local")
    size = ("--layers", "2", "--sessions", "1", "--turns", "4", "--pool", "64MiB")
    return [
        Part("doctor", (*python, "kvmoverd", "doctor", "--json"), 60.0),
        Part("override", (*python, "tests.rdma_vm.override"), 60.0),
        Part("posting", (*python, "tests.bench.posting", "--json"), 90.0),
        Part("contract", (*python, *contract, f"--junitxml={folder / 'contract.xml'}", *suites), 300.0),
        *(Part(f"demo-{local}", (*python, *demo, local, *size), 420.0) for local in LOCALS),
        Part("helped", (*python, "tests.rdma_vm.helped"), 240.0),
        Part("capture", (*python, "tests.rdma_vm.capture"), 60.0),
        Part("qos", (*python, "tests.rdma_vm.qos"), 120.0),
    ]


def _of_transports(name: str) -> bool:
    return name.startswith(("test_transport", "test_verbs"))


def run(part: Part, folder: Path) -> Ended:
    """Runs one part in a group of processes of its own, and leaves none of them."""
    began_s = time.monotonic()
    with (folder / f"{part.name}.out").open("wb") as out:
        process = subprocess.Popen(part.command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            code = process.wait(part.limit_s)
        except subprocess.TimeoutExpired:
            code = TIME_LIMIT
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return Ended(part.name, part.command, code, round(time.monotonic() - began_s, 1), part.limit_s)


def main(arguments: Sequence[str]) -> int:
    folder, wanted = Path(arguments[0]), arguments[1:]
    for part in parts(folder):
        if wanted and part.name not in wanted:
            continue
        print(f"{part.name}: begins", flush=True)
        ended = run(part, folder)
        print(f"{part.name}: ended with {ended.code} after {ended.seconds:g} s", flush=True)
        (folder / f"{part.name}.json").write_text(json.dumps(asdict(ended)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
