/* Copies between two lists of slices within this process, without a call of the interpreter or of the kernel per slice.
 *
 * The slices are `struct iovec` rows, as numpy arrays of uint64 with shape (n, 2) lay them out. The caller answers for
 * every address in them: one that is not mapped, or that its file can no longer back, ends the process by a signal.
 *
 * Where the processor has an instruction for CRC-32C, what was copied can be summed while it is in the cache.
 */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030b0000
#include <Python.h>
#include <stdint.h>
#include <string.h>
#include <sys/uio.h>

#if defined(__x86_64__) && defined(__GNUC__)
#define CAN_SUM 1
#else
#define CAN_SUM 0
#endif

/* Between two looks at the stop byte: some 0.1 ms of copying. */
#define PART_BYTES_MAX ((size_t)1 << 20)

/* Where a walk over slices stands: `at` bytes of row `row` are behind it. */
struct walk {
    const struct iovec *rows;
    size_t count;
    size_t row;
    size_t at;
};

static int begin(struct walk *walk, const Py_buffer *view, const char *name, Py_ssize_t row, Py_ssize_t at)
{
    size_t count = (size_t)view->len / sizeof(struct iovec);

    if ((size_t)view->len % sizeof(struct iovec) || (uintptr_t)view->buf % _Alignof(struct iovec)) {
        PyErr_Format(PyExc_ValueError, "%s has %zd bytes at %p, no aligned rows of address and length", name, view->len,
                     view->buf);
        return -1;
    }
    if (row < 0 || (size_t)row > count || at < 0 || (at > 0 && ((size_t)row == count))) {
        PyErr_Format(PyExc_ValueError, "%s has %zu rows, row %zd, byte %zd is none", name, count, row, at);
        return -1;
    }
    walk->rows = view->buf;
    walk->count = count;
    walk->row = (size_t)row;
    walk->at = (size_t)at;
    if (walk->row < count && walk->at > walk->rows[walk->row].iov_len) {
        PyErr_Format(PyExc_ValueError, "%s has %zu bytes in row %zd, byte %zd is none", name,
                     walk->rows[walk->row].iov_len, row, at);
        return -1;
    }
    return 0;
}

/* Bytes up to the end of the row it stands in; 0 only at the end of the walk. */
static size_t ahead(struct walk *walk)
{
    while (walk->row < walk->count && walk->at == walk->rows[walk->row].iov_len) {
        walk->row++;
        walk->at = 0;
    }
    return walk->row < walk->count ? walk->rows[walk->row].iov_len - walk->at : 0;
}

static char *place(const struct walk *walk)
{
    return (char *)walk->rows[walk->row].iov_base + walk->at;
}

/* memmove is what memcpy is, and forgives slices that overlap. Stores around the cache were no quicker at 42 KB a slice. */
static size_t copy(struct walk *to, struct walk *from, size_t bytes_max, const volatile char *stop)
{
    size_t moved = 0;

    while (moved < bytes_max && !*stop) {
        size_t room = ahead(to), found = ahead(from), part = room < found ? room : found;

        if (part > bytes_max - moved)
            part = bytes_max - moved;
        if (part > PART_BYTES_MAX)
            part = PART_BYTES_MAX;
        if (part == 0)
            break;
        memmove(place(to), place(from), part);
        to->at += part;
        from->at += part;
        moved += part;
    }
    return moved;
}

PyDoc_STRVAR(copy_doc,
             "copy(to_rows, to_row, to_at, from_rows, from_row, from_at, bytes_max, stop) -> bytes moved\n\n"
             "Goes on from the places named until one list ends, bytes_max are moved or the byte `stop` is not 0, which\n"
             "any thread may set; no lock is held meanwhile. Raises ValueError for rows or places that are none.");

