/* Collectives in memory that the ranks of a host map: the protocols of arena.py and protocol.py,
 * without Python's interpreter between two steps.
 *
 * A function returns DONE when it has finished, or WAITING after a peer has made it wait for a while.
 * The caller then checks whether the peer is lost, and calls the function again. The function
 * continues at the job's `phase` and `piece`.
 *
 * Asynchronous calls are submitted through a queue. A Python thread waits in `serve` without the
 * interpreter, so data moves before the thread acquires the interpreter. Threads that poll read
 * `done`.
 *
 * The clock is stored with at least release order and loaded with acquire order, so data that was
 * written before a tick is visible after it on every machine. The same holds for the queue's counts
 * and for `done`.
 */

#define _GNU_SOURCE
#include <limits.h>
#include <linux/futex.h>
#include <sched.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { DONE, WAITING, MISMATCH };
enum { FLOAT32, FLOAT64, BFLOAT16, INT32, INT64, UINT8, FLOAT16 };
enum { SUM, AVG, PRODUCT, MIN, MAX };
enum { BLOCK = 1024, PAUSES = 16 };
/* The phases of an all-reduce, in which a call continues after WAITING. */
enum { FIRST_COPY, COMPARE, COPY_IN, SUM_SLOTS, COPY_OUT, SUM_IN_PLACE, LAST_WAIT, NEXT_PIECE };
/* Before a wait sleeps, it polls for POLL_NANOSECONDS, or for less time on a crowded core. */
enum { POLL_NANOSECONDS = 100000, CROWDED_POLL_NANOSECONDS = 10000 };
/* After a yield of more than LONG_YIELD_NANOSECONDS, a core is crowded for CROWDED_NANOSECONDS. */
enum { LONG_YIELD_NANOSECONDS = 100000, CROWDED_NANOSECONDS = 50000000 };
/* A sleep consists of up to NAPS naps. */
enum { NAPS = 40, NAP_NANOSECONDS = 1000000, NOTE_BYTES = 16 };

typedef struct {
    int64_t rank, world_size, tick, slot_bytes, one_shot_bytes, piece_bytes;
    /* Offsets in a rank's memory: see arena.py. */
    int64_t sleepers, failure, calls, call_room, call_bytes, notes, note_room, data;
    int64_t crowded_until; /* other programs use this core: a value of nanoseconds() */
    int64_t completed;     /* the last tick at which this rank has finished its wait */
    char **memory;
} Arena;

typedef struct {
    int64_t kind, count, itemsize, dtype, op, root;
    /* `piece` is the number of the piece that passes through the slots. `phase` is 0 before a piece
     * is copied in and 1 after it, except in an all-reduce. */
    int64_t phase, piece;
    char *in, *out;
    char **copies; /* every rank's copy of a shared tensor, or NULL */
    /* For an all-to-all: the parts to and from each rank, and their numbers of elements. */
    char **ins, **outs;
    int64_t *lengths;
    const char *call, *note; /* written before the first tick and then set to NULL */
    int32_t done;
} Job;

enum { ROOM = 1024 };

typedef struct {
    uint32_t submitted, taken; /* number of jobs so far */
    Job *jobs[ROOM];           /* NULL for a call that Python runs */
} Queue;

/* ----- the clock ----- */

static int64_t *clock_of(const Arena *a, int64_t rank) { return (int64_t *)a->memory[rank]; }

static int32_t *sleepers_of(const Arena *a, int64_t rank) {
    return (int32_t *)(a->memory[rank] + a->sleepers);
}

/* Return 1 if a rank has left the group after an error. */
static int has_failed(const Arena *a, int64_t rank) {
    return __atomic_load_n((int64_t *)(a->memory[rank] + a->failure), __ATOMIC_ACQUIRE) != 0;
}

/* Return 1 if a rank has reached this rank's tick. */
static int has_reached(const Arena *a, int64_t rank) {
    return __atomic_load_n(clock_of(a, rank), __ATOMIC_ACQUIRE) >= a->tick;
}

