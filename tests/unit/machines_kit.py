"""A bench for the tests of the machines: it plays the node and keeps its own books."""

from __future__ import annotations

from collections import Counter
from typing import Any

from machines_words import Event, give, parse, picture, say, show

from kvmoverd.core.errors import BadRequest, NotWhole, UnknownRequest
from kvmoverd.core.machines import actions as act
from kvmoverd.core.machines.actions import Action
from kvmoverd.core.status import End, Reason

PROGRESS = (
    act.TakeSlots,
    act.Reserve,
    act.StartPart,
    act.Grant,
    act.SetPrefix,
    act.SendLayer,
    act.SendAssembly,
    act.GaveUp,
    act.GaveRest,
    act.FindStored,
    act.WriteBlocks,
    act.AnnouncePrefix,
    act.AnnounceLayers,
    act.AnnounceAttached,
    act.AnnounceWhole,
    act.AnnounceStored,
    act.AnnounceAccepted,
    act.AnnounceProgress,
    act.AnnounceBlocks,
    act.GrantLease,
)
"""What no machine may ask or say once it was stopped."""


class Bench:
    """Runs one machine as the node would, remembers what is under way, and checks every action against its own books.

    `send_max`: layers that may be under way. `credit_layers` None: the machine is not paced by credits.
    """

    def __init__(self, machine: Any, *, send_max: int = 0, holds_slots: bool = False, credit_layers: int | None = None):
        self.machine = machine
        self.send_max = send_max
        self.holds_slots = holds_slots
        self.credit_layers = credit_layers
        self.credit_prefix = getattr(machine, "blocks", 0)
        self.holds = getattr(machine, "holds", False)
        self.lost_while_holding: list[int] = []
        self.history: list[Event] = []
        self.log: list[Action] = []
        self.asked: list[str] = []
        self.reads: set[int] = set()
        self.sends: set[int] = set()
        self.assembling: set[int] = set()
        self.assembled: set[int] = set()
        self.writes: set[int] = set()
        self.joined: set[int] = set()
        self.is_part = hasattr(machine, "on_give_up")
        self.layers = machine.window.layers if self.is_part else 0
        self.come: Counter[int] = Counter()
        self.given: tuple[int, int] | None = None
        self.first_layer = self.sent_layers = self.announced_layers = machine.window.next_layer if self.is_part else 0
        self.arrived: set[int] = set()
        self.filled: set[int] = set()
        self.first_pushed: int | None = None
        self.deliveries = 0
        self.cause: Reason | None = None

    @property
    def state_name(self) -> str:
        return str(self.machine.state.name)

    @property
    def ended(self) -> bool:
        return self.state_name == "ENDED"

    def run(self, script: str) -> list[Action]:
        """Gives the events of a script, separated by semicolons; returns the actions of the last one."""
        told = [self.give(parse(line)) for line in script.split(";") if line.strip()]
        return told[-1] if told else []

    def run_all(self, script: str) -> list[Action]:
        """As `run`, and returns the actions of all of them."""
        return [action for line in script.split(";") for action in self.give(parse(line))]

    def give(self, event: Event) -> list[Action]:
        """Gives one event and checks what the machine answers. Errors that a caller can cause pass through, checked."""
        before = picture(self.machine) if event[0] in ("computed", "deliver", "prefix") else None
        was_ended = self.ended
        if event[0] == "give_rest":
            event = self._stopped_reading(*event[1:])
        self.history.append(event)
        try:
            told = give(self.machine, event)
        except (BadRequest, NotWhole, UnknownRequest):
            assert picture(self.machine) == before, f"{say(event)}: was refused, and changed the machine"
            raise
        self._answered(event)
        assert not (was_ended and told), f"{say(event)}: came after the end and was answered by {told}"
        for action in told:
            self._note(action)
            self.log.append(action)
        return told

    def owed(self) -> list[Event]:
        """The completions of everything under way, all of them good."""
        answers: dict[str, Event] = {
            "found": ("found", tuple((block, Reason.MISS) for block in range(getattr(self.machine, "blocks", 0)))),
            "slots": ("slots",),
            "quiet": ("quiet",),
        }
        return [
            *(answers[question] for question in self.asked),
            *(self._read(block) for block in sorted(self.reads)),
            *(("sent", layer, Reason.OK) for layer in sorted(self.sends)),
            *(("assembled", layer, Reason.OK) for layer in sorted(self.assembling)),
            *(("written", block, Reason.OK) for block in sorted(self.writes | self.joined)),
        ]

    def _read(self, block: int) -> Event:
        if self.given is not None and block >= self.given[0]:
            return "layers", ((block, self.given[1]),)
        return "blocks", ((block, Reason.OK),)

    def _stopped_reading(self, kept_blocks: int, first_layer: int) -> Event:
        """What a block reader would make of it: no more than the machine can, and no layer that the last block has."""
        prefix = self.machine.prefix_blocks
        if not self.machine.may_give_rest or kept_blocks >= prefix or not first_layer or self.layers < 2:
            return "give_rest", prefix, 0
        first_layer = max(1, self.come[prefix - 1], min(first_layer, self.layers - 1))
        return ("give_rest", kept_blocks, first_layer) if first_layer < self.layers else ("give_rest", prefix, 0)

    def finish_up(self) -> None:
        """Completes what is under way, and what follows from it, until nothing is."""
        while owed := self.owed():
            for event in owed:
                self.give(event)

    def all(self, kind: type[Action]) -> list[Any]:
        return [action for action in self.log if isinstance(action, kind)]

    def end(self) -> End:
        """What the caller was told, exactly once."""
        finishes = self.all(act.Finish)
        assert len(finishes) == 1, f"{len(finishes)} Finish in {self.log}"
        end: End = finishes[0].end
        return end

    def check_over(self) -> None:
        """Nothing is owed to anyone any more: the caller was told once, slots were given back once, pages are quiet."""
        assert self.ended, f"everything came back, and the machine is still {self.state_name}"
        end = self.end()
        assert len(self.all(act.FinishDelivery)) == self.deliveries, "each Deliver has one last word"
        assert len(self.all(act.Release)) == int(self.holds_slots), f"slots held: {self.holds_slots}; {self.log}"
        assert len(self.all(act.AnnounceQuiet)) == int(not end.pages_quiet), f"quiet at the end: {end.pages_quiet}"

    def _answered(self, event: Event) -> None:
        """Books of what the event itself completes or causes."""
        match event:
            case ("slots",) if self._no_longer("slots") and hasattr(self.machine, "on_blocks"):
                self.reads = set(range(self.machine.blocks))
            case ("no_slots", reason, *_) if self._no_longer("slots"):
                self._caused(reason)
            case ("blocks", outcomes):
                self._reads_ended(outcomes)
            case ("layers", progress):
                self.come |= Counter(dict(progress))
                self.reads -= {block for block, _ in progress if self._has_come(block)}
            case ("found", *found) if self._no_longer("found"):
                self.joined = set(range(self.machine.blocks)) - {block for block, _ in (found[0] if found else ())}
            case ("written", block, _):
                self.writes.discard(block)
                self.joined.discard(block)
            case ("stop", reason, *_):
                self._caused(reason)
            case _:
                self._moved(event)

    def _has_come(self, block: int) -> bool:
        return self.come[block] >= (self.given[1] if self.given and block >= self.given[0] else self.layers)

    def _reads_ended(self, outcomes: tuple[tuple[int, Reason], ...]) -> None:
        """A block of the announced prefix that is lost cuts the attempt short."""
        announced = [action.prefix_blocks for action in self.all(act.AnnouncePrefix)]
        for block, reason in outcomes:
            if reason is not Reason.OK and block in self.reads and announced and block < announced[0]:
                self._lost_late(block)
            self.reads.discard(block)
            self.come[block] = self.layers if reason is Reason.OK else self.come[block]

    def _lost_late(self, block: int) -> None:
        """Of a part that holds, only the first credit says whether the block matters."""
        if self.holds:
            self.lost_while_holding.append(block)
        elif self.credit_layers is None or block < self.credit_prefix:
            self._caused(Reason.PREFIX_CUT)

    def _credited(self, prefix_blocks: int, layers: int) -> None:
        assert self.credit_layers is not None, "a credit for a machine without credits"
        if self.holds:
            if not self.all(act.AnnouncePrefix) or prefix_blocks > self.credit_prefix:
                return
            self.holds, self.credit_prefix = False, prefix_blocks
            if any(block < prefix_blocks for block in self.lost_while_holding):
                self._caused(Reason.PREFIX_CUT)
        if self.given is not None and prefix_blocks != self.given[0]:
            layers = min(layers, self.given[1])
        if prefix_blocks and prefix_blocks in (self.credit_prefix, *(self.given or ())[:1]):
            self.credit_layers = max(self.credit_layers, layers)

    def _moved(self, event: Event) -> None:
        match event:
            case ("sent", layer, reason, *_) if layer in self.sends:
                self._landed(layer, reason, self.sends, self.arrived)
            case ("assembled", layer, reason, *_) if layer in self.assembling:
                self._landed(layer, reason, self.assembling, self.assembled)
            case ("layer", layer):
                self.filled.add(layer)
            case ("prefix", _, *more) if self.first_pushed is None:
                self.first_pushed = more[1] if len(more) > 1 else 0
            case ("rest", layer) if self.first_pushed is not None:
                self.first_pushed = min(self.first_pushed, layer)
            case ("credit", prefix_blocks, layers):
                self._credited(prefix_blocks, layers)
            case ("deliver",):
                self.deliveries += 1

    def _landed(self, layer: int, reason: Reason, under_way: set[int], landed: set[int]) -> None:
        under_way.remove(layer)
        if reason is Reason.OK:
            landed.add(layer)
        else:
            self._caused(reason)

    def _no_longer(self, question: str) -> bool:
        if question not in self.asked:
            return False
        self.asked.remove(question)
        return True

    def _caused(self, reason: Reason) -> None:
        """The first cause counts; none does once the request is over for its caller, or all there was to do is done."""
        if self.cause is None and not self.all(act.Finish) and not self.all(act.Quiesce):
            self.cause = reason

    def _note(self, action: Action) -> None:
        """Checks an action against the books and enters it there."""
        tells_loss = isinstance(action, act.AnnounceBlocks) and hasattr(self.machine, "on_found")
        assert self.cause is None or tells_loss or not isinstance(action, PROGRESS), (
            f"{show(action)} after {self.cause}"
        )
        if self.all(act.Finish):
            assert isinstance(action, act.Release | act.AnnounceQuiet), f"{show(action)} after Finish"
        match action:
            case act.FindStored():
                self.asked.append("found")
            case act.TakeSlots():
                self.asked.append("slots")
                self.holds_slots = True
            case act.AnnounceWhole():
                assert self.first_pushed is not None, "whole without a prefix"
                missing = set(range(self.first_pushed, self.machine.pushed.layers)) - self.filled
                assert not missing, f"whole with layers {self.filled}, pushed from {self.first_pushed} on"
            case act.WriteBlocks(blocks):
                assert not self.all(act.WriteBlocks), "asked twice to write"
                self.writes = set(blocks)
            case act.GaveUp(kept_blocks) if not self.all(act.AnnouncePrefix) and kept_blocks < self.credit_prefix:
                self.credit_prefix, self.credit_layers, self.holds = kept_blocks, 0, True
                self.reads = {block for block in self.reads if block < kept_blocks}
            case act.GaveRest(kept_blocks, first_layer) if first_layer:
                assert self.given is None and first_layer >= self.sent_layers, f"{show(action)} after {self.given}"
                assert self.credit_layers is not None, "a part is paced by credits"
                self.given, self.credit_layers = (kept_blocks, first_layer), min(self.credit_layers, first_layer)
                self.reads -= {block for block in self.reads if self._has_come(block)}
            case act.AnnouncePrefix(prefix_blocks, first_lost) if self.credit_layers is not None:
                self.credit_prefix = prefix_blocks
                self.credit_layers = 0 if first_lost else self.credit_layers
            case _:
                self._note_layers(action)

    def _note_layers(self, action: Action) -> None:
        match action:
            case act.SendLayer(layer):
                assert layer == self.sent_layers, f"layer {layer} is sent after {self.sent_layers} layers"
                self.sends.add(layer)
                self.sent_layers += 1
                assert len(self.sends) <= self.send_max, f"{len(self.sends)} layers under way, {self.send_max} may be"
                assert self.credit_layers is None or layer < self.credit_layers, f"{layer} of {self.credit_layers}"
                assert not self.holds, f"{show(action)} before the first credit"
            case act.SendAssembly(layer):
                self._note_assembly(layer)
            case act.AnnounceLayers(first, last):
                assert first == self.announced_layers <= last, f"{show(action)} after {self.announced_layers} layers"
                self.announced_layers = last + 1
                assert set(range(first, last + 1)) <= self.arrived, f"{show(action)}; arrived: {self.arrived}"
            case _:
                self._note_end(action)

    def _note_assembly(self, layer: int) -> None:
        assert ("assemble",) in self.history and not self.holds, (
            f"layer {layer} goes to a buffer that does not wait for it"
        )
        under_way = self.assembled | self.assembling
        assert layer == len(under_way) and under_way == set(range(layer)), (
            f"layer {layer} is assembled after {under_way}"
        )
        self.assembling.add(layer)
        assert len(self.assembling) <= self.send_max, f"{len(self.assembling)} under way, {self.send_max} may be"

    def _check_all_sent(self) -> None:
        layers = self.given[1] if self.given is not None and not self.given[0] else self.layers
        assert self.arrived == set(range(self.first_layer, layers)), f"over with {self.arrived}"
        if self.machine.assembles:
            assert len(self.assembled) == self.machine.window.layers, f"over with {self.assembled} in the DE buffer"

    def _note_end(self, action: Action) -> None:
        under_way = bool(self.sends or self.assembling) or "quiet" in self.asked
        match action:
            case act.Release():
                assert self.holds_slots, "released slots that it does not hold"
                assert not self.all(act.Release), "released its slots twice"
                sends = self.sends | self.assembling
                assert not sends | self.writes, f"released under sends {sends}, writes {self.writes}"
            case act.Finish(end) | act.FinishDelivery(end):
                assert end.pages_quiet is not under_way, f"{show(action)} with layers {self.sends} under way"
                if self.is_part and end.reason is Reason.OK and end.prefix_blocks:
                    self._check_all_sent()
            case act.AnnounceQuiet():
                assert not self.end().pages_quiet, "the pages were said to be quiet already"
                assert not under_way, f"{show(action)} with layers {self.sends} under way"


def failing(event: Event) -> Event:
    """The bad outcome of an operation whose good one is `event`."""
    match event:
        case ("slots",):
            return ("no_slots", Reason.POOL_EXHAUSTED, "the pool is full")
        case ("reserved", *_):
            return ("reserve_failed", Reason.PEER_LOST, "no answer")
        case ("part_prefix" | "part_layer" | "part_ended" | "gave_up" | "gave_rest", part, *_):
            return ("part_failed", part, Reason.PEER_LOST, "the reader went")
        case ("sent" | "assembled", layer, *_):
            return (event[0], layer, Reason.IO_ERROR, "the copy failed")
        case ("written", block, *_):
            return ("written", block, Reason.NO_SPACE)
        case ("blocks", outcomes):
            return ("blocks", tuple((block, Reason.CORRUPT) for block, _ in outcomes))
        case ("quiet",):
            return ("quiesce_timeout",)
    return event
