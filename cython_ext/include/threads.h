/* Runs a function on several threads at once. They are made for the call and are gone after it, so that nothing waits in
 * a loop for the next call: the pool of an OpenMP keeps a core of every thread busy for milliseconds after each of them,
 * which those who launch kernels on a device, and whoever else is on this machine, then lack. There is nothing to be
 * found broken after a fork either, and the threads of the caller's OpenMP, such as torch's, are its own.
 *
 * A thread begins with the CPUs and the mode of floating-point numbers of its maker.
 */
#ifndef LIGHTNING_CXL_THREADS_H
#define LIGHTNING_CXL_THREADS_H

#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>

enum { CXL_STACK_BYTES = 1 << 20 }; /* small enough that the C library keeps the stacks of many threads */

typedef void (*cxl_work)(void *job, int thread);

struct cxl_worker {
    pthread_t id;
    cxl_work work;
    void *job;
    int thread, runs;
};

static void *cxl_begin(void *argument)
{
    struct cxl_worker *worker = argument;
    worker->work(worker->job, worker->thread);
    return NULL;
}

/* Call `work(job, thread)` for threads 0 (the caller) to `num_threads - 1` and return when all have returned.
 *
 * There may be fewer threads, if the system has no more: `work` takes what is to be done from a common counter.
 */
static void cxl_run_threads(const int num_threads, const cxl_work work, void *job)
{
    struct cxl_worker *workers = num_threads > 1 ? calloc((size_t)num_threads, sizeof *workers) : NULL;
    pthread_attr_t small;
    const int has_small = workers && pthread_attr_init(&small) == 0;
    if (has_small)
        pthread_attr_setstacksize(&small, CXL_STACK_BYTES);
    for (int i = 1; workers && i < num_threads; i++) {
        struct cxl_worker *worker = &workers[i];
        *worker = (struct cxl_worker){.work = work, .job = job, .thread = i};
        /* a library with much memory of its own per thread needs larger stacks */
        worker->runs = (has_small && pthread_create(&worker->id, &small, cxl_begin, worker) == 0) ||
                       pthread_create(&worker->id, NULL, cxl_begin, worker) == 0;
        if (!worker->runs)
            break;
    }
    work(job, 0);
    for (int i = 1; workers && i < num_threads; i++)
        if (workers[i].runs)
            pthread_join(workers[i].id, NULL);
    if (has_small)
        pthread_attr_destroy(&small);
    free(workers);
}

/* Return the number of the next thing to be done. */
static inline int64_t cxl_take(int64_t *next) { return __atomic_fetch_add(next, 1, __ATOMIC_RELAXED); }

#endif
