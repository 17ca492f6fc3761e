"""A bench for the stream: it plays the readers and their sinks, and knows of each page who may write it, and who did."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from machines_kit import Bench
from machines_words import Event, show

from kvmoverd.core.machines import actions as act
from kvmoverd.core.machines.actions import Action
from kvmoverd.core.runs import Runs
from kvmoverd.core.shares import Share
from kvmoverd.core.status import Reason

OWN, DECODE = "pe", "de"


@dataclass(eq=False)
class Running:
    """One reader's part. `is_open`: its sink may still let something in; `layers`: those it may send.

    `asked`: how many blocks it is to keep when it gives the rest. `kept`: it has given that, from layer `cut` on; `heard`: it
    was granted what it keeps.
    """

    node: str
    blocks: Runs
    holds: bool
    first_layer: int
    layers: int
    is_open: bool = True
    prefix: int | None = None
    granted: int | None = None
    giving: int | None = None
    fencing: bool = False
    ended: bool = False
    arrived: set[int] = field(default_factory=set)
    rest: bool = False
    asked: int | None = None
    was_asked: bool = False
    kept: int | None = None
    cut: int = 0
    heard: bool = False

    def blocks_at(self, layer: int) -> Runs:
        """What it brings of a layer."""
        kept = self.kept if self.kept is not None and layer >= self.cut else self.sends
        return self.blocks.head(kept)

    def layers_of(self, blocks: Runs) -> int:
        """Layers below which it may write some of these blocks."""
        if self.kept is None or self.blocks.head(self.kept).both(blocks):
            return self.layers_total if self.blocks.both(blocks) else 0
        return self.cut if self.blocks.both(blocks) else 0

    @property
    def stop(self) -> int:
        """One more than the last layer that it has sent."""
        return max(self.arrived, default=self.first_layer - 1) + 1

    def may_send(self, layer: int) -> bool:
        """Would its sink let the layer in? After a rest was given, the later layers wait for a grant of what is kept."""
        if layer in self.arrived or not self.first_layer <= layer < self.layers or not self.blocks_at(layer):
            return False
        return self.kept is None or layer < self.cut or self.heard

    @property
    def sends(self) -> int:
        """Blocks in each of its layers, of its rest aside; 0 while it may send nothing."""
        if self.granted is not None:
            return self.granted
        return 0 if self.holds else self.blocks.count if self.prefix is None else self.prefix

    @property
    def is_whole(self) -> bool:
        last = self.cut if self.kept == 0 else self.layers_total
        return self.prefix == 0 or self.granted == 0 or set(range(self.first_layer, last)) <= self.arrived

    layers_total: int = 0


class StreamBench(Bench):
    """`plan`: who reads what, unless a script says it."""

    def __init__(self, machine: Any, plan: tuple[Share, ...]) -> None:
        super().__init__(machine)
        self.plan = plan
        self.running: dict[int, Running] = {}
        self.landed = np.zeros((machine.layers, max(1, machine.hit_blocks)), dtype=np.bool_)
        self.writers = np.zeros(self.landed.shape, dtype=np.int64)
        """Of each page, the part that has written it; 0: none, or none that counts."""
        self.prefix: int | None = None
        self.refused: defaultdict[int, set[str]] = defaultdict(set)
        """Of each block, the nodes that could not read it."""
        self.rest_refused: defaultdict[int, set[str]] = defaultdict(set)
        """The same, of its rest."""
        self.was_draining = False
        self.computed_layers = self.pushed_layers = 0
        self.ring_layers = min(machine.ring_sets or machine.layers, machine.layers)

    def give(self, event: Event) -> list[Action]:
        self.was_draining = self.is_draining
        return super().give(event)

    def owed(self) -> list[Event]:
        answers: dict[str, Event] = {"reserved": ("reserved", self.plan), "quiet": ("quiet",)}
        events = [answers[question] for question in self.asked]
        return events if self.is_draining else events + [e for part in self.running for e in self._owed_by(part)]

    @property
    def is_draining(self) -> bool:
        return self.state_name in ("DRAINING", "UNQUIET", "ENDED")

    @property
    def emptied(self) -> int:
        """Layers whose page sets are free again."""
        return min(self.computed_layers, self.pushed_layers) if self.machine.pushes else self.computed_layers

    def _owed_by(self, part: int) -> list[Event]:
        running = self.running[part]
        if not running.is_open:
            return []
        if running.fencing:
            return [("part_fenced", part)]
        if running.ended:
            return []
        # What it is asked to give up crosses with what it says: once its prefix is told it keeps all.
        kept = running.giving if running.prefix is None else running.blocks.count
        events: list[Event] = [("gave_up", part, kept)] if running.giving is not None else []
        if running.prefix is None:
            return [*events, ("part_prefix", part, running.blocks.count, None)]
        events += self._rests_owed(part, running)
        layers: list[Event] = [("part_layer", part, layer) for layer in self.may_land(part)]
        return events + (layers or ([("part_ended", part)] if running.is_whole else []))

    def may_land(self, part: int) -> list[int]:
        """Layers that the part's sink would let in now."""
        running = self.running[part]
        if not running.is_open or running.fencing or not running.sends or self.is_draining:
            return []
        return [layer for layer in range(running.first_layer, running.layers) if running.may_send(layer)]

    def _rests_owed(self, part: int, running: Running) -> list[Event]:
        """It may keep more than it has to, and give from any layer on that it has not sent; or nothing."""
        if running.asked is None or running.granted is None:
            return []
        kept, layers = {running.asked, running.granted - 1}, range(max(1, running.stop), running.layers_total)
        return [
            ("gave_rest", part, running.granted, 0),
            *(("gave_rest", part, k, layer) for k in kept for layer in layers),
        ]

    def check_over(self) -> None:
        super().check_over()
        if self.end().reason is Reason.OK:
            first, prefix = self.machine.resident_blocks, self.end().prefix_blocks
            assert self.landed[:, first:prefix].all(), "a stream ended well without all of its layers"

    def _answered(self, event: Event) -> None:
        match event:
            case ("reserved", *_):
                self._no_longer("reserved")
            case ("reserve_failed", reason, *_) if not self.is_draining or self._no_longer("reserved"):
                self._caused(reason)
            case ("computed", layers):
                self.computed_layers = max(self.computed_layers, layers)
            case ("pushed", layers):
                self.pushed_layers = max(self.pushed_layers, layers)
            case ("stop", reason, *_):
                self._caused(reason)
            case ("quiet",):
                self._no_longer("quiet")
            case (name, part, *said) if part in self.running and self.running[part].is_open and not self.was_draining:
                self._said_of(self.running[part], name, said)

    def _said_of(self, running: Running, name: str, said: list[Any]) -> None:
        match name, said:
            case "part_fenced", _ if running.fencing and not self.all(act.Quiesce):
                running.is_open = False
            case _ if running.fencing:
                pass
            case "part_prefix", [prefix, _] if running.prefix is None and not running.ended:
                self._prefix_told(running, prefix)
            case "part_layer", [layer] if running.may_send(layer):
                self._landed_of(running, layer)
            case "gave_up", [kept]:
                self._gave_up(running, kept)
            case "gave_rest", [kept, first_layer] if not running.ended:
                self._gave_rest(running, kept, first_layer)
            case "part_failed", [reason, *_] if not running.ended:
                running.ended = True
                self._failed(running, reason)
            case "part_ended", [] if not running.ended:
                running.ended, running.giving, running.asked = True, None, None
                if running.prefix is None:
                    self._failed(running, Reason.INTERNAL)

    def _landed_of(self, running: Running, layer: int) -> None:
        """Each page once, but for those that came early from somebody whose sink is closed now."""
        blocks = running.blocks_at(layer).indexes()
        part = next(number for number, one in self.running.items() if one is running)
        for writer in set(self.writers[layer, blocks].tolist()) - {0}:
            assert not self.running[writer].is_open, f"layer {layer} of parts {writer} and {part} in the same pages"
            assert layer not in self.running[writer].arrived or layer >= self.announced_layers, (
                f"layer {layer} was ready"
            )
        running.arrived.add(layer)
        self.landed[layer, blocks], self.writers[layer, blocks] = True, part

    def _gave_rest(self, running: Running, kept: int, first_layer: int) -> None:
        asked, running.asked = running.asked, None
        if not first_layer or (kept, first_layer) == (running.kept, running.cut):
            return
        if asked is None or kept >= (running.granted or 0) or not running.stop <= first_layer < running.layers_total:
            running.ended = True
            self._failed(running, Reason.INTERNAL)
            return
        running.kept, running.cut = kept, first_layer

    def _prefix_told(self, running: Running, prefix: int) -> None:
        if prefix > running.blocks.count:
            running.ended = True
            self._failed(running, Reason.INTERNAL)
            return
        running.prefix = prefix
        if prefix < running.blocks.count:
            # The cut voids what was granted, and what came under it.
            self.landed[:, running.blocks.indexes()] = False
            self.writers[:, running.blocks.indexes()] = 0
            running.arrived.clear()
            if self.prefix is not None:
                self._caused(Reason.PREFIX_CUT)

    def _gave_up(self, running: Running, kept: int) -> None:
        asked, running.giving = running.giving, None
        if kept >= running.blocks.count or running.ended:
            return
        if asked is None or running.prefix is not None:
            running.ended = True
            self._failed(running, Reason.INTERNAL)
            return
        running.blocks, running.holds, running.is_open = running.blocks.head(kept), True, kept > 0

    def _failed(self, running: Running, reason: Reason) -> None:
        """Does it end the request? Others may read what a third node could not, or what one of the two others has no room for."""
        if running.granted == 0 or (running.rest and running.is_whole):
            return
        if reason is Reason.PREFIX_CUT or not self._is_spared(running, reason):
            self._caused(reason)

    def _is_spared(self, running: Running, reason: Reason) -> bool:
        if running.node not in (OWN, DECODE):
            return True
        if running.rest:
            return self.rest_is_spared(running)
        refused = self.refused[running.blocks.first]
        other = OWN if running.node == DECODE else self.machine.decode_node
        if self.prefix is None:
            return reason is Reason.POOL_EXHAUSTED and other not in ("", *refused)
        has_begun = running.first_layer in running.arrived
        return reason is Reason.LEASE_EXPIRED and running.node == DECODE and bool(refused) and not has_begun

    def rest_is_spared(self, running: Running) -> bool:
        """Is one of the two owners left that could read it?"""
        return bool({OWN, self.machine.decode_node} - {"", running.node} - self.rest_refused[running.blocks.first])

    def _note(self, action: Action) -> None:
        is_over = self.cause is not None or self.all(act.Quiesce) or self.all(act.Finish)
        goes_on = isinstance(action, act.Reserve | act.StartPart | act.Grant | act.AskToGiveUp | act.FencePart)
        goes_on = goes_on or isinstance(action, act.AskForRest | act.PushRest)
        says = isinstance(action, act.AnnouncePrefix | act.AnnounceLayers | act.SetPrefix)
        assert not (is_over and (goes_on or says)), f"{show(action)} after {self.cause}"
        match action:
            case act.Reserve():
                self.asked.append("reserved")
            case act.Quiesce():
                assert not self.all(act.Quiesce), "asked twice to quiesce"
                fenced = [part for part, running in self.running.items() if running.fencing and running.is_open]
                wanted = [part for part in fenced if self._is_wanted(self.running[part])]
                assert not (self.machine.went_well and wanted), f"over while parts {wanted} are still to be read again"
                self.asked.append("quiet")
            case act.StartPart(part, share, first_layer, holds, rest):
                self._note_start(part, share, first_layer, holds=holds, rest=rest)
            case act.AskForRest(part, kept_blocks):
                self._note_asked(self.running[part], kept_blocks)
            case act.PushRest(blocks, first_layer):
                _, part, kept, layer = self.history[-1]
                running = self.running[part]
                assert running.node == self.machine.decode_node, "what it never had is not pushed"
                assert (first_layer, blocks) == (layer, running.blocks.head(running.granted or 0).tail(kept)), show(
                    action
                )
            case act.AskToGiveUp(part, kept_blocks):
                running = self.running[part]
                assert self.prefix is None and running.prefix is None and running.giving is None, show(action)
                assert kept_blocks < running.blocks.count, show(action)
                running.giving = kept_blocks
            case act.FencePart(part):
                assert not self.running[part].fencing, f"{show(action)} twice"
                running = self.running[part]
                running.fencing, running.giving, running.asked = True, None, None
                for block in running.blocks.indexes().tolist():
                    (self.rest_refused if running.rest else self.refused)[block].add(running.node)
            case act.AnnouncePrefix(prefix_blocks):
                self._note_prefix(prefix_blocks)
            case act.Grant(part, blocks, layers):
                self._note_grant(self.running[part], blocks, layers)
            case act.AnnounceLayers(first, last):
                assert first == self.announced_layers <= last, f"{show(action)} after {self.announced_layers} layers"
                self.announced_layers = last + 1
                loaded = slice(self.machine.resident_blocks, self.prefix)
                assert self.landed[first : last + 1, loaded].all(), f"{show(action)}, and not all of it has landed"
            case _:
                super()._note(action)

    def _is_wanted(self, running: Running) -> bool:
        """Does anybody lack its layers? Without a decode node those that came are all."""
        fills_buffer = bool(self.machine.decode_node) and not running.rest
        return bool(running.granted) and (fills_buffer or not running.is_whole)

    def _note_asked(self, running: Running, kept: int) -> None:
        """Only who sends, one of the two owners, with something to give, once ever."""
        assert self.prefix is not None and running.granted is not None and kept < running.granted, f"{kept} are kept"
        assert running.node in (OWN, DECODE) and not running.rest and not self.refused[running.blocks.first]
        assert running.is_open and not running.fencing and not running.ended and not running.was_asked
        running.asked, running.was_asked = kept, True

    def _note_start(self, part: int, share: Share, first_layer: int, *, holds: bool, rest: bool) -> None:
        assert part not in self.running, f"part {part} began twice"
        giver = self._giver(share.blocks) if rest else None
        for number, other in self.running.items():
            may_write = other.layers_of(share.blocks) if other.is_open else 0
            assert may_write <= first_layer if rest else not may_write, (
                f"parts {number} and {part} write the same pages"
            )
        layers = min(self.machine.layers, self.emptied + self.ring_layers) if not holds else 0
        running = Running(
            share.node, share.blocks, holds, first_layer, layers, layers_total=self.machine.layers, rest=rest
        )
        if self.prefix is not None:
            assert share.blocks.below(self.prefix) == share.blocks.count, "blocks behind the prefix are read again"
            running.granted = share.blocks.count
        owed = giver.cut if giver is not None else 0
        assert self.landed[owed:first_layer, share.blocks.indexes()].all(), f"layers below {first_layer} have not come"
        if rest:
            assert share.node not in self.rest_refused[share.blocks.first], f"{share.node} could not read it"
        self.running[part] = running

    def _giver(self, blocks: Runs) -> Running:
        """Whose rest it is: it still brings the layers before."""
        given = [one for one in self.running.values() if one.is_open and one.kept is not None]
        (giver,) = [one for one in given if one.blocks.head(one.granted or 0).tail(one.kept or 0) == blocks]
        return giver

    def _note_prefix(self, prefix_blocks: int) -> None:
        parts = [running for running in self.running.values() if running.is_open]
        assert all(running.prefix is not None for running in parts), "a part's prefix is not known yet"
        assert not any(running.fencing or running.giving is not None for running in parts), "a part moves"
        lost = [r.blocks.at(r.prefix) for r in parts if r.prefix is not None and r.prefix < r.blocks.count]
        assert prefix_blocks == min(lost, default=self.machine.hit_blocks), f"{prefix_blocks}, lost are {lost}"
        loaded = Runs.union(running.blocks for running in parts)
        assert loaded == Runs.of((self.machine.resident_blocks, self.machine.hit_blocks)), f"{loaded} are read"
        self.prefix = prefix_blocks
        for running in parts:
            running.granted = running.blocks.below(prefix_blocks)

    def _note_grant(self, running: Running, blocks: int, layers: int) -> None:
        if running.kept is None:
            assert self.prefix is not None and blocks == running.blocks.below(self.prefix) <= (running.prefix or blocks)
        else:
            assert blocks == (running.kept or running.granted), f"{blocks} granted to who keeps {running.kept}"
            assert running.kept or layers <= running.cut, f"{layers} layers granted to who brings {running.cut}"
            running.heard = True
        assert layers >= running.layers or running.kept == 0, f"{layers} layers granted after {running.layers}"
        running.layers = layers
        self._check_ring(layers)

    def _check_ring(self, layers: int) -> None:
        """No page set is granted again before its layer was computed and, where it must be, pushed."""
        assert not self.machine.ring_sets or layers <= self.emptied + self.machine.ring_sets, (
            f"{layers} granted, {self.emptied} emptied"
        )
