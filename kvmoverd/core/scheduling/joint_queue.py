"""Whose turn it is: fair between tenants, and nobody waits for ever.

Start-time fair queuing: a request's tag is where its tenant's last one ends, in prompt tokens over the tenant's weight, or the
tag that was served last, if that is more; the least tag is next. So tenants that always have something waiting get tokens by
their weights, and one that comes back after a while is not ahead of the others for what it has not used. Every so many-th turn
is that of the request that has waited longest, if that is too long by the settings.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from heapq import heapify, heappop, heappush

from kvmoverd.core.scheduling.joint_settings import JointSettings
from kvmoverd.core.scheduling.requests import Entry

_Tag = tuple[float, int, str]
"""Where it starts, its place by arrival, and its name."""


class FairQueue:
    """Requests that wait. Those that come back, since their engine was lost, are before all others, in the order of arrival."""

    def __init__(self, settings: JointSettings) -> None:
        self._settings = settings
        self._weights = dict(settings.weights)
        self._entries: OrderedDict[str, Entry] = OrderedDict()
        """By when they came; of them `_back` came back."""
        self._back: list[tuple[int, str]] = []
        self._tags: dict[str, _Tag] = {}
        self._heap: list[_Tag] = []
        self._aside: list[_Tag] = []
        self._back_aside: list[tuple[int, str]] = []
        """Of both, those that were passed over in this round."""
        self._ends: dict[str, float] = {}
        """Of each tenant, where its last request ends."""
        self._now = 0.0
        """The tag that was served last."""
        self._turns = 0

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, entry: Entry, *, again: bool) -> None:
        """It waits from now on; `again`: it came back."""
        name = entry.request.request_id
        self._entries[name] = entry
        if again:
            self._entries.move_to_end(name, last=False)
            heappush(self._back, (entry.order, name))
            return
        tenant = entry.request.tenant
        start = max(self._now, self._ends.get(tenant, 0.0))
        self._ends[tenant] = start + entry.tokens / self._weights.get(tenant, 1.0)
        if len(self._ends) > self._settings.tenants_max + len(self._entries):
            self._forget_idle()
        tag = self._tags[name] = (start, entry.order, name)
        heappush(self._heap, tag)

    def drop(self, name: str) -> None:
        """It waits no longer; one that does not is ignored."""
        if self._entries.pop(name, None) is None:
            return
        self._tags.pop(name, None)
        if len(self._heap) > 2 * len(self._tags) + 64:
            self._heap = list(self._tags.values())
            heapify(self._heap)

    def next(self, now_ns: int, passed: Mapping[str, Entry]) -> Entry | None:
        """Whose turn it is, of those not `passed` over in this round; it stays until it `took` its turn. None: nobody has one."""
        back = self._back
        # Nearly always: nobody came back, nobody is passed over, and it is the turn of the least tag.
        if not back and (self._turns + 1) % self._settings.aged_every and self._heap:
            tag = self._heap[0]
            if self._tags.get(tag[2]) is tag and tag[2] not in passed:
                return self._entries[tag[2]]
        while back:
            entry = self._entries.get(back[0][1])
            if entry is not None and entry.order == back[0][0]:
                if back[0][1] not in passed:
                    return entry
                self._back_aside.append(back[0])
            heappop(back)
        if (self._turns + 1) % self._settings.aged_every == 0:
            for name, entry in self._entries.items():
                if now_ns - entry.since_ns > self._settings.age_ns:
                    if name not in passed:
                        return entry
                elif name in self._tags:
                    # Those behind are younger; those that came back are before them all, whenever they did.
                    break
        return self._least(passed)

    def _least(self, passed: Mapping[str, Entry]) -> Entry | None:
        heap, tags = self._heap, self._tags
        while heap:
            tag = heap[0]
            if tags.get(tag[2]) is tag:
                if tag[2] not in passed:
                    return self._entries[tag[2]]
                self._aside.append(tag)
            heappop(heap)
        return None

    def took(self, entry: Entry) -> None:
        """It had its turn."""
        name = entry.request.request_id
        self._turns += 1
        tag = self._tags.get(name)
        # The turns of those that have waited too long are beside the tags: they don't put others behind.
        if tag is not None and self._heap and self._heap[0] is tag:
            self._now = max(self._now, tag[0])
        self.drop(name)
        if not self._entries:
            self._now = max(self._now, *self._ends.values(), 0.0)
            self._ends.clear()

    def end_round(self) -> None:
        """Those that were passed over are where they were."""
        for tag in self._aside:
            heappush(self._heap, tag)
        for back in self._back_aside:
            heappush(self._back, back)
        self._aside.clear()
        self._back_aside.clear()

    def _forget_idle(self) -> None:
        """Tenants of whom nothing waits are as those that never came, but for some that have used the most beyond their turn."""
        waiting = {entry.request.tenant for entry in self._entries.values()}
        idle = [tenant for tenant, end in self._ends.items() if end > self._now and tenant not in waiting]
        idle.sort(key=lambda tenant: (-self._ends[tenant], tenant))
        keep = waiting.union(idle[: self._settings.tenants_max // 2])
        self._ends = {tenant: end for tenant, end in self._ends.items() if tenant in keep}
