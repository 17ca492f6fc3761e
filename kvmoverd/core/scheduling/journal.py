"""The decision log: what the scheduler was told and what it decided, as lines of JSON in order; and playing it again.

The first line says what the scheduler was made with; then each call is a line with "in", and each of its decisions one with
"out" after it. Played again the log gives the same decisions. Under another policy it says which requests would have gone
elsewhere; the reports are those of the engines as they were loaded by the first policy, so that a long log compares choices, not
outcomes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, astuple, dataclass
from typing import Any, NamedTuple, TypeVar, cast

from kvmoverd.core.errors import BadRequest, KvmoverError
from kvmoverd.core.scheduling.cluster import Cluster
from kvmoverd.core.scheduling.explain import PathWhy
from kvmoverd.core.scheduling.held import Held
from kvmoverd.core.scheduling.joint_settings import JointSettings
from kvmoverd.core.scheduling.limits import Limits
from kvmoverd.core.scheduling.reports import Done, EngineReport, GroupReport, NodeReport, Role
from kvmoverd.core.scheduling.requests import (
    Assignment,
    CachedPrefix,
    Delivery,
    Fence,
    Part,
    ReadChoice,
    Request,
    State,
    Ticket,
)
from kvmoverd.core.scheduling.state import Model
from kvmoverd.core.shares import Depth
from kvmoverd.core.status import Path

VERSION = 3
Write = Callable[[str], None]
Line = dict[str, Any]
Answer = TypeVar("Answer")


class BadJournal(BadRequest):
    """A log that can't be played; the message has the number of the line."""

    reason = "BAD_JOURNAL"


class Recorded:
    """A cluster of which every call that changes something is written down, with what it decided. Calls and errors are its own.

    `write` takes a line without its end. Calls that are refused are written, too: they are refused again.
    """

    def __init__(
        self,
        models: Iterable[Model],
        write: Write,
        *,
        policy: str = "paper",
        limits: Limits | None = None,
        joint: JointSettings | None = None,
        numbers_from: int = 0,
        settled_ns: int = 0,
    ) -> None:
        models = tuple(models)
        self.cluster = Cluster(
            models, policy=policy, limits=limits, joint=joint, numbers_from=numbers_from, settled_ns=settled_ns
        )
        self._write = write
        self._news: list[Assignment | Ticket] = []
        self._put(
            {
                "version": VERSION,
                "policy": policy,
                "models": [astuple(model) for model in models],
                "limits": astuple(self.cluster.limits),
                "joint": None if joint is None else asdict(joint),
                "numbers_from": numbers_from,
                "settled_ns": settled_ns,
            }
        )

    def submit(self, request: Request, now_ns: int) -> Ticket:
        return self._done("submit", now_ns, astuple(request), lambda: self.cluster.submit(request, now_ns))

    def cancel(self, request_id: str, now_ns: int) -> Ticket:
        return self._done("cancel", now_ns, [request_id], lambda: self.cluster.cancel(request_id))

    def pull(self, report: GroupReport, now_ns: int) -> tuple[Delivery, ...]:
        return self._done("pull", now_ns, _group_words(report), lambda: self.cluster.pull(report, now_ns))

    def node_reported(self, report: NodeReport, now_ns: int) -> tuple[Fence, ...]:
        return self._done("node", now_ns, astuple(report), lambda: self.cluster.node_reported(report, now_ns))

    def lose_group(self, name: str, now_ns: int) -> None:
        self._done("lose_group", now_ns, [name], lambda: self.cluster.lose_group(name, now_ns))

    def lose_node(self, name: str, now_ns: int) -> None:
        self._done("lose_node", now_ns, [name], lambda: self.cluster.lose_node(name, now_ns))

    def tick(self, now_ns: int) -> None:
        self._done("tick", now_ns, [], lambda: self.cluster.tick(now_ns))

    def choose_path(
        self, model: str, prefill: str, decode: str, hit_tokens: int, now_ns: int
    ) -> tuple[ReadChoice, PathWhy]:
        words = [model, prefill, decode, hit_tokens]
        return self._done(
            "choose_path", now_ns, words, lambda: self.cluster.choose_path(model, prefill, decode, hit_tokens, now_ns)
        )

    def _done(self, name: str, now_ns: int, words: object, call: Callable[[], Answer]) -> Answer:
        self._put({"at_ns": now_ns, "in": name, "words": words})
        try:
            return call()
        finally:
            for news in self.cluster.take_news():
                self._news.append(news)
                if (words := _news_words(news)) is not None:
                    self._put({"at_ns": now_ns, **words})

    def take_news(self) -> list[Assignment | Ticket]:
        """As the cluster's own, after it was written down."""
        news, self._news = self._news, []
        return news

    def _put(self, line: Line) -> None:
        self._write(json.dumps(line, separators=(",", ":")))


