"""When a request will have its first token, by prefill engine, decode engine and readers.

Prefill begins when the engine has done what it was given and the KV is read, and takes as long as the prompt is at the engine's
rate. Layers are sent as they are read, so a lane costs only what it is slower than storage; KV that lies in the decode node's
pool is sent alone. All in seconds from now.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import NamedTuple

from kvmoverd.core.levelling import Casting, Lane, ends_of_two, split_in_two
from kvmoverd.core.scheduling.joint_pace import Pace
from kvmoverd.core.scheduling.requests import Part, ReadChoice
from kvmoverd.core.scheduling.state import Engine, Node
from kvmoverd.core.status import Path

PREFILL_READS = ReadChoice(Path.PE)
DECODE_READS = ReadChoice(Path.DE)
FAR = (inf, inf)


class PrefillOption(NamedTuple):
    """`own_s`: the prompt's prefill itself. `pages`, `pool`: leading tokens that lie in its pages, in its node's pool."""

    engine: Engine
    pace: Pace
    reads: Lane
    wait_s: float
    own_s: float
    pages: int = 0
    pool: int = 0


class DecodeOption(NamedTuple):
    """`reads`: with what the lane to another node lets through. `pool`: leading tokens in its node's pool."""

    engine: Engine
    pace: Pace
    reads: Lane
    pool: int = 0


class Prediction(NamedTuple):
    """`read_s`: until all is read; `lane_s`: for what only has to cross; `held`: leading tokens that nobody reads."""

    ttft_s: float
    read_s: float
    wait_s: float
    lane_s: float
    own_s: float
    held: int
    prefill: PrefillOption
    decode: DecodeOption


class Work(NamedTuple):
    """What is read: so many hit tokens of so many bytes; who reads with others gains more than the floor."""

    hit_tokens: int
    kv_bytes_per_token: int
    floor_s: float


def soonest(
    prefills: Sequence[PrefillOption], decodes: Sequence[DecodeOption], work: Work
) -> tuple[Prediction, Prediction | None]:
    """The pair whose first token comes first, and the next best that was compared. Of equal ones the one that has read sooner,
    then the one that is earlier in the lists. Engines that can't be sooner than a pair that is known are not looked at."""
    best_s = second_s = FAR
    best = second = None
    for prefill in sorted(prefills, key=_least_s) if len(prefills) > 1 else prefills:
        if second is not None and prefill.wait_s + prefill.own_s > best_s[0]:
            break
        for decode in decodes:
            found_s = _times(prefill, decode, work)
            if best is None or found_s < best_s:
                best_s, second_s, best, second = found_s, best_s, (prefill, decode), best
            elif second is None or found_s < second_s:
                second_s, second = found_s, (prefill, decode)
    assert best is not None, "no pair to choose from"
    return _predicted(*best, best_s, work), None if second is None else _predicted(*second, second_s, work)


def _predicted(prefill: PrefillOption, decode: DecodeOption, found_s: tuple[float, float], work: Work) -> Prediction:
    """As `predict` has it: nothing is held nearly always, and both times are known."""
    if prefill.pages or prefill.pool or decode.pool:
        return predict(prefill, decode, work)
    return Prediction(*found_s, prefill.wait_s, 0.0, prefill.own_s, 0, prefill, decode)


def _times(prefill: PrefillOption, decode: DecodeOption, work: Work) -> tuple[float, float]:
    """Until the first token, and until all is read, as `predict` has them, without more where nothing is held and both sides may
    read: nearly always."""
    _, pace_p, (queue_p, rate_p), wait_s, own_s, pages, pool = prefill
    _, pace_d, (queue_d, rate_d), pool_d = decode
    hit_tokens, kv_bytes_per_token, floor_s = work
    if pages or pool or pool_d or not hit_tokens or pace_p is pace_d or pace_p.starved != pace_d.starved:
        return predict(prefill, decode, work)[:2]
    size = hit_tokens * kv_bytes_per_token
    # As `ends_of_two`.
    read_s, end_d_s = (queue_p + size) / rate_p, (queue_d + size) / rate_d
    read_s = end_d_s if end_d_s < read_s else read_s
    level_s = (queue_p + queue_d + size) / (rate_p + rate_d)
    if read_s - level_s > floor_s and level_s > queue_p / rate_p and level_s > queue_d / rate_d:
        read_s = level_s
    return (read_s if read_s > wait_s else wait_s) + 0.0 + own_s, read_s


def predict(prefill: PrefillOption, decode: DecodeOption, work: Work) -> Prediction:
    """Of this pair."""
    _, pace_p, reads_p, wait_s, own_s, pages, pool = prefill
    _, pace_d, reads_d, pool_d = decode
    here = pages if pages > pool else pool
    held = here if here > pool_d else pool_d
    size = (work.hit_tokens - held) * work.kv_bytes_per_token
    lane_s = 0.0
    if size <= 0:
        read_s = 0.0
    elif pace_p is pace_d:
        read_s = reads_p.ends_s(size)
    elif pace_p.starved != pace_d.starved:
        # What the decode node reads goes over its lane to the prefill engine, what the prefill node reads goes back over its own.
        read_s = (reads_d if pace_p.starved else reads_p).ends_s(size)
    else:
        read_s = ends_of_two(reads_p, reads_d, size, work.floor_s)
    if pool_d > here and pace_p is not pace_d and pace_d.lane:
        lane_s = (pool_d - here) * work.kv_bytes_per_token / pace_d.lane
    ttft_s = (read_s if read_s > wait_s else wait_s) + lane_s + own_s
    return Prediction(ttft_s, read_s, wait_s, lane_s, own_s, held, prefill, decode)


