"""Storage adapters: two layouts on filesystems, read by threads, io_uring or 3FS's rings, several roots, and RAM."""
