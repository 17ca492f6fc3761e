"""What engines and nodes report, checked against bounds, and who has said nothing for too long."""

from __future__ import annotations

import enum
from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvmoverd.core.errors import BadRequest
from kvmoverd.core.shares import Depth

if TYPE_CHECKING:
    from kvmoverd.core.scheduling.held import Held

NAME_CHARS_MAX = 256
REQUEST_ID_CHARS_MAX = 128
TOKENS_MAX = 1 << 40
BYTES_MAX = 1 << 62
COUNT_MAX = 1 << 31
GROUP_ENGINES_MAX = 4096
DONE_MAX = 65_536
"""Requests that one report may say are done; the leader keeps the others for its next one."""
HELD_MAX = 65_536
BOOTS_REMEMBERED = 8


class BadReport(BadRequest):
    """A report with a value out of its bounds, or one that speaks of another's engines."""

    reason = "BAD_REPORT"


class Role(enum.Enum):
    """What a group's engines do. The values are words of logs."""

    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class EngineReport:
    """One engine, that is one GPU rank. `seq_e`: requests that it was given and has not finished; `tok_e`: all their prompt
    tokens, hit and new; `free_hbm_tokens`: what would fit beside all of these, as if their KV were there already;
    `tokens_per_s`: prompt tokens, hit and new, that it lately got done while busy, 0: not known.

    Names are unique in the cluster. Raises `BadReport`.
    """

    engine: str
    node: str
    seq_e: int = 0
    tok_e: int = 0
    free_hbm_tokens: int = 0
    tokens_per_s: int = 0

    def __post_init__(self) -> None:
        if not (
            0 < len(self.engine) <= NAME_CHARS_MAX
            and 0 < len(self.node) <= NAME_CHARS_MAX
            and 0 <= self.seq_e <= COUNT_MAX
            and 0 <= self.tok_e <= TOKENS_MAX
            and 0 <= self.free_hbm_tokens <= TOKENS_MAX
            and 0 <= self.tokens_per_s <= TOKENS_MAX
        ):
            raise BadReport(
                f"engine {self.engine[:NAME_CHARS_MAX]!r} on node {self.node[:NAME_CHARS_MAX]!r}: seq_e {self.seq_e}, tok_e "
                f"{self.tok_e}, free_hbm_tokens {self.free_hbm_tokens}, tokens_per_s {self.tokens_per_s}; names have 1 to "
                f"{NAME_CHARS_MAX} characters, numbers are 0 to {COUNT_MAX}, {TOKENS_MAX}, {TOKENS_MAX}, {TOKENS_MAX}"
            )


@dataclass(frozen=True, slots=True)
class Done:
    """What a group has finished of one attempt: its prefill, or its decode; `failed`: it could not. Raises `BadReport`."""

    request_id: str
    attempt: int
    failed: bool = False

    def __post_init__(self) -> None:
        if not 0 < len(self.request_id) <= REQUEST_ID_CHARS_MAX or not 1 <= self.attempt <= COUNT_MAX:
            raise BadReport(
                f"request_id has {len(self.request_id)} characters, attempt is {self.attempt}: 1 to {REQUEST_ID_CHARS_MAX} "
                f"characters, attempts from 1 to {COUNT_MAX}"
            )


@dataclass(frozen=True, slots=True)
class GroupReport:
    """What a group's leader says when it pulls work. `sequence` rises with each pull of a boot; the same once more is a repeat.

    `heard`: the number of the last delivery that the leader has taken: the numbers of its engines hold what was delivered up
    to there, and nothing beyond. `done`: what was finished since the last report that was answered. `held`: what the group goes
    on with, in its first report to a scheduler that has started anew. Raises `BadReport`.
    """

    group: str
    model: str
    role: Role
    boot_id: str
    sequence: int
    engines: tuple[EngineReport, ...]
    heard: int = 0
    done: tuple[Done, ...] = ()
    held: tuple[Held, ...] = ()

    def __post_init__(self) -> None:
        _check_source("group", self.group, self.boot_id, self.sequence)
        if not 0 < len(self.model) <= NAME_CHARS_MAX or not 0 <= self.heard <= BYTES_MAX:
            raise BadReport(f"group {self.group!r}: model has {len(self.model)} characters, heard is {self.heard}")
        engines, done, held = len(self.engines), len(self.done), len(self.held)
        if not 1 <= engines <= GROUP_ENGINES_MAX or done > DONE_MAX or held > HELD_MAX:
            raise BadReport(
                f"group {self.group!r} has {engines} engines, {done} done requests and {held} held ones: 1 to "
                f"{GROUP_ENGINES_MAX}, and at most {DONE_MAX} and {HELD_MAX}"
            )
        if len({engine.engine for engine in self.engines}) != len(self.engines):
            raise BadReport(f"group {self.group!r}: two of its {len(self.engines)} engines have one name")


