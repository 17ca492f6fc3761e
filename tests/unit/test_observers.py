"""What the node tells: counted, logged line by line, thinned out, and never in the way of the loop."""

from __future__ import annotations

import io
import json
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from kvmoverd.adapters.clock import MonotonicClock
from kvmoverd.adapters.membership.static import StaticMembership
from kvmoverd.adapters.observers import log_writer
from kvmoverd.adapters.observers.count import CountingObserver
from kvmoverd.adapters.observers.log import BURST_EVENTS_MAX, KINDS_MAX, WINDOW_NS, LogObserver
from kvmoverd.adapters.observers.log_writer import LINES_MAX, LogWriter, TextFormatter, start_log
from kvmoverd.core.status import Reason
from kvmoverd.ports.clock import Clock
from kvmoverd.ports.membership import Membership
from kvmoverd.ports.observer import Observer


class Time:
    def __init__(self) -> None:
        self.now_ns = 0

    def __call__(self) -> int:
        return self.now_ns


@contextmanager
def logged(level: str = "debug", style: str = "text") -> Iterator[io.StringIO]:
    """The root logger writes to the text given; all of it is there after the block."""
    root, stream = logging.getLogger(), io.StringIO()
    before, before_level = root.handlers[:], root.level
    root.handlers = []
    try:
        writer = start_log(level, style, stream)
        yield stream
        assert writer.stop(5.0)
    finally:
        root.handlers = before
        root.setLevel(before_level)


def all_events(observer: Observer) -> None:
    observer.request_ended("fetch", "r-1", Reason.IO_ERROR, "EIO after 3 of 7 blocks")
    observer.blocks_read(2, 5_136_384)
    observer.block_failed("disk", b"\xab" * 32, Reason.CORRUPT, "layer 3: crc 0x1, expected 0x2")
    observer.session_ended("s-1", "engine", "end of file")
    observer.peer_changed("node-1", "down", "refused")
    observer.lane_changed("DSCP 8", "node-1", "starved", "3 B/s")
    observer.lane_changed("DSCP 8", "", "well", "7 B/s")


def test_text_is_one_line_per_event_with_its_fields() -> None:
    with logged() as stream:
        all_events(LogObserver())
    lines = [line.split(" ", 1)[1] for line in stream.getvalue().splitlines()]
    assert lines == [
        "WARNING kvmoverd.events request_ended kind=fetch reason=IO_ERROR request_id=r-1 "
        'message="EIO after 3 of 7 blocks"',
        "DEBUG kvmoverd.events blocks_read blocks=2 read_bytes=5136384",
        f"WARNING kvmoverd.events block_failed root=disk reason=CORRUPT key={'ab' * 32} "
        'message="layer 3: crc 0x1, expected 0x2"',
        'INFO kvmoverd.events session_ended session_id=s-1 client=engine why="end of file"',
        "WARNING kvmoverd.events peer_changed node=node-1 state=down message=refused",
        'WARNING kvmoverd.events lane_changed lane="DSCP 8" node=node-1 state=starved message="3 B/s"',
        'INFO kvmoverd.events lane_changed lane="DSCP 8" state=well message="7 B/s"',
    ]


def test_json_is_one_object_per_event() -> None:
    with logged(style="json") as stream:
        all_events(LogObserver())
        logging.getLogger("kvmoverd.x").info("up after %d s", 3)
    events = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [event["event"] for event in events] == [
        "request_ended",
        "blocks_read",
        "block_failed",
        "session_ended",
        "peer_changed",
        "lane_changed",
        "lane_changed",
        "up after 3 s",
    ]
    assert events[0]["level"] == "warning"
    assert events[0]["reason"] == "IO_ERROR"
    assert events[1]["read_bytes"] == 5_136_384
    assert events[7]["logger"] == "kvmoverd.x"
    assert events[7]["time"].endswith("Z")


def test_what_a_caller_wrote_cannot_forge_a_line() -> None:
    with logged() as stream:
        LogObserver().session_ended("s", 'x"\nERROR forged a=b', "\x1b[31m")
        logging.getLogger("kvmoverd").warning("one\ntwo")
        logging.getLogger("kvmoverd").warning("long " * 10_000)
    lines = stream.getvalue().splitlines()
    assert len(lines) == 3
    assert r'client="x\"\nERROR forged a=b" why="\u001b[31m"' in lines[0]
    assert r"one\ntwo" in lines[1]
    assert len(lines[2]) <= log_writer.LINE_CHARACTERS_MAX


@pytest.mark.parametrize("style", ["text", "json"])
def test_a_traceback_stays_in_its_line(style: str) -> None:
    with logged(style=style) as stream:
        try:
            raise RuntimeError("boom")
        except RuntimeError:
            logging.getLogger("kvmoverd").exception("a fault")
    (line,) = stream.getvalue().splitlines()
    assert "a fault" in line
    assert "RuntimeError: boom" in line


