/* The calls of 3FS's ring I/O library, as the adapter uses them, over ordinary files: for tests, written from its manual.
 *
 * Kept: reads run in threads of their own, maybe before they are submitted, in batches that end as a whole and in any
 * order; results may be short; a full ring says EAGAIN; a depth above zero waits for exactly so many; waits end by the wall
 * clock; a descriptor is registered once, and reads of one that was taken out fail; memory must be published by a link in
 * 3fs-virt/iovs, be shared, and no read may cross a block of it. The "mount" is the directory in USRBIO_SHIM_MOUNT.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

struct iov {
  uint8_t *base;
  void *handle;
  uint8_t id[16];
  char mount_point[256];
  size_t size, block_size;
  int numa;
};
struct ior {
  struct iov iov;
  void *handle;
  char mount_point[256];
  bool for_read;
  int io_depth, priority, timeout;
  uint64_t flags;
};
struct cqe {
  int32_t index, reserved;
  int64_t result;
  size_t userdata;
};

enum { HANG, SHORT_BYTES, ERROR, ERROR_TIMES, FULL_TIMES, REFUSE_RING, STRICT_DEPTH, DELAY_US, STRAYS, REFUSE_FD, WAIT_ERROR, KNOBS };
enum { READS, LOW_READS, REGISTERED, TWICE, TAKEN_OUT, BAD_MEMORY, RINGS, SUBMITS, BEFORE_SUBMIT, COUNTS };
volatile long shim_knobs[KNOBS];
volatile long shim_counts[COUNTS];

enum state { FREE, PENDING, RUNNING, DONE };
struct io {
  enum state state;
  struct iov iov;
  uint8_t *target;
  int fd;
  long generation;
  size_t offset, size, userdata;
  int64_t result;
};
struct ring {
  struct ring *next;
  int entries, depth, priority, pending, done_count;
  long submitted, prepared;
  int *order, *done;
  struct io *slots;
  char link[PATH_MAX];
};

#define FDS 65536
static struct { int fd; long generation; } registered[FDS];
static pthread_mutex_t big = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t ended = PTHREAD_COND_INITIALIZER, wanted = PTHREAD_COND_INITIALIZER;
static struct ring *rings;
static long generations;
static bool started;

static const char *mount_of(const char *path) {
  const char *mount = getenv("USRBIO_SHIM_MOUNT");
  size_t size = mount ? strlen(mount) : 0;
  return size && !strncmp(path, mount, size) && (path[size] == '/' || !path[size]) ? mount : NULL;
}

bool hf3fs_is_hf3fs(int fd) {
  char name[64], path[PATH_MAX];
  snprintf(name, sizeof name, "/proc/self/fd/%d", fd);
  ssize_t size = readlink(name, path, sizeof path - 1);
  if (size < 0) return false;
  path[size] = 0;
  return mount_of(path) != NULL;
}

int hf3fs_extract_mount_point(char *found, int size, const char *path) {
  const char *mount = mount_of(path);
  if (!mount) return -1;
  if ((int)strlen(mount) < size) strcpy(found, mount);
  return strlen(mount) + 1;
}

int hf3fs_iovwrap(struct iov *iov, void *base, const uint8_t *id, const char *mount, size_t size, size_t block_size, int numa) {
  if (strlen(mount) >= sizeof iov->mount_point) return -EINVAL;
  memset(iov, 0, sizeof *iov);
  iov->base = base;
  memcpy(iov->id, id, 16);
  strcpy(iov->mount_point, mount);
  iov->size = size;
  iov->block_size = block_size;
  iov->numa = numa;
  return 0;
}

static void link_name(const struct iov *iov, char *name) {
  int at = snprintf(name, PATH_MAX, "%s/3fs-virt/iovs/", iov->mount_point);
  for (int i = 0; i < 16; i++)
    at += snprintf(name + at, 4, i == 4 || i == 6 || i == 8 || i == 10 ? "-%02x" : "%02x", iov->id[i]);
  if (iov->block_size) snprintf(name + at, 32, ".b%zu", iov->block_size);
}

/* What the daemon finds when it looks for the memory of a read. */
static bool is_published(const struct io *io) {
  char name[PATH_MAX], target[PATH_MAX], line[PATH_MAX + 256];
  link_name(&io->iov, name);
  ssize_t size = readlink(name, target, sizeof target - 1);
  if (size < 9 || strncmp(target, "/dev/shm/", 9)) return false;
  size_t from = io->target - io->iov.base, block = io->iov.block_size;
  if (block && from / block != (from + io->size - 1) / block) return false;
  bool shared = false;
  FILE *maps = fopen("/proc/self/maps", "r");
  while (!shared && fgets(line, sizeof line, maps)) {
    unsigned long low, high;
    char mode[8] = "";
    sscanf(line, "%lx-%lx %7s", &low, &high, mode);
    shared = low <= (unsigned long)io->target && (unsigned long)io->target < high && mode[3] == 's' && strstr(line, "/dev/shm/");
  }
  fclose(maps);
  return shared;
}

