/* The calls of CUDA's runtime and driver that the daemon and the client use, over files: for tests, from the headers of 12.8
 * and 13.0. It is both libraries at once; CUDART says which runtime.
 *
 * Kept: memory of a GPU has addresses that no processor can touch (a copy of its own would be a SIGSEGV); a handle stands for
 * a whole allocation, opens in other processes only, and one that is opened twice has one address; copies run in streams,
 * later, in threads; events are asked; a copy may not straddle two pinned ranges; the GPU of a thread is what it has set;
 * a batch must have its attributes, and a stream. Allocations are files in CUDA_SHIM_DIR.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#ifndef CUDART
#define CUDART 13000
#endif
enum { OK = 0, INVALID_VALUE = 1, INVALID_DEVICE = 101, NO_DEVICE = 100, UNINITIALIZED = 201, BAD_HANDLE = 400, NOT_READY = 600,
       ALREADY = 712, NOT_PINNED = 713, NOT_SUPPORTED = 801 };
enum { GPUS, DELAY_US, HANG, BROKEN, OPEN_ERROR, BATCH_ERROR_AT, PIN_ERROR_AT, NO_DMABUF, CLOSE_HANG, DRIVER, OPEN_DELAY_US,
       EACH_ERROR_AT, EVENT_ERROR, UNORDERED, KNOBS };
enum { OPENED, PINNED, STREAMS, EVENTS, BATCHES, EACH, COPIES, PAGEABLE, STRADDLES, DMABUF_START, DMABUF_BYTES, PINS, DROPPED, COUNTS };
volatile long shim_knobs[KNOBS] = {[GPUS] = 2, [DRIVER] = CUDART};
volatile long shim_counts[COUNTS];

#define ALLOCATIONS 256
#define RANGES 4096
struct handle { char magic[8]; long pid, number, gpu, size; char rest[24]; };
_Static_assert(sizeof(struct handle) == 64, "a handle has 64 bytes");
struct allocation { char *device, *shadow; size_t size; int gpu, refs, fd; long pid, number; };
struct range { char *start; size_t size; };
struct op { struct op *next; char *to; const char *from; size_t size; };
struct stream { int gpu; pthread_t thread; pthread_mutex_t lock; pthread_cond_t changed; struct op *first, **last; long given, done; bool end; };
struct event { int gpu; struct stream *stream; long at; };

static pthread_mutex_t big = PTHREAD_MUTEX_INITIALIZER;
static struct allocation allocations[ALLOCATIONS];
static struct range pinned[RANGES];
static __thread int current, last_error;
static long numbers;
static const char *addresses[] = {"0000:3b:00.0", "0000:5e:00.0", "0000:86:00.0"};

static int told(int code) {
  if (shim_knobs[BROKEN]) code = shim_knobs[BROKEN];
  if (code && code != NOT_READY) last_error = code;
  return code;
}

static void pause_us(long us) {
  struct timespec t = {us / 1000000, us % 1000000 * 1000};
  if (us > 0) nanosleep(&t, NULL);
}

/* Allocations ------------------------------------------------------------------------------------------------------------ */

static void file_name(char *name, long pid, long number) {
  const char *home = getenv("CUDA_SHIM_DIR");
  snprintf(name, 512, "%s/gpu-%ld-%ld", home ? home : "/nonexistent", pid, number);
}

