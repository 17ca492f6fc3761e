"""python -m tests.rdma_vm build | run [options] -- COMMAND: real RDMA verbs for one command, on any x86-64 machine."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tests.rdma_vm import image, vm


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.rdma_vm", description=__doc__)
    commands = parser.add_subparsers(dest="what", required=True)
    commands.add_parser("build", help="install what is missing and make the image, if there is none")
    run = commands.add_parser("run", help="run a command in a VM; its exit code, 124 past the limit, 125 without a VM")
    run.add_argument("-t", dest="limit_s", type=float, default=300.0, help="limit for the command in seconds (300)")
    run.add_argument(
        "-w", dest="writable", type=_folder, action="append", default=[], help="folder that it may write to"
    )
    run.add_argument("-C", dest="folder", type=Path, default=Path.cwd(), help="folder that it begins in (this one)")
    run.add_argument("-s", dest="cpus", type=int, default=1, help="processors (1: the cheapest on a busy machine)")
    run.add_argument("-m", dest="memory_mib", type=int, default=2048, help="memory in MiB (2048)")
    run.add_argument("-c", dest="console", type=Path, help="file for what the kernel's console said")
    run.add_argument("command", nargs=argparse.REMAINDER, help="-- and the command")
    return parser.parse_args()


def _folder(text: str) -> Path:
    if not Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"{text} is no folder: make it first")
    return Path(text)


def _echo(output: bytes) -> None:
    sys.stdout.buffer.write(output)
    sys.stdout.buffer.flush()


def main() -> int:
    given = _arguments()
    try:
        made = image.ready()
        if given.what == "build":
            print(made.kernel.parent)
            return 0
        command = given.command[1:] if given.command[:1] == ["--"] else given.command
        names = ("folder", "limit_s", "writable", "cpus", "memory_mib", "console")
        return vm.run(made, vm.Order(command, **{name: getattr(given, name) for name in names}), _echo)
    except (image.NoImage, vm.VmFailed) as error:
        print(f"rdma_vm: {error}", file=sys.stderr)
        return 125


if __name__ == "__main__":
    sys.exit(main())