static PyObject *copy_slices(PyObject *module, PyObject *arguments)
{
    Py_buffer to_view, from_view, stop_view;
    Py_ssize_t to_row, to_at, from_row, from_at, bytes_max;
    struct walk to, from;
    PyObject *result = NULL;

    (void)module;
    if (!PyArg_ParseTuple(arguments, "y*nny*nnny*:copy", &to_view, &to_row, &to_at, &from_view, &from_row, &from_at,
                          &bytes_max, &stop_view))
        return NULL;
    if (bytes_max < 0 || stop_view.len < 1) {
        PyErr_Format(PyExc_ValueError, "bytes_max is %zd, stop has %zd bytes", bytes_max, stop_view.len);
    } else if (begin(&to, &to_view, "to_rows", to_row, to_at) == 0 &&
               begin(&from, &from_view, "from_rows", from_row, from_at) == 0) {
        size_t moved;

        Py_BEGIN_ALLOW_THREADS
        moved = copy(&to, &from, (size_t)bytes_max, stop_view.buf);
        Py_END_ALLOW_THREADS
        result = PyLong_FromSize_t(moved);
    }
    PyBuffer_Release(&to_view);
    PyBuffer_Release(&from_view);
    PyBuffer_Release(&stop_view);
    return result;
}

#if CAN_SUM

/* The instruction takes 3 cycles, and one can begin in each: three lanes are summed at once, and put together by tables that
 * say what a sum becomes behind so many zeros. Short lanes are for what the long ones leave. */
#define LONG_BYTES 2048
#define SHORT_BYTES 256
/* Summed right after it was copied: less than the cache next to the core. */
#define SUMMED_BYTES_MAX ((size_t)64 << 10)

static uint32_t behind_long[4][256], behind_short[4][256];

__attribute__((target("sse4.2"))) static void fill(uint32_t table[4][256], size_t zeros)
{
    uint32_t of_bit[32];

    for (int bit = 0; bit < 32; bit++) {
        uint64_t sum = (uint64_t)1 << bit;

        for (size_t at = 0; at < zeros; at += 8)
            sum = __builtin_ia32_crc32di(sum, 0);
        of_bit[bit] = (uint32_t)sum;
    }
    for (int byte = 0; byte < 4; byte++)
        for (int value = 0; value < 256; value++) {
            uint32_t sum = 0;

            for (int bit = 0; bit < 8; bit++)
                if (value >> bit & 1)
                    sum ^= of_bit[8 * byte + bit];
            table[byte][value] = sum;
        }
}

static uint64_t behind(uint32_t table[4][256], uint64_t sum)
{
    return table[0][sum & 255] ^ table[1][sum >> 8 & 255] ^ table[2][sum >> 16 & 255] ^ table[3][sum >> 24 & 255];
}

static uint64_t word(const char *from)
{
    uint64_t value;

    memcpy(&value, from, sizeof value);
    return value;
}

__attribute__((target("sse4.2"))) static uint64_t sum_lanes(uint64_t sum, const char **from, size_t *left, size_t lane,
                                                            uint32_t table[4][256])
{
    for (; *left >= 3 * lane; *left -= 3 * lane, *from += 3 * lane) {
        uint64_t second = 0, third = 0;

        for (const char *at = *from; at < *from + lane; at += 8) {
            sum = __builtin_ia32_crc32di(sum, word(at));
            second = __builtin_ia32_crc32di(second, word(at + lane));
            third = __builtin_ia32_crc32di(third, word(at + 2 * lane));
        }
        sum = behind(table, behind(table, sum) ^ second) ^ third;
    }
    return sum;
}

/* The CRC-32C of what had `crc` and `left` bytes more. */
__attribute__((target("sse4.2"))) static uint32_t summed(uint32_t crc, const char *from, size_t left)
{
    uint64_t sum = ~crc;

    sum = sum_lanes(sum, &from, &left, LONG_BYTES, behind_long);
    sum = sum_lanes(sum, &from, &left, SHORT_BYTES, behind_short);
    for (; left >= 8; left -= 8, from += 8)
        sum = __builtin_ia32_crc32di(sum, word(from));
    for (; left; left--, from++)
        sum = __builtin_ia32_crc32qi((uint32_t)sum, (unsigned char)*from);
    return ~(uint32_t)sum;
}

