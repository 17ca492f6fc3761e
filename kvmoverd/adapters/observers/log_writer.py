"""The process's log on stderr, as text or JSON. A reader of stderr that stands still never holds the event loop."""

from __future__ import annotations

import json
import logging
import queue
import re
import sys
import threading
import time
from typing import TextIO

LINES_MAX = 4096
LINE_CHARACTERS_MAX = 8192
EXIT_S = 2.0
FORMATS = ("text", "json")
PLAIN = re.compile(r"[^\s\"=\\\x00-\x1f\x7f-\x9f]+")


class TextFormatter(logging.Formatter):
    """`2026-01-31T12:00:00.000Z INFO kvmoverd.events request_ended kind=fetch reason=OK ...`, always one line."""

    def format(self, record: logging.LogRecord) -> str:
        head = f"{_stamp(record)} {record.levelname} {record.name} {_one_line(_message(self, record))}"
        pairs = "".join(f" {name}={_quoted(value)}" for name, value in _fields(record).items())
        return (head + pairs)[:LINE_CHARACTERS_MAX]


class JsonFormatter(logging.Formatter):
    """One JSON object per line: `time`, `level`, `logger`, `event` and the event's own fields."""

    def format(self, record: logging.LogRecord) -> str:
        head = {"time": _stamp(record), "level": record.levelname.lower(), "logger": record.name}
        text = _message(self, record)[: LINE_CHARACTERS_MAX // 2]
        fields = {f"{name}_" if name in head else name: _short(value) for name, value in _fields(record).items()}
        return json.dumps({**head, "event": text, **fields}, default=str)


class LogWriter(logging.Handler):
    """Hands lines to a thread that writes them; beyond `LINES_MAX` waiting lines new ones are dropped and counted."""

    def __init__(self, stream: TextIO, formatter: logging.Formatter) -> None:
        super().__init__()
        self.setFormatter(formatter)
        self.dropped_lines = 0
        self._stream = stream
        self._lines: queue.Queue[str | None] = queue.Queue(LINES_MAX)
        self._thread = threading.Thread(target=self._write, name="kvmoverd-log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._lines.put_nowait(self.format(record))
        except queue.Full:
            self.dropped_lines += 1

    def stop(self, timeout_s: float) -> bool:
        """Writes what waits; True when all of it was written in time."""
        if self._thread.is_alive():
            try:
                self._lines.put(None, timeout=timeout_s)
            except queue.Full:
                return False
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def close(self) -> None:
        """At the interpreter's exit."""
        self.stop(EXIT_S)
        super().close()

    def _write(self) -> None:
        """Ends at the None of `stop`; a broken stream loses lines, it must not end the thread."""
        told = 0
        while (line := self._lines.get()) is not None:
            try:
                if self.dropped_lines > told:
                    self._stream.write(f"{self.dropped_lines - told} log lines were dropped: stderr was too slow\n")
                    told = self.dropped_lines
                self._stream.write(line + "\n")
                self._stream.flush()
            except (OSError, ValueError):
                self.dropped_lines += 1


def start_log(level: str, style: str, stream: TextIO | None = None) -> LogWriter:
    """Makes the root logger write to `stream` (stderr by default) from `level` up; stop the writer before the exit.

    `style` is "text" or "json". Replaces the handlers that the root logger had.
    """
    assert style in FORMATS, f"{style!r} is none of {FORMATS}"
    writer = LogWriter(stream or sys.stderr, JsonFormatter() if style == "json" else TextFormatter())
    logging.basicConfig(level=level.upper(), handlers=[writer], force=True)
    return writer


def _stamp(record: logging.LogRecord) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"


def _message(formatter: logging.Formatter, record: logging.LogRecord) -> str:
    trace = formatter.formatException(record.exc_info) if record.exc_info and record.exc_info[0] else ""
    return f"{record.getMessage()}\n{trace}" if trace else record.getMessage()


def _fields(record: logging.LogRecord) -> dict[str, object]:
    fields: dict[str, object] = getattr(record, "fields", {})
    return {name: value for name, value in fields.items() if value != ""}


def _short(value: object) -> object:
    return value[:1024] if isinstance(value, str) else value


def _one_line(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1] if "\n" in text or "\r" in text else text


def _quoted(value: object) -> str:
    text = str(value)[:1024]
    return text if PLAIN.fullmatch(text) else json.dumps(text)
