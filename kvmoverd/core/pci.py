"""Names of PCI devices."""

from __future__ import annotations

import re

_FORM = re.compile(r"(?:([0-9a-f]{4,8}):)?([0-9a-f]{2}:[0-9a-f]{2}\.[0-7])")


def pci_address(text: str) -> str:
    """As sysfs writes it. Tools leave the domain out, or give it eight digits; raises `ValueError` for all else.

    >>> pci_address("00000000:3B:00.0"), pci_address("3b:00.0"), pci_address("10000:e1:00.0")
    ('0000:3b:00.0', '0000:3b:00.0', '10000:e1:00.0')
    """
    match = _FORM.fullmatch(text.lower())
    if match is None:
        raise ValueError(f'{text[:64]!r} is no PCI address: "DOMAIN:BUS:DEVICE.FUNCTION", e.g. "0000:3b:00.0"')
    return f"{int(match[1] or '0', 16):04x}:{match[2]}"