static int64_t run(const struct io *io) {
  if (registered[io->fd].generation != io->generation) {
    __sync_fetch_and_add(&shim_counts[TAKEN_OUT], 1);
    return -EBADF;
  }
  if (!is_published(io)) {
    __sync_fetch_and_add(&shim_counts[BAD_MEMORY], 1);
    return -EINVAL;
  }
  if (shim_knobs[ERROR] && shim_knobs[ERROR_TIMES]) {
    if (shim_knobs[ERROR_TIMES] > 0) shim_knobs[ERROR_TIMES]--;
    return -shim_knobs[ERROR];
  }
  size_t size = io->size;
  if (shim_knobs[SHORT_BYTES] && (size_t)shim_knobs[SHORT_BYTES] < size) size = shim_knobs[SHORT_BYTES];
  if (shim_knobs[DELAY_US]) usleep(shim_knobs[DELAY_US]);
  size_t got = 0;
  while (got < size) {
    ssize_t part = pread(registered[io->fd].fd, io->target + got, size - got, io->offset + got);
    if (part < 0) return -errno;
    if (!part) break;
    got += part;
  }
  return got;
}

static int take(struct ring *ring, int *batch) {
  int count = ring->pending;
  if (ring->depth > 0 && count < ring->depth) return 0;
  if (ring->depth && count > abs(ring->depth)) count = abs(ring->depth);
  if (count > 8) count = 8;
  memcpy(batch, ring->order, count * sizeof *batch);
  ring->pending -= count;
  memmove(ring->order, ring->order + count, ring->pending * sizeof *batch);
  for (int i = 0; i < count; i++) ring->slots[batch[i]].state = RUNNING;
  if (ring->prepared - ring->pending > ring->submitted) shim_counts[BEFORE_SUBMIT]++;
  return count;
}

static void finish(struct ring *ring, int *batch, int count) {
  for (int i = count - 1; i >= 0; i--) { /* last first */
    ring->slots[batch[i]].state = DONE;
    ring->done[ring->done_count++] = batch[i];
    shim_counts[READS]++;
    shim_counts[LOW_READS] += ring->priority > 0;
  }
  pthread_cond_broadcast(&ended);
}

static void *work(void *unused) {
  (void)unused;
  pthread_mutex_lock(&big);
  for (;;) {
    int batch[8], count = 0;
    struct ring *ring = rings;
    while (ring && (shim_knobs[HANG] || !(count = take(ring, batch)))) ring = ring->next;
    if (!count) {
      struct timespec until;
      clock_gettime(CLOCK_REALTIME, &until);
      until.tv_nsec += 1000000;
      if (until.tv_nsec >= 1000000000) until.tv_sec++, until.tv_nsec -= 1000000000;
      pthread_cond_timedwait(&wanted, &big, &until);
      continue;
    }
    pthread_mutex_unlock(&big);
    for (int i = 0; i < count; i++) ring->slots[batch[i]].result = run(&ring->slots[batch[i]]);
    pthread_mutex_lock(&big);
    finish(ring, batch, count);
  }
  return NULL;
}

int hf3fs_iorcreate3(struct ior *ior, const char *mount, int entries, bool for_read, int depth, int priority, int timeout, int numa) {
  (void)numa;
  if (!ior || !*mount || timeout < 0 || !for_read) return -EINVAL;
  if (shim_knobs[REFUSE_RING]) return -shim_knobs[REFUSE_RING];
  if (shim_knobs[STRICT_DEPTH] && depth < 0) return -EINVAL;
  struct ring *ring = calloc(1, sizeof *ring);
  ring->entries = entries, ring->depth = depth, ring->priority = priority;
  ring->order = calloc(entries, sizeof(int)), ring->done = calloc(entries, sizeof(int));
  ring->slots = calloc(entries, sizeof *ring->slots);
  pthread_mutex_lock(&big);
  snprintf(ring->link, sizeof ring->link, "%s/3fs-virt/iovs/ring-%ld.r%d%s.t%d", mount, ++generations, depth,
           priority > 0 ? ".pl" : priority < 0 ? ".ph" : "", timeout);
  if (symlink("/dev/shm/ring", ring->link)) {
    int number = errno;
    pthread_mutex_unlock(&big);
    return -number;
  }
  ring->next = rings, rings = ring;
  shim_counts[RINGS]++;
  if (!started) {
    pthread_t thread;
    for (int i = 0; i < 2; i++) pthread_create(&thread, NULL, work, NULL);
    started = true;
  }
  pthread_mutex_unlock(&big);
  memset(ior, 0, sizeof *ior);
  ior->handle = ring, ior->for_read = for_read, ior->io_depth = depth, ior->priority = priority;
  return 0;
}

