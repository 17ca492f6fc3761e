/* Posts work to a queue pair of libibverbs, a chain of writes at once: one call of the interpreter, one doorbell.
 *
 * Nothing is linked: the calls of verbs.h that post are inline, and go through the device's own table. The caller answers
 * for the address of the `struct ibv_qp`.
 */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030b0000
#include <Python.h>
#include <arpa/inet.h>
#include <infiniband/verbs.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* On all requests of a chain but the last: they complete only when they fail. */
#define MIDDLE UINT64_MAX

struct row {
    uint64_t local;
    uint64_t remote;
    uint32_t size_bytes;
    uint32_t local_key;
    uint32_t remote_key;
    uint32_t spare;
};
_Static_assert(sizeof(struct row) == 32, "the rows of fabric.WRITE");

/* Where `pointers` looks for what it knows, before it believes in an address. */
_Static_assert(offsetof(struct ibv_qp, context) == 0 && offsetof(struct ibv_qp, pd) == 16 &&
                   offsetof(struct ibv_qp, qp_num) == 52 && offsetof(struct ibv_qp, qp_type) == 60,
               "pointers.QUEUE_PAIR");
_Static_assert(offsetof(struct ibv_pd, context) == 0 && offsetof(struct ibv_pd, handle) == 8, "pointers.DOMAIN");
_Static_assert(offsetof(struct ibv_context, cmd_fd) == 264 && offsetof(struct ibv_context, num_comp_vectors) == 272,
               "pointers.CONTEXT");

/* What `reaching` gives to ibv_modify_qp. */
_Static_assert(sizeof(struct ibv_ah_attr) == 32 && offsetof(struct ibv_ah_attr, dlid) == 24 &&
                   offsetof(struct ibv_ah_attr, is_global) == 29,
               "reaching.Vector");
_Static_assert(sizeof(struct ibv_qp_attr) == 144 && offsetof(struct ibv_qp_attr, ah_attr) == 56 &&
                   offsetof(struct ibv_qp_attr, max_dest_rd_atomic) == 127 &&
                   offsetof(struct ibv_qp_attr, min_rnr_timer) == 128,
               "reaching.Attributes");

static PyObject *refused(int error, const char *words, Py_ssize_t done, Py_ssize_t count)
{
    PyObject *text = PyUnicode_FromFormat("%s took %zd of %zd: %s", words, done, count, strerror(error));
    PyObject *arguments = text ? Py_BuildValue("(iN)", error, text) : NULL;

    if (arguments) {
        PyErr_SetObject(PyExc_OSError, arguments);
        Py_DECREF(arguments);
    }
    return NULL;
}

/* How many requests of the chain stand before the one that was refused. */
static Py_ssize_t before(const struct ibv_send_wr *requests, const struct ibv_send_wr *bad)
{
    return bad ? bad - requests : 0;
}

static void fill(struct ibv_send_wr *requests, struct ibv_sge *elements, const struct row *rows, Py_ssize_t count)
{
    for (Py_ssize_t at = 0; at < count; at++) {
        const struct row *row = rows + at;
        struct ibv_sge *element = elements + at;
        struct ibv_send_wr *request = requests + at;

        element->addr = row->local;
        element->length = row->size_bytes;
        element->lkey = row->local_key;
        request->wr_id = MIDDLE;
        request->next = request + 1;
        request->sg_list = element;
        request->num_sge = 1;
        request->opcode = IBV_WR_RDMA_WRITE;
        request->send_flags = 0;
        request->imm_data = 0;
        request->wr.rdma.remote_addr = row->remote;
        request->wr.rdma.rkey = row->remote_key;
    }
}

static PyObject *post_chain(struct ibv_qp *pair, const struct row *rows, Py_ssize_t count, uint64_t work_id,
                            long long immediate)
{
    struct ibv_send_wr *requests = PyMem_Malloc((size_t)count * (sizeof *requests + sizeof(struct ibv_sge)));
    struct ibv_send_wr *last, *bad = NULL;
    int error;

    if (!requests)
        return PyErr_NoMemory();
    fill(requests, (struct ibv_sge *)(requests + count), rows, count);
    last = requests + count - 1;
    last->wr_id = work_id;
    last->next = NULL;
    last->send_flags = IBV_SEND_SIGNALED;
    if (immediate >= 0) {
        last->opcode = IBV_WR_RDMA_WRITE_WITH_IMM;
        last->imm_data = htonl((uint32_t)immediate);
    }
    error = ibv_post_send(pair, requests, &bad);
    if (error)
        refused(error, "ibv_post_send", before(requests, bad), count);
    PyMem_Free(requests);
    if (error)
        return NULL;
    Py_RETURN_NONE;
}

