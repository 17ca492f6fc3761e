"""The command line beside a running daemon."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from cluster import Cluster, environment

pytestmark = pytest.mark.e2e
RUN_S = 20.0


def kvmoverd(*arguments: str) -> tuple[int, str, str]:
    command = [sys.executable, "-m", "kvmoverd", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=RUN_S, check=False)
    return done.returncode, done.stdout, done.stderr


def test_status_is_what_the_daemon_says_of_itself(single: Cluster) -> None:
    code, out, err = kvmoverd("status", "--socket", str(single.pe.socket), "--json")
    assert (code, err) == (0, "")
    status = json.loads(out)
    assert (status["node"], status["transport"], status["draining"]) == ("pe", "tcp", False)
    assert status["pool_bytes"] == 64 << 20 and status["storage"][0]["read_bytes"] == 0
    code, out, err = kvmoverd("status", "--socket", str(single.pe.socket))
    assert (code, err) == (0, "")
    assert "node: pe" in out and "transport: tcp" in out


def test_a_second_daemon_on_the_same_socket_is_refused_and_the_first_one_goes_on(single: Cluster) -> None:
    other = single.home / "other.toml"
    other.write_text(single.pe.config.read_text().replace(f"127.0.0.1:{single.pe.port}", "127.0.0.1:0"))
    for config, named in ((single.pe.config, str(single.pe.port)), (other, "taken by a live daemon")):
        code, out, err = kvmoverd("serve", "--config", str(config))
        assert (code, out) == (2, "")
        assert named in err and "Traceback" not in err and len(err.splitlines()) == 1, err
    assert kvmoverd("status", "--socket", str(single.pe.socket))[0] == 0
    assert single.pe.sockets() == ["pe.sock", "pe.sock.companion"]