/* Increment this rank's clock and wake the ranks that wait for it; return 0 after an error. */
static int tick(Arena *a) {
    int64_t *clock = clock_of(a, a->rank);
    /* Another thread of this process may have left the group. */
    if (has_failed(a, a->rank)) return 0;
    __atomic_store_n(clock, ++a->tick, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(sleepers_of(a, a->rank), __ATOMIC_SEQ_CST))
        syscall(SYS_futex, clock, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
    return 1;
}

static void relax(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static int64_t nanoseconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * (int64_t)1000000000 + now.tv_nsec;
}

/* Return 1 if `rank` reaches this tick within a short time: poll its clock. */
static int poll_for(Arena *a, int64_t rank) {
    const int64_t start = nanoseconds();
    int64_t now = start, limit = POLL_NANOSECONDS;
    while (now - start < limit) {
        for (int i = 0; i < PAUSES; i++) {
            if (has_reached(a, rank)) return 1;
            relax();
        }
        const int64_t before = now = nanoseconds();
        limit = POLL_NANOSECONDS;
        if (now < a->crowded_until) {
            limit = CROWDED_POLL_NANOSECONDS;
            continue;
        }
        sched_yield();
        now = nanoseconds();
        /* Another thread has used this core for a whole time slice. The scheduler runs a thread that
         * sleeps as soon as it is woken, but not a thread that yields. A thread that sleeps also
         * frees its core for a rank that waits behind another program. */
        if (now - before > LONG_YIELD_NANOSECONDS) a->crowded_until = now + CROWDED_NANOSECONDS;
    }
    return has_reached(a, rank);
}

/* Return 1 if `rank` reaches this tick soon: poll its clock, then sleep for a while. */
static int wait_for(Arena *a, int64_t rank) {
    if (poll_for(a, rank)) return 1;
    /* A futex has 32 bits: the low half of the clock, which changes with every tick. */
    int32_t *word = (int32_t *)clock_of(a, rank);
    struct timespec nap = {0, NAP_NANOSECONDS};
    for (int i = 0; i < NAPS; i++) {
        __atomic_add_fetch(sleepers_of(a, rank), 1, __ATOMIC_SEQ_CST);
        int64_t now = __atomic_load_n(clock_of(a, rank), __ATOMIC_SEQ_CST);
        if (now < a->tick)
            syscall(SYS_futex, word, FUTEX_WAIT, (int32_t)now, &nap, NULL, 0);
        __atomic_sub_fetch(sleepers_of(a, rank), 1, __ATOMIC_SEQ_CST);
        if (has_reached(a, rank)) return 1;
        if (has_failed(a, rank) || has_failed(a, a->rank)) return 0;
    }
    return 0;
}

/* Return 1 when all ranks have reached this tick, or 0 if a rank does not reach it soon. */
static int all_have_reached(Arena *a) {
    for (int64_t rank = 0; rank < a->world_size; rank++)
        if (rank != a->rank && !has_reached(a, rank) && !wait_for(a, rank)) return 0;
    /* Another thread of this process may have left the group. */
    if (has_failed(a, a->rank)) return 0;
    a->completed = a->tick;
    return 1;
}

#define TICK(next)                       \
    do {                                 \
        if (!tick(a)) return WAITING;    \
        job->phase = (next);             \
    } while (0)

#define WAIT()                                    \
    do {                                          \
        if (!all_have_reached(a)) return WAITING; \
    } while (0)

/* ----- slots, notes and calls ----- */

static char *slot(const Arena *a, int64_t rank, int64_t ahead) {
    return a->memory[rank] + a->data + ((a->tick + ahead) & 1) * a->slot_bytes;
}

static char *note(const Arena *a, int64_t rank) {
    return a->memory[rank] + a->notes + (a->tick & 1) * a->note_room;
}

/* Return 1 if all ranks have announced the same call. */
static int calls_agree(const Arena *a) {
    const int64_t cell = a->calls + (a->tick & 1) * a->call_room;
    const char *first = a->memory[0] + cell;
    for (int64_t rank = 1; rank < a->world_size; rank++)
        if (memcmp(first, a->memory[rank] + cell, a->call_bytes)) return 0;
    return 1;
}

/* Write this rank's call and note, which the other ranks read after the next tick. */
static void announce(const Arena *a, Job *job) {
    const int64_t cell = (a->tick + 1) & 1;
    char *local = a->memory[a->rank];
    if (job->call) memcpy(local + a->calls + cell * a->call_room, job->call, a->call_bytes);
    if (job->note) memcpy(local + a->notes + cell * a->note_room, job->note, NOTE_BYTES);
    job->call = job->note = NULL;
}

/* Return the length of a rank's slice of `count` elements, and its start, as tensor_split does. */
static int64_t split(const Arena *a, int64_t count, int64_t rank, int64_t *start) {
    int64_t width = count / a->world_size, longer = count % a->world_size;
    *start = rank * width + (rank < longer ? rank : longer);
    return width + (rank < longer);
}

/* ----- sums ----- */

static float widen_bfloat16(uint16_t x) {
    uint32_t bits = (uint32_t)x << 16;
    float wide;
    memcpy(&wide, &bits, 4);
    return wide;
}

static uint16_t narrow_bfloat16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    /* Round to the nearest value; ties round to even. */
    uint16_t rounded = (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
    return x != x ? 0x7fc0 : rounded;
}

#define SAME(x) (x)
#define SMALLER(x, y) ((x) < (y) || (x) != (x) ? (x) : (y))
#define LARGER(x, y) ((x) > (y) || (x) != (x) ? (x) : (y))
#define PLUS(x, y) ((x) + (y))
#define TIMES(x, y) ((x) * (y))
#define CHOOSE(WHAT, FIRST)                                                                \
    switch (op) {                                                                          \
    case PRODUCT: for (int64_t i = 0; i < n; i++) sum[i] = TIMES(FIRST, WHAT); break;      \
    case MIN: for (int64_t i = 0; i < n; i++) sum[i] = SMALLER(FIRST, WHAT); break;        \
    case MAX: for (int64_t i = 0; i < n; i++) sum[i] = LARGER(FIRST, WHAT); break;         \
    default: for (int64_t i = 0; i < n; i++) sum[i] = PLUS(FIRST, WHAT);                   \
    }

/* Compute parts[0] op parts[1] op ... in this order, in WIDE, and write it to all `outs` after one
 * rounding. `outs` may be among the parts: a block is read from all parts before it is written. */
#define REDUCE(NAME, NARROW, WIDE, LOAD, STORE, DIVIDE)                                     \
    static void NAME(char **outs, int64_t copies, char **parts, int64_t world_size,         \
                     int64_t count, int64_t op) {                                           \
        WIDE sum[BLOCK];                                                                    \
        for (int64_t start = 0; start < count; start += BLOCK) {                            \
            int64_t n = count - start < BLOCK ? count - start : BLOCK;                      \
            const NARROW *first = (const NARROW *)parts[0] + start;                         \
            if (world_size == 1) {                                                          \
                for (int64_t i = 0; i < n; i++) sum[i] = LOAD(first[i]);                    \
            } else {                                                                        \
                const NARROW *part = (const NARROW *)parts[1] + start;                      \
                CHOOSE(LOAD(part[i]), LOAD(first[i]))                                       \
            }                                                                               \
            for (int64_t rank = 2; rank < world_size; rank++) {                             \
                const NARROW *part = (const NARROW *)parts[rank] + start;                   \
                CHOOSE(LOAD(part[i]), sum[i])                                               \
            }                                                                               \
            if (op == AVG) DIVIDE;                                                          \
            NARROW *out = (NARROW *)outs[0] + start;                                        \
            for (int64_t i = 0; i < n; i++) out[i] = STORE(sum[i]);                         \
            for (int64_t copy = 1; copy < copies; copy++)                                   \
                memcpy((NARROW *)outs[copy] + start, out, n * sizeof(NARROW));              \
        }                                                                                   \
    }

#define QUOTIENT(WIDE)                                                                  \
    do {                                                                                \
        if (world_size & (world_size - 1))                                              \
            for (int64_t i = 0; i < n; i++) sum[i] /= (WIDE)world_size;                 \
        else                                                                            \
            for (int64_t i = 0; i < n; i++) sum[i] *= (WIDE)(1.0 / (double)world_size); \
    } while (0)

REDUCE(reduce_float32, float, float, SAME, SAME, QUOTIENT(float))
REDUCE(reduce_float64, double, double, SAME, SAME, QUOTIENT(double))
REDUCE(reduce_bfloat16, uint16_t, float, widen_bfloat16, narrow_bfloat16, QUOTIENT(float))
REDUCE(reduce_int32, int32_t, int32_t, SAME, SAME, (void)0)
REDUCE(reduce_int64, int64_t, int64_t, SAME, SAME, (void)0)
REDUCE(reduce_uint8, uint8_t, uint8_t, SAME, SAME, (void)0)
#ifdef __FLT16_MAX__
REDUCE(reduce_float16, _Float16, float, (float), (_Float16), QUOTIENT(float))
#endif

int can_reduce(int64_t dtype) {
#ifdef __FLT16_MAX__
    return dtype <= FLOAT16;
#else
    return dtype < FLOAT16;
#endif
}

static void reduce(const Arena *a, const Job *job, char **outs, int64_t copies, char **parts,
                   int64_t count) {
    switch (job->dtype) {
    case FLOAT32: reduce_float32(outs, copies, parts, a->world_size, count, job->op); break;
    case FLOAT64: reduce_float64(outs, copies, parts, a->world_size, count, job->op); break;
    case BFLOAT16: reduce_bfloat16(outs, copies, parts, a->world_size, count, job->op); break;
    case INT32: reduce_int32(outs, copies, parts, a->world_size, count, job->op); break;
    case INT64: reduce_int64(outs, copies, parts, a->world_size, count, job->op); break;
    case UINT8: reduce_uint8(outs, copies, parts, a->world_size, count, job->op); break;
#ifdef __FLT16_MAX__
    case FLOAT16: reduce_float16(outs, copies, parts, a->world_size, count, job->op); break;
#endif
    }
}

/* ----- collectives ----- */

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* Reduce `in` over all ranks into `out`; protocol.py describes the three protocols. */
int all_reduce(Arena *a, Job *job) {
    const int64_t size = job->itemsize, width = a->slot_bytes / size, world_size = a->world_size;
    const int small = job->count * size <= a->one_shot_bytes;
    char *parts[world_size], *outs[world_size];
    for (;;) {
        const int64_t start = job->piece * width, n = least(width, job->count - start);
        int64_t at, mine = split(a, n, a->rank, &at);
        switch (job->phase) {
        case FIRST_COPY:
            if (!job->copies) memcpy(slot(a, a->rank, 1), job->in, n * size);
            TICK(COMPARE);
            break;
        case COMPARE: {
            WAIT();
            if (!calls_agree(a)) return MISMATCH;
            /* A note contains an allocation and an offset, or zeros if the tensor is not shared. */
            int same = 1, none_shared = 1;
            static const char nothing[NOTE_BYTES];
            for (int64_t rank = 0; rank < world_size; rank++) {
                same &= !memcmp(note(a, rank), note(a, a->rank), NOTE_BYTES);
                none_shared &= !memcmp(note(a, rank), nothing, NOTE_BYTES);
            }
            job->phase = COPY_IN;
            if (job->copies && same)
                job->phase = SUM_IN_PLACE;
            else if (none_shared)
                job->phase = SUM_SLOTS;
            break;
        }
        case COPY_IN:
            memcpy(slot(a, a->rank, 1), job->in + start * size, n * size);
            TICK(SUM_SLOTS);
            break;
        case SUM_SLOTS:
            WAIT();
            if (small || world_size <= 2) {
                for (int64_t rank = 0; rank < world_size; rank++) parts[rank] = slot(a, rank, 0);
                outs[0] = job->out + start * size;
                reduce(a, job, outs, 1, parts, n);
                job->phase = NEXT_PIECE;
                break;
            }
            for (int64_t rank = 0; rank < world_size; rank++)
                parts[rank] = slot(a, rank, 0) + at * size;
            outs[0] = slot(a, a->rank, 1) + at * size;
            reduce(a, job, outs, 1, parts, mine);
            TICK(COPY_OUT);
            break;
        case COPY_OUT:
            WAIT();
            for (int64_t rank = 0; rank < world_size; rank++) {
                int64_t theirs = split(a, n, rank, &at);
                memcpy(job->out + (start + at) * size, slot(a, rank, 0) + at * size, theirs * size);
            }
            job->phase = NEXT_PIECE;
            break;
        case SUM_IN_PLACE: /* only this rank writes its slice, in all copies */
            mine = split(a, job->count, a->rank, &at);
            for (int64_t offset = 0, step = a->piece_bytes / size; offset < mine; offset += step) {
                for (int64_t rank = 0; rank < world_size; rank++)
                    outs[rank] = parts[rank] = job->copies[rank] + (at + offset) * size;
                reduce(a, job, outs, world_size, parts, least(step, mine - offset));
            }
            TICK(LAST_WAIT);
            break;
        case LAST_WAIT:
            WAIT();
            return DONE;
        case NEXT_PIECE:
            job->phase = COPY_IN;
            if (++job->piece * width >= job->count) return DONE;
        }
    }
}

/* Reduce this rank's slice of `in` over all ranks into `out`, which has `count` elements. */
int reduce_scatter(Arena *a, Job *job) {
    const int64_t size = job->itemsize, width = a->slot_bytes / a->world_size / size;
    char *parts[a->world_size];
    for (;;) {
        const int64_t start = job->piece * width, n = least(width, job->count - start);
        if (job->phase == 0) {
            for (int64_t rank = 0; rank < a->world_size; rank++)
                memcpy(slot(a, a->rank, 1) + rank * width * size,
                       job->in + (rank * job->count + start) * size, n * size);
            TICK(1);
        }
        WAIT();
        if (job->piece == 0 && !calls_agree(a)) return MISMATCH;
        for (int64_t rank = 0; rank < a->world_size; rank++)
            parts[rank] = slot(a, rank, 0) + a->rank * width * size;
        char *out = job->out + start * size;
        reduce(a, job, &out, 1, parts, n);
        job->phase = 0;
        if (++job->piece * width >= job->count) return DONE;
    }
}

/* Write every rank's `in` of `count` bytes to `out`, in rank order. */
int all_gather(Arena *a, Job *job) {
    const int64_t width = a->slot_bytes;
    for (;;) {
        const int64_t start = job->piece * width, n = least(width, job->count - start);
        if (job->phase == 0) {
            memcpy(slot(a, a->rank, 1), job->in + start, n);
            TICK(1);
        }
        WAIT();
        if (job->piece == 0 && !calls_agree(a)) return MISMATCH;
        for (int64_t rank = 0; rank < a->world_size; rank++)
            memcpy(job->out + rank * job->count + start, slot(a, rank, 0), n);
        job->phase = 0;
        if (++job->piece * width >= job->count) return DONE;
    }
}

/* Copy the `count` bytes of rank `root` to every rank. */
int broadcast(Arena *a, Job *job) {
    const int64_t width = a->slot_bytes;
    for (;;) {
        const int64_t start = job->piece * width, n = least(width, job->count - start);
        if (job->phase == 0) {
            if (a->rank == job->root) memcpy(slot(a, a->rank, 1), job->in + start, n);
            TICK(1);
        }
        WAIT();
        if (job->piece == 0 && !calls_agree(a)) return MISMATCH;
        if (a->rank != job->root) memcpy(job->out + start, slot(a, job->root, 0), n);
        job->phase = 0;
        if (++job->piece * width >= job->count) return DONE;
    }
}

/* Return the number of elements of a part in the piece [start, start + width). */
static int64_t within(int64_t length, int64_t start, int64_t width) {
    return length <= start ? 0 : least(width, length - start);
}

/* Copy ins[j] of rank i to outs[i] of rank j; lengths may differ. A slot contains the lengths that
 * its rank sends and expects, then a part for each other rank. A rank copies its own part directly. */
int all_to_all(Arena *a, Job *job) {
    const int64_t size = job->itemsize, world_size = a->world_size, rank = a->rank;
    const int64_t head = (2 * world_size * 8 + 63) / 64 * 64;
    const int64_t width = (a->slot_bytes - head) / (world_size > 1 ? world_size - 1 : 1) / size;
    const int64_t *sends = job->lengths, *expects = job->lengths + world_size;
    for (;;) {
        const int64_t start = job->piece * width;
        if (job->phase == 0) {
            char *local = slot(a, rank, 1);
            if (job->piece == 0) memcpy(local, job->lengths, 2 * world_size * 8);
            for (int64_t to = 0; to < world_size; to++)
                if (to != rank)
                    memcpy(local + head + (to - (to > rank)) * width * size,
                           job->ins[to] + start * size, within(sends[to], start, width) * size);
            TICK(1);
        }
        WAIT();
        if (job->piece == 0) {
            if (!calls_agree(a)) return MISMATCH;
            job->count = 0;
            for (int64_t from = 0; from < world_size; from++) {
                const int64_t *theirs = (const int64_t *)slot(a, from, 0);
                for (int64_t to = 0; to < world_size; to++) {
                    if (theirs[to] != ((const int64_t *)slot(a, to, 0))[world_size + from])
                        return MISMATCH;
                    if (theirs[to] > job->count) job->count = theirs[to];
                }
            }
        }
        for (int64_t from = 0; from < world_size; from++) {
            const char *part = slot(a, from, 0) + head + (rank - (rank > from)) * width * size;
            if (from == rank) part = job->ins[rank] + start * size;
            memcpy(job->outs[from] + start * size, part,
                   within(expects[from], start, width) * size);
        }
        job->phase = 0;
        if (++job->piece * width >= job->count) return DONE;
    }
}

/* Tick, and return DONE when all ranks have ticked: the tick between steps that run in Python. */
int synchronize(Arena *a, Job *job) {
    if (job->phase == 0) TICK(1);
    WAIT();
    return DONE;
}

/* ----- synchronous and asynchronous calls ----- */

static int (*const COLLECTIVES[])(Arena *, Job *) = {
    all_reduce, reduce_scatter, all_gather, broadcast, all_to_all, synchronize,
};

/* Start or continue a call. */
int run(Arena *a, Job *job) {
    if (job->done) return DONE;
    announce(a, job);
    const int status = COLLECTIVES[job->kind](a, job);
    if (status == DONE) __atomic_store_n(&job->done, 1, __ATOMIC_RELEASE);
    return status;
}

/* Submit a job, or NULL for a call that Python runs; return 0 if the queue is full. */
int put(Queue *queue, Job *job) {
    const uint32_t count = queue->submitted;
    if (count - __atomic_load_n(&queue->taken, __ATOMIC_ACQUIRE) == ROOM) return 0;
    queue->jobs[count % ROOM] = job;
    __atomic_store_n(&queue->submitted, count + 1, __ATOMIC_RELEASE);
    syscall(SYS_futex, &queue->submitted, FUTEX_WAKE_PRIVATE, 1, NULL, NULL, 0);
    return 1;
}

/* Wait for the next job and run it as far as possible. The Python thread then acquires the
 * interpreter, and `run` returns the result or continues. */
void serve(Arena *a, Queue *queue) {
    const uint32_t count = queue->taken;
    while (__atomic_load_n(&queue->submitted, __ATOMIC_ACQUIRE) == count)
        syscall(SYS_futex, &queue->submitted, FUTEX_WAIT_PRIVATE, count, NULL, NULL, 0);
    Job *job = queue->jobs[count % ROOM];
    __atomic_store_n(&queue->taken, count + 1, __ATOMIC_RELEASE);
    if (!job) return;
    run(a, job);
}

/* Return 1 if the job has been run. */
int is_done(const Job *job) { return __atomic_load_n(&job->done, __ATOMIC_ACQUIRE); }
