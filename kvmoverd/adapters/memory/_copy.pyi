from kvmoverd.ports.transport import IoVec

def copy(
    to_rows: IoVec,
    to_row: int,
    to_at: int,
    from_rows: IoVec,
    from_row: int,
    from_at: int,
    bytes_max: int,
    stop: bytearray,
    /,
) -> int: ...
