import numpy as np
import numpy.typing as npt

from kvmoverd.ports.transport import IoVec

SUMS: int

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
def copy_summed(
    to_rows: IoVec,
    from_rows: IoVec,
    ends: npt.NDArray[np.uint64],
    sums: npt.NDArray[np.uint32],
    stop: bytearray,
    /,
) -> int: ...
