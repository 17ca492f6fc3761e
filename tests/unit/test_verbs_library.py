"""How pyverbs is found, and what is said where it isn't."""

from __future__ import annotations

import importlib
import importlib.machinery
import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvmoverd.adapters.transport.verbs import library
from kvmoverd.core.errors import TransportRefused

PARTS = ("pd", "mr", "cq", "qp", "addr", "wr")


def _drop() -> dict[str, object]:
    names = [name for name in sys.modules if name == "pyverbs" or name.startswith("pyverbs.")]
    return {name: sys.modules.pop(name) for name in names}


@pytest.fixture(autouse=True)
def no_pyverbs() -> Iterator[None]:
    """What this process had loaded comes back afterwards: an extension module is loaded once."""
    kept = _drop()
    yield
    _drop()
    sys.modules.update(kept)  # type: ignore[arg-type]
    importlib.invalidate_caches()


@pytest.fixture(autouse=True)
def not_on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if not (Path(entry) / "pyverbs").is_dir()])


def write_package(directory: Path, *, enums: str, device: str = "") -> Path:
    package = directory / "pyverbs"
    package.mkdir(parents=True)
    for name in ("__init__", *PARTS):
        (package / f"{name}.py").write_text("")
    (package / "device.py").write_text(device)
    (package / f"{enums}.py").write_text("IBV_QPT_RC = 2\n")
    (package / "pyverbs_error.py").write_text("class PyverbsError(Exception):\n    pass\n")
    return package


@pytest.mark.parametrize("enums", ["enums", "libibverbs_enums"])
def test_either_generation_is_taken_as_the_interpreter_finds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, enums: str
) -> None:
    package = write_package(tmp_path, enums=enums)
    monkeypatch.syspath_prepend(str(tmp_path))
    found = library.load_from([])
    assert found.enums.IBV_QPT_RC == 2
    assert found.words.startswith("pyverbs beside rdma-core")
    assert found.words.endswith(str(package))


def test_what_it_does_to_the_root_logger_is_undone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_package(tmp_path, enums="enums", device="import logging\nlogging.basicConfig(level=10, force=True)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    library.load_from([])
    assert (root.handlers, root.level) == (handlers, level)


def test_where_it_is_not_installed_the_packages_are_named(tmp_path: Path) -> None:
    with pytest.raises(TransportRefused, match=rf"not installed.*{tmp_path}.*apt-get install python3-pyverbs"):
        library.load_from([tmp_path])


def test_one_for_another_python_is_named_and_not_loaded(tmp_path: Path) -> None:
    package = tmp_path / "pyverbs"
    package.mkdir()
    other = package / "device.cpython-399-x86_64-linux-gnu.so"
    other.write_bytes(b"")
    with pytest.raises(TransportRefused, match=rf"another Python: {other}"):
        library.load_from([tmp_path])
    assert "pyverbs" not in sys.modules


def test_one_that_does_not_load_is_refused_with_the_reason_and_leaves_nothing(tmp_path: Path) -> None:
    """As PyPI's does beside an older rdma-core."""
    package = write_package(tmp_path, enums="enums")
    (package / "device.py").unlink()
    (package / f"device{importlib.machinery.EXTENSION_SUFFIXES[0]}").write_bytes(b"not ELF")
    with pytest.raises(TransportRefused, match=r"pyverbs doesn't load: .*device.*apt-get install"):
        library.load_from([tmp_path])
    assert not [name for name in sys.modules if name.startswith("pyverbs")]


def test_only_the_package_is_taken_from_the_systems_directory(tmp_path: Path) -> None:
    package = write_package(tmp_path, enums="enums", device="")
    (package / f"device{importlib.machinery.EXTENSION_SUFFIXES[0]}").write_bytes(b"")
    (tmp_path / "beside_pyverbs.py").write_text("")
    with pytest.raises(TransportRefused):
        library.load_from([tmp_path])
    assert str(tmp_path) not in sys.path
    assert importlib.util.find_spec("beside_pyverbs") is None


def test_the_number_of_an_error_is_found_under_both_names() -> None:
    class Old(Exception):
        _error_code = 14

    class New(Exception):
        error_code = 12

    class Without(Exception):
        error_code = -1

    assert [library.errno_of(each()) for each in (Old, New, Without, ValueError)] == [14, 12, 0, 0]
