"""A real daemon whose storage gets slow when it is told to: `slow_daemon.py CONFIG`; after SIGUSR1 it has a tenth of its rate.

SIGUSR2: it stands still; once more: it goes on.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Any

from kvmoverd import devices_storage, serve
from kvmoverd.adapters.storage.throttled import ThrottledStorage
from kvmoverd.config import load

SLOWER = 10
STILL = 1
"""Bytes a second."""


class SlowableStorage(ThrottledStorage):
    """`Storage` at a rate that may change; `made` are all of this process."""

    made: list[ThrottledStorage] = []  # noqa: RUF012 - as many as the process has roots

    rates: dict[int, int] = {}  # noqa: RUF012
    """What each had before, or stands still at."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.made.append(self)


def slow_down(*_: object) -> None:
    for storage in SlowableStorage.made:
        storage._rate = max(1, storage._rate // SLOWER)


def stand_still_or_go_on(*_: object) -> None:
    for storage in SlowableStorage.made:
        storage._rate, SlowableStorage.rates[id(storage)] = SlowableStorage.rates.get(id(storage), STILL), storage._rate
        storage._hand_on(storage._clock_s())


def main() -> int:
    devices_storage.ThrottledStorage = SlowableStorage  # type: ignore[misc]
    signal.signal(signal.SIGUSR1, slow_down)
    signal.signal(signal.SIGUSR2, stand_still_or_go_on)
    return serve.run(load(Path(sys.argv[1])))


if __name__ == "__main__":
    sys.exit(main())
