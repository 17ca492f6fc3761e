"""Engines, groups and nodes as policies see them: what was reported, and what has been given out since."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from kvmoverd.core.errors import BadRequest
from kvmoverd.core.scheduling.explain import Seen
from kvmoverd.core.scheduling.reports import BYTES_MAX, TOKENS_MAX, EngineReport, NodeReport, Role
from kvmoverd.core.scheduling.requests import Assignment, Delivery, Entry, Fence, Revoked, Side

ALPHA_S = 3.0
BETA_S = 5.0
RATE_WEIGHT = 0.2
"""Of the newest report in an engine's rate."""


@dataclass(frozen=True, slots=True)
class Model:
    """What is known of a model. Tokens are all of a prompt, hit and new: they stand for GPU, storage and network alike.

    `alpha_tokens`: a storage NIC with more than that ahead of it is avoided; `beta_tokens`: an engine with more than that gets
    nothing. `Model.of` has them from rates. Raises `BadRequest`.
    """

    name: str
    kv_bytes_per_token: int
    alpha_tokens: int
    beta_tokens: int

    def __post_init__(self) -> None:
        for name, number, most in (
            ("kv_bytes_per_token", self.kv_bytes_per_token, 1 << 32),
            ("alpha_tokens", self.alpha_tokens, TOKENS_MAX),
            ("beta_tokens", self.beta_tokens, TOKENS_MAX),
        ):
            if not 1 <= number <= most:
                raise BadRequest(f"model {self.name!r}: {name} is {number}, must be 1 to {most}")

    @classmethod
    def of(cls, name: str, *, kv_bytes_per_token: int, snic_bytes_per_s: float, gpu_tokens_per_s: float) -> Model:
        """With alpha = what a storage NIC reads in 3 s, and beta = what one GPU gets done in 5 s, both in tokens.

        >>> Model.of("v3.2", kv_bytes_per_token=40_016, snic_bytes_per_s=50e9, gpu_tokens_per_s=1.6e5)
        Model(name='v3.2', kv_bytes_per_token=40016, alpha_tokens=3748500, beta_tokens=800000)
        """
        alpha = int(ALPHA_S * snic_bytes_per_s / max(1, kv_bytes_per_token))
        return cls(name, kv_bytes_per_token, alpha, int(BETA_S * gpu_tokens_per_s))

    @property
    def alpha_bytes(self) -> int:
        return self.alpha_tokens * self.kv_bytes_per_token


class Node:
    """A node's storage NIC and buffer. `queue_bytes` is what was reported and what was given out since, so that requests that
    come at once don't all go where it was empty a moment ago. What was given counts until a report that is `lag_ns` younger: so
    long it takes until it shows in the node's own numbers. At most `GIVEN_MAX` are kept apart, beyond it they are joined.
    """

    GIVEN_MAX = 4096
    FENCES_MAX = 65_536
    """That the node has not heard of; beyond it the oldest is dropped, and counted."""

    __slots__ = (
        "_fences",
        "_given",
        "boot_id",
        "draining",
        "engines",
        "fences_dropped",
        "given_bytes",
        "heard_ns",
        "lag_ns",
        "name",
        "queue_bytes",
        "report",
        "reserved_bytes",
    )

    def __init__(self, name: str, lag_ns: int) -> None:
        self.name = name
        self.lag_ns = lag_ns
        self.boot_id = ""
        self.report: NodeReport | None = None
        self.heard_ns = 0
        self.draining = False
        """It takes no new requests."""
        self.queue_bytes = -1
        """-1: its reports are missing or too old."""
        self.given_bytes = 0
        self.reserved_bytes = 0
        """Of its buffer, for requests that decode here and are not done."""
        self.engines: dict[str, Engine] = {}
        self._given: deque[tuple[int, int]] = deque()
        self._fences: deque[Fence] = deque()
        self.fences_dropped = 0

    def reported(self, report: NodeReport, now_ns: int) -> None:
        self.report, self.heard_ns, self.draining = report, now_ns, report.draining
        given = self._given
        while given and now_ns - given[0][0] >= self.lag_ns:
            self.given_bytes -= given.popleft()[1]
        self.queue_bytes = report.storage.queue_bytes + self.given_bytes

    def give(self, read_bytes: int, now_ns: int) -> None:
        """So much more will be read here."""
        if read_bytes <= 0:
            return
        given = self._given
        if given and (given[-1][0] == now_ns or len(given) >= self.GIVEN_MAX):
            given[-1] = now_ns, min(BYTES_MAX, given[-1][1] + read_bytes)
        else:
            given.append((now_ns, read_bytes))
        self.given_bytes += read_bytes
        if self.report is not None:
            self.queue_bytes += read_bytes

    def groups(self) -> list[Group]:
        """Those of its engines."""
        return list({engine.group.name: engine.group for engine in self.engines.values()}.values())

    def fence(self, fence: Fence) -> None:
        """To be told with the answers to its reports until it has heard of it."""
        self._fences.append(fence)
        if len(self._fences) > self.FENCES_MAX:
            self._fences.popleft()
            self.fences_dropped += 1

    def fences(self, heard: int, most: int) -> tuple[Fence, ...]:
        """Those it has not heard of, the oldest first; `heard` are in force and forgotten."""
        fences = self._fences
        while fences and fences[0].number <= heard:
            fences.popleft()
        return tuple(islice(fences, most)) if fences else ()

    def reset(self) -> None:
        """A new start of the daemon, or no report for too long: nothing of its numbers is known, nothing of what was given."""
        self.report = None
        self._given.clear()
        self.given_bytes = 0
        self.queue_bytes = -1


