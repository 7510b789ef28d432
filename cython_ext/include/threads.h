/* Runs a function on several threads at once. The threads stay between calls and sleep there. A thread that waits in a
 * loop, as OpenMP's do for milliseconds after each call, takes a core from the threads that launch kernels on a device.
 * A new thread for each call starts later than a sleeping one wakes, most of all while OpenMP's loops occupy the cores.
 *
 * A call on the main thread that may use as many threads as torch does runs on those of torch's OpenMP: right after
 * torch's operators these still wait in their loops, and any other thread would share the cores with them (a step of 10 M
 * parameters on 2 cores took 1.2 to 1.5 times that of torch). Calls beside a device come from other threads, or leave
 * cores to it, and so make no thread wait in loops.
 *
 * A thread runs with the floating-point mode that its caller has at the call, and, unless it is torch's, with the
 * caller's CPUs. Calls from several threads at once each take threads of their own. A forked child begins without
 * threads, and uses none of torch's. (One that loads this only after the fork does: operators of torch hang there, too.)
 */
#ifndef LIGHTNING_CXL_THREADS_H
#define LIGHTNING_CXL_THREADS_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <dlfcn.h>
#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>
#ifdef __x86_64__
#include <xmmintrin.h>
#endif

enum { CXL_STACK_BYTES = 1 << 20 }; /* small enough for many threads */

/* the mode of floating-point numbers: rounding, denormals */
#ifdef __x86_64__
static inline unsigned int cxl_get_mode(void) { return _mm_getcsr(); }
static inline void cxl_set_mode(const unsigned int mode) { _mm_setcsr(mode); }
#elif defined(__aarch64__)
static inline unsigned int cxl_get_mode(void)
{
    uint64_t mode;
    __asm__ volatile("mrs %0, fpcr" : "=r"(mode));
    return (unsigned int)mode; /* the upper half is reserved */
}
static inline void cxl_set_mode(const unsigned int mode) { __asm__ volatile("msr fpcr, %0" : : "r"((uint64_t)mode)); }
#endif

typedef void (*cxl_work)(void *job, int thread);

struct cxl_call {
    cxl_work work;
    void *job;
    unsigned int mode;
    unsigned running;  /* workers that have not returned; atomic, a futex */
};

struct cxl_worker {
    struct cxl_worker *next; /* in the list of idle ones */
    struct cxl_call *call;
    unsigned wakes;          /* a futex: counts calls */
    int thread;
    cpu_set_t cpus, cpus_now; /* to run on, and set at present */
};

static pthread_mutex_t cxl_lock = PTHREAD_MUTEX_INITIALIZER;
static struct cxl_worker *cxl_idle; /* the one used last comes first */
static int cxl_in_child;            /* of a fork: its OpenMP waits for the parent's threads for ever */

static void cxl_wait(unsigned *address, const unsigned value)
{
    syscall(SYS_futex, address, FUTEX_WAIT_PRIVATE, value, NULL, NULL, 0);
}

static void cxl_wake(unsigned *address) { syscall(SYS_futex, address, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0); }

static void *cxl_serve(void *argument)
{
    struct cxl_worker *worker = argument;
    prctl(PR_SET_NAME, "cxl-kernel"); /* for top, py-spy and the tests */
    for (unsigned seen = 0;; seen++) {
        while (__atomic_load_n(&worker->wakes, __ATOMIC_ACQUIRE) == seen)
            cxl_wait(&worker->wakes, seen);
        struct cxl_call *call = worker->call;
        if (!CPU_EQUAL(&worker->cpus, &worker->cpus_now) && sched_setaffinity(0, sizeof worker->cpus, &worker->cpus) == 0)
            worker->cpus_now = worker->cpus; /* else it runs where it is: slower, not wrong */
        cxl_set_mode(call->mode);
        call->work(call->job, worker->thread);
        if (__atomic_sub_fetch(&call->running, 1, __ATOMIC_RELEASE) == 0)
            cxl_wake(&call->running); /* the call may be over by now: then no thread waits at this address */
    }
    return NULL;
}

/* The threads are the parent's, and another of its threads may have held the lock. */
static void cxl_after_fork(void)
{
    cxl_idle = NULL;
    cxl_in_child = 1;
    pthread_mutex_init(&cxl_lock, NULL);
}

__attribute__((constructor)) static void cxl_watch_forks(void) { pthread_atfork(NULL, NULL, cxl_after_fork); }

/* Return a sleeping thread, or null if the system has no more. */
static struct cxl_worker *cxl_new_worker(void)
{
    struct cxl_worker *worker = calloc(1, sizeof *worker);
    pthread_attr_t attributes;
    if (!worker || pthread_attr_init(&attributes)) {
        free(worker);
        return NULL;
    }
    pthread_t id;
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    int failed = pthread_attr_setstacksize(&attributes, CXL_STACK_BYTES) || pthread_create(&id, &attributes, cxl_serve, worker);
    if (failed) { /* a library with much memory of its own per thread needs larger stacks */
        pthread_attr_destroy(&attributes);
        pthread_attr_init(&attributes);
        pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
        failed = pthread_create(&id, &attributes, cxl_serve, worker);
    }
    pthread_attr_destroy(&attributes);
    if (failed) {
        free(worker);
        return NULL;
    }
    return worker;
}

