"""Finds pyverbs, which belongs to the system's rdma-core and not to a virtual environment; says what it found, or how to get it.

pyverbs is bound to one version of libibverbs: the system's own is the supported one. The only module that imports it.
"""

from __future__ import annotations

import functools
import importlib
import importlib.machinery
import importlib.metadata
import importlib.util
import logging
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from kvmoverd.core.errors import TransportRefused

SYSTEM_DIRECTORIES = (
    Path("/usr/lib/python3/dist-packages"),
    Path(f"/usr/lib64/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"),
    Path(f"/usr/lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"),
)
REMEDY = "install it beside the system's rdma-core: apt-get install python3-pyverbs ibverbs-providers"


@dataclass(frozen=True, slots=True)
class Library:
    """The modules of pyverbs, whichever generation: the names of the enums moved between rdma-core 44 and 59."""

    device: ModuleType
    pd: ModuleType
    mr: ModuleType
    cq: ModuleType
    qp: ModuleType
    addr: ModuleType
    wr: ModuleType
    enums: ModuleType
    error: type[Exception]
    """What its calls raise when the device or the system refuses; `errno_of` has the number."""
    words: str
    """One line: version and directory."""


@functools.cache
def load() -> Library:
    """Imports pyverbs, once. Raises `TransportRefused` with the remedy."""
    return load_from(SYSTEM_DIRECTORIES)


def load_from(directories: Sequence[Path]) -> Library:
    """As the interpreter finds it, else from the first of `directories` that has one for this interpreter."""
    with _logging_left_alone():
        try:
            if importlib.util.find_spec("pyverbs") is None:
                _adopt(_package_in(directories))
            return _library()
        except (ImportError, AttributeError) as why:
            for name in [name for name in sys.modules if name == "pyverbs" or name.startswith("pyverbs.")]:
                del sys.modules[name]
            raise TransportRefused(f"pyverbs doesn't load: {why}; {REMEDY}") from why


def errno_of(refused: Exception) -> int:
    """What the system said, as an errno; 0 where pyverbs kept none."""
    code = getattr(refused, "error_code", 0) or getattr(refused, "_error_code", 0)
    return int(code) if isinstance(code, int) and code > 0 else 0


def _package_in(directories: Sequence[Path]) -> Path:
    """The package's directory. Only one that this interpreter can load; others are named in the refusal."""
    others = []
    for directory in directories:
        package = directory / "pyverbs"
        if any((package / f"device{suffix}").is_file() for suffix in importlib.machinery.EXTENSION_SUFFIXES):
            return package
        others += sorted(str(path) for path in package.glob("device.*.so"))
    wanted = importlib.machinery.EXTENSION_SUFFIXES[0]
    if others:
        raise TransportRefused(
            f"pyverbs is there for another Python: {', '.join(others)}; this one wants {wanted}. Run kvmoverd on the "
            f"system's own Python"
        )
    raise TransportRefused(
        f"pyverbs is not installed, neither for {sys.executable} nor in {', '.join(map(str, directories))}; {REMEDY}"
    )


def _adopt(package: Path) -> None:
    """That one package, never the rest of its directory: other versions of our own dependencies may lie beside it."""
    spec = importlib.util.spec_from_file_location(
        "pyverbs", package / "__init__.py", submodule_search_locations=[str(package)]
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["pyverbs"] = module
    spec.loader.exec_module(module)


def _library() -> Library:
    parts = {
        name: importlib.import_module(f"pyverbs.{name}") for name in ("device", "pd", "mr", "cq", "qp", "addr", "wr")
    }
    try:
        enums = importlib.import_module("pyverbs.libibverbs_enums")
    except ImportError:
        enums = importlib.import_module("pyverbs.enums")
    error: type[Exception] = importlib.import_module("pyverbs.pyverbs_error").PyverbsError
    where = Path(str(parts["device"].__file__)).parent
    return Library(**parts, enums=enums, error=error, words=f"pyverbs beside rdma-core {_version()} in {where}")


def _version() -> str:
    """rdma-core's own, which the name of the library that is loaded ends with: libibverbs.so.1.14.44.0 is 44.0."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        if found := re.search(r"/libibverbs\.so\.1\.\d+\.(\d+\.\d+)$", line):
            return found[1]
    try:
        return importlib.metadata.version("pyverbs")
    except importlib.metadata.PackageNotFoundError:
        return "of unknown version"


@contextmanager
def _logging_left_alone() -> Iterator[None]:
    """pyverbs sets the root logger up when it is imported; that is not its to do."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    try:
        yield
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
