"""The [transport.verbs] table: what is taken, what is refused, and that the refusal names the key."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

from kvmoverd import config
from kvmoverd.config_transport import TransportConfig
from kvmoverd.core.errors import ConfigError
from kvmoverd.core.pci import pci_address
from kvmoverd.core.qos import KV_LANE, KvClass, Marks

MINIMAL = """
node.name = "a"
pool.bytes = "1GiB"
[[storage]]
name = "disk"
path = "blocks"
[transport]
kind = "verbs"
"""


def parsed(text: str = "") -> TransportConfig:
    return config.parse(tomllib.loads(MINIMAL + text), Path("/etc/kvmoverd")).transport


def test_without_a_word_every_class_rides_on_the_kv_lane() -> None:
    found = parsed()
    assert (found.kind, found.local) == ("verbs", "shm")
    verbs = found.verbs
    assert verbs.marks == dict.fromkeys(KvClass, KV_LANE)
    assert (verbs.devices, verbs.exclude, verbs.gid_index) == ((), (), -1)
    assert (verbs.timeout, verbs.retry, verbs.fence_s, verbs.qps_max) == (14, 7, 1.0, 4096)


def test_a_class_overrides_the_lane_which_overrides_the_default() -> None:
    verbs = parsed("""
[transport.verbs]
devices = ["mlx5_0", "mlx5_1:2"]
exclude = ["mlx5_9"]
service_level = 3
traffic_class = 40
fence = "250ms"
[transport.verbs.classes.prefetch]
traffic_class = 4
flow_label = 7
[transport.verbs.gpus]
"3B:00.0" = "mlx5_0"
"00000000:5e:00.0" = "mlx5_1:2"
""").verbs
    assert verbs.marks[KvClass.LAYERS] == Marks(3, 40) and verbs.marks[KvClass.PREFETCH] == Marks(3, 4, 7)
    assert dict(verbs.gpus) == {"0000:3b:00.0": "mlx5_0", "0000:5e:00.0": "mlx5_1:2"}
    assert (verbs.devices, verbs.exclude, verbs.fence_s) == (("mlx5_0", "mlx5_1:2"), ("mlx5_9",), 0.25)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[transport.verbs]\nservice_level = 16", r"transport\.verbs\.service_level is 16, must be 0 to 15"),
        ("[transport.verbs]\ntraffic_class = 256", r"transport\.verbs\.traffic_class is 256, must be 0 to 255"),
        ("[transport.verbs]\ntraffic_class = 33", r"transport\.verbs\.traffic_class is 33: .*ECN.*DSCP 8 is 32"),
        ("[transport.verbs]\nflow_label = 1048576", r"transport\.verbs\.flow_label is 1,048,576"),
        ("[transport.verbs]\nretry = 8", r"transport\.verbs\.retry is 8"),
        ("[transport.verbs]\ntimeout = 0", r"transport\.verbs\.timeout is 0, must be 1 to 31"),
        ("[transport.verbs]\nqps_max = 0", r"transport\.verbs\.qps_max is 0"),
        ("[transport.verbs]\ngid_index = -2", r"transport\.verbs\.gid_index is -2"),
        ("[transport.verbs]\nfence = 1", r"transport\.verbs\.fence is an integer"),
        ("[transport.verbs]\ndevices = 'mlx5_0'", r"transport\.verbs\.devices is text"),
        (
            "[transport.verbs]\ndevices = ['mlx 5']",
            r"transport\.verbs\.devices\[0\] is 'mlx 5', must be an RDMA device",
        ),
        ("[transport.verbs]\ndevices = [5]", r"transport\.verbs\.devices\[0\] is an integer"),
        ("[transport.verbs]\ndevices = ['a', 'a']", r"transport\.verbs\.devices has an entry twice"),
        ("[transport.verbs]\ndevices = ['a']\nexclude = ['a']", r"transport\.verbs\.exclude names a, and so does"),
        ("[transport.verbs]\nlane = 1", r"transport\.verbs\.lane is unknown"),
        (
            "[transport.verbs.classes.laers]\nservice_level = 1",
            r"transport\.verbs\.classes\.laers is unknown; known here: assembly, layers, prefetch, write_back",
        ),
        (
            "[transport.verbs.classes.layers]\ntraffic_class = 3",
            r"transport\.verbs\.classes\.layers\.traffic_class is 3: ",
        ),
        ("[transport.verbs.gpus]\n'gpu0' = 'a'", r"transport\.verbs\.gpus\.gpu0: 'gpu0' is no PCI address"),
        ("[transport.verbs.gpus]\n'3b:00.0' = 7", r"transport\.verbs\.gpus\.3b:00\.0 is an integer"),
        ("[transport.verbs.gpus]\n'3b:00.0'='a'\n'0000:3b:00.0'='b'", "GPU 0000:3b:00.0 stands there twice"),
    ],
)
def test_what_the_fabric_can_not_do_is_refused_by_its_key(text: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        parsed(text)


def test_the_node_itself_goes_over_verbs_only_where_its_cnics_are_open() -> None:
    assert parsed('local = "verbs"').local == "verbs"
    values = tomllib.loads(MINIMAL + 'local = "verbs"')
    values["transport"]["kind"] = "tcp"
    with pytest.raises(ConfigError, match=r'transport\.local is "verbs" and transport\.kind is "tcp"'):
        config.parse(values, Path("/"))


def test_check_shows_the_marks_of_every_class() -> None:
    loaded = config.parse(tomllib.loads(MINIMAL + "[transport.verbs]\nservice_level = 1"), Path("/"))
    found = json.loads(json.dumps(loaded.describe()))["transport"]["verbs"]
    assert found["classes"]["write_back"] == {"service_level": 1, "traffic_class": 32, "flow_label": 0}
    assert (found["fence"], found["devices"], found["gpus"]) == ("1s", [], {})


@pytest.mark.parametrize(
    "text", ["", "3b:0.0", "3b:00.8", "3b:00:00", "g000:3b:00.0", "123456789:3b:00.0", "003:3b:00.0"]
)
def test_what_is_no_pci_address_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="no PCI address"):
        pci_address(text)
