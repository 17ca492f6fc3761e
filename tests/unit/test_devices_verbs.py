"""Which ports become CNICs, and which of them a region is near to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvmoverd.adapters.transport.verbs.gids import Gid
from kvmoverd.adapters.transport.verbs.ports import LinkLayer, PortFacts
from kvmoverd.config_transport import CNICS_MAX, VerbsConfig, transport_config
from kvmoverd.core.errors import TransportRefused
from kvmoverd.devices_verbs import CnicChoice, check_memlock, chosen_ports, left_out
from kvmoverd.ports.memory import Near
from kvmoverd.toml_table import Table
from tests.unit.sysfs_kit import Machine

GPU = "0000:3b:00.0"


def settings(**verbs: Any) -> VerbsConfig:
    return transport_config(Table({"kind": "verbs", "verbs": verbs}, "transport"), Path("/")).verbs


def port(device: str, number: int = 1, state: str = "active") -> PortFacts:
    return PortFacts(
        device=device,
        port=number,
        state=state,
        link_layer=LinkLayer.ETHERNET,
        lid=0,
        mtu_bytes=4096,
        gids=(Gid(0, bytes(15) + b"1", "RoCE v2", "eth0"),),
        netdev="eth0",
        numa_node=0,
        region_bytes_max=1 << 40,
        regions_max=1 << 20,
        requests_max=1 << 15,
        elements_max=32,
        completions_max=1 << 20,
        pairs_max=1 << 16,
        vendor_id=0,
        firmware="",
    )


PORTS = [port("mlx5_0"), port("mlx5_1", 1), port("mlx5_1", 2, "down"), port("mlx5_2", 1, "down"), port("mlx5_3")]


def names(**verbs: Any) -> list[str]:
    asked = settings(**verbs)
    return [found.name for found in chosen_ports(asked.devices, asked.exclude, PORTS)]


def test_without_a_word_all_ports_that_are_up_are_used() -> None:
    assert names() == ["mlx5_0:1", "mlx5_1:1", "mlx5_3:1"]


def test_those_of_the_storage_network_are_left_out_by_device_or_port() -> None:
    assert names(exclude=["mlx5_3", "mlx5_1:2"]) == ["mlx5_0:1", "mlx5_1:1"]
    assert names(exclude=["mlx5_1:1", "mlx5_9"]) == ["mlx5_0:1", "mlx5_3:1"]


@pytest.mark.parametrize(
    ("verbs", "told"),
    [
        ({}, ["mlx5_1:2 is down", "mlx5_2:1 is down"]),
        (
            {"exclude": ["mlx5_3", "mlx5_9"]},
            [
                "mlx5_1:2 is down",
                "mlx5_2:1 is down",
                "mlx5_3:1 is left out by transport.verbs.exclude",
                'no port is "mlx5_9", as transport.verbs.exclude has it',
            ],
        ),
        (
            {"devices": ["mlx5_0", "mlx5_1"]},
            ["mlx5_1:2 is down", "mlx5_2:1 is down", "mlx5_3:1 is not in transport.verbs.devices"],
        ),
    ],
)
def test_check_says_which_ports_are_left_out_and_why(verbs: dict[str, Any], told: list[str]) -> None:
    asked = settings(**verbs)
    assert left_out(asked, chosen_ports(asked.devices, asked.exclude, PORTS), PORTS) == told


def test_named_ones_are_counted_in_the_order_of_the_config_and_once() -> None:
    assert names(devices=["mlx5_3", "mlx5_0:1", "mlx5_0"]) == ["mlx5_3:1", "mlx5_0:1"]
    assert names(devices=["mlx5_1"]) == ["mlx5_1:1"], "a device's ports are those that are up"


@pytest.mark.parametrize(
    ("verbs", "words"),
    [
        ({"devices": ["mlx5_2"]}, r'devices has "mlx5_2": mlx5_2:1 is down'),
        ({"devices": ["mlx5_0", "mlx5_1:2"]}, r'devices has "mlx5_1:2": mlx5_1:2 is down'),
        ({"devices": ["mlx4_0"]}, r'has "mlx4_0": there is no such port; there are: mlx5_0:1, mlx5_1:1'),
        ({"exclude": ["mlx5_0", "mlx5_1", "mlx5_3"]}, r"mlx5_0:1 is left out by .*exclude.*mlx5_2:1 is down"),
        ({"devices": ["mlx5_0:1"], "exclude": ["mlx5_0"]}, "no port can be used"),
    ],
)
def test_what_can_not_be_used_is_refused_with_what_is_there(verbs: dict[str, Any], words: str) -> None:
    with pytest.raises(TransportRefused, match=words):
        names(**verbs)


def test_a_machine_without_rdma_says_so() -> None:
    with pytest.raises(TransportRefused, match=r'kind = "verbs": no port can be used: there is no RDMA device'):
        chosen_ports((), (), [])


def test_more_ports_than_can_be_told_apart_need_a_choice() -> None:
    with pytest.raises(TransportRefused, match=f"{CNICS_MAX + 1} ports are up, at most {CNICS_MAX}"):
        chosen_ports((), (), [port(f"mlx5_{number}") for number in range(CNICS_MAX + 1)])


CNICS = [("mlx5_0:1", 0), ("mlx5_1:1", 1), ("mlx5_1:2", 1)]


def test_a_gpu_that_is_named_by_hand_goes_by_that_cnic_whatever_else_is_near(tmp_path: Path) -> None:
    choose = CnicChoice(CNICS, {GPU: "mlx5_1:2"}, tmp_path)
    assert choose(Near(GPU, 0), [0, 0, 9]) == (2, f"mlx5_1:2, by transport.verbs.gpus for GPU {GPU}")


def test_else_the_numa_node_decides_and_then_the_fewest_regions(tmp_path: Path) -> None:
    choose = CnicChoice(CNICS, {}, tmp_path)
    assert choose(Near(None, 1), [0, 1, 0])[0] == 2 and choose(Near(None, 1), [0, 0, 0])[0] == 1
    assert choose(Near(None, 0), [9, 0, 0])[0] == 0
    assert choose(Near(), [2, 1, 3])[0] == 1
    index, why = choose(Near(GPU, None), [1, 1, 0])
    assert index == 2 and f"no PCI device {GPU}" in why


def test_pcie_decides_where_sysfs_knows_both(tmp_path: Path) -> None:
    bus = tmp_path / "sys/bus/pci/devices"
    devices = tmp_path / "sys/devices"
    bus.mkdir(parents=True)
    for name, path in (
        (GPU, f"pci0000:3a/0000:3a:00.0/{GPU}"),
        ("0000:3b:00.1", "pci0000:3a/0000:3a:00.0/0000:3b:00.1"),
        ("0000:d8:00.0", "pci0000:d7/0000:d7:00.0/0000:d8:00.0"),
    ):
        (devices / path).mkdir(parents=True)
        (bus / name).symlink_to(devices / path)
    for cnic, address in (("mlx5_0", "0000:d8:00.0"), ("mlx5_1", "0000:3b:00.1")):
        home = tmp_path / "sys/class/infiniband" / cnic
        home.mkdir(parents=True)
        (home / "device").symlink_to((bus / address).resolve())
    choose = CnicChoice([("mlx5_0:1", -1), ("mlx5_1:1", -1)], {}, tmp_path)
    index, why = choose(Near(GPU, None), [0, 5])
    assert index == 1 and why == f"mlx5_1:1, PIX to GPU {GPU}"


@pytest.mark.parametrize(
    ("cnic", "words"),
    [("mlx5_7", "none of the CNICs in use: mlx5_0:1, mlx5_1:1, mlx5_1:2"), ("mlx5_1", "several of the CNICs in use")],
)
def test_a_hand_that_points_at_no_one_cnic_is_refused(cnic: str, words: str) -> None:
    with pytest.raises(TransportRefused, match=words):
        CnicChoice(CNICS, {GPU: cnic})


@pytest.mark.parametrize(
    ("limit", "capabilities", "is_refused"),
    [
        ("65536", "0", True),
        ("65536", "4000", False),
        ("unlimited", "0", False),
        ("1048576", "0", False),
        ("", "0", False),
    ],
)
def test_a_pool_that_may_not_be_locked_is_refused_with_both_numbers(
    tmp_path: Path, limit: str, capabilities: str, is_refused: bool
) -> None:
    machine = Machine(tmp_path)
    machine.write("/proc/self/limits", f"Max locked memory         {limit}   unlimited   bytes" if limit else "nothing")
    machine.write("/proc/self/status", f"CapEff:\t{capabilities}")
    if not is_refused:
        check_memlock(1 << 20, tmp_path)
        return
    with pytest.raises(
        TransportRefused, match=r"65536 bytes of locked memory .* has 1048576: set LimitMEMLOCK=infinity"
    ):
        check_memlock(1 << 20, tmp_path)