def test_levels_follow_who_has_to_act() -> None:
    with logged("info") as stream:
        observer = LogObserver()
        for reason in Reason:
            observer.request_ended("fetch", "r", reason, "")
        observer.peer_changed("b", "up", "")
    found = {line.split("reason=")[1].split()[0]: line.split()[1] for line in stream.getvalue().splitlines()[:-1]}
    assert "OK" not in found
    assert "MISS" not in found
    assert found["CANCELLED"] == found["PREFIX_CUT"] == "INFO"
    assert found["CORRUPT"] == found["DEADLINE"] == "WARNING"
    assert found["INTERNAL"] == "ERROR"
    assert len(found) == len(Reason) - 2


def test_repeats_are_thinned_out_and_accounted_for() -> None:
    now = Time()
    with logged() as stream:
        observer = LogObserver(now)
        for _ in range(BURST_EVENTS_MAX + 7):
            observer.peer_changed("b", "down", "refused")
        observer.peer_changed("c", "down", "refused")
        now.now_ns = WINDOW_NS
        observer.peer_changed("b", "down", "refused")
        observer.peer_changed("b", "down", "refused")
    lines = stream.getvalue().splitlines()
    assert len(lines) == BURST_EVENTS_MAX + 3
    assert "node=c" in lines[-3]
    assert lines[-2].endswith("left_out=7")
    assert "left_out" not in lines[-1]


def test_at_its_end_a_window_says_what_it_left_out_though_nothing_follows() -> None:
    now = Time()
    with logged() as stream:
        observer = LogObserver(now)
        for _ in range(BURST_EVENTS_MAX + 7):
            observer.peer_changed("b", "down", "refused")
        observer.peer_changed("c", "down", "refused")
        now.now_ns = WINDOW_NS - 1
        observer.tell_left_out()
        now.now_ns = WINDOW_NS
        for _ in range(2):
            observer.tell_left_out()
        for _ in range(BURST_EVENTS_MAX + 2):
            observer.peer_changed("b", "down", "refused")
        observer.tell_left_out(all_windows=True)
    lines = [line.split(" ", 1)[1] for line in stream.getvalue().splitlines()]
    assert len(lines) == 2 * BURST_EVENTS_MAX + 3
    told = 'WARNING kvmoverd.events peer_changed node=b state=down left_out={} message="as those before"'
    assert lines[BURST_EVENTS_MAX + 1] == told.format(7) and lines[-1] == told.format(2)


def test_the_memory_of_repeats_is_bounded() -> None:
    with logged("warning"):
        observer = LogObserver(Time())
        for number in range(2 * KINDS_MAX):
            observer.peer_changed(f"node-{number}", "down", "")
        assert len(observer._windows) == KINDS_MAX


def test_a_reader_that_stands_still_holds_nobody() -> None:
    read_fd, write_fd = os.pipe()
    stream = os.fdopen(write_fd, "w")
    writer = LogWriter(stream, TextFormatter())
    record = logging.makeLogRecord({"msg": "x" * 1000, "levelname": "INFO", "name": "kvmoverd"})
    began = time.monotonic()
    for _ in range(LINES_MAX + 500):
        writer.emit(record)
    assert time.monotonic() - began < 5.0
    assert 300 < writer.dropped_lines <= 500
    assert not writer.stop(0.05)
    os.close(read_fd)  # the writer's thread sees EPIPE for all that waits, then the end
    assert writer.stop(5.0)
    with pytest.raises(BrokenPipeError):
        stream.close()


def test_dropped_lines_are_told() -> None:
    stream = io.StringIO()
    writer = LogWriter(stream, TextFormatter())
    writer.dropped_lines = 3
    writer.emit(logging.makeLogRecord({"msg": "next", "levelname": "INFO", "name": "kvmoverd"}))
    assert writer.stop(5.0)
    first, second = stream.getvalue().splitlines()
    assert first == "3 log lines were dropped: stderr was too slow"
    assert second.endswith("INFO kvmoverd next")


def test_counts_have_small_label_sets() -> None:
    observer = CountingObserver()
    for number in range(100):
        observer.request_ended("fetch", f"r-{number}", Reason.OK, "")
    all_events(observer)
    assert observer.counts == {
        ("fetch", "OK"): 100,
        ("fetch", "IO_ERROR"): 1,
        ("block", "CORRUPT"): 1,
        ("session", "ended"): 1,
        ("peer", "down"): 1,
        ("lane", "starved"): 1,
        ("lane", "well"): 1,
    }
    assert (observer.read_blocks, observer.read_bytes) == (2, 5_136_384)


def test_members_are_the_list() -> None:
    members: Membership = StaticMembership({"b": "b:9401", "a": "10.0.0.1:9401"})
    assert members.nodes() == ["b", "a"]
    assert members.address_of("a") == "10.0.0.1:9401"
    assert members.address_of("c") is None


def test_the_clock_never_goes_back() -> None:
    clock: Clock = MonotonicClock()
    seen = [clock.now_ns() for _ in range(1000)]
    assert seen == sorted(seen)
    assert abs(seen[-1] - time.monotonic_ns()) < 60_000_000_000
