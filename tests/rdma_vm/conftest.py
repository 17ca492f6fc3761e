"""One VM for all tests here: what its parts left is theirs to look at."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.rdma_vm import image, inside, vm

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[1]
PARTS_LIMIT_S = 1500.0
"""With two boots that hang, and the grace, 1640 s in all."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == HERE:
            item.add_marker(pytest.mark.rdma)


@dataclass(frozen=True, slots=True)
class Results:
    """What a run left in `folder`."""

    folder: Path
    code: int

    def output(self, part: str) -> str:
        """All that a part said, which succeeded. Fails the test otherwise, with its last words."""
        told = self.folder / f"{part}.json"
        late = (
            f": all parts have {PARTS_LIMIT_S:g} s, too few on a machine that is busy"
            if self.code == vm.TIME_LIMIT
            else ""
        )
        assert told.exists(), f"{part} has not ended, the VM ended with {self.code}{late}\n{self._said(part)[-4000:]}"
        ended = inside.Ended(**json.loads(told.read_text()))
        said = self._said(part)
        assert ended.code == 0, f"{part} ended with {ended.code} after {ended.seconds:g} s\n{said[-8000:]}"
        print(f"{part}: {ended.seconds:g} s of {ended.limit_s:g} s at most")
        return said

    def _said(self, part: str) -> str:
        path = self.folder / f"{part}.out"
        return path.read_text(errors="replace") if path.exists() else ""


@pytest.fixture(scope="session")
def results() -> Iterator[Results]:
    """All parts, run in one VM. Skips the test where none can be had; a VM that fails is a failure."""
    try:
        made = image.ready()
    except image.NoImage as why:
        pytest.skip(f"needs a VM with Soft-RoCE: {why}")
    with tempfile.TemporaryDirectory(prefix="rdma_vm-results.") as name:
        yield _run(made, Path(name))


def _run(made: image.Image, folder: Path) -> Results:
    command = [sys.executable, "-m", "tests.rdma_vm.inside", str(folder)]
    order = vm.Order(command, REPOSITORY, PARTS_LIMIT_S, writable=[folder], cpus=2, environment=_environment())
    began_s = time.monotonic()
    code = vm.run(made, order, sys.stderr.buffer.write)
    print(f"the VM took {time.monotonic() - began_s:.0f} s")
    return Results(folder, code)


def _environment() -> dict[str, str]:
    return {"PYTHONPATH": ":".join(str(REPOSITORY / name) for name in (".", "proto", "client"))}
