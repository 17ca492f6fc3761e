"""The demo over real CNICs: a prefill and a decode node, each with a port of its own, every byte checked."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from cluster import environment
from markers import needs_rxe

pytestmark = [pytest.mark.e2e, needs_rxe, pytest.mark.timeout(300)]

RUN_S = 280.0
"""In a virtual machine without help of the processor three interpreters take a minute to start."""
SMALL = ("--layers", "2", "--sessions", "1", "--turns", "3", "--pool", "64MiB", "--json")


@pytest.mark.parametrize("local", ["shm", "verbs"])
def test_every_byte_is_right_on_both_paths_over_rdma(local: str) -> None:
    command = [sys.executable, "-m", "kvmoverd", "demo", "--transport", "verbs", "--local", local, *SMALL]
    done = subprocess.run(command, capture_output=True, text=True, timeout=RUN_S, check=False, env=environment())
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["errors"] == [] and told["verified_bytes"] > 1 << 20
    assert {name for name, path in told["paths"].items() if path["hit_tokens"]} == {"pe_read", "de_read"}
