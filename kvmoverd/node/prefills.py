"""A node's prefill requests: found by the calls that share them, abandoned when those who could go on with them are gone."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from kvmoverd.core.errors import BadPlan
from kvmoverd.core.status import End, Reason
from kvmoverd.node.driver import Call
from kvmoverd.node.helper_book import HelperBook
from kvmoverd.node.peer import Peer, Peers
from kvmoverd.node.prefill import Plan, PrefillRequest
from kvmoverd.node.read_plans import ReadPlanner
from kvmoverd.node.requests import Over, Requests
from kvmoverd.node.services import Services

FAILED_MAX = 4096

Name = tuple[str, int]


class Prefills:
    """By request id and attempt. Of those that failed, the last ones' ends are kept for calls that come late.

    `peers` and `helpers`: who the other nodes are, and which of them may read for others now; None while nobody knows.
    """

    def __init__(
        self,
        services: Services,
        requests: Requests,
        *,
        peers: Callable[[], Peers | None] = lambda: None,
        helpers: Callable[[], HelperBook | None] = lambda: None,
    ) -> None:
        self.by_name: dict[Name, PrefillRequest] = {}
        self._services = services
        self._peers = peers
        self._helpers = helpers
        self._failed: OrderedDict[Name, End] = OrderedDict()
        requests.on_over.append(self._abandon_over)
        requests.waiting_owners.append(self._owners_below)

    def __len__(self) -> int:
        return len(self.by_name)

    def of(self, plan: Plan, find_peer: Callable[[str], Peer]) -> PrefillRequest:
        """The request that a stream and a push share; the first of them makes it. Raises `BadPlan`, and as `find_peer` does."""
        name = (plan.call.request_id, plan.call.attempt)
        known = self.by_name.get(name)
        if known is not None:
            if not known.plan.same_request(plan):
                raise BadPlan("StreamLayers and PushLayers of one attempt must carry the same plan")
            return known
        peer = find_peer(plan.decode_node) if plan.decode_node else None
        planner = ReadPlanner(self._services, plan, self._peers(), self._helpers())
        request = PrefillRequest(self._services, plan, peer, planner)
        self.by_name[name] = request
        request.on_over.append(lambda: self._forget(name, request))
        return request

    def failure(self, call: Call) -> End | None:
        """How the request of a call that comes late has failed, if it has."""
        return self._failed.get((call.request_id, call.attempt))

    def abandon(self, reason: Reason, which: Callable[[PrefillRequest], bool] = lambda request: True) -> None:
        """Ends those with nothing under way; the others end by their calls."""
        for request in list(self.by_name.values()):
            if which(request):
                request.abandon(reason)

    def peer_lost(self, node: str, boot_id: str, message: str) -> None:
        """Requests whose decode side is that boot: the calls that still come end at once."""
        for request in list(self.by_name.values()):
            if request.is_alone and request.goes_over(node, boot_id):
                request.failure = request.failure or End(Reason.PEER_LOST, f"{node}: {message}")
                request.abandon(Reason.PEER_LOST)

    def _owners_below(self, kind: str, request_id: str, attempt: int) -> set[str]:
        """Sessions whose requests of lower attempts would be abandoned."""
        return {
            request.plan.call.session_id
            for name, request in self.by_name.items()
            if name[0] == request_id and name[1] < attempt and request.is_alone
        }

    def _abandon_over(self, over: Over) -> None:
        self.abandon(
            Reason.STALE_ATTEMPT,
            lambda request: (
                request.plan.call.request_id == over.request_id and request.plan.call.attempt <= over.attempt
            ),
        )

    def _forget(self, name: Name, request: PrefillRequest) -> None:
        self.by_name.pop(name, None)
        if request.failure is not None:
            self._failed[name] = request.failure
        while len(self._failed) > FAILED_MAX:
            self._failed.popitem(last=False)
