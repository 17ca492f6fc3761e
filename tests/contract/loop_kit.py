"""Small filesystems of their own on a file as block device: of few bytes or inodes, of 4 KiB sectors, turned read-only."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from markers import skip_no_loop, skip_no_mount

_TRIES = 3
"""Another process may take the free device between finding and setting it up."""


@contextlib.contextmanager
def loop_device(image: Path, size_bytes: int, *, sector_bytes: int = 512) -> Iterator[str]:
    """The name of a block device over a new sparse file. Skips the test where none can be had."""
    missing = [tool for tool in ("losetup", "mkfs.ext4", "mount") if not shutil.which(tool)]
    if os.geteuid() or missing:
        pytest.skip(skip_no_loop(f"there is no {missing[0]}" if missing else "this is not root"))
    with image.open("wb") as file:
        file.truncate(size_bytes)
    for _ in range(_TRIES):
        made = _run("losetup", "--find", "--show", "--sector-size", str(sector_bytes), str(image))
        if not made.returncode:
            break
    else:
        pytest.skip(skip_no_loop(made.stderr.partition("\n")[0]))
    device = made.stdout.strip()
    try:
        yield device
    finally:
        _run("losetup", "--detach", device)
        image.unlink()


@contextlib.contextmanager
def loop_filesystem(
    place: Path, size_bytes: int, *, sector_bytes: int = 512, inodes: int = 0, options: str = "rw"
) -> Iterator[Path]:
    """An ext4 mounted at `place`, which is made; `inodes` 0: as many as mkfs likes. Whatever was open in it is gone after."""
    place.mkdir(parents=True, exist_ok=True)
    with loop_device(place.with_suffix(".image"), size_bytes, sector_bytes=sector_bytes) as device:
        few = ("-N", str(inodes)) if inodes else ()
        made = _run("mkfs.ext4", "-q", "-F", "-m", "0", "-E", "lazy_itable_init=0", *few, device)
        assert not made.returncode, made.stderr
        mounted = _run("mount", "-o", options, device, str(place))
        if mounted.returncode:
            pytest.skip(skip_no_mount(mounted.stderr.partition("\n")[0]))
        try:
            yield place
        finally:
            unmount(place)


def unmount(place: Path) -> None:
    """Unmounts; what is still open keeps the device until it is closed."""
    if _run("umount", str(place)).returncode:
        _run("umount", "--lazy", str(place))


def turn_read_only(place: Path) -> None:
    """What the kernel does to an ext4 whose device fails: read-only at once, whatever is open for writing."""
    made = _run("mount", "-o", "remount,abort", str(place))
    assert not made.returncode, made.stderr


def fill(path: Path) -> int:
    """Takes all room of the filesystem of `path`; gives the bytes taken."""
    chunk = bytes(1 << 20)
    with path.open("ab", buffering=0) as file:
        while chunk:
            try:
                file.write(chunk)
            except OSError:
                chunk = chunk[: len(chunk) // 2]
        os.fsync(file.fileno())
    return path.stat().st_size


def fill_inodes(directory: Path, *, leave: int = 0) -> int:
    """Makes empty files until so few inodes are left; gives how many."""
    made = 0
    with contextlib.suppress(OSError):
        while os.statvfs(directory).f_favail > leave:
            (directory / f"empty.{made}").touch()
            made += 1
    return made


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