@dataclass(frozen=True, slots=True)
class NodeReport:
    """What a node's daemon says. `storage`: bytes that wait for its storage NIC, the rate seen, and for how long it was silent;
    `buffer_free_bytes` of `buffer_bytes`: room for the KV of requests that will decode here; `lane_bytes_per_s`: what KV lately
    got of its compute network while there was work, 0: not known; `starved`: that is too little; `help_free_bytes`: room for
    blocks that it reads for other nodes; `fences_heard`: number of the last fence that is in force there; `draining`: it takes no
    new requests. Raises `BadReport`.
    """

    node: str
    boot_id: str
    sequence: int
    storage: Depth = field(default_factory=Depth)
    buffer_free_bytes: int = 0
    buffer_bytes: int = 0
    lane_bytes_per_s: int = 0
    starved: bool = False
    help_free_bytes: int = 0
    fences_heard: int = 0
    draining: bool = False

    def __post_init__(self) -> None:
        _check_source("node", self.node, self.boot_id, self.sequence)
        numbers = {
            "queue_bytes": self.storage.queue_bytes,
            "rate_bytes_per_s": self.storage.rate_bytes_per_s,
            "silent_ns": self.storage.silent_ns,
            "buffer_free_bytes": self.buffer_free_bytes,
            "buffer_bytes": self.buffer_bytes,
            "lane_bytes_per_s": self.lane_bytes_per_s,
            "help_free_bytes": self.help_free_bytes,
            "fences_heard": self.fences_heard,
        }
        for name, number in numbers.items():
            if not 0 <= number <= BYTES_MAX:
                raise BadReport(f"node {self.node!r}: {name} is {number}, must be 0 to {BYTES_MAX}")


def _check_source(kind: str, name: str, boot_id: str, sequence: int) -> None:
    if not (0 < len(name) <= NAME_CHARS_MAX and 0 < len(boot_id) <= NAME_CHARS_MAX and 0 <= sequence <= BYTES_MAX):
        raise BadReport(
            f"{kind} {name[:NAME_CHARS_MAX]!r}: the name has {len(name)} characters, the boot id {len(boot_id)}, the sequence "
            f"number is {sequence}: 1 to {NAME_CHARS_MAX} characters, numbers from 0 to {BYTES_MAX}"
        )


class Arrival(enum.Enum):
    """What a report is beside those that came from its source before."""

    NEW_BOOT = "new boot"
    """The first one of this start of its source: whatever an earlier start had is gone."""
    NEWER = "newer"
    REPEATED = "repeated"
    OLD = "old"
    """Overtaken by a newer one, or from a start that was followed by another."""


@dataclass(slots=True)
class _Source:
    boot_id: str
    sequence: int
    heard_ns: int
    former: deque[str] = field(default_factory=lambda: deque(maxlen=BOOTS_REMEMBERED))


class Sources:
    """Who reports: the newest boot and sequence number of each, and the order in which they were last heard.

    `silent_ns`: who says nothing for longer is silent.
    """

    def __init__(self, silent_ns: int) -> None:
        self.silent_ns = silent_ns
        self._sources: OrderedDict[str, _Source] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sources)

    def __contains__(self, name: str) -> bool:
        return name in self._sources

    def arrived(self, name: str, boot_id: str, sequence: int, now_ns: int) -> Arrival:
        """Says what the report is, and takes note of it unless it is old."""
        source = self._sources.get(name)
        if source is None:
            self._sources[name] = _Source(boot_id, sequence, now_ns)
            return Arrival.NEW_BOOT
        found = _compared(source, boot_id, sequence)
        if found is not Arrival.OLD:
            source.boot_id, source.sequence, source.heard_ns = boot_id, sequence, now_ns
            self._sources.move_to_end(name)
        return found

    def forget(self, name: str) -> None:
        """It is gone; the same boot may come back, and is a new one then."""
        self._sources.pop(name, None)

    def silent(self, now_ns: int) -> Iterator[str]:
        """Those that are silent, the longest silent first. None may be forgotten meanwhile."""
        for name, source in self._sources.items():
            if now_ns - source.heard_ns <= self.silent_ns:
                return
            yield name


def _compared(source: _Source, boot_id: str, sequence: int) -> Arrival:
    if boot_id != source.boot_id:
        if boot_id in source.former:
            return Arrival.OLD
        source.former.append(source.boot_id)
        return Arrival.NEW_BOOT
    if sequence == source.sequence:
        return Arrival.REPEATED
    return Arrival.NEWER if sequence > source.sequence else Arrival.OLD
