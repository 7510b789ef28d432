/* Divides a table of spans over threads.
 *
 * The spans of one team are laid end to end, each team's line is cut into chunks, and the threads take chunk after
 * chunk: first those of their own team, then what is left of others. Handed out as threads become free, because memory
 * of different kinds takes different time. A chunk is a whole number of blocks and cache lines of every span.
 *
 * Chunks are not handed out in the order of addresses: state may be striped over tiers, in stripes of 2 MiB and more, so
 * neighbours lie in the same stripe, and with all threads there the tiers would work one after the other. Steps of the
 * golden section of the line keep the chunks of any moment spread over it evenly, so each tier has about its share of
 * the threads. Equal ways side by side would be as simple, but keep step with the stripes where a way is a multiple of
 * their period. One thread alone goes in the order of addresses, which is a little faster.
 */
#ifndef LIGHTNING_CXL_ADAM_THREADS_H
#define LIGHTNING_CXL_ADAM_THREADS_H

#include <sched.h>
#include <stdlib.h>

#include "adam_isa.h"
#include "threads.h"

enum { ADAM_CHUNK = 65536, ADAM_ALIGN = BLOCKWISE_SIZE };

/* The line of one team. */
struct adam_line {
    int64_t first, last;  /* its spans, as places in `order` */
    int64_t num_chunks;
    int64_t stride;       /* from one chunk that is handed out to the next, without a factor in common with num_chunks */
    int64_t next_turn;    /* of handing out a chunk; atomic */
    int num_threads;      /* that start here */
    cpu_set_t cpus;       /* empty: any */
};

struct adam_job {
    const struct adam_span *spans;
    const struct adam_scalars *scalars;
    int64_t *order;  /* spans by team */
    int64_t *starts; /* of the span at the same place in `order`, in elements from the start of its line */
    struct adam_line *lines;
    int64_t num_lines;
    enum adam_isa isa;
};

static void adam_lay_out(struct adam_job *job, const int64_t num_spans)
{
    int64_t place = 0;
    for (int64_t team = 0; team < job->num_lines; team++) {
        struct adam_line *line = &job->lines[team];
        int64_t end = 0;
        line->first = place;
        for (int64_t i = 0; i < num_spans; i++) {
            if (job->spans[i].team != team)
                continue;
            job->order[place] = i;
            job->starts[place++] = end;
            end += (job->spans[i].numel + ADAM_ALIGN - 1) / ADAM_ALIGN * ADAM_ALIGN;
        }
        line->last = place;
        line->num_chunks = (end + ADAM_CHUNK - 1) / ADAM_CHUNK;
    }
}

/* Return a step near the golden section of `n` whose multiples modulo `n` are all of 0 to n - 1. */
static int64_t adam_stride(const int64_t n)
{
    for (int64_t step = (int64_t)(0.6180339887498949 * (double)n);; step++) {
        int64_t a = n, b = step;
        while (b) {
            const int64_t rest = a % b;
            a = b;
            b = rest;
        }
        if (a <= 1) /* the greatest common divisor */
            return step;
    }
}

/* Threads by share of the chunks, and the order of these. */
static int adam_divide_threads(struct adam_job *job, int num_threads)
{
    int64_t chunks = 0, before = 0;
    for (int64_t i = 0; i < job->num_lines; i++)
        chunks += job->lines[i].num_chunks;
    if (chunks < num_threads)
        num_threads = chunks > 0 ? (int)chunks : 1;
    for (int64_t i = 0; i < job->num_lines; i++) {
        const int64_t after = before + job->lines[i].num_chunks;
        job->lines[i].num_threads = chunks ? (int)(after * num_threads / chunks - before * num_threads / chunks) : 0;
        before = after;
        job->lines[i].stride = num_threads > 1 ? adam_stride(job->lines[i].num_chunks) : 1;
    }
    return num_threads;
}

/* Update the part of every span of a line that lies in one chunk. */
static void adam_chunk(const struct adam_job *job, const struct adam_line *line, const int64_t chunk)
{
    const int64_t begin = chunk * ADAM_CHUNK, end = begin + ADAM_CHUNK;
    int64_t low = line->first, high = line->last;
    while (high - low > 1) { /* the last span that starts at or before `begin` */
        const int64_t middle = (low + high) / 2;
        if (job->starts[middle] <= begin)
            low = middle;
        else
            high = middle;
    }
    for (; low < line->last && job->starts[low] < end; low++) {
        const struct adam_span *span = &job->spans[job->order[low]];
        const int64_t offset = begin > job->starts[low] ? begin - job->starts[low] : 0;
        const int64_t stop = end - job->starts[low] < span->numel ? end - job->starts[low] : span->numel;
        if (stop > offset)
            adam_update(job->isa, span, offset, stop - offset, &job->scalars[span->row]);
    }
}

static void adam_work(void *argument, const int thread)
{
    struct adam_job *job = argument;
    int64_t team = 0;
    for (int before = 0; team < job->num_lines - 1; team++) {
        before += job->lines[team].num_threads;
        if (thread < before)
            break;
    }
    cpu_set_t old, own;
    int moved = 0; /* else it runs where it is: slower, not wrong */
    if (CPU_COUNT(&job->lines[team].cpus) > 0 && sched_getaffinity(0, sizeof old, &old) == 0) {
        CPU_AND(&own, &old, &job->lines[team].cpus); /* whoever confined this thread did not mean CPUs outside */
        moved = CPU_COUNT(&own) > 0 && sched_setaffinity(0, sizeof own, &own) == 0;
    }
    for (int64_t i = 0; i < job->num_lines; i++) {
        struct adam_line *line = &job->lines[(team + i) % job->num_lines];
        int64_t turn;
        while ((turn = cxl_take(&line->next_turn)) < line->num_chunks)
            adam_chunk(job, line, turn * line->stride % line->num_chunks);
    }
    if (moved)
        sched_setaffinity(0, sizeof old, &old);
}

/* Update all spans; `cpus` has pairs of team and CPU. Returns 0, or -1 without memory for the index. */
static int adam_run(
    const struct adam_span *spans, const int64_t num_spans, const struct adam_scalars *scalars, int num_threads,
    const enum adam_isa isa, const int64_t *cpus, const int64_t num_cpus, const int64_t num_teams)
{
    struct adam_job job = {.spans = spans, .scalars = scalars, .num_lines = num_teams, .isa = isa};
    job.lines = calloc((size_t)num_teams, sizeof *job.lines);
    job.order = malloc((size_t)num_spans * 2 * sizeof *job.order);
    if (!job.lines || !job.order) {
        free(job.lines);
        free(job.order);
        return -1;
    }
    job.starts = job.order + num_spans;
    for (int64_t i = 0; i < num_cpus; i++)
        CPU_SET((size_t)cpus[2 * i + 1], &job.lines[cpus[2 * i]].cpus);
    adam_lay_out(&job, num_spans);
    cxl_run_threads(adam_divide_threads(&job, num_threads), num_cpus == 0 ? num_threads : 0, adam_work, &job);
    free(job.lines);
    free(job.order);
    return 0;
}

#endif
