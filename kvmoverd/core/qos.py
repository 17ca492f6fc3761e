"""Classes of KV traffic, and how a fabric is told of them. KV is low priority everywhere; among itself it has four classes."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from kvmoverd.core.errors import ConfigError

SERVICE_LEVEL_MAX = 15
TRAFFIC_CLASS_MAX = 255
FLOW_LABEL_MAX = (1 << 20) - 1
ECN_BITS = 3


class KvClass(enum.Enum):
    """What a transfer is for, most urgent first. The values are names of the config file and of the protocol."""

    LAYERS = "layers"
    """Layers and pages that an engine waits for."""
    ASSEMBLY = "assembly"
    """Computed layers on their way to the decode node."""
    WRITE_BACK = "write_back"
    """Blocks on their way to storage."""
    PREFETCH = "prefetch"
    """Blocks that a next turn will want."""


@dataclass(frozen=True, slots=True)
class Marks:
    """What packets of a class carry: InfiniBand's service level, and in the global route header traffic class and flow label.

    The traffic class is DSCP << 2; its two lowest bits are the fabric's own (ECN) and must be 0. Raises `ConfigError`.
    """

    service_level: int
    traffic_class: int
    flow_label: int = 0

    def __post_init__(self) -> None:
        for name, value, most in (
            ("service_level", self.service_level, SERVICE_LEVEL_MAX),
            ("traffic_class", self.traffic_class, TRAFFIC_CLASS_MAX),
            ("flow_label", self.flow_label, FLOW_LABEL_MAX),
        ):
            if not 0 <= value <= most:
                raise ConfigError(f"{name} is {value}, must be 0 to {most}")
        if self.traffic_class & ECN_BITS:
            raise ConfigError(
                f"traffic_class is {self.traffic_class}: its two lowest bits are ECN's; DSCP {self.traffic_class >> 2} is "
                f"{self.traffic_class & ~ECN_BITS}"
            )

    @property
    def dscp(self) -> int:
        return self.traffic_class >> 2

    @property
    def text(self) -> str:
        """
        >>> Marks(2, 32).text
        'SL 2, traffic class 32 (DSCP 8)'
        """
        label = f", flow label {self.flow_label}" if self.flow_label else ""
        return f"SL {self.service_level}, traffic class {self.traffic_class} (DSCP {self.dscp}){label}"


KV_LANE = Marks(service_level=2, traffic_class=0x20)
"""The KV lane of `config/fabric/`: SL 2 is mapped to VL 2, the only one without a weight in the high table; DSCP 8 (CS1)."""