class Choice(NamedTuple):
    """What a decision comes to, without its reasons. A request that failed has no engines."""

    request_id: str
    attempt: int
    prefill: str
    decode: str
    path: str
    parts: tuple[tuple[str, float, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Replay:
    """`was`: the decisions of the log, `now`: those of playing it again, each in its order."""

    was: tuple[Choice, ...]
    now: tuple[Choice, ...]

    @property
    def same(self) -> bool:
        return self.was == self.now


@dataclass(frozen=True, slots=True)
class Difference:
    """One request that would have gone elsewhere; `now` is None for one that was not assigned at all."""

    was: Choice
    now: Choice | None

    @property
    def words(self) -> tuple[str, ...]:
        """What differs: of "prefill", "decode", "path"; or "waits"."""
        if self.now is None:
            return ("waits",)
        pairs = {
            "prefill": (self.was.prefill, self.now.prefill),
            "decode": (self.was.decode, self.now.decode),
            "path": ((self.was.path, self.was.parts), (self.now.path, self.now.parts)),
        }
        return tuple(name for name, (was, now) in pairs.items() if was != now)


def replay(lines: Iterable[str], policy: str = "") -> Replay:
    """Plays the log again, under its own policy or another one. Raises `BadJournal`."""
    was: list[Choice] = []
    now: list[Choice] = []
    numbered = enumerate(lines, 1)
    cluster = _begun(numbered, policy)
    for number, text in numbered:
        line = _parsed(number, text)
        try:
            if "out" in line:
                was.append(_choice(line))
            else:
                _apply(cluster, line)
        except KvmoverError as error:
            if isinstance(error, BadJournal):
                raise BadJournal(f"line {number}: {error}") from error
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise BadJournal(f"line {number} is not one of a decision log: {error!r}") from error
        now += [_choice(words) for news in cluster.take_news() if (words := _news_words(news)) is not None]
    return Replay(tuple(was), tuple(now))


def diff(lines: Iterable[str], policy: str) -> list[Difference]:
    """The first decision on each request, in the log's order, where the other policy's is another. Raises `BadJournal`."""
    played = replay(lines, policy)
    was, now = _firsts(played.was), _firsts(played.now)
    found = [Difference(choice, now.get(request_id)) for request_id, choice in was.items()]
    return [difference for difference in found if difference.words]


def _firsts(choices: Iterable[Choice]) -> dict[str, Choice]:
    return {choice.request_id: choice for choice in reversed(list(choices))}


def _begun(numbered: Iterator[tuple[int, str]], policy: str) -> Cluster:
    number, text = next(numbered, (1, ""))
    head = _parsed(number, text)
    if head.get("version") != VERSION:
        raise BadJournal(f"line {number}: version is {head.get('version')!r}, {VERSION} can be played")
    try:
        models = [Model(*words) for words in head["models"]]
        limits = Limits(*head["limits"])
        numbers_from, settled_ns = head["numbers_from"], head["settled_ns"]
        return Cluster(
            models,
            policy=policy or head["policy"],
            limits=limits,
            joint=_joint(head["joint"]),
            numbers_from=numbers_from,
            settled_ns=settled_ns,
        )
    except (KeyError, TypeError, ValueError, BadRequest) as error:
        raise BadJournal(f"line {number} is not the first of a decision log: {error!r}") from error


def _joint(words: Line | None) -> JointSettings | None:
    if words is None:
        return None
    return JointSettings(**{**words, "weights": tuple((tenant, weight) for tenant, weight in words["weights"])})


def _parsed(number: int, text: str) -> Line:
    try:
        line = json.loads(text)
    except ValueError as error:
        raise BadJournal(f"line {number} is no JSON: {text[:80]!r}") from error
    if not isinstance(line, dict):
        raise BadJournal(f"line {number} is no object: {text[:80]!r}")
    return cast(Line, line)


def _apply(cluster: Cluster, line: Line) -> None:
    words, now_ns = line["words"], line["at_ns"]
    match line["in"]:
        case "submit":
            cluster.submit(_request(words), now_ns)
        case "cancel":
            cluster.cancel(*words)
        case "pull":
            cluster.pull(_group_report(words), now_ns)
        case "node":
            node, boot_id, sequence, storage, *rest = words
            cluster.node_reported(NodeReport(node, boot_id, sequence, Depth(*storage), *rest), now_ns)
        case "lose_group":
            (name,) = words
            cluster.lose_group(name, now_ns)
        case "lose_node":
            (name,) = words
            cluster.lose_node(name, now_ns)
        case "tick":
            cluster.tick(now_ns)
        case "choose_path":
            model, prefill, decode, hit_tokens = words
            cluster.choose_path(model, prefill, decode, hit_tokens, now_ns)
        case other:
            raise BadJournal(f"no call is named {other!r}")


def _request(words: list[Any]) -> Request:
    *asked, cached = words
    return Request(*cast(Any, [*asked, tuple(CachedPrefix(*prefix) for prefix in cached)]))


def _group_words(report: GroupReport) -> list[object]:
    engines = [
        [said.engine, said.node, said.seq_e, said.tok_e, said.free_hbm_tokens, said.tokens_per_s]
        for said in report.engines
    ]
    done = [[done.request_id, done.attempt, done.failed] for done in report.done]
    held = [_held_words(one) for one in report.held]
    source = [report.group, report.model, report.role.value, report.boot_id, report.sequence]
    return [*source, engines, report.heard, done, held]


def _group_report(words: list[Any]) -> GroupReport:
    group, model, role, boot_id, sequence, engines, heard, done, held = words
    said = tuple(EngineReport(*engine) for engine in engines)
    finished = tuple(Done(*each) for each in done)
    return GroupReport(
        group, model, Role(role), boot_id, sequence, said, heard, finished, tuple(_held(one) for one in held)
    )


def _held_words(held: Held) -> list[object]:
    read = [held.read.path.name, [astuple(part) for part in held.read.parts]]
    engines = [held.prefill_engine, held.prefill_node, held.decode_engine, held.decode_node]
    return [held.request_id, held.attempt, *engines, read, held.prompt_tokens, held.hit_tokens, held.prefill_done]


def _held(words: list[Any]) -> Held:
    path, parts = words[6]
    read = ReadChoice(Path[path], tuple(Part(*part) for part in parts))
    return Held(*cast(Any, [*words[:6], read, *words[7:]]))


def _news_words(news: Assignment | Ticket) -> Line | None:
    """None: no decision, but what follows from a call."""
    if isinstance(news, Ticket):
        failed = {"out": "failed", "request_id": news.request_id, "attempt": news.attempt, "why": news.why}
        return failed if news.state is State.FAILED else None
    return {
        "out": "assigned",
        "request_id": news.request_id,
        "attempt": news.attempt,
        "prefill": news.prefill_engine,
        "decode": news.decode_engine,
        "path": news.read.path.name,
        "parts": [astuple(part) for part in news.read.parts],
        "why": news.explain.json(),
    }


def _choice(line: Line) -> Choice:
    parts = tuple((str(node), float(first), float(stop)) for node, first, stop in line.get("parts", ()))
    engines = line.get("prefill", ""), line.get("decode", ""), line.get("path", "")
    return Choice(line["request_id"], line["attempt"], *engines, parts)
