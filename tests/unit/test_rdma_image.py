"""The VM's image is made by one process at a time."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from tests.rdma_vm import image


def test_who_waits_for_another_builder_goes_on_after_it_and_gives_up_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = tmp_path / "lock"
    done = threading.Event()

    def build() -> None:
        with image._alone(lock):
            done.set()

    waiting = threading.Thread(target=build)
    monkeypatch.setattr(image, "LOCK_S", 0.2)
    with image._alone(lock), pytest.raises(image.NoImage, match=r"more than 0\.2 s"), image._alone(lock):
        pytest.fail("two builders at once")
    monkeypatch.setattr(image, "LOCK_S", 30.0)
    with image._alone(lock):
        waiting.start()
        assert not done.wait(0.2), "it is held"
    assert done.wait(10.0)
    waiting.join(10.0)
