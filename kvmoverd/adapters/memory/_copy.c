/* Copies between two lists of slices within this process, without a call of the interpreter or of the kernel per slice.
 *
 * The slices are `struct iovec` rows, as numpy arrays of uint64 with shape (n, 2) lay them out. The caller answers for
 * every address in them: one that is not mapped, or that its file can no longer back, ends the process by a signal.
 */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030b0000
#include <Python.h>
#include <stdint.h>
#include <string.h>
#include <sys/uio.h>

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

static PyMethodDef methods[] = {{"copy", copy_slices, METH_VARARGS, copy_doc}, {NULL, NULL, 0, NULL}};

static PyModuleDef_Slot slots[] = {{0, NULL}};

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
