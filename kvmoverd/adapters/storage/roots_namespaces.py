"""Namespaces in several roots: opened and purged in the main root, then in its copies, each beside the others, in bounded time.

What the main root says is so. A copy is asked for blocks of a namespace only while it is known to have been purged up to
where the main root is: it remembers that by itself, see `roots_marks`, so that neither a restart nor the time for which it
was away brings back what was purged.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from kvmoverd.adapters.storage.block_io import errno_name
from kvmoverd.adapters.storage.namespaces import stored_namespaces
from kvmoverd.adapters.storage.roots_calls import Call
from kvmoverd.adapters.storage.roots_copies import Copies
from kvmoverd.adapters.storage.roots_marks import GONE, DiskMarks
from kvmoverd.adapters.storage.roots_root import Root, Tenure
from kvmoverd.core.errors import KvmoverError, QueueFull, StorageUnusable
from kvmoverd.core.manifest import Namespace

log = logging.getLogger(__name__)

T = TypeVar("T")

CALL_S = 25.0
"""For a call in all roots."""
COPIES_S = 1.0
"""What copies have of it at least, however long the main root took."""
OPEN_TRIES = 3
DRAIN_S = 20.0
"""How long a purge of a copy waits for what is just being copied."""
DRAIN_POLL_S = 0.005


@dataclass(frozen=True, slots=True)
class Known:
    """What the main root said of a namespace. `doubts`: how often it had been put in doubt until it was asked."""

    namespace: Namespace
    token: str
    doubts: int


class RootsNamespaces:
    """What the port has that blocks; called in threads beside the loop.

    The main root must do what is asked. A copy that can't open a namespace, or can't purge it, is not asked for its blocks
    until it can, and did.
    """

    def __init__(self, roots: Sequence[Root], now_s: Callable[[], float]) -> None:
        self.roots = list(roots)
        mains = [root for root in roots if root.settings.is_main]
        assert len(mains) == 1, f"{len(mains)} of {len(roots)} roots are main, one must be"
        self.main = mains[0]
        self.copy_roots = [root for root in roots if root is not self.main]
        self.copying = Copies(self.roots)
        self._book_now_s = now_s
        self._books = threading.Lock()
        """Over `opened` of all roots and the doubts; never held while anybody waits for a device."""
        self._doubts: Counter[bytes] = Counter()
        self._tenants: dict[bytes, str] = {}

    def open_namespace(self, namespace: Namespace) -> None:
        """As in the port. A manifest or an epoch that differs is refused, wherever it lies."""
        deadline_s = time.monotonic() + CALL_S
        call = self.main.calls.begin(partial(self.open_main, namespace), what="opening a namespace")
        known = call.result(deadline_s)
        for _, error in self._in_copies(lambda root: self.follow(root, known), "opening a namespace", deadline_s):
            if not isinstance(error, StorageUnusable | QueueFull):
                raise error
            log.warning("its copies are not used: %s", error)

    def purge(self, namespace: Namespace) -> tuple[int, int]:
        """As in the port, summed over the roots. Raises when the main root could not.

        A copy that could not is not asked for the namespace before it could; its bytes stay until then.
        """
        self._shut([namespace.fingerprint])
        return self._purge([namespace.fingerprint], lambda root: root.storage.purge(namespace), "purging a namespace")

    def purge_tenant(self, tenant: str) -> tuple[int, int]:
        """As `purge`."""
        ours = [fingerprint for fingerprint, owner in list(self._tenants.items()) if owner == tenant]
        self._shut(ours)
        return self._purge(ours, lambda root: root.storage.purge_tenant(tenant), "purging a tenant")

    def doubt(self, fingerprint: bytes) -> None:
        """The namespace was purged, perhaps by others: no copy is asked for it until the main root was. Never blocks long."""
        with self._books:
            self._doubts[fingerprint] += 1
            for root in self.copy_roots:
                root.opened.pop(fingerprint, None)

    def heard(self, author: str, log: int) -> None:
        """Others write in the main root: copies are nobody else's."""
        self.main.storage.heard(author, log)

    def signature(self) -> tuple[str, int]:
        return self.main.storage.signature()

    # For threads that may hang ----------------------------------------------------------------------------------------

    def open_main(self, namespace: Namespace) -> Known:
        """Opens it in the main root; what that knows when it returns is not older than the token."""
        fingerprint = namespace.fingerprint
        doubts = self._doubts[fingerprint]
        if not self.copy_roots:
            self.main.storage.open_namespace(namespace)
            token = GONE
        else:
            token = self._open_between(namespace)
        with self._books:
            self._tenants[fingerprint] = namespace.manifest.tenant
            self.main.opened[fingerprint] = Tenure(namespace, token, self._book_now_s())
        return Known(namespace, token, doubts)

    def look(self, namespace: Namespace) -> Known:
        """What the main root says now; if it was purged by others, no copy is asked until it has done so, too."""
        tenure = self.main.opened.get(namespace.fingerprint)
        doubts = self._doubts[namespace.fingerprint]
        token = self._in_main(partial(self.main.marks.token, namespace.fingerprint[:16]))
        if tenure is not None and token == tenure.token:
            return Known(namespace, token, doubts)
        self.doubt(namespace.fingerprint)
        return self.open_main(namespace)

    def follow(self, root: Root, known: Known) -> None:
        """Opens a namespace in a copy, which is purged first unless it was purged up to the same token."""
        namespace, fingerprint = known.namespace, known.namespace.fingerprint
        if root.is_absent:
            raise StorageUnusable(f"{root.name} is {root.storage.facts.note}")
        with root.namespaces:
            tenure = root.opened.get(fingerprint)
            if tenure is not None and tenure.token == known.token:
                return
            root.opened.pop(fingerprint, None)
            self._drain(root, [fingerprint])
            root.storage.open_namespace(namespace)
            try:
                if root.marks.mark(fingerprint[:16]) != known.token:
                    root.storage.purge(namespace)
                    root.storage.open_namespace(namespace)
                    root.marks.set_mark(fingerprint[:16], known.token)
            except OSError as error:
                raise _unusable(root, error) from error
            with self._books:
                if self._doubts[fingerprint] == known.doubts and fingerprint in self.main.opened:
                    root.opened[fingerprint] = Tenure(namespace, known.token, self._book_now_s())

    def sweep(self, root: Root) -> None:
        """Purges what a copy holds of namespaces that the main root has purged or has not, and that nobody opens here."""
        marks = root.marks
        if not isinstance(marks, DiskMarks):
            return
        try:
            for namespace in stored_namespaces(marks.base):
                fingerprint16 = namespace.fingerprint[:16]
                if namespace.fingerprint in self.main.opened:
                    continue
                token = self._in_main(partial(self.main.marks.token, fingerprint16)) or GONE
                with root.namespaces:
                    if marks.mark(fingerprint16) == token or namespace.fingerprint in root.opened:
                        continue
                    root.storage.purge(namespace)
                    if (marks.base / fingerprint16.hex()).is_dir():
                        marks.set_mark(fingerprint16, token)
        except OSError as error:
            raise _unusable(root, error) from error

    # Parts ------------------------------------------------------------------------------------------------------------

    def _open_between(self, namespace: Namespace) -> str:
        """Opens it in the main root between two looks at its token, which must be one: so the root knows of all purges."""
        fingerprint16 = namespace.fingerprint[:16]
        for _ in range(OPEN_TRIES):
            before = self._in_main(partial(self.main.marks.token, fingerprint16))
            self.main.storage.open_namespace(namespace)
            if self._in_main(partial(self.main.marks.ensure_token, fingerprint16)) == before:
                return before or GONE
        raise StorageUnusable(f"{self.main.name}: it was purged {OPEN_TRIES - 1} times while it was opened")

    def _in_main(self, work: Callable[[], T]) -> T:
        try:
            return work()
        except OSError as error:
            raise _unusable(self.main, error) from error

    def _shut(self, fingerprints: Sequence[bytes]) -> None:
        """No root is asked for these from now on."""
        for fingerprint in fingerprints:
            self.doubt(fingerprint)
            with self._books:
                self.main.opened.pop(fingerprint, None)

    def _purge(
        self, fingerprints: Sequence[bytes], work: Callable[[Root], tuple[int, int]], what: str
    ) -> tuple[int, int]:
        deadline_s = time.monotonic() + CALL_S
        found = [self.main.calls.begin(partial(work, self.main), what=what).result(deadline_s)]
        for fingerprint in fingerprints:
            self.main.marks.purged(fingerprint[:16])

        def purge_copy(root: Root) -> None:
            with root.namespaces:
                self._drain(root, fingerprints)
                found.append(work(root))

        for _, error in self._in_copies(purge_copy, what, deadline_s):
            if not isinstance(error, KvmoverError | OSError):
                raise error
            log.warning("what it holds of it is not read, and deleted when it can be: %s", error)
        return sum(blocks for blocks, _ in found), sum(size_bytes for _, size_bytes in found)

    def _drain(self, root: Root, fingerprints: Sequence[bytes]) -> None:
        """Waits until nothing of these is being copied any more: it would come after the purge."""
        until_s = time.monotonic() + DRAIN_S
        while any(self.copying.busy(root, fingerprint) for fingerprint in fingerprints):
            if time.monotonic() > until_s:
                raise StorageUnusable(f"{root.name}: blocks are still being copied after {DRAIN_S:g} s")
            time.sleep(DRAIN_POLL_S)

    def _in_copies(self, work: Callable[[Root], None], what: str, deadline_s: float) -> list[tuple[Root, Exception]]:
        """Does it in all copies at once; the failures. One that is not there yet catches up when it is."""
        deadline_s = max(deadline_s, time.monotonic() + COPIES_S)
        calls: list[tuple[Root, Call[None]]] = []
        failures: list[tuple[Root, Exception]] = []
        for root in self.copy_roots:
            if root.is_absent:
                continue
            try:
                calls.append((root, root.calls.begin(partial(work, root), what=what)))
            except QueueFull as error:
                failures.append((root, error))
        for root, call in calls:
            try:
                call.result(deadline_s)
            except Exception as error:  # noqa: BLE001 whoever called decides
                failures.append((root, error))
        return failures


def _unusable(root: Root, error: OSError) -> StorageUnusable:
    return StorageUnusable(f"{root.name}: {errno_name(error)} ({error})", root=root.name, errno=error.errno)
