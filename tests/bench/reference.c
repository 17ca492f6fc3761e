/* What our transports are compared with: plain C over the same slices, with nothing around it. */
#define _GNU_SOURCE
#include <errno.h>
#include <string.h>
#include <sys/types.h>
#include <sys/uio.h>

enum { SLICES_A_CALL = 64 };

/* One core's memcpy, slice by slice; equal lengths on both sides. */
void copy_slices(const struct iovec *to, const struct iovec *from, size_t count)
{
    for (size_t slice = 0; slice < count; slice++)
        memcpy(to[slice].iov_base, from[slice].iov_base, from[slice].iov_len);
}

/* Moves all slices through a blocking socket, 64 a call; 0, or an errno, or -1 at the end of the stream. */
static int move_all(int fd, const struct iovec *slices, size_t count, ssize_t (*move)(int, const struct iovec *, int))
{
    struct iovec window[SLICES_A_CALL];
    size_t first = 0, skip = 0;
    while (first < count) {
        size_t rows = count - first < SLICES_A_CALL ? count - first : SLICES_A_CALL;
        memcpy(window, slices + first, rows * sizeof *window);
        window[0].iov_base = (char *)window[0].iov_base + skip;
        window[0].iov_len -= skip;
        ssize_t moved = move(fd, window, (int)rows);
        if (moved < 0 && errno == EINTR)
            continue;
        if (moved <= 0)
            return moved < 0 ? errno : -1;
        skip += (size_t)moved;
        while (first < count && skip >= slices[first].iov_len)
            skip -= slices[first++].iov_len;
    }
    return 0;
}

int write_slices(int fd, const struct iovec *slices, size_t count)
{
    return move_all(fd, slices, count, writev);
}

int read_slices(int fd, const struct iovec *slices, size_t count)
{
    return move_all(fd, slices, count, readv);
}
