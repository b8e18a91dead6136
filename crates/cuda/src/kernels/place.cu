// Which rows of which sequence and head a block takes.
//   SEQS 1 = rows and keys are those of sequences in a table: packed along the seqlen axes, or with used lengths

// Mirrored by `sequences::Entry` (repr(C)).
struct Sequence {
    int q_batch, q_row; // entry of the batch axis of q, out, lse, bias and mask, and first row there
    int k_batch, k_row; // the same for k and v
    Span span;
};

struct Place {
    int rb;                   // row block of the sequence
    int seq;                  // number of the sequence
    int h, hk;                // query head, key head
    int q_batch, q_row, k_batch, k_row;
    Span span;
};

// Blocks of one group of heads run together, so that their K and V stay in L2; inside a group the row blocks with the most keys
// go first. The last group has all heads that are left, so that there are short ones enough to even out how the launch ends.
DEV Place place_of(const Args& a, int block = blockIdx.x) {
    // Where all blocks run at once, a multiprocessor's second is short if its first is long.
    if (a.turn && block >= a.turn) block = a.row_blocks * a.pairs - 1 - (block - a.turn);
    const int per = a.row_blocks * a.pairs_per_group;
    const int g = min(block / per, a.last_group), r = block - g * per;
    const int width = g < a.last_group ? a.pairs_per_group : a.pairs - g * a.pairs_per_group;
    const int item = r / width, pair = a.pair0 + g * a.pairs_per_group + (r - item * width);
    Place p;
#if SEQS
    // The host sorted the row blocks of all sequences; pairs are heads.
    const int2 work = ((const int2*)a.work)[item];
    const Sequence& s = ((const Sequence*)a.seqs)[work.x];
    p = {work.y, work.x, pair, pair / a.group_size, s.q_batch, s.q_row, s.k_batch, s.k_row, s.span};
#else
    const int b = pair / a.heads, h = pair - b * a.heads;
    p = {MASK >= 1 ? a.row_blocks - 1 - item : item, a.seq0 + b, h, h / a.group_size, b, 0, b, 0, span_of(a)};
#endif
    return p;
}

template <class T = elem> DEV const T* rows_of(const Tensor& t, int b, int h, int row) { return (const T*)t.ptr + b * t.sb + h * t.sh + row * t.ss; }
