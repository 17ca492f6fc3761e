"""Generates `kvmover_proto` from the `.proto` files; with `--check`, says whether what is checked in matches.

The `.proto` files live under their package path (`kvmover/v1/...`), the Python package is `kvmover_proto`: only the import
lines differ, and are rewritten here.
"""

from __future__ import annotations

import argparse
import filecmp
import re
import sys
import tempfile
from pathlib import Path

from grpc_tools import protoc

HERE = Path(__file__).resolve().parent
PACKAGE = HERE / "kvmover_proto"
SOURCES = sorted((HERE / "kvmover" / "v1").glob("*.proto"))
SUFFIXES = ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py", "_pb2_grpc.pyi")


def generate(target: Path) -> list[Path]:
    """Writes the generated modules into `target` and returns them."""
    with tempfile.TemporaryDirectory() as raw:
        options = [
            f"--{kind}{raw}" for kind in ("python_out=", "mypy_out=quiet:", "grpc_python_out=", "mypy_grpc_out=quiet:")
        ]
        names = [str(source.relative_to(HERE)) for source in SOURCES]
        status = protoc.main(["protoc", f"-I{HERE}", *options, *names])
        if status:
            raise SystemExit(status)
        made = [path for path in sorted(Path(raw, "kvmover", "v1").iterdir()) if path.name.endswith(SUFFIXES)]
        return [_rewritten(path, target) for path in made if not _empty_service(path)]


def _empty_service(path: Path) -> bool:
    source = HERE / "kvmover" / "v1" / (path.name.split("_pb2")[0] + ".proto")
    return "_grpc.py" in path.name and not re.search(r"^service ", source.read_text(), re.M)


def _rewritten(path: Path, target: Path) -> Path:
    text = path.read_text()
    text = re.sub(r"^from kvmover\.v1 import (\w+)", r"from kvmover_proto import \1", text, flags=re.M)
    text = re.sub(r"^import kvmover\.v1\.(\w+)", r"import kvmover_proto.\1", text, flags=re.M)
    text = re.sub(r"\bkvmover\.v1\.(\w+_pb2)\b", r"kvmover_proto.\1", text)
    written = target / path.name
    written.write_text(text)
    return written


def check() -> int:
    with tempfile.TemporaryDirectory() as fresh:
        made = generate(Path(fresh))
        stale = [path.name for path in made if not _same(path, PACKAGE / path.name)]
        known = {path.name for path in made}
        left = [path.name for path in PACKAGE.iterdir() if path.name.endswith(SUFFIXES) and path.name not in known]
    for name in stale + left:
        print(f"kvmover_proto/{name} does not match the .proto files; run: python proto/generate.py")
    return 1 if stale or left else 0


def _same(fresh: Path, checked_in: Path) -> bool:
    return checked_in.exists() and filecmp.cmp(fresh, checked_in, shallow=False)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="exit 1 when the checked-in code is stale; write nothing")
    if parser.parse_args().check:
        return check()
    for path in generate(PACKAGE):
        print(path.relative_to(HERE.parent))
    return 0


if __name__ == "__main__":
    sys.exit(main())