class Engine:
    """One GPU rank. `seq_e`, `tok_e`, `free_hbm`: what it reported, with what it was given and has not heard of yet;
    `tokens_per_s`: what it gets done, over its last reports, 0: not known."""

    __slots__ = (
        "free_hbm",
        "group",
        "live",
        "name",
        "node",
        "seq_e",
        "tok_e",
        "tokens_per_s",
        "unheard_seqs",
        "unheard_tokens",
    )

    def __init__(self, name: str, node: Node, group: Group) -> None:
        self.name = name
        self.node = node
        self.group = group
        self.seq_e = self.tok_e = self.free_hbm = 0
        self.tokens_per_s = 0.0
        self.unheard_seqs = self.unheard_tokens = 0
        self.live: dict[str, Entry] = {}
        """What it was given and has not finished."""

    def reported(self, report: EngineReport) -> None:
        self.seq_e = report.seq_e + self.unheard_seqs
        self.tok_e = report.tok_e + self.unheard_tokens
        self.free_hbm = report.free_hbm_tokens - self.unheard_tokens
        if report.tokens_per_s:
            before = self.tokens_per_s or report.tokens_per_s
            self.tokens_per_s = before + RATE_WEIGHT * (report.tokens_per_s - before)

    def take(self, entry: Entry) -> None:
        tokens = entry.tokens
        self.live[entry.request.request_id] = entry
        self.seq_e += 1
        self.tok_e += tokens
        self.group.tok_sum += tokens
        self.free_hbm -= tokens
        self.unheard_seqs += 1
        self.unheard_tokens += tokens

    def heard(self, tokens: int) -> None:
        """Its own numbers hold one of so many tokens from the next report on."""
        self.unheard_seqs -= 1
        self.unheard_tokens -= tokens

    def drop_unheard(self, tokens: int) -> None:
        """One that it was given, and not told of or not heard, is not its own any more."""
        self.heard(tokens)
        self.seq_e -= 1
        self.tok_e -= tokens
        if self.group.engines.get(self.name) is self:
            self.group.tok_sum -= tokens
        self.free_hbm += tokens

    def seen(self) -> Seen:
        return Seen(self.name, self.node.name, self.seq_e, self.tok_e, self.free_hbm, self.node.queue_bytes)


class Group:
    """The engines that one leader pulls work for. What it was not known to have heard when it last pulled is told again.

    `numbers` of deliveries are those of all groups together: one that was lost and comes back has heard of none that is new.
    """

    __slots__ = (
        "_numbers",
        "_told",
        "boot_id",
        "engines",
        "model",
        "name",
        "private",
        "private_tokens",
        "role",
        "takers",
        "tok_sum",
    )

    def __init__(self, name: str, model: str, role: Role, numbers: Iterator[int]) -> None:
        self.name = name
        self._numbers = numbers
        self.model = model
        self.role = role
        self.boot_id = ""
        self.engines: dict[str, Engine] = {}
        self.takers: list[Engine] = []
        """Those whose nodes take new requests, in the order of `engines`."""
        self.tok_sum = 0
        """Of `tok_e` over its engines."""
        self.private: OrderedDict[str, Entry] = OrderedDict()
        """Requests that are this group's, and no engine's yet."""
        self.private_tokens = 0
        self._told: deque[tuple[Delivery, Side | None]] = deque()

    def tell(self, what: Assignment | Revoked, side: Side | None) -> None:
        """Goes with the next pull."""
        self._told.append((Delivery(next(self._numbers), what), side))

    def heard(self, number: int) -> None:
        """The leader has taken what was told up to this number."""
        told = self._told
        while told and told[0][0].number <= number:
            side = told.popleft()[1]
            if side is not None:
                side.hear()

    def unheard(self, most: int) -> tuple[Delivery, ...]:
        """What its leader is told now, the oldest first."""
        return tuple([delivery for delivery, _ in islice(self._told, most)])

    @property
    def unheard_count(self) -> int:
        return len(self._told)

    def unheard_text(self, most: int) -> str:
        return f"has not taken {len(self._told)} deliveries, at most {most} may be due: it is lost"

    def look_around(self) -> None:
        """Its engines are others, or a node of theirs begins or ceases to drain."""
        self.takers = [engine for engine in self.engines.values() if not engine.node.draining]

    def sum_up(self) -> None:
        self.tok_sum = sum([engine.tok_e for engine in self.engines.values()])