PyDoc_STRVAR(writes_doc,
             "writes(pair, rows, first, count, work_id, immediate)\n\n"
             "Rows of fabric.WRITE as one chain, its end completing as work_id, with the immediate unless that is -1. Raises\n"
             "ValueError for what is no chain, OSError with what the device said and how many it took.");

static PyObject *writes(PyObject *module, PyObject *arguments)
{
    Py_buffer view;
    unsigned long long pair, work_id;
    Py_ssize_t first, count;
    long long immediate;
    PyObject *result = NULL;

    (void)module;
    if (!PyArg_ParseTuple(arguments, "Ky*nnKL:writes", &pair, &view, &first, &count, &work_id, &immediate))
        return NULL;
    if (view.len % (Py_ssize_t)sizeof(struct row) || (uintptr_t)view.buf % _Alignof(struct row) || first < 0 ||
        count < 1 || count > view.len / (Py_ssize_t)sizeof(struct row) - first) {
        PyErr_Format(PyExc_ValueError, "rows have %zd bytes at %p: no aligned %zd rows from row %zd on", view.len, view.buf,
                     count, first);
    } else if (!pair || work_id == MIDDLE || immediate < -1 || immediate > (long long)UINT32_MAX) {
        PyErr_Format(PyExc_ValueError, "queue pair %llu, work id %llu or immediate %lld is none", pair, work_id, immediate);
    } else {
        result = post_chain((struct ibv_qp *)(uintptr_t)pair, (const struct row *)view.buf + first, count, work_id,
                            immediate);
    }
    PyBuffer_Release(&view);
    return result;
}

/* One element of memory, as a message to send or a slot to receive into. */
struct slot {
    struct ibv_qp *pair;
    struct ibv_sge element;
    uint64_t work_id;
};

static int parse(PyObject *arguments, struct slot *slot)
{
    unsigned long long pair, address, work_id;
    unsigned int size_bytes, key;

    if (!PyArg_ParseTuple(arguments, "KKIIK", &pair, &address, &size_bytes, &key, &work_id))
        return -1;
    if (!pair || work_id == MIDDLE) {
        PyErr_Format(PyExc_ValueError, "queue pair %llu or work id %llu is none", pair, work_id);
        return -1;
    }
    slot->pair = (struct ibv_qp *)(uintptr_t)pair;
    slot->element = (struct ibv_sge){.addr = address, .length = size_bytes, .lkey = key};
    slot->work_id = work_id;
    return 0;
}

PyDoc_STRVAR(message_doc, "message(pair, address, size_bytes, key, work_id)\n\nSends memory into the next receive slot.");

static PyObject *message(PyObject *module, PyObject *arguments)
{
    struct slot slot;
    struct ibv_send_wr *bad = NULL;
    int error;

    (void)module;
    if (parse(arguments, &slot))
        return NULL;
    struct ibv_send_wr request = {.wr_id = slot.work_id,
                                  .sg_list = &slot.element,
                                  .num_sge = 1,
                                  .opcode = IBV_WR_SEND,
                                  .send_flags = IBV_SEND_SIGNALED};
    error = ibv_post_send(slot.pair, &request, &bad);
    if (error)
        return refused(error, "ibv_post_send", 0, 1);
    Py_RETURN_NONE;
}

PyDoc_STRVAR(receive_doc, "receive(pair, address, size_bytes, key, work_id)\n\nPosts memory as a receive slot.");

static PyObject *receive(PyObject *module, PyObject *arguments)
{
    struct slot slot;
    struct ibv_recv_wr *bad = NULL;
    int error;

    (void)module;
    if (parse(arguments, &slot))
        return NULL;
    struct ibv_recv_wr request = {.wr_id = slot.work_id, .sg_list = &slot.element, .num_sge = 1};
    error = ibv_post_recv(slot.pair, &request, &bad);
    if (error)
        return refused(error, "ibv_post_recv", 0, 1);
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"writes", writes, METH_VARARGS, writes_doc},
    {"message", message, METH_VARARGS, message_doc},
    {"receive", receive, METH_VARARGS, receive_doc},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot slots[] = {{0, NULL}};

static struct PyModuleDef definition = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "_post",
    .m_methods = methods,
    .m_slots = slots,
};

PyMODINIT_FUNC PyInit__post(void)
{
    return PyModuleDef_Init(&definition);
}
