"""A call of an engine process, and the pages that it writes: what is promised is compared, what is quiet is painted."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
from engine import LAYERS, SCRUB, Engine, kv

from kvmover_client.call import Call
from kvmover_client.errors import (
    BadRequest,
    KvmoverError,
    NotRegistered,
    NotWhole,
    PagesBusy,
    RequestTaken,
    StaleAttempt,
    UnknownRequest,
)

REFUSALS = (BadRequest, NotRegistered, NotWhole, PagesBusy, RequestTaken, StaleAttempt, UnknownRequest)
"""A call that was refused has touched no page."""


class Watched:
    """A call, the pages it writes, and what was found out about it."""

    def __init__(self, call: Call[Any], owner: Engine, name: str) -> None:
        self.call = call
        self.owner = owner
        self.name = name
        self.keys: list[bytes] = []
        self.pages: list[int] = []
        self.page_sets: list[list[int]] = []
        self.ring = False
        self.wrong: list[str] = []
        self.end = ""
        self.message = ""
        self.pages_quiet = True
        self.is_deaf = False
        self.checked_layers = 0
        self.over = asyncio.Event()
        self.quiet = asyncio.Event()
        self.painted = False
        self.tasks: list[asyncio.Task[None]] = []

    def told(self) -> dict[str, Any]:
        return {
            "end": self.end,
            "message": self.message,
            "pages_quiet": self.pages_quiet,
            "quiet": self.quiet.is_set(),
            "wrong": self.wrong,
            "ready": getattr(self.call, "ready_layers", 0),
        }

    async def watch(self) -> None:
        """Waits for the end; what it is called: a reason, the class of the error, or TimedOut for none at all."""
        try:
            end = await self.call.end()
            self.end, self.message, self.pages_quiet = end.reason.name, end.message, end.pages_quiet
            self.over.set()
            await self.call.quiet()
            self.quiet.set()
        except KvmoverError as error:
            if not self.end:
                self.end, self.message = type(error).__name__, str(error)
            if self.over.is_set() or not isinstance(error, REFUSALS):
                # The daemon may live on, and only what it says itself makes pages quiet: nobody is left to hear that.
                self.pages_quiet = False
                self.is_deaf = True
        self.over.set()

    def view(self, layer: int, page: int) -> Any:
        return (self.owner.ring if self.ring else self.owner.region).page_view(0 if self.ring else layer, 0, page)

    def check(self, layer: int, blocks: int, pages: list[int]) -> None:
        for block in range(blocks):
            if not np.array_equal(self.view(layer, pages[block]), kv(self.keys[block], layer)):
                self.wrong.append(f"{self.name}: layer {layer} of block {block} is ready with wrong bytes")

    def paint(self) -> None:
        self.painted = True
        for layer in range(1 if self.ring else LAYERS):
            for page in self.pages:
                self.view(layer, page)[:] = SCRUB

    def late_writes(self) -> list[str]:
        """What was written after the pages were painted."""
        return [
            f"{self.name}: page {page} of layer {layer} was written after {self.end}"
            for layer in range(1 if self.ring else LAYERS)
            for page in self.pages
            if not (self.view(layer, page) == SCRUB).all()
        ]
