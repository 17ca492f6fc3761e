/* A queue pair without a device: its calls do what a driver does before its doorbell, walk the chain and write 64 bytes for
 * each request into a ring, and nothing leaves. What it was told can be read back.
 */
#include <errno.h>
#include <infiniband/verbs.h>
#include <stdlib.h>
#include <string.h>

/* What a request said. 64 bytes, as a request of one element has in the send queue of most devices. */
struct entry {
    uint64_t work_id;
    uint64_t local;
    uint64_t remote;
    uint32_t size_bytes;
    uint32_t local_key;
    uint32_t remote_key;
    uint32_t opcode;
    uint32_t flags;
    uint32_t immediate;
    uint64_t chain;
    uint64_t spare;
};
_Static_assert(sizeof(struct entry) == 64, "one cache line");

struct null_device {
    struct ibv_context context;
    struct ibv_qp pair;
    struct entry *ring;
    uint64_t places; /* a power of two */
    uint64_t taken;
    uint64_t takes_max;
    volatile uint64_t doorbells;
};

static struct null_device *device_of(struct ibv_qp *pair)
{
    return pair->qp_context;
}

static int post_send(struct ibv_qp *pair, struct ibv_send_wr *request, struct ibv_send_wr **bad)
{
    struct null_device *device = device_of(pair);

    for (; request; request = request->next) {
        struct entry *entry = device->ring + (device->taken & (device->places - 1));

        if (device->taken == device->takes_max) {
            *bad = request;
            return ENOMEM;
        }
        entry->work_id = request->wr_id;
        entry->local = request->sg_list->addr;
        entry->remote = request->wr.rdma.remote_addr;
        entry->size_bytes = request->sg_list->length;
        entry->local_key = request->sg_list->lkey;
        entry->remote_key = request->wr.rdma.rkey;
        entry->opcode = request->opcode;
        entry->flags = request->send_flags;
        entry->immediate = request->imm_data;
        entry->chain = device->doorbells;
        device->taken++;
    }
    device->doorbells++;
    return 0;
}

static int post_recv(struct ibv_qp *pair, struct ibv_recv_wr *request, struct ibv_recv_wr **bad)
{
    struct null_device *device = device_of(pair);
    struct entry *entry = device->ring + (device->taken & (device->places - 1));

    if (device->taken == device->takes_max) {
        *bad = request;
        return ENOMEM;
    }
    *entry = (struct entry){.work_id = request->wr_id,
                            .local = request->sg_list->addr,
                            .size_bytes = request->sg_list->length,
                            .local_key = request->sg_list->lkey,
                            .opcode = IBV_WC_RECV,
                            .chain = device->doorbells};
    device->taken++;
    device->doorbells++;
    return 0;
}

/* `takes_max` requests, then it is full. NULL: no memory. */
struct null_device *null_open(uint64_t places, uint64_t takes_max)
{
    struct null_device *device = calloc(1, sizeof *device);

    if (!device)
        return NULL;
    device->ring = calloc(places, sizeof *device->ring);
    if (!device->ring) {
        free(device);
        return NULL;
    }
    device->places = places;
    device->takes_max = takes_max;
    device->context.ops.post_send = post_send;
    device->context.ops.post_recv = post_recv;
    device->pair.context = &device->context;
    device->pair.qp_context = device;
    return device;
}

struct ibv_qp *null_pair(struct null_device *device)
{
    return &device->pair;
}

struct entry *null_ring(struct null_device *device)
{
    return device->ring;
}

uint64_t null_taken(struct null_device *device)
{
    return device->taken;
}

/* A chain that somebody else built, to any queue pair: what the driver alone costs. 0, or an errno. */
int post_built(struct ibv_qp *pair, struct ibv_send_wr *request)
{
    struct ibv_send_wr *bad = NULL;

    return ibv_post_send(pair, request, &bad);
}

void null_close(struct null_device *device)
{
    free(device->ring);
    free(device);
}
