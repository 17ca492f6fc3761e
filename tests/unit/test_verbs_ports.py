"""Ports of devices of which some fail: a library on paper stands in for pyverbs."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvmoverd.adapters.transport.verbs import ports
from kvmoverd.adapters.transport.verbs.fabric import FabricError


class Refused(Exception):
    """What the library's calls raise."""


class Context:
    """A device of two ports; `fails`: the call that it refuses."""

    def __init__(self, fails: str) -> None:
        self.fails = fails
        self.closed = False

    def query_device(self) -> Any:
        self._may("query_device")
        names = ("max_mr_size", "max_mr", "max_qp_wr", "max_sge", "max_cqe", "max_qp", "vendor_id")
        return SimpleNamespace(phys_port_cnt=2, fw_version="", **dict.fromkeys(names, 1))

    def query_port(self, port: int) -> Any:
        self._may("query_port")
        return SimpleNamespace(state=4, link_layer=2, lid=0, active_mtu=5, gid_tbl_len=1)

    def close(self) -> None:
        self.closed = True

    def _may(self, call: str) -> None:
        if call == self.fails:
            raise Refused("Input/output error")


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> dict[str, Context]:
    """By name; a test adds what there is."""
    found: dict[str, Context] = {}

    def make(name: str) -> Context:
        found[name]._may("open")
        return found[name]

    library = SimpleNamespace(device=SimpleNamespace(Context=make), error=Refused)
    monkeypatch.setattr(ports, "load", lambda: library)
    monkeypatch.setattr(ports, "_devices", lambda library, sysfs: sorted(found))
    return found


@pytest.mark.parametrize("call", ["open", "query_device", "query_port"])
def test_a_device_that_fails_is_left_out_and_the_others_are_found(
    devices: dict[str, Context], tmp_path: Path, caplog: pytest.LogCaptureFixture, call: str
) -> None:
    devices.update(bad=Context(call), good=Context(""))
    assert [port.name for port in ports.list_ports(sysfs=tmp_path)] == ["good:1", "good:2"]
    assert "bad" in caplog.text and "Input/output error" in caplog.text
    assert devices["good"].closed and devices["bad"].closed is (call != "open")


@pytest.mark.parametrize("call", ["open", "query_device", "query_port"])
def test_the_only_device_that_fails_says_why(devices: dict[str, Context], tmp_path: Path, call: str) -> None:
    devices["bad"] = Context(call)
    with pytest.raises(FabricError, match=r"bad.*Input/output error"):
        ports.list_ports(sysfs=tmp_path)


def test_devices_that_only_the_kernel_sees_are_named_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    library = SimpleNamespace(device=SimpleNamespace(get_device_list=list), error=Refused)
    monkeypatch.setattr(ports, "load", lambda: library)
    assert ports.list_ports(sysfs=tmp_path) == []
    (tmp_path / "mlx5_0").mkdir()
    with pytest.raises(FabricError, match=r"the kernel has mlx5_0, .*modprobe ib_uverbs, in a container --device"):
        ports.list_ports(sysfs=tmp_path)
