"""Storage adapters: a file per block on a POSIX filesystem, and records in memory."""