static struct cxl_worker *cxl_take_worker(void)
{
    pthread_mutex_lock(&cxl_lock);
    struct cxl_worker *worker = cxl_idle;
    if (worker)
        cxl_idle = worker->next;
    pthread_mutex_unlock(&cxl_lock);
    return worker ? worker : cxl_new_worker();
}

struct cxl_team_call {
    cxl_work work;
    void *job;
    unsigned int mode;
    int num_threads;
    int next; /* number of a thread; atomic */
};

static void cxl_work_in_team(void *argument)
{
    struct cxl_team_call *call = argument;
    const int thread = __atomic_fetch_add(&call->next, 1, __ATOMIC_RELAXED);
    if (thread >= call->num_threads)
        return;
    const unsigned int mode = cxl_get_mode();
    cxl_set_mode(call->mode);
    call->work(call->job, thread);
    cxl_set_mode(mode); /* the threads are torch's */
}

/* Run on the threads of torch's OpenMP; returns 0 where these do not serve this thread. */
static int cxl_run_team(const int num_threads, const int allowed, const cxl_work work, void *job)
{
    static void (*parallel)(void (*)(void *), void *, unsigned num_threads, unsigned flags);
    static int (*max_threads)(void);
    static int is_looked_up;
    if (cxl_in_child || getpid() != (pid_t)syscall(SYS_gettid)) /* not the main thread */
        return 0;
    if (!is_looked_up) {
        is_looked_up = 1;
        parallel = (void (*)(void (*)(void *), void *, unsigned, unsigned))dlsym(RTLD_DEFAULT, "GOMP_parallel");
        max_threads = (int (*)(void))dlsym(RTLD_DEFAULT, "omp_get_max_threads");
    }
    if (!parallel || !max_threads || allowed != max_threads())
        return 0;
    struct cxl_team_call call = {.work = work, .job = job, .mode = cxl_get_mode(), .num_threads = num_threads};
    parallel(cxl_work_in_team, &call, (unsigned)allowed, 0); /* the whole team: of a smaller one, threads end */
    return 1;
}

/* Call `work(job, thread)` for threads 0 (the caller) to `num_threads - 1` and return when all have returned. `allowed`
 * is how many threads the call may use at most. Threads may be torch's, or confined to one CPU each; `work` that chooses
 * their CPUs wants neither: then it is 0.
 *
 * There may be fewer threads, if the system has no more: `work` takes what is to be done from a common counter.
 */
static void cxl_run_threads(const int num_threads, const int allowed, const cxl_work work, void *job)
{
    if (allowed && num_threads > 1 && cxl_run_team(num_threads, allowed, work, job))
        return;
    struct cxl_call call = {.work = work, .job = job, .mode = cxl_get_mode()};
    struct cxl_worker *used = NULL;
    cpu_set_t cpus;
    const int here = sched_getcpu();
    /* A waking thread may be put on the CPU of its caller while OpenMP's threads wait in loops on the others. So where
     * there is a thread for every CPU, each gets one of its own. With fewer threads the scheduler finds free CPUs. */
    const int knows = num_threads > 1 && sched_getaffinity(0, sizeof cpus, &cpus) == 0;
    const int each_has_one = allowed && knows && here >= 0 && CPU_COUNT(&cpus) == num_threads;
    int cpu = -1;
    for (int i = 1; i < num_threads; i++) {
        struct cxl_worker *worker = cxl_take_worker();
        if (!worker)
            break;
        worker->next = used;
        used = worker;
        worker->call = &call;
        worker->thread = i;
        if (each_has_one) {
            do
                cpu++;
            while (!CPU_ISSET(cpu, &cpus) || cpu == here);
            CPU_ZERO(&worker->cpus);
            CPU_SET(cpu, &worker->cpus);
        } else if (knows)
            worker->cpus = cpus;
        call.running++;
    }
    for (struct cxl_worker *worker = used; worker; worker = worker->next) {
        __atomic_add_fetch(&worker->wakes, 1, __ATOMIC_RELEASE);
        cxl_wake(&worker->wakes);
    }
    work(job, 0);
    for (unsigned left; used && (left = __atomic_load_n(&call.running, __ATOMIC_ACQUIRE)) > 0;)
        cxl_wait(&call.running, left);
    if (!used)
        return;
    pthread_mutex_lock(&cxl_lock);
    while (used) {
        struct cxl_worker *next = used->next;
        used->next = cxl_idle;
        cxl_idle = used;
        used = next;
    }
    pthread_mutex_unlock(&cxl_lock);
}

/* Return the number of the next thing to be done. */
static inline int64_t cxl_take(int64_t *next) { return __atomic_fetch_add(next, 1, __ATOMIC_RELAXED); }

#endif