void hf3fs_iordestroy(struct ior *ior) {
  struct ring *ring = ior->handle;
  pthread_mutex_lock(&big);
  struct ring **at = &rings;
  while (*at != ring) at = &(*at)->next;
  *at = ring->next;
  unlink(ring->link);
  shim_counts[RINGS]--;
  for (int i = 0; i < ring->entries; i++)
    if (ring->slots[i].state == RUNNING || ring->slots[i].state == PENDING) abort(); /* its memory is in use */
  free(ring->order), free(ring->done), free(ring->slots), free(ring);
  pthread_mutex_unlock(&big);
  ior->handle = NULL;
}

int hf3fs_io_entries(const struct ior *ior) { return ((struct ring *)ior->handle)->entries; }

int hf3fs_reg_fd(int fd, uint64_t flags) {
  (void)flags;
  if (shim_knobs[REFUSE_FD]) return shim_knobs[REFUSE_FD];
  if (!hf3fs_is_hf3fs(fd) || fd >= FDS) return EBADF;
  pthread_mutex_lock(&big);
  int result = EINVAL;
  if (registered[fd].generation) {
    shim_counts[TWICE]++;
  } else {
    char name[64]; /* anew, as reads through rings know no rule of direct files */
    snprintf(name, sizeof name, "/proc/self/fd/%d", fd);
    registered[fd].fd = open(name, O_RDONLY | O_CLOEXEC);
    registered[fd].generation = ++generations;
    shim_counts[REGISTERED]++;
    result = -registered[fd].fd;
  }
  pthread_mutex_unlock(&big);
  return result;
}

void hf3fs_dereg_fd(int fd) {
  if (!hf3fs_is_hf3fs(fd)) return;
  pthread_mutex_lock(&big);
  if (registered[fd].generation) {
    close(registered[fd].fd);
    registered[fd].generation = 0;
    shim_counts[REGISTERED]--;
  }
  pthread_mutex_unlock(&big);
}

int hf3fs_prep_io(const struct ior *ior, const struct iov *iov, bool read, void *ptr, int fd, size_t off, uint64_t len, size_t userdata) {
  struct ring *ring = ior ? ior->handle : NULL;
  uint8_t *target = ptr;
  if (!ring || read != ior->for_read || !iov || !target || !len || target < iov->base || target + len > iov->base + iov->size)
    return -EINVAL;
  if (fd < 0 || fd >= FDS || !registered[fd].generation) return -EBADF;
  pthread_mutex_lock(&big);
  int at = 0;
  while (at < ring->entries && ring->slots[at].state != FREE) at++;
  if (shim_knobs[FULL_TIMES] && shim_knobs[FULL_TIMES]--) at = ring->entries;
  if (at < ring->entries) {
    ring->slots[at] = (struct io){PENDING, *iov, target, fd, registered[fd].generation, off, len, userdata, 0};
    ring->order[ring->pending++] = at;
    ring->prepared++;
  }
  pthread_mutex_unlock(&big);
  return at < ring->entries ? at : -EAGAIN;
}

int hf3fs_submit_ios(const struct ior *ior) {
  pthread_mutex_lock(&big);
  struct ring *ring = ior->handle;
  ring->submitted = ring->prepared;
  shim_counts[SUBMITS]++;
  pthread_cond_broadcast(&wanted);
  pthread_mutex_unlock(&big);
  return 0;
}

int hf3fs_wait_for_ios(const struct ior *ior, struct cqe *cqes, int cqec, int min_results, const struct timespec *until) {
  if (cqec <= 0 || !ior || !ior->handle) return -EINVAL;
  if (shim_knobs[WAIT_ERROR]) return -shim_knobs[WAIT_ERROR];
  struct ring *ring = ior->handle;
  if (min_results > cqec) min_results = cqec;
  pthread_mutex_lock(&big);
  while (ring->done_count < min_results)
    if (until ? pthread_cond_timedwait(&ended, &big, until) : pthread_cond_wait(&ended, &big)) break;
  int count = ring->done_count < cqec ? ring->done_count : cqec;
  for (int i = 0; i < count; i++) {
    struct io *io = &ring->slots[ring->done[i]];
    cqes[i] = (struct cqe){ring->done[i], 0, io->result, io->userdata};
    io->state = FREE;
  }
  ring->done_count -= count;
  memmove(ring->done, ring->done + count, ring->done_count * sizeof(int));
  if (count && count < cqec && shim_knobs[STRAYS]) {
    shim_knobs[STRAYS]--;
    cqes[count] = cqes[0];
    count++;
  }
  pthread_mutex_unlock(&big);
  return count;
}
