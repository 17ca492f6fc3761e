from typing_extensions import Buffer

def copy(
    to_rows: Buffer, to_row: int, to_at: int, from_rows: Buffer, from_row: int, from_at: int, bytes_max: int, /
) -> int: ...
