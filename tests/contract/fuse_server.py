"""A FUSE filesystem with faults on demand: `fuse_server.py PLACE BACKING SOCKET_FD SETTINGS`; `fuse_kit` starts it.

One thread serves it all; what is delayed or held stands aside. It is told what to do in lines of JSON over a socket. It
unmounts and ends when that socket closes, or when its time is over: a hung mount never outlives its test for long.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fnmatch
import heapq
import itertools
import json
import os
import resource
import select
import socket
import sys
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

import fuse_wire as wire
from fuse_files import Files
from fuse_wire import Caching, Op, Request

MNT_FORCE, MNT_DETACH = 1, 2
MS_NOSUID, MS_NODEV = 2, 4
_LIBC = ctypes.CDLL(None, use_errno=True)


@dataclass(slots=True)
class Rule:
    """A fault: of requests named `op` ("*": all) about a path like `path`, the first `after` pass, then `times` suffer.

    `do`: "error" answers with `number`; "short" moves at most `number` bytes; "delay" answers `number` ms later; "hang"
    answers never, or when it is told to resume. `times` 0: all that come.
    """

    do: str
    op: str = "*"
    path: str = "*"
    number: int = 0
    after: int = 0
    times: int = 0
    seen: int = 0

    def takes(self, op: str, path: str) -> bool:
        """Counts the request, too."""
        if self.op not in ("*", op) or not fnmatch.fnmatchcase(path, self.path):
            return False
        self.seen += 1
        return self.seen > self.after and (not self.times or self.seen <= self.after + self.times)


class Server:
    """Serves one mount until it is told to end."""

    def __init__(self, place: str, backing: str, control: socket.socket, settings: dict[str, Any]) -> None:
        self.place = place
        self.control = control
        self.files = Files(backing, Caching(**settings["caching"]), volatile=settings["volatile"])
        self.locks = bool(settings["locks"])
        self.ends_s = time.monotonic() + settings["life_s"]
        self.rules: dict[int, Rule] = {}
        self.held: list[Request] = []
        self.late: list[tuple[float, int, Request]] = []
        self.counts: Counter[str] = Counter()
        self._numbers = itertools.count(1)
        self._buffer = memoryview(bytearray(wire.REQUEST_BYTES_MAX))
        self._lines = b""
        self._serving = True
        self.fd = os.open("/dev/fuse", os.O_RDWR | os.O_NONBLOCK)
        self._mount(settings["kind"])

    def serve(self) -> None:
        with select.epoll() as poll:
            poll.register(self.fd, select.EPOLLIN)
            poll.register(self.control, select.EPOLLIN)
            while self._serving and (left_s := self.ends_s - time.monotonic()) > 0:
                if self.late:
                    left_s = max(0.0, min(left_s, self.late[0][0] - time.monotonic()))
                ready = {fd for fd, _ in poll.poll(left_s)}
                while self.late and self.late[0][0] <= time.monotonic():
                    self._answer(heapq.heappop(self.late)[2])
                if self.control.fileno() in ready:
                    self._hear()
                if self.fd in ready:
                    self._take()

    def end(self) -> None:
        """Whoever waits for an answer gets an error; the mount goes."""
        os.close(self.fd)
        _LIBC.umount2(self.place.encode(), MNT_FORCE | MNT_DETACH)

    def _mount(self, kind: str) -> None:
        options = f"fd={self.fd},rootmode=40000,user_id=0,group_id=0,allow_other,default_permissions"
        arguments = (b"kvmover-tests", self.place.encode(), kind.encode(), MS_NOSUID | MS_NODEV)
        if _LIBC.mount(*arguments, f"{options},max_read={wire.IO_BYTES_MAX}".encode()):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))

    def _take(self) -> None:
        try:
            got = os.readv(self.fd, [self._buffer])
        except OSError as error:
            # ENOENT: the request was withdrawn before it was read; ENODEV: unmounted by somebody else.
            self._serving = error.errno != errno.ENODEV
            return
        request = Request.of(self._buffer[:got])
        if request.op in wire.NO_ANSWER:
            self._forget(request)
            return
        name = Op(request.op).name if request.op in Op.__members__.values() else str(request.op)
        self.counts[name] += 1
        if request.op == Op.INIT:
            self._send(request, 0, wire.init_answer(request.body, locks=self.locks))
        elif request.op == Op.DESTROY:
            self._serving = False
        else:
            self._serve(request, name)

    def _serve(self, request: Request, name: str) -> None:
        path = self.files.name_of(request)
        rule = next((rule for rule in self.rules.values() if rule.takes(name, path)), None)
        match rule:
            case None:
                self._answer(request)
            case Rule(do="error"):
                self._send(request, rule.number)
            case Rule(do="short"):
                self._answer(request, bytes_max=rule.number)
            case Rule(do="delay"):
                due_s = time.monotonic() + rule.number / 1000
                heapq.heappush(self.late, (due_s, next(self._numbers), request.kept()))
            case _:
                self.held.append(request.kept())

    def _answer(self, request: Request, bytes_max: int = wire.IO_BYTES_MAX) -> None:
        if request.op == Op.WRITE and bytes_max < wire.IO_BYTES_MAX:
            handle, offset, size_bytes, *rest = wire.IO_IN.unpack_from(request.body)
            size_bytes = min(size_bytes, bytes_max)
            head = wire.IO_IN.pack(handle, offset, size_bytes, *rest)
            body = memoryview(head + bytes(request.body[wire.IO_IN.size :]))
            request = Request(request.op, request.unique, request.node, request.uid, request.gid, body)
        try:
            answer = self.files.answer(request)
        except OSError as error:
            self._send(request, error.errno or errno.EIO)
            return
        self._send(request, 0, answer[:bytes_max] if request.op == Op.READ else answer)

    def _send(self, request: Request, number: int, answer: bytes = b"") -> None:
        head = wire.OUT_HEADER.pack(wire.OUT_HEADER.size + len(answer), -number, request.unique)
        with contextlib.suppress(FileNotFoundError):  # who asked was killed meanwhile
            os.writev(self.fd, [head, answer])

    def _forget(self, request: Request) -> None:
        if request.op == Op.FORGET:
            self.files.forget(request.node, wire.WORD.unpack_from(request.body)[0])
        elif request.op == Op.BATCH_FORGET:
            count, _ = wire.PAIR.unpack_from(request.body)
            for number in range(count):
                at = wire.PAIR.size + number * wire.FORGET_ONE.size
                self.files.forget(*wire.FORGET_ONE.unpack_from(request.body, at))

    def _hear(self) -> None:
        heard = self.control.recv(1 << 16)
        *lines, self._lines = (self._lines + heard).split(b"\n")
        for line in lines:
            answer = self._obey(**json.loads(line))
            self.control.sendall(json.dumps(answer).encode() + b"\n")
        self._serving = self._serving and bool(heard)

    def _obey(self, command: str, **words: Any) -> object:
        match command:
            case "add":
                number = next(self._numbers)
                self.rules[number] = Rule(**words)
                return number
            case "clear":
                self.rules = (
                    {} if words["rule"] is None else {n: r for n, r in self.rules.items() if n != words["rule"]}
                )
            case "resume":
                self.rules = {number: rule for number, rule in self.rules.items() if rule.do != "hang"}
                waiting, self.held = self.held, []
                for request in waiting:
                    self._answer(request)
                return len(waiting)
            case "state":
                return {"held": len(self.held), "counts": self.counts, "unsynced": self.files.unsynced()}
            case "cut":
                self._serving = False
                return self.files.cut(words["keep"], words["seed"])
            case _:
                raise AssertionError(f"no such command: {command}")
        return None


def main(place: str, backing: str, socket_fd: int, settings: dict[str, Any]) -> None:
    os.umask(0)
    files_max = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (files_max, files_max))
    control = socket.socket(fileno=socket_fd)
    try:
        server = Server(place, backing, control, settings)
    except OSError as error:
        control.sendall(json.dumps({"refused": f"{errno.errorcode[error.errno or 0]}: {error}"}).encode() + b"\n")
        return
    try:
        control.sendall(json.dumps({"serving": os.getpid()}).encode() + b"\n")
        server.serve()
    finally:
        server.end()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), json.loads(sys.argv[4]))
