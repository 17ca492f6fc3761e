"""The choice of a CNIC for a GPU, on machines that lie on paper."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvmoverd.adapters.sysfs.infiniband import device_path
from kvmoverd.adapters.sysfs.pci import gpus, pci_path
from kvmoverd.adapters.sysfs.topology import Cnic, Distance, between, distance, nearest_cnic
from tests.unit.sysfs_kit import Machine, eight_pairs

ONE_SWITCH = "pci0000:00/00:01.0/01:00.0"
"""Root port, upstream port of a switch; downstream ports are 02:NN.0."""


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def between_gpu_and_cnic(machine: Machine, gpu: str, cnic: str, *, numa: tuple[int, int] = (0, 0)) -> Distance:
    machine.gpu(gpu, numa=numa[0])
    machine.cnic("mlx5_0", cnic, numa=numa[1])
    path = device_path(machine.tree, "mlx5_0")
    assert path is not None
    return distance(gpus(machine.tree)[0], path)


@pytest.mark.parametrize(
    ("gpu", "cnic", "numa", "expected"),
    [
        (f"{ONE_SWITCH}/02:00.0/03:00.0", f"{ONE_SWITCH}/02:01.0/04:00.0", (0, 0), Distance.PIX),
        ("pci0000:00/00:01.0/01:00.0", "pci0000:00/00:01.0/01:00.1", (0, 0), Distance.PIX),
        (f"{ONE_SWITCH}/02:00.0/03:00.0/04:00.0/05:00.0", f"{ONE_SWITCH}/02:01.0/06:00.0", (0, 0), Distance.PXB),
        ("pci0000:00/00:01.0/01:00.0", "pci0000:00/00:02.0/02:00.0", (0, 0), Distance.PHB),
        ("pci0000:00/00:01.0/01:00.0", "pci0000:40/40:01.0/41:00.0", (0, 0), Distance.NODE),
        ("pci0000:00/00:01.0/01:00.0", "pci0000:80/80:01.0/81:00.0", (0, 1), Distance.SYS),
        ("pci0000:00/00:01.0/01:00.0", "pci0000:80/80:01.0/81:00.0", (-1, -1), Distance.SYS),
        ("pci0000:17/17:01.0/18:00.0", "pci10000:e0/e0:01.0/e1:00.0", (0, 0), Distance.NODE),
    ],
)
def test_distance_is_that_of_the_bridges_between(
    machine: Machine, gpu: str, cnic: str, numa: tuple[int, int], expected: Distance
) -> None:
    assert between_gpu_and_cnic(machine, gpu, cnic, numa=numa) is expected


def test_a_virtual_function_stands_where_its_card_does(machine: Machine) -> None:
    machine.gpu(f"{ONE_SWITCH}/02:00.0/03:00.0", numa=0)
    machine.cnic("mlx5_0", f"{ONE_SWITCH}/02:01.0/04:00.0", numa=0)
    machine.cnic("mlx5_9", f"{ONE_SWITCH}/02:01.0/04:00.2", numa=0)
    machine.cnic("mlx5_3", "pci0000:80/80:01.0/81:00.2", numa=1)
    index, why = nearest_cnic(machine.root, "03:00.0", None, [Cnic("mlx5_3"), Cnic("mlx5_9")])
    assert (index, why) == (1, "mlx5_9, PIX to GPU 0000:03:00.0")


def test_each_of_eight_gpus_has_the_cnic_of_its_own_switch(machine: Machine) -> None:
    eight_pairs(machine)
    cnics = [Cnic(f"mlx5_{at}:1") for at in range(8)]
    found = [nearest_cnic(machine.root, gpu.address, None, cnics)[0] for gpu in gpus(machine.tree)]
    assert found == list(range(8))


def test_four_cnics_for_eight_gpus_serve_two_each(machine: Machine) -> None:
    eight_pairs(machine)
    users = {f"mlx5_{at}": 0 for at in (0, 1, 4, 5)}
    for gpu in gpus(machine.tree):
        cnics = [Cnic(name, count) for name, count in users.items()]
        users[cnics[nearest_cnic(machine.root, gpu.address, None, cnics)[0]].name] += 1
    # 2 and 3 share their socket with 0 and 1; 6 and 7 with 4 and 5: the fewest users decide.
    assert users == {"mlx5_0": 2, "mlx5_1": 2, "mlx5_4": 2, "mlx5_5": 2}


def test_the_bridges_between_are_those_below_the_shared_one(machine: Machine) -> None:
    between_gpu_and_cnic(machine, f"{ONE_SWITCH}/02:00.0/03:00.0", f"{ONE_SWITCH}/02:01.0/04:00.0")
    gpu, cnic = pci_path(machine.tree, "03:00.0"), pci_path(machine.tree, "04:00.0")
    assert gpu and cnic and between(gpu, cnic) == ["0000:02:00.0", "0000:02:01.0"]


def test_without_a_gpu_the_numa_node_decides(machine: Machine) -> None:
    machine.nodes("10 12 32", "12 10 32", "32 32 10")
    machine.cnic("mlx5_0", "pci0000:80/80:01.0/81:00.0", numa=2)
    machine.cnic("mlx5_1", "pci0000:40/40:01.0/41:00.0", numa=1)
    cnics = [Cnic("mlx5_0"), Cnic("mlx5_1", users=7)]
    assert nearest_cnic(machine.root, None, 2, cnics) == (0, "mlx5_0, on NUMA node 2 for memory of node 2")
    assert nearest_cnic(machine.root, None, 0, cnics) == (1, "mlx5_1, on NUMA node 1 for memory of node 0")


def test_equals_are_chosen_by_their_users_then_by_their_order(machine: Machine) -> None:
    for at in range(3):
        machine.cnic(f"mlx5_{at}", f"pci0000:00/00:0{at + 1}.0/0{at + 1}:00.0", numa=0)
    cnics = [Cnic("mlx5_0", 2), Cnic("mlx5_1", 1), Cnic("mlx5_2", 1)]
    index, why = nearest_cnic(machine.root, None, 0, cnics)
    assert index == 1 and "mlx5_1 with 1 users, the fewest of 3 alike" in why


def test_a_gpu_that_is_not_there_is_said_and_the_node_decides(machine: Machine) -> None:
    machine.cnic("mlx5_0", "pci0000:00/00:01.0/01:00.0", numa=0)
    machine.cnic("mlx5_1", "pci0000:80/80:01.0/81:00.0", numa=1)
    index, why = nearest_cnic(machine.root, "0000:99:00.0", 1, [Cnic("mlx5_0"), Cnic("mlx5_1")])
    assert index == 1 and why.startswith("there is no PCI device 0000:99:00.0; mlx5_1, on NUMA node 1")


def test_machines_that_say_nothing_are_served_in_turn(machine: Machine) -> None:
    machine.cnic("rxe0", netdev="veth0")
    machine.cnic("rxe1", netdev="veth1")
    assert nearest_cnic(machine.root, None, None, [Cnic("rxe0", 1), Cnic("rxe1")]) == (
        1,
        "rxe1 with 0 users, the fewest of 2 alike; which is near is not known",
    )
    empty = nearest_cnic(machine.root / "nothing", "0000:03:00.0", None, [Cnic("rxe0")])
    assert empty == (0, "there is no PCI device 0000:03:00.0; rxe0; which is near is not known")


def test_a_virtual_cnic_is_as_near_as_its_network_card(machine: Machine) -> None:
    machine.gpu(f"{ONE_SWITCH}/02:00.0/03:00.0", numa=0)
    machine.cnic("rxe0", netdev="eth0")
    machine.link("/sys/class/net/eth0/device", machine.pci(f"{ONE_SWITCH}/02:01.0/04:00.0"))
    machine.cnic("rxe1", netdev="veth1")
    index, why = nearest_cnic(machine.root, "03:00.0", None, [Cnic("rxe1"), Cnic("rxe0")])
    assert (index, why) == (1, "rxe0, PIX to GPU 0000:03:00.0")


def test_a_numa_node_that_the_caller_knows_stands_in_for_sysfs(machine: Machine) -> None:
    cnics = [Cnic("rxe0", numa_node=0), Cnic("rxe1", numa_node=1)]
    assert nearest_cnic(machine.root, None, 1, cnics)[0] == 1


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_tree_that_may_not_be_read_is_said(machine: Machine) -> None:
    machine.cnic("mlx5_0", "pci0000:00/00:01.0/01:00.0", numa=0)
    machine.tree.at("/sys/devices/pci0000:00/0000:00:01.0/0000:01:00.0/numa_node").chmod(0)
    assert "can't be read" in nearest_cnic(machine.root, None, 0, [Cnic("mlx5_0")])[1]


def test_addresses_are_taken_as_any_tool_prints_them(machine: Machine) -> None:
    machine.gpu("pci0000:3a/3a:01.0/3b:00.0")
    assert {bool(pci_path(machine.tree, text)) for text in ("3B:00.0", "0000:3b:00.0", "00000000:3B:00.0")} == {True}
    assert pci_path(machine.tree, "../../etc") is None