static int map_file(struct allocation *a, int flags) {
  char name[512];
  file_name(name, a->pid, a->number);
  a->fd = open(name, O_RDWR | O_CLOEXEC | flags, 0600);
  if (a->fd < 0) return BAD_HANDLE;
  if (flags && ftruncate(a->fd, a->size)) return INVALID_VALUE;
  a->device = mmap(NULL, a->size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  a->shadow = mmap(NULL, a->size, PROT_READ | PROT_WRITE, MAP_SHARED, a->fd, 0);
  return a->device == MAP_FAILED || a->shadow == MAP_FAILED ? INVALID_VALUE : OK;
}

static void unmap_file(struct allocation *a) {
  munmap(a->device, a->size);
  munmap(a->shadow, a->size);
  close(a->fd);
  memset(a, 0, sizeof *a);
}

static struct allocation *holder(const void *pointer) {
  const char *p = pointer;
  for (struct allocation *a = allocations; a < allocations + ALLOCATIONS; a++)
    if (a->refs && p >= a->device && p < a->device + a->size) return a;
  return NULL;
}

static struct allocation *unused(void) {
  for (struct allocation *a = allocations; a < allocations + ALLOCATIONS; a++)
    if (!a->refs) return a;
  return NULL;
}

static void fill_handle(struct handle *h, const struct allocation *a) {
  memset(h, 0, sizeof *h);
  memcpy(h->magic, "KVSHIM", 7);
  h->pid = a->pid, h->number = a->number, h->gpu = a->gpu, h->size = a->size;
}

/* Memory of another process, as far as this one can tell: a handle of it. */
int shim_share(int gpu, size_t size, struct handle *h) {
  pthread_mutex_lock(&big);
  struct allocation a = {.gpu = gpu, .size = size, .pid = -(long)getpid(), .number = ++numbers};
  int code = map_file(&a, O_CREAT);
  fill_handle(h, &a);
  if (!code) unmap_file(&a);
  pthread_mutex_unlock(&big);
  return code;
}

int cudaMalloc(void **made, size_t size) {
  pthread_mutex_lock(&big);
  struct allocation *a = unused();
  *a = (struct allocation){.gpu = current, .size = (size + 511) / 512 * 512, .pid = getpid(), .number = ++numbers};
  int code = map_file(a, O_CREAT);
  a->refs = !code;
  *made = a->device;
  pthread_mutex_unlock(&big);
  return told(code);
}

int cudaFree(void *pointer) {
  pthread_mutex_lock(&big);
  struct allocation *a = holder(pointer);
  char name[512];
  if (a) file_name(name, a->pid, a->number), unlink(name), unmap_file(a);
  pthread_mutex_unlock(&big);
  return told(a ? OK : INVALID_VALUE);
}

int cudaMemset(void *pointer, int value, size_t size) {
  pthread_mutex_lock(&big);
  struct allocation *a = holder(pointer);
  bool fits = a && (char *)pointer + size <= a->device + a->size;
  if (fits) memset(a->shadow + ((char *)pointer - a->device), value, size);
  pthread_mutex_unlock(&big);
  return told(fits ? OK : INVALID_VALUE);
}

int cudaDeviceSynchronize(void) { return told(OK); }

int cudaIpcGetMemHandle(struct handle *h, void *pointer) {
  pthread_mutex_lock(&big);
  struct allocation *a = holder(pointer);
  if (a) fill_handle(h, a);
  pthread_mutex_unlock(&big);
  return told(a ? OK : INVALID_VALUE);
}

int cuIpcGetMemHandle(struct handle *h, uintptr_t pointer) { return cudaIpcGetMemHandle(h, (void *)pointer); }

int cuPointerGetAttribute(int *value, int attribute, uintptr_t pointer) {
  pthread_mutex_lock(&big);
  struct allocation *a = attribute == 9 ? holder((void *)pointer) : NULL;
  if (a) *value = a->gpu;
  pthread_mutex_unlock(&big);
  return told(a ? OK : INVALID_VALUE);
}

int cudaIpcOpenMemHandle(void **opened, struct handle h, unsigned flags) {
  pause_us(shim_knobs[OPEN_DELAY_US]);
  if (shim_knobs[OPEN_ERROR]) return told(shim_knobs[OPEN_ERROR]);
  if (flags != 1 || strcmp(h.magic, "KVSHIM")) return told(INVALID_VALUE);
  if (h.pid == getpid()) return told(UNINITIALIZED);
  pthread_mutex_lock(&big);
  int code = OK;
  struct allocation *a = allocations, *end = allocations + ALLOCATIONS;
  while (a < end && !(a->refs && a->pid == h.pid && a->number == h.number)) a++;
  if (a == end) {
    a = unused();
    *a = (struct allocation){.gpu = h.gpu, .size = h.size, .pid = h.pid, .number = h.number};
    code = map_file(a, 0);
  }
  if (!code) a->refs++, shim_counts[OPENED]++, *opened = a->device;
  pthread_mutex_unlock(&big);
  return told(code);
}

int cudaIpcCloseMemHandle(void *pointer) {
  while (shim_knobs[CLOSE_HANG]) pause_us(1000);
  pthread_mutex_lock(&big);
  struct allocation *a = holder(pointer);
  int code = a && a->device == pointer && a->pid != getpid() ? OK : INVALID_VALUE;
  if (!code) {
    shim_counts[OPENED]--;
    if (!--a->refs) unmap_file(a);
  }
  pthread_mutex_unlock(&big);
  return told(code);
}

struct attributes { int type, device; void *device_pointer, *host_pointer; long reserved[8]; };
int cudaPointerGetAttributes(struct attributes *found, const void *pointer) {
  memset(found, 0, CUDART >= 13000 ? sizeof *found : 24);
  pthread_mutex_lock(&big);
  struct allocation *a = holder(pointer);
  if (a) found->type = 2, found->device = a->gpu, found->device_pointer = (void *)pointer;
  pthread_mutex_unlock(&big);
  return told(OK);
}

int cuMemGetAddressRange_v2(uintptr_t *base, size_t *size, uintptr_t pointer) {
  pthread_mutex_lock(&big);
  struct allocation *a = holder((void *)pointer);
  if (a) *base = (uintptr_t)a->device, *size = a->size;
  pthread_mutex_unlock(&big);
  return told(a ? OK : INVALID_VALUE);
}

int cuMemGetHandleForAddressRange(void *handle, uintptr_t pointer, size_t size, int type, unsigned long long flags) {
  pthread_mutex_lock(&big);
  struct allocation *a = holder((void *)pointer);
  int code = !a || type != 1 || flags || pointer % 4096 || size % 4096 ? INVALID_VALUE : OK;
  if (!code) {
    shim_counts[DMABUF_START] = pointer - (uintptr_t)a->device;
    shim_counts[DMABUF_BYTES] = size;
    *(int *)handle = fcntl(a->fd, F_DUPFD_CLOEXEC, 3);
  }
  pthread_mutex_unlock(&big);
  return told(code);
}

/* The process, and its GPUs ----------------------------------------------------------------------------------------------- */

int cudaRuntimeGetVersion(int *v) { return *v = CUDART, OK; }
int cudaDriverGetVersion(int *v) { return *v = shim_knobs[DRIVER], OK; }
int cudaGetDeviceCount(int *n) { return *n = shim_knobs[GPUS], told(*n ? OK : NO_DEVICE); }
int cudaSetDevice(int gpu) { return gpu < shim_knobs[GPUS] ? (current = gpu, told(OK)) : told(INVALID_DEVICE); }
int cudaGetLastError(void) { int code = last_error; return last_error = OK, code; }
const char *cudaGetErrorString(int code) {
  return code == INVALID_VALUE ? "invalid argument" : code == 719 ? "unspecified launch failure" : "an error of the shim";
}
int cudaDeviceGetByPCIBusId(int *gpu, const char *address) {
  for (*gpu = 0; *gpu < shim_knobs[GPUS]; ++*gpu)
    if (!strcasecmp(addresses[*gpu], address)) return told(OK);
  return told(INVALID_DEVICE);
}
int cudaDeviceGetPCIBusId(char *address, int size, int gpu) {
  if (gpu < 0 || gpu >= shim_knobs[GPUS]) return told(INVALID_DEVICE);
  return snprintf(address, size, "%s", addresses[gpu]), told(OK);
}
int cuDeviceGetPCIBusId(char *address, int size, int device) { return cudaDeviceGetPCIBusId(address, size, device - 100); }
int cuDeviceGet(int *device, int gpu) { return *device = gpu + 100, told(OK); }
int cuDeviceGetAttribute(int *value, int attribute, int device) {
  if ((attribute != 124 && attribute != 118) || device < 100) return told(INVALID_VALUE);
  if (attribute == 118) return *value = shim_knobs[UNORDERED] ? 0 : 100, told(OK);
  return *value = !shim_knobs[NO_DMABUF], told(OK);
}

/* Pinned host memory ------------------------------------------------------------------------------------------------------ */

int cudaHostRegister(void *start, size_t size, unsigned flags) {
  int code = flags == 1 && size ? OK : INVALID_VALUE;
  pthread_mutex_lock(&big);
  if (++shim_counts[PINS] == shim_knobs[PIN_ERROR_AT]) code = 2;
  int place = -1;
  for (int i = 0; i < RANGES; i++) {
    if (!pinned[i].size) place = place < 0 ? i : place;
    else if ((char *)start < pinned[i].start + pinned[i].size && pinned[i].start < (char *)start + size) code = ALREADY;
  }
  if (!code) pinned[place] = (struct range){start, size}, shim_counts[PINNED]++;
  pthread_mutex_unlock(&big);
  return told(code);
}

int cudaHostUnregister(void *start) {
  int code = NOT_PINNED;
  pthread_mutex_lock(&big);
  for (int i = 0; i < RANGES; i++)
    if (pinned[i].size && pinned[i].start == start) pinned[i].size = 0, shim_counts[PINNED]--, code = OK;
  pthread_mutex_unlock(&big);
  return told(code);
}

/* Where the bytes of one end are; NULL for a range that is not all of one memory. Under `big`. */
static char *resolve(const void *pointer, size_t size) {
  char *p = (char *)pointer;
  struct allocation *a = holder(p);
  if (a) return p + size <= a->device + a->size ? a->shadow + (p - a->device) : NULL;
  for (int i = 0; i < RANGES; i++) {
    struct range *r = &pinned[i];
    if (!r->size || p >= r->start + r->size || p + size <= r->start) continue;
    if (p >= r->start && p + size <= r->start + r->size) return p;
    shim_counts[STRADDLES]++;
    return NULL;
  }
  shim_counts[PAGEABLE]++;
  return p;
}

/* Streams ----------------------------------------------------------------------------------------------------------------- */

static void *run_stream(void *argument) {
  struct stream *s = argument;
  pthread_mutex_lock(&s->lock);
  while (!s->end) {
    struct op *op = s->first;
    if (!op) {
      pthread_cond_wait(&s->changed, &s->lock);
      continue;
    }
    pthread_mutex_unlock(&s->lock);
    while (shim_knobs[HANG] && !shim_knobs[BROKEN]) pause_us(1000);
    pause_us(shim_knobs[DELAY_US]);
    if (shim_knobs[BROKEN]) __atomic_add_fetch(&shim_counts[DROPPED], 1, __ATOMIC_RELAXED);
    else memcpy(op->to, op->from, op->size);
    pthread_mutex_lock(&s->lock);
    s->first = op->next;
    if (!s->first) s->last = &s->first;
    s->done++;
    free(op);
  }
  pthread_mutex_unlock(&s->lock);
  return NULL;
}

static int put(struct stream *s, void *to, const void *from, size_t size) {
  pthread_mutex_lock(&big);
  char *a = resolve(to, size), *b = resolve(from, size);
  pthread_mutex_unlock(&big);
  if (!s || !a || !b) return INVALID_VALUE;
  struct op *op = malloc(sizeof *op);
  *op = (struct op){NULL, a, b, size};
  pthread_mutex_lock(&s->lock);
  *s->last = op;
  s->last = &op->next;
  s->given++;
  pthread_cond_signal(&s->changed);
  pthread_mutex_unlock(&s->lock);
  __atomic_add_fetch(&shim_counts[COPIES], 1, __ATOMIC_RELAXED);
  return OK;
}

int cudaStreamCreateWithFlags(struct stream **made, unsigned flags) {
  if (flags != 1) return told(INVALID_VALUE);
  struct stream *s = calloc(1, sizeof *s);
  s->gpu = current;
  s->last = &s->first;
  pthread_mutex_init(&s->lock, NULL);
  pthread_cond_init(&s->changed, NULL);
  pthread_create(&s->thread, NULL, run_stream, s);
  __atomic_add_fetch(&shim_counts[STREAMS], 1, __ATOMIC_RELAXED);
  *made = s;
  return told(OK);
}

int cudaStreamDestroy(struct stream *s) {
  pthread_mutex_lock(&s->lock);
  s->end = true;
  pthread_cond_signal(&s->changed);
  pthread_mutex_unlock(&s->lock);
  pthread_join(s->thread, NULL);
  free(s);
  __atomic_sub_fetch(&shim_counts[STREAMS], 1, __ATOMIC_RELAXED);
  return told(OK);
}

int cudaEventCreateWithFlags(struct event **made, unsigned flags) {
  if (flags != 2) return told(INVALID_VALUE);
  *made = calloc(1, sizeof **made);
  (*made)->gpu = current;
  __atomic_add_fetch(&shim_counts[EVENTS], 1, __ATOMIC_RELAXED);
  return told(OK);
}

int cudaEventDestroy(struct event *e) {
  free(e);
  __atomic_sub_fetch(&shim_counts[EVENTS], 1, __ATOMIC_RELAXED);
  return told(OK);
}

int cudaEventRecord(struct event *e, struct stream *s) {
  if (!s || e->gpu != s->gpu || current != s->gpu) return told(BAD_HANDLE);
  if (shim_knobs[EVENT_ERROR]) return told(shim_knobs[EVENT_ERROR]);
  pthread_mutex_lock(&s->lock);
  e->stream = s;
  e->at = s->given;
  pthread_mutex_unlock(&s->lock);
  return told(OK);
}

int cudaEventQuery(struct event *e) {
  if (shim_knobs[EVENT_ERROR]) return told(shim_knobs[EVENT_ERROR]);
  if (!e->stream) return told(OK);
  pthread_mutex_lock(&e->stream->lock);
  int code = e->stream->done >= e->at ? OK : NOT_READY;
  pthread_mutex_unlock(&e->stream->lock);
  return told(code);
}

int cudaMemcpyAsync(void *to, const void *from, size_t size, int kind, struct stream *s) {
  if (kind != 4) return told(INVALID_VALUE);
  long number = __atomic_add_fetch(&shim_counts[EACH], 1, __ATOMIC_RELAXED);
  return told(number == shim_knobs[EACH_ERROR_AT] ? INVALID_VALUE : put(s, to, from, size));
}

#if CUDART >= 12080
struct copy_attributes { int order, hints[4]; unsigned flags; };
int cudaMemcpyBatchAsync(void *const *to, const void *const *from, const size_t *sizes, size_t count, struct copy_attributes *attributes,
                         size_t *indices, size_t kinds,
#if CUDART < 13000
                         size_t *failed,
#endif
                         struct stream *s) {
  __atomic_add_fetch(&shim_counts[BATCHES], 1, __ATOMIC_RELAXED);
  if (!s || !count || !kinds || kinds > count || indices[0]) return told(INVALID_VALUE);
  for (size_t i = 0; i < kinds; i++)
    if (attributes[i].order < 1 || attributes[i].order > 3 || attributes[i].flags > 1) return told(INVALID_VALUE);
  for (size_t i = 0; i < count; i++) {
    int code = (long)i + 1 == shim_knobs[BATCH_ERROR_AT] ? INVALID_VALUE : put(s, to[i], from[i], sizes[i]);
    if (!code) continue;
#if CUDART < 13000
    if (failed) *failed = i;
#endif
    return told(code);
  }
  return told(OK);
}
#endif