def _least_s(prefill: PrefillOption) -> float:
    return prefill.wait_s + prefill.own_s


class Plan(NamedTuple):
    """Who reads. `reads`: bytes by node; `word`: "prefill", "decode", "split", "helped", or "pooled" where nobody reads."""

    choice: ReadChoice
    word: str
    ends_s: float
    reads: Sequence[tuple[Pace, int]]


class Leading(NamedTuple):
    """Leading `tokens` that nobody reads: the first `pages` of them lie in the prefill engine's own pages, all in the pool of
    `node` if there are more of them than that."""

    tokens: int = 0
    pages: int = 0
    node: Node | None = None


class Ways(NamedTuple):
    """Who may read one request: its two nodes, third ones that have nothing to do, and who has its leading tokens."""

    prefill: Pace
    decode: Pace
    helpers: Sequence[Pace]
    held: Leading = Leading()


def plan(ways: Ways, work: Work, now_ns: int) -> Plan:
    """Sides level, and helpers where each gains more than the floor. Parts are in the order prefill node, helpers, decode node;
    the decode node's is the first where its pool has the leading tokens. They follow each other from 0 to 1, over all that the
    engine's own pages have not: that is nobody's part."""
    prefill, decode, helpers, (held, pages, held_by) = ways
    sides = [decode] if decode is prefill else [decode, prefill]
    readers = [*sides, *helpers]
    at_sides, at_helpers = _well(sides, readers)
    lanes = [pace.lane_of(now_ns, crosses=pace is not prefill) for pace in readers]
    casting = Casting(lanes, at_sides, at_helpers, work.kv_bytes_per_token, work.floor_s)
    cast = casting.cast(work.hit_tokens - held)
    counts = {readers[place].node.name: count for place, count in cast.counts.items()}
    reads = [(readers[place], count * work.kv_bytes_per_token) for place, count in cast.counts.items()]
    word = _word(cast.counts, len(sides))
    if held > pages and held_by is not None:
        counts[held_by.name] = counts.get(held_by.name, 0) + held - pages
    if len(counts) <= 1:
        by_prefill = prefill.node.name in counts if counts else held > 0
        return Plan(PREFILL_READS if by_prefill and prefill is not decode else DECODE_READS, word, cast.ends_s, reads)
    order = [pace.node.name for pace in (prefill, *helpers, decode)]
    if held > pages and held_by is decode.node:
        order.reverse()
    return Plan(ReadChoice(Path.PARTS, _parts(order, counts)), word, cast.ends_s, reads)


def plan_of_two(prefill: PrefillOption, decode: DecodeOption, work: Work) -> Plan:
    """As `plan` of two nodes that are both well, or neither is, where nothing is held and nobody helps."""
    units, kv_bytes_per_token, floor_s = work
    if not units:
        return Plan(DECODE_READS, "pooled", 0.0, ())
    pace_p, pace_d = prefill.pace, decode.pace
    count_d, count_p, ends_s = split_in_two(decode.reads, prefill.reads, units, float(kv_bytes_per_token), floor_s)
    if not count_p:
        return Plan(DECODE_READS, "decode", ends_s, ((pace_d, count_d * kv_bytes_per_token),))
    if not count_d:
        return Plan(PREFILL_READS, "prefill", ends_s, ((pace_p, count_p * kv_bytes_per_token),))
    stop = count_p / units
    parts = Part(pace_p.node.name, 0.0, stop), Part(pace_d.node.name, stop, 1.0)
    reads = (pace_d, count_d * kv_bytes_per_token), (pace_p, count_p * kv_bytes_per_token)
    return Plan(ReadChoice(Path.PARTS, parts), "split", ends_s, reads)


def _well(sides: Sequence[Pace], readers: Sequence[Pace]) -> tuple[list[int], list[int]]:
    """Places of sides and helpers whose lanes are well; all sides where none is, or where there is one."""
    every = range(len(sides))
    well = [place for place in every if not readers[place].starved] if len(sides) > 1 else []
    helpers = [place for place in range(len(sides), len(readers)) if not readers[place].starved]
    return well or list(every), helpers


def _word(counts: dict[int, int], sides: int) -> str:
    if any(place >= sides for place in counts):
        return "helped"
    return "split" if len(counts) > 1 else next((("decode", "prefill")[place] for place in counts), "pooled")


def _parts(order: Sequence[str], counts: dict[str, int]) -> tuple[Part, ...]:
    """Each node its part, by its share of the tokens."""
    parts: list[Part] = []
    total = sum(counts.values())
    begun, first = 0, 0.0
    for node in dict.fromkeys(order):
        if not counts.get(node):
            continue
        begun += counts[node]
        stop = 1.0 if begun == total else begun / total
        parts.append(Part(node, first, stop))
        first = stop
    return tuple(parts)
