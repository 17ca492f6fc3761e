"""What the doctor's checks say of machines that lie on paper."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from kvmoverd.adapters.doctor import lanes, rdma
from kvmoverd.adapters.doctor.counters import check_counters, check_pauses
from kvmoverd.adapters.doctor.finding import Look, Status, Wanted
from kvmoverd.adapters.doctor.gpus import check_acs, check_gpu_memory, check_iommu, check_paths
from kvmoverd.adapters.doctor.lanes import check_override, check_sl2vl, parse_sl2vl
from kvmoverd.adapters.doctor.rdma import check_gids, check_ports
from kvmoverd.core.qos import Marks
from tests.unit.doctor_kit import VERBS, one, see, statuses
from tests.unit.sysfs_kit import Machine, eight_pairs

ROUTED = ("0000:0000:0000:0000:0000:ffff:0a4d:0001", "RoCE v2")
LINK_LOCAL = ("fe80:0000:0000:0000:0000:00ff:fe00:0001", "RoCE v2")
SWITCH = "pci0000:00/00:01.0/01:00.0"


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


# RDMA devices


def test_no_device_matters_only_to_who_asked_for_one(machine: Machine) -> None:
    assert one(check_ports, machine).status is Status.SKIP
    assert one(check_ports, machine, VERBS).status is Status.FAIL


def with_device_file(machine: Machine) -> Machine:
    machine.write("/dev/infiniband/uverbs0", "")
    return machine


def test_an_active_port_is_fine_and_says_what_it_is(machine: Machine) -> None:
    with_device_file(machine).cnic("mlx5_0", f"{SWITCH}/02:00.0/03:00.0", numa=1)
    finding = one(check_ports, machine, VERBS)
    assert finding.status is Status.OK
    assert finding.found == (
        "mlx5_0:1: ACTIVE, LinkUp, InfiniBand, 400 Gb/sec (4X NDR), lid 31, firmware 28.39.1002, PCI 0000:03:00.0, NUMA node 1"
    )


def test_a_port_that_waits_for_a_subnet_manager_is_told_so(machine: Machine) -> None:
    with_device_file(machine).cnic("mlx5_0", f"{SWITCH}/02:00.0/03:00.0", state="2: INIT")
    machine.write("/sys/class/infiniband/mlx5_0/ports/1/phys_state", "5: LinkUp")
    skipped, useless = see(check_ports, machine, VERBS)
    assert skipped.status is Status.SKIP and "opensm" in skipped.remedy
    assert useless.status is Status.FAIL and useless.found.startswith("none of 1 ports can be used")


def test_a_port_that_is_named_and_down_is_a_failure_one_that_is_left_out_is_not(machine: Machine) -> None:
    with_device_file(machine).cnic("mlx5_0", f"{SWITCH}/02:00.0/03:00.0", state="1: DOWN")
    machine.cnic("mlx5_1", f"{SWITCH}/02:00.0/03:00.1")
    assert statuses(see(check_ports, machine, Wanted(transport="verbs", devices=("mlx5_0:1", "mlx5_1")))) == "fail ok"
    assert statuses(see(check_ports, machine, Wanted(transport="verbs", exclude=("mlx5_0",)))) == "skip ok"


def test_a_device_that_only_the_config_knows_is_a_failure_that_names_the_others(machine: Machine) -> None:
    with_device_file(machine).cnic("mlx5_0", f"{SWITCH}/02:00.0/03:00.0")
    found = see(check_ports, machine, Wanted(transport="verbs", devices=("mlx5_7", "mlx5_0")))
    assert statuses(found) == "ok fail" and found[1].remedy == "name one of mlx5_0, mlx5_0:1"


@pytest.mark.parametrize(
    ("mtu", "status", "packet_bytes"), [(4200, "ok", 4096), (9000, "ok", 4096), (1500, "warn", 1024)]
)
def test_the_mtu_of_the_interface_bounds_rdma_packets(
    machine: Machine, mtu: int, status: str, packet_bytes: int
) -> None:
    with_device_file(machine).cnic("rxe0", netdev="veth0", gids=(LINK_LOCAL, ROUTED))
    machine.netdev("veth0", mtu=mtu)
    finding = one(check_ports, machine)
    assert finding.status.value == status and f"RDMA packets of {packet_bytes} bytes" in finding.found


def test_an_interface_that_is_down_is_a_failure(machine: Machine) -> None:
    with_device_file(machine).cnic("mlx5_0", f"{SWITCH}/02:00.0/03:00.0", netdev="eth2")
    machine.netdev("eth2", mtu=9000, state="down")
    assert one(check_ports, machine).remedy == "ip link set dev eth2 up"


def test_a_narrow_slot_is_told_with_both_numbers(machine: Machine) -> None:
    with_device_file(machine).cnic("mlx5_0", f"{SWITCH}/02:00.0/03:00.0")
    for name, text in (("current_link_width", "8"), ("max_link_width", "16")):
        machine.write(f"/sys/bus/pci/devices/0000:03:00.0/{name}", text)
    finding = one(check_ports, machine)
    assert finding.status is Status.WARN and "link width 8 of 16" in finding.found


def test_a_card_without_its_driver_and_a_container_without_the_files_are_told_apart(machine: Machine) -> None:
    machine.pci(f"{SWITCH}/02:00.0/03:00.0", vendor="0x15b3", kind="0x020000")
    assert "0000:03:00.0 has no RDMA device" in see(check_ports, machine)[0].found
    machine.cnic("mlx5_1", f"{SWITCH}/02:01.0/04:00.0")
    assert see(check_ports, machine)[-1].remedy.startswith("modprobe ib_uverbs; in a container: --device")


def test_rdma_core_is_known_by_the_name_of_its_library(machine: Machine) -> None:
    machine.write("/usr/lib/x86_64-linux-gnu/libibverbs.so.1.14.44.0", "")
    machine.link("/usr/lib/x86_64-linux-gnu/libibverbs.so.1", "/usr/lib/x86_64-linux-gnu/libibverbs.so.1.14.44.0")
    assert rdma._rdma_core(machine.tree) == "rdma-core 44.0"
    assert rdma._rdma_core(Machine(machine.root / "other").tree) == "no libibverbs on this machine"


# addresses and lanes


def test_the_address_that_would_be_taken_is_told_and_why(machine: Machine) -> None:
    machine.cnic("rxe0", netdev="veth0", gids=(LINK_LOCAL, ROUTED))
    finding = one(check_gids, machine)
    assert finding.status is Status.OK
    assert finding.found == "rxe0:1: GID 1 of 2: ::ffff:10.77.0.1, RoCE v2, veth0"


def test_a_bond_with_nothing_but_a_link_local_address_is_a_warning(machine: Machine) -> None:
    machine.cnic("mlx5_bond_0", f"{SWITCH}/02:00.0/03:00.0", netdev="bond0", gids=(LINK_LOCAL,))
    finding = one(check_gids, machine)
    assert finding.status is Status.WARN and "give bond0 an address" in finding.remedy


def test_roce_v1_has_no_lane_to_ride_on(machine: Machine) -> None:
    machine.cnic("mlx5_0", f"{SWITCH}/02:00.0/03:00.0", netdev="eth2", gids=((ROUTED[0], "IB/RoCE v1"),))
    finding = one(check_gids, machine)
    assert finding.status is Status.WARN and "without a traffic class" in finding.found
    assert "KV needs RoCE v2" in finding.remedy


def test_roce_v1_by_hand_is_told_where_v2_is_there(machine: Machine) -> None:
    gids = ((ROUTED[0], "IB/RoCE v1"), ROUTED)
    machine.cnic("mlx5_0", f"{SWITCH}/02:00.0/03:00.0", netdev="eth2", gids=gids)
    assert one(check_gids, machine).status is Status.OK
    finding = one(check_gids, machine, Wanted(gid_index=0))
    assert finding.status is Status.WARN and "gid_index to a row of RoCE v2" in finding.remedy


def test_a_port_without_any_address_fails_who_needs_it(machine: Machine) -> None:
    machine.cnic("mlx5_0", f"{SWITCH}/02:00.0/03:00.0", netdev="eth2")
    assert one(check_gids, machine).status is Status.WARN
    assert one(check_gids, machine, VERBS).status is Status.FAIL


def test_a_traffic_class_forced_on_the_whole_device_defeats_the_lane(machine: Machine) -> None:
    machine.cnic("mlx5_0", f"{SWITCH}/02:00.0/03:00.0", netdev="eth2")
    assert one(check_override, machine).status is Status.OK
    path = "/sys/class/infiniband/mlx5_0/tc/1/traffic_class"
    machine.write(path, "Global tclass=106")
    finding = one(check_override, machine)
    assert finding.status is Status.FAIL and "traffic class 106 is forced" in finding.found and path in finding.remedy
    machine.write(path, "Global tclass=32")
    assert one(check_override, machine).status is Status.OK
    machine.write(path, "Global tclass=34")
    assert one(check_override, machine).status is Status.OK, "the two lowest bits are not the lane"
    machine.write(path, "Global tclass=32")
    both = Wanted(marks={"layers": Marks(2, 32), "prefetch": Marks(2, 64)})
    assert one(check_override, machine, both).status is Status.FAIL, "two classes were asked for, one is forced"


def test_a_traffic_class_forced_on_some_addresses_takes_kv_to_them_off_its_lane(machine: Machine) -> None:
    machine.cnic("mlx5_0", f"{SWITCH}/02:00.0/03:00.0", netdev="eth2")
    path = "/sys/class/infiniband/mlx5_0/tc/1/traffic_class"
    machine.write(path, "dst_ip=10.1.0.0/16,tclass=32\ndst_ip=10.0.0.0/8,tclass=106")
    finding = one(check_override, machine)
    assert finding.status is Status.FAIL and "by the rule dst_ip=10.0.0.0/8,tclass=106" in finding.found
    assert finding.remedy.startswith(f"echo dst_ip=10.0.0.0/8,tclass=-1 > {path}")


def test_a_default_of_rdma_cm_is_told_but_does_not_touch_our_own_connections(machine: Machine) -> None:
    machine.cnic("mlx5_0", f"{SWITCH}/02:00.0/03:00.0", netdev="eth2")
    machine.write("/sys/kernel/config/rdma_cm/mlx5_0/ports/1/default_roce_tos", 106)
    finding = one(check_override, machine)
    assert finding.status is Status.WARN and "rdma_cm gives connections traffic class 106" in finding.found


def sl2vl(machine: Machine, *lanes_by_level: int) -> None:
    machine.cnic("hfi1_0", f"{SWITCH}/02:00.0/03:00.0")
    for level, lane in enumerate(lanes_by_level):
        machine.write(f"/sys/class/infiniband/hfi1_0/ports/1/sl2vl/{level}", lane)


def test_a_service_level_with_a_virtual_lane_of_its_own_is_fine(machine: Machine) -> None:
    sl2vl(machine, 0, 1, 2, 3)
    assert one(check_sl2vl, machine, VERBS).found == "hfi1_0:1: SL 2 -> VL 2; SL 0 -> VL 0"


def test_a_fabric_without_quality_of_service_has_no_lane_for_kv(machine: Machine) -> None:
    sl2vl(machine, 0, 0, 0, 0)
    finding = one(check_sl2vl, machine, VERBS)
    assert finding.status is Status.FAIL and "no lane of its own" in finding.found


def test_a_table_that_nobody_shows_is_skipped_with_the_command(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lanes.shutil, "which", lambda name: None)
    machine.cnic("mlx5_0", f"{SWITCH}/02:00.0/03:00.0")
    finding = one(check_sl2vl, machine)
    assert finding.status is Status.SKIP and finding.remedy == "as root: smpquery -C mlx5_0 -P 1 -D sl2vl 0"


def test_the_table_of_smpquery_is_read() -> None:
    text = (
        "# SL2VL table: Lid 1\n"
        "#                 SL: | 0| 1| 2| 3| 4| 5| 6| 7| 8| 9|10|11|12|13|14|15|\n"
        "ports: in  0, out  0: | 0| 1| 2| 3| 0| 0| 0| 0| 0| 0| 0| 0| 0| 0| 0| 0|\n"
    )
    assert parse_sl2vl(text) == [0, 1, 2, 3] + [0] * 12
    assert parse_sl2vl("ibwarn: can't open UMAD port") == []


@pytest.mark.parametrize(
    ("kinds", "status"),
    [
        ({"mq", "fq_codel"}, "warn"),
        ({"noqueue"}, "warn"),
        (set(), "warn"),
        ({"pfifo_fast"}, "ok"),
        ({"mq", "pfifo_fast"}, "ok"),
        ({"tbf", "prio"}, "ok"),
    ],
)
def test_only_queueing_disciplines_with_bands_let_kv_yield(kinds: set[str], status: str) -> None:
    assert lanes._qdisc("eth0", kinds).status.value == status


# counters


def test_losses_are_told_with_what_they_mean(machine: Machine) -> None:
    machine.cnic("mlx5_0", f"{SWITCH}/02:00.0/03:00.0")
    home = "/sys/class/infiniband/mlx5_0/ports/1"
    machine.write(f"{home}/hw_counters/out_of_buffer", 7)
    machine.write(f"{home}/hw_counters/np_cnp_sent", 3)
    machine.write(f"{home}/counters/port_xmit_data", 10**12)
    finding = one(check_counters, machine)
    assert finding.status is Status.WARN and "out_of_buffer 7 (messages found no receive slot)" in finding.found
    machine.write(f"{home}/hw_counters/out_of_buffer", 0)
    assert one(check_counters, machine).status is Status.OK


def test_growth_alone_counts_while_it_is_watched(machine: Machine) -> None:
    machine.cnic("mlx5_0", f"{SWITCH}/02:00.0/03:00.0")
    machine.write("/sys/class/infiniband/mlx5_0/ports/1/hw_counters/out_of_buffer", 7)
    (finding,) = check_counters(Look(machine.tree, Wanted(), watch_s=0.01))
    assert finding.status is Status.OK and "in 0.01 s: 0 in all 1 counters" in finding.found


def test_pause_frames_are_those_of_the_interface_behind_the_port(machine: Machine) -> None:
    machine.cnic("rxe0", netdev="lo")
    assert one(check_pauses, machine).found == "lo: its driver counts no pause frames"


# GPUs


def test_each_gpu_is_told_its_cnic_and_how_far_it_is(machine: Machine) -> None:
    eight_pairs(machine)
    found = see(check_paths, machine)
    assert [finding.found for finding in found[:2]] == [
        "mlx5_0:1, PIX to GPU 0000:13:00.0",
        "mlx5_1:1, PIX to GPU 0000:23:00.0",
    ]
    assert statuses(found) == " ".join(["ok"] * 8)


def test_a_gpu_whose_cnic_is_behind_the_other_socket_is_a_warning(machine: Machine) -> None:
    machine.nodes("10 21", "21 10")
    machine.gpu("pci0000:00/00:01.0/01:00.0", numa=0)
    machine.cnic("mlx5_0", "pci0000:80/80:01.0/81:00.0", numa=1)
    finding = one(check_paths, machine)
    assert finding.status is Status.WARN and "crosses the CPU, and the other socket" in finding.found


def test_a_choice_by_hand_is_taken_and_a_wrong_one_is_a_failure(machine: Machine) -> None:
    eight_pairs(machine)
    by_hand = Wanted(transport="verbs", gpus={"0000:13:00.0": "mlx5_7", "0000:23:00.0": "mlx5_99"})
    found = see(check_paths, machine, by_hand)
    assert found[0].status is Status.WARN and "mlx5_7, by the config" in found[0].found and "SYS" in found[0].found
    assert found[1].status is Status.FAIL and "mlx5_99, none of the CNICs in use" in found[1].found


def test_a_choice_by_hand_must_name_one_port(machine: Machine) -> None:
    machine.gpu(f"{SWITCH}/02:00.0/03:00.0", numa=0)
    machine.cnic("mlx5_0", f"{SWITCH}/02:01.0/04:00.0", numa=0)
    machine.write("/sys/class/infiniband/mlx5_0/ports/2/state", "4: ACTIVE")
    finding = one(check_paths, machine, Wanted(transport="verbs", gpus={"0000:03:00.0": "mlx5_0"}))
    assert finding.status is Status.FAIL and "2 of the CNICs in use" in finding.found
    assert finding.remedy == "name one of mlx5_0:1, mlx5_0:2"


def test_of_two_cnics_equally_near_the_configs_first_is_taken_as_by_the_daemon(machine: Machine) -> None:
    machine.gpu(f"{SWITCH}/02:00.0/03:00.0", numa=0)
    for at in (1, 2):
        machine.cnic(f"mlx5_{at}", f"{SWITCH}/02:0{at}.0/0{3 + at}:00.0", numa=0)
    assert "mlx5_1:1" in one(check_paths, machine).found
    assert "mlx5_2:1" in one(check_paths, machine, Wanted(transport="verbs", devices=("mlx5_2:1", "mlx5_1"))).found


def acs(control: int) -> bytes:
    """A configuration space whose second extended capability is ACS."""
    space = bytearray(4096)
    space[0x100:0x104] = struct.pack("<I", 0x0001 | 1 << 16 | 0x150 << 20)
    space[0x150:0x154] = struct.pack("<I", 0x000D | 1 << 16)
    space[0x156:0x158] = struct.pack("<H", control)
    return bytes(space)


@pytest.mark.parametrize(
    ("config", "status", "words"),
    [
        (acs(0x1D), "warn", "ACS redirects peer traffic to the CPU at 0000:02:00.0, 0000:02:01.0"),
        (acs(0x01), "ok", "ACS redirects nothing at the 2 bridges"),
        (bytes(4096), "ok", "ACS redirects nothing"),
        (bytes(64), "skip", "the registers of 0000:02:00.0, 0000:02:01.0 can't be read"),
    ],
)
def test_acs_on_the_bridges_between_is_seen_by_root(machine: Machine, config: bytes, status: str, words: str) -> None:
    machine.gpu(f"{SWITCH}/02:00.0/03:00.0", numa=0)
    machine.cnic("mlx5_0", f"{SWITCH}/02:01.0/04:00.0", numa=0)
    for address in ("0000:02:00.0", "0000:02:01.0"):
        machine.write(f"/sys/bus/pci/devices/{address}/config", config)
    finding = one(check_acs, machine)
    assert finding.status.value == status and words in finding.found


def test_an_iommu_that_translates_is_told(machine: Machine) -> None:
    machine.cnic("mlx5_0", f"{SWITCH}/02:01.0/04:00.0", numa=0)
    assert one(check_iommu, machine).found == "no translation for 1 devices (no IOMMU)"
    machine.write("/sys/bus/pci/devices/0000:04:00.0/iommu_group/type", "DMA-FQ")
    assert one(check_iommu, machine).remedy == "boot with the kernel's parameter iommu=pt"


@pytest.mark.parametrize(
    ("release", "driver", "module", "status"),
    [
        ("6.1.0", "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  550.54.15", "", "ok"),
        ("6.1.0", "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15", "", "warn"),
        ("6.1.0", "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15", "nvidia_peermem", "ok"),
        ("5.4.0", "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  550.54.15", "", "warn"),
        ("6.1.0", "", "", "warn"),
    ],
)
def test_gpu_memory_is_reached_by_dmabuf_or_by_a_module(
    machine: Machine, release: str, driver: str, module: str, status: str
) -> None:
    machine.gpu(f"{SWITCH}/02:00.0/03:00.0")
    machine.write("/proc/sys/kernel/osrelease", release)
    machine.write("/proc/driver/nvidia/version", driver)
    if module:
        machine.write(f"/sys/module/{module}/version", "1")
    assert one(check_gpu_memory, machine).status.value == status


# limits
