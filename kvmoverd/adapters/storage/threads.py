"""Storage by threads: a fixed set of workers, each doing one op at a time with plain preadv and pwritev."""

from __future__ import annotations

from kvmoverd.adapters.storage.file_storage import FileStorage


class ThreadsStorage(FileStorage):
    """Storage port over a root; `note`: why it is this one, where another was asked for."""

    kind = "threads"
