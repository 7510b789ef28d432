/* Loops that touch memory and do next to nothing else, in plain C. Included once per ISA by membench_isa.h, so there is
 * no include guard.
 *
 * MEM_NAME(x)      appends the ISA to a function name
 * MEM_TARGET       the target attribute
 * MEM_VECTOR       bytes of one vector
 * MEM_PAST(p, x)   stores one vector past the caches
 *
 * `n` is in bytes: cache lines first, then words, then bytes.
 */
typedef uint64_t MEM_NAME(mem_vector) __attribute__((vector_size(MEM_VECTOR), aligned(1), may_alias));
typedef uint64_t MEM_NAME(mem_aligned) __attribute__((vector_size(MEM_VECTOR), may_alias));

/* Return the OR of all words, so that no load can be left out. */
MEM_TARGET static uint64_t MEM_NAME(mem_read)(const char *p /* IN */, const int64_t n)
{
    MEM_NAME(mem_vector) all = {0};
    uint64_t found = 0;
    int64_t i = 0;
    for (; i + MEM_LINE <= n; i += MEM_LINE)
        for (int k = 0; k < MEM_LINE; k += MEM_VECTOR)
            all |= *(const MEM_NAME(mem_vector) *)(p + i + k);
    for (int k = 0; k < MEM_VECTOR / 8; k++)
        found |= all[k];
    for (; i < n; i += 8)
        found |= mem_load(p + i, n - i);
    return found;
}

/* XOR every word with `pattern`: read and written in place; 0 leaves the contents as they are. */
MEM_TARGET static void MEM_NAME(mem_update)(char *p /* INOUT */, const int64_t n, const uint64_t pattern)
{
    const MEM_NAME(mem_vector) all = (MEM_NAME(mem_vector)){0} | pattern;
    int64_t i = 0;
    for (; i + MEM_LINE <= n; i += MEM_LINE)
        for (int k = 0; k < MEM_LINE; k += MEM_VECTOR)
            *(MEM_NAME(mem_vector) *)(p + i + k) ^= all;
    for (; i < n; i += 8)
        mem_store(p + i, n - i, mem_load(p + i, n - i) ^ pattern);
}

/* Store `pattern` in every word, through the caches. */
MEM_TARGET static void MEM_NAME(mem_write)(char *p /* OUT */, const int64_t n, const uint64_t pattern)
{
    const MEM_NAME(mem_vector) all = (MEM_NAME(mem_vector)){0} | pattern;
    int64_t i = 0;
    for (; i + MEM_LINE <= n; i += MEM_LINE)
        for (int k = 0; k < MEM_LINE; k += MEM_VECTOR)
            *(MEM_NAME(mem_vector) *)(p + i + k) = all;
    for (; i < n; i += 8)
        mem_store(p + i, n - i, pattern);
}

/* The same past the caches; `p` is a multiple of 64. */
MEM_TARGET static void MEM_NAME(mem_write_past)(char *p /* OUT */, const int64_t n, const uint64_t pattern)
{
    const MEM_NAME(mem_aligned) all = (MEM_NAME(mem_aligned)){0} | pattern;
    int64_t i = 0;
    for (; i + MEM_LINE <= n; i += MEM_LINE)
        for (int k = 0; k < MEM_LINE; k += MEM_VECTOR)
            MEM_PAST(p + i + k, all);
    for (; i < n; i += 8)
        mem_store(p + i, n - i, pattern);
}

/* Walk the streams of a group side by side, a block of each in turn, as a fused loop would. Returns what was read. */
MEM_TARGET static uint64_t MEM_NAME(mem_sweep)(
    const struct mem_part *parts, const int num_parts, const int log2_blocks, const uint64_t pattern)
{
    uint64_t found = 0;
    for (int64_t block = 0; block < (int64_t)1 << log2_blocks; block++)
        for (int s = 0; s < num_parts; s++) {
            const int64_t begin = mem_cut(parts[s].bytes, block, log2_blocks);
            const int64_t n = mem_cut(parts[s].bytes, block + 1, log2_blocks) - begin;
            char *p = parts[s].address + begin;
            switch (parts[s].access) {
            case MEM_READ: found |= MEM_NAME(mem_read)(p, n); break;
            case MEM_UPDATE: MEM_NAME(mem_update)(p, n, pattern); break;
            case MEM_WRITE: MEM_NAME(mem_write)(p, n, pattern); break;
            case MEM_WRITE_PAST: MEM_NAME(mem_write_past)(p, n, pattern); break;
            }
        }
    return found;
}