/* `ends`, `count` of them, rising: places in a part, the last its end. `sums`: as many for each part, to be found. */
static size_t copy_and_sum(struct walk *to, struct walk *from, const uint64_t *ends, size_t count, uint32_t *sums,
                           size_t sums_count, const volatile char *stop)
{
    size_t moved = 0, in_part = 0;
    uint32_t crc = 0;

    for (size_t next = 0; next < sums_count && !*stop;) {
        size_t room = ahead(to), found = ahead(from), part = room < found ? room : found;
        size_t wanted = ends[next % count] - in_part;

        if (part > wanted)
            part = wanted;
        if (part > SUMMED_BYTES_MAX)
            part = SUMMED_BYTES_MAX;
        if (part == 0)
            break;
        memmove(place(to), place(from), part);
        crc = summed(crc, place(to), part);
        to->at += part;
        from->at += part;
        moved += part;
        in_part += part;
        if (part == wanted) {
            sums[next++] = crc;
            if (next % count == 0) {
                crc = 0;
                in_part = 0;
            }
        }
    }
    return moved;
}

static int are_rising(const Py_buffer *view)
{
    const uint64_t *ends = view->buf;
    size_t count = (size_t)view->len / sizeof *ends;
    uint64_t last = 0;

    for (size_t at = 0; at < count; at++) {
        if (ends[at] <= last)
            return 0;
        last = ends[at];
    }
    return count > 0 && (size_t)view->len % sizeof *ends == 0;
}

PyDoc_STRVAR(copy_summed_doc,
             "copy_summed(to_rows, from_rows, ends, sums, stop) -> bytes moved\n\n"
             "As copy, from the begin, of parts: `ends` are places in one, rising, the last its end, and `sums` gets for each\n"
             "part as many checksums: the CRC-32C of the part up to there. Once byte `stop` is set they mean nothing.");

static PyObject *copy_summed(PyObject *module, PyObject *arguments)
{
    Py_buffer to_view, from_view, ends_view, sums_view, stop_view;
    struct walk to, from;
    PyObject *result = NULL;

    (void)module;
    if (!PyArg_ParseTuple(arguments, "y*y*y*w*y*:copy_summed", &to_view, &from_view, &ends_view, &sums_view, &stop_view))
        return NULL;
    if (!are_rising(&ends_view) || (uintptr_t)ends_view.buf % 8 || (uintptr_t)sums_view.buf % 4 || stop_view.len < 1) {
        PyErr_Format(PyExc_ValueError, "ends has %zd bytes that are no rising aligned numbers, or stop has %zd bytes",
                     ends_view.len, stop_view.len);
    } else if (begin(&to, &to_view, "to_rows", 0, 0) == 0 && begin(&from, &from_view, "from_rows", 0, 0) == 0) {
        size_t moved;

        Py_BEGIN_ALLOW_THREADS
        moved = copy_and_sum(&to, &from, ends_view.buf, (size_t)ends_view.len / sizeof(uint64_t), sums_view.buf,
                             (size_t)sums_view.len / sizeof(uint32_t), stop_view.buf);
        Py_END_ALLOW_THREADS
        result = PyLong_FromSize_t(moved);
    }
    PyBuffer_Release(&to_view);
    PyBuffer_Release(&from_view);
    PyBuffer_Release(&ends_view);
    PyBuffer_Release(&sums_view);
    PyBuffer_Release(&stop_view);
    return result;
}

#endif

/* SUMS says whether this processor can sum; copy_summed is there only where the compiler could make it. */
static int prepare(PyObject *module)
{
    int can_sum = 0;

#if CAN_SUM
    __builtin_cpu_init();
    can_sum = __builtin_cpu_supports("sse4.2") != 0;
    if (can_sum) {
        fill(behind_long, LONG_BYTES);
        fill(behind_short, SHORT_BYTES);
    }
#endif
    return PyModule_AddIntConstant(module, "SUMS", can_sum);
}

static PyMethodDef methods[] = {
    {"copy", copy_slices, METH_VARARGS, copy_doc},
#if CAN_SUM
    {"copy_summed", copy_summed, METH_VARARGS, copy_summed_doc},
#endif
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot slots[] = {{Py_mod_exec, prepare}, {0, NULL}};

static struct PyModuleDef definition = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "_copy",
    .m_methods = methods,
    .m_slots = slots,
};

PyMODINIT_FUNC PyInit__copy(void)
{
    return PyModuleDef_Init(&definition);
}
