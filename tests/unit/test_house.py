"""What holds for the whole tree: sizes, words, the protocol and its twins in the core, examples that are true.

The counts here are ratchets: they may be lowered, never raised.
"""

from __future__ import annotations

import ast
import doctest
import enum
import functools
import importlib
import itertools
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from kvmover_proto import common_pb2
from kvmoverd import __version__
from kvmoverd.core.drops import Drop
from kvmoverd.core.status import BlockState, Reason
from kvmoverd.core.status import Path as ReadPath

ROOT = Path(__file__).resolve().parents[2]
PROTOS = sorted((ROOT / "proto" / "kvmover" / "v1").glob("*.proto"))
FILE_LINES_MAX = 400
FUNCTION_LINES_MAX = 70
LONG_FUNCTION_LINES = 40
LONG_FUNCTIONS_MAX = 0
GENERATED = ROOT / "proto" / "kvmover_proto"
PACKAGES = {"kvmoverd": ROOT, "kvmover_client": ROOT / "client"}

# Written in pieces, so that this file does not hold what it looks for.
FORBIDDEN = {
    "a path of one machine": re.compile("/" + "work/|/tmp/" + r"w/|(?<![\w./-])" + "shared" + "/"),
    "work left undone": re.compile(r"\b(" + "TO" + "DO|FIX" + "ME|XX" + r"X|HA" + r"CK)\b"),
    "a registry's host": re.compile("(py" + r"pi|pythonhosted|debian)\.org"),
}


def sources() -> list[Path]:
    return [path for package, home in PACKAGES.items() for path in sorted((home / package).rglob("*.py"))]


@functools.cache
def parsed() -> tuple[dict[str, int], list[str]]:
    """Lines of each function; modules that do not say what they are."""
    functions, bare = {}, []
    for path in sources():
        tree, name = ast.parse(path.read_text()), path.relative_to(ROOT)
        bare += [] if ast.get_docstring(tree) else [str(name)]
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno is not None
                functions[f"{name}:{node.lineno} {node.name}"] = node.end_lineno - node.lineno + 1
    return functions, bare


def tracked() -> list[Path]:
    """Files of the repository that are text, or those on disk where there is no git."""
    try:
        done = subprocess.run(["git", "-C", str(ROOT), "ls-files", "-z"], capture_output=True, check=True, timeout=30)
        names = done.stdout.decode().split("\0")[:-1]
    except (OSError, subprocess.CalledProcessError):
        names = [str(path.relative_to(ROOT)) for path in sources()]
    paths = [ROOT / name for name in names]
    return [path for path in paths if path.is_file() and b"\0" not in path.read_bytes()[:4096]]


def test_the_generated_code_is_that_of_the_protos() -> None:
    command = [sys.executable, str(ROOT / "proto" / "generate.py"), "--check"]
    # protoc looks for its plugins on the path; they lie beside the interpreter, whether its environment is active or not.
    environ = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False, env=environ)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("ours", "theirs", "names"),
    [
        (Reason, common_pb2.Reason, "{}"),
        (BlockState, common_pb2.BlockState, "{}"),
        (ReadPath, common_pb2.Path, "PATH_{}"),
    ],
)
def test_enums_of_the_core_are_those_of_the_protocol(ours: type[enum.Enum], theirs: object, names: str) -> None:
    # Values of an enum share one scope in protobuf: MISS is taken by Reason there.
    renamed = {"BlockState.MISS": "BLOCK_MISS"}
    mine = {renamed.get(str(member), names.format(member.name)): member.value for member in ours}
    assert mine == {name: number for name, number in theirs.items() if number}  # type: ignore[attr-defined]


def bare_fields(text: str) -> list[str]:
    """Fields of plain types that neither they nor their message say a word about."""
    found, message, said, message_said = [], "", False, False
    for line in text.splitlines():
        stripped = line.strip()
        if match := re.match(r"message (\w+)", stripped):
            message, message_said = match[1], said
        field = re.match(r"(?:repeated |optional )?(\w+|map<.*>) (\w+) = \d+;(.*)", stripped)
        if field and field[1][0].islower() and not (said or message_said or "//" in field[3]):
            found.append(f"{message}.{field[2]}")
        said = stripped.startswith("//")
    return found


def test_every_field_of_the_protocol_is_explained() -> None:
    bare = [f"{path.name}: {name}" for path in PROTOS for name in bare_fields(path.read_text())]
    assert not bare, "\n".join(bare)


def test_every_call_of_the_protocol_is_explained() -> None:
    bare = []
    for path in PROTOS:
        lines = path.read_text().splitlines()
        bare += [line for before, line in itertools.pairwise(lines) if "  rpc " in line and "//" not in before]
    assert not bare


def test_no_two_modules_of_tests_have_one_name() -> None:
    """pytest imports them by their plain names: the second one of a name ends the whole run."""
    names = Counter(path.name for path in (ROOT / "tests").rglob("*.py"))
    assert not {
        name for name, count in names.items() if count > 1 and name not in ("__init__.py", "__main__.py", "conftest.py")
    }


def test_no_file_is_long() -> None:
    lines = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in sources()}
    assert not {name: count for name, count in lines.items() if count > FILE_LINES_MAX}


def test_no_function_is_long() -> None:
    sizes, _ = parsed()
    assert not {name: lines for name, lines in sizes.items() if lines > FUNCTION_LINES_MAX}
    longish = {name: lines for name, lines in sizes.items() if lines > LONG_FUNCTION_LINES}
    assert len(longish) <= LONG_FUNCTIONS_MAX, longish


def test_every_module_says_what_it_is() -> None:
    _, bare = parsed()
    assert not bare


def test_nothing_forbidden_is_written_anywhere() -> None:
    found = []
    for path in tracked():
        if path.is_relative_to(GENERATED) or "traces" in path.parts:
            continue
        text = path.read_text(errors="replace")
        for what, pattern in FORBIDDEN.items():
            found += [f"{path.relative_to(ROOT)}: {what}: {match[0]}" for match in pattern.finditer(text)]
    assert not found, "\n".join(found)


def test_every_example_in_a_docstring_is_true() -> None:
    tried = 0
    for package, home in PACKAGES.items():
        for path in sorted((home / package).rglob("*.py")):
            if ">>> " not in path.read_text():
                continue
            module = importlib.import_module(".".join(path.relative_to(home).with_suffix("").parts))
            result = doctest.testmod(module)
            assert result.failed == 0, module.__name__
            tried += result.attempted
    assert tried >= 10


def test_the_licence_and_the_changelog_are_there() -> None:
    licence = (ROOT / "LICENSE").read_text()
    assert "Apache License" in licence
    assert licence.rstrip().endswith("limitations under the License.")
    assert f"## [{__version__}]" in (ROOT / "CHANGELOG.md").read_text()


def test_whatever_a_dropped_block_is_counted_by_is_explained() -> None:
    text = (ROOT / "docs" / "write_back.md").read_text()
    assert [drop.value for drop in Drop if f"`{drop.value}`" not in text] == []
