"""A bench for the stream: it plays the readers and their sinks, and knows of each page who may write it."""

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
    """One reader's part. `is_open`: its sink may still let something in; `layers`: those it may send."""

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

    @property
    def sends(self) -> int:
        """Blocks in each of its layers; 0 while it may send nothing."""
        if self.granted is not None:
            return self.granted
        return 0 if self.holds else self.blocks.count if self.prefix is None else self.prefix

    @property
    def is_whole(self) -> bool:
        return self.prefix == 0 or self.granted == 0 or len(self.arrived) == self.layers_total - self.first_layer

    layers_total: int = 0


class StreamBench(Bench):
    """`plan`: who reads what, unless a script says it."""

    def __init__(self, machine: Any, plan: tuple[Share, ...]) -> None:
        super().__init__(machine)
        self.plan = plan
        self.running: dict[int, Running] = {}
        self.landed = np.zeros((machine.layers, max(1, machine.hit_blocks)), dtype=np.bool_)
        self.prefix: int | None = None
        self.refused: defaultdict[int, set[str]] = defaultdict(set)
        """Of each block, the nodes that could not read it."""
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
        layers: list[Event] = [("part_layer", part, layer) for layer in self.may_land(part)]
        return events + (layers or ([("part_ended", part)] if running.is_whole else []))

    def may_land(self, part: int) -> list[int]:
        """Layers that the part's sink would let in now."""
        running = self.running[part]
        if not running.is_open or running.fencing or not running.sends or self.is_draining:
            return []
        return [layer for layer in range(running.first_layer, running.layers) if layer not in running.arrived]

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
            case "part_layer", [layer]:
                running.arrived.add(layer)
                self.landed[layer, running.blocks.head(running.sends).indexes()] = True
            case "gave_up", [kept]:
                self._gave_up(running, kept)
            case "part_failed", [reason, *_] if not running.ended:
                running.ended = True
                self._failed(running, reason)
            case "part_ended", [] if not running.ended:
                running.ended, running.giving = True, None
                if running.prefix is None:
                    self._failed(running, Reason.INTERNAL)

    def _prefix_told(self, running: Running, prefix: int) -> None:
        if prefix > running.blocks.count:
            running.ended = True
            self._failed(running, Reason.INTERNAL)
            return
        running.prefix = prefix
        if prefix < running.blocks.count:
            # The cut voids what was granted, and what came under it.
            self.landed[:, running.blocks.indexes()] = False
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
        if running.granted == 0:
            return
        if reason is Reason.PREFIX_CUT or not self._is_spared(running, reason):
            self._caused(reason)

    def _is_spared(self, running: Running, reason: Reason) -> bool:
        if running.node not in (OWN, DECODE):
            return True
        refused = self.refused[running.blocks.first]
        other = OWN if running.node == DECODE else self.machine.decode_node
        if self.prefix is None:
            return reason is Reason.POOL_EXHAUSTED and other not in ("", *refused)
        has_begun = running.first_layer in running.arrived
        return reason is Reason.LEASE_EXPIRED and running.node == DECODE and bool(refused) and not has_begun

    def _note(self, action: Action) -> None:
        is_over = self.cause is not None or self.all(act.Quiesce) or self.all(act.Finish)
        goes_on = isinstance(action, act.Reserve | act.StartPart | act.Grant | act.AskToGiveUp | act.FencePart)
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
            case act.StartPart(part, share, first_layer, holds):
                self._note_start(part, share, first_layer, holds)
            case act.AskToGiveUp(part, kept_blocks):
                running = self.running[part]
                assert self.prefix is None and running.prefix is None and running.giving is None, show(action)
                assert kept_blocks < running.blocks.count, show(action)
                running.giving = kept_blocks
            case act.FencePart(part):
                assert not self.running[part].fencing, f"{show(action)} twice"
                self.running[part].fencing, self.running[part].giving = True, None
                for block in self.running[part].blocks.indexes().tolist():
                    self.refused[block].add(self.running[part].node)
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
        return bool(running.granted) and (bool(self.machine.decode_node) or not running.is_whole)

    def _note_start(self, part: int, share: Share, first_layer: int, holds: bool) -> None:
        assert part not in self.running, f"part {part} began twice"
        for number, other in self.running.items():
            if other.is_open:
                assert not other.blocks.both(share.blocks), f"parts {number} and {part} write the same pages"
        layers = min(self.machine.layers, self.emptied + self.ring_layers) if not holds else 0
        running = Running(share.node, share.blocks, holds, first_layer, layers, layers_total=self.machine.layers)
        if self.prefix is not None:
            assert share.blocks.below(self.prefix) == share.blocks.count, "blocks behind the prefix are read again"
            running.granted = share.blocks.count
        assert self.landed[:first_layer, share.blocks.indexes()].all(), f"layers below {first_layer} have not come"
        self.running[part] = running

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
        assert self.prefix is not None and blocks == running.blocks.below(self.prefix) <= (running.prefix or blocks)
        assert layers >= running.layers, f"{layers} layers granted after {running.layers}"
        running.layers = layers
        self._check_ring(layers)

    def _check_ring(self, layers: int) -> None:
        """No page set is granted again before its layer was computed and, where it must be, pushed."""
        assert not self.machine.ring_sets or layers <= self.emptied + self.machine.ring_sets, (
            f"{layers} granted, {self.emptied} emptied"
        )
