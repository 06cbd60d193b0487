// A span: what is decoded, stepped and encoded at a time, and its rows, blocks and runs.
#pragma once

#include "random.h"

namespace masterless {
inline namespace MASTERLESS_ISA {

// Elements in the buffers at once: also so many when tiles are short, and of short rows. A span has costs of its own, some 700
// cycles, which weigh more than that its buffers are in the L2 cache, mostly.
constexpr int kMaxSpan = 12288;
constexpr int kMaxBlocks = kMaxSpan / 16;
constexpr int kPair = 32;  // chunks are gone through in pairs of vectors: their lengths are multiples of this

struct Span {
    int64_t row, col;
    int n;
    uint64_t chunk;  // number of its first chunk in the whole parameter, for the random bits
    int length;      // of each of its rows: n if it is only one
    int pitch;       // from one row to the next in the buffers: n, or the length in whole vectors

    bool has_whole_vectors() const { return length % kLanes == 0; }  // then rows lie side by side in the buffers, too
    bool has_whole_chunks() const { return length % kChunk == 0; }
    bool has_even_chunks() const { return length % kPair == 0; }  // the last of a row may be shorter
    int chunks_of_row() const { return (length + kChunk - 1) / kChunk; }
    int rows() const { return n == pitch ? 1 : n / pitch; }  // mostly no division
    int chunks() const { return rows() * chunks_of_row(); }
    int count() const { return rows() * length; }
};

// The even chunks of a span one after the other: where each starts, and its length.
class ChunkWalk {
  public:
    explicit ChunkWalk(const Span& span) : row_(span.length), left_(span.length) {}

    int start() const { return start_; }
    int length() const { return left_ < kChunk ? left_ : kChunk; }

    void next() {
        const int passed = length();
        start_ += passed, left_ -= passed;
        if (left_ == 0) left_ = row_;
    }

  private:
    int row_, left_, start_ = 0;
};

// Calls f(e, i) for the rows of a span: where each starts in the buffers, and in what is stored.
template <class F>
inline void for_each_row(const Span& span, F&& f) {
    for (int e = 0, i = 0; e < span.n; e += span.pitch, i += span.length) f(e, i);
}

// Zeros from the end of every row up to a whole vector.
inline void clear_rest(const Span& span, float* x) {
    if (span.has_whole_vectors()) return;
    const int whole = span.length / kLanes * kLanes;
    const vi is_number = lane_numbers() < span.length - whole;
    for_each_row(span, [&](int e, int) { store(x + e + whole, select(is_number, load<vf>(x + e + whole), vf{})); });
}

// The chunk of a piece of a span, counted from the span's first, and which of the chunk's elements it starts with.
struct Place {
    int chunk, element;
};

// Calls f(e, length, block, place) for the pieces of a span that share both a block and a chunk; blocks are counted from
// the span's first.
template <class F>
inline void for_each_run(const Span& span, int64_t block_length, F&& f) {
    const int run = block_length < kChunk ? (int)block_length : kChunk;
    int chunk = 0;
    for (int start = 0, block = 0; start < span.n; start += span.pitch) {
        const int end = start + span.length;
        int64_t left = block_length;  // of the block; counted, for a division a run would cost as much as ten vectors
        for (int e = start; e < end; e += run) {
            f(e, end - e < run ? end - e : run, block, Place{chunk + (e - start) / kChunk, (e - start) % kChunk});
            left -= run;
            if (left <= 0) ++block, left = block_length;
        }
        block += left < block_length;
        chunk += (span.length + kChunk - 1) / kChunk;
    }
}

// Calls f(e, length, block) for the blocks of a span.
template <class F>
inline void for_each_block(const Span& span, int64_t block_length, F&& f) {
    const int step = block_length < span.length ? (int)block_length : span.length;
    for (int start = 0, block = 0; start < span.n; start += span.pitch) {
        const int end = start + span.length;
        for (int e = start; e < end; e += step, ++block) f(e, end - e < step ? end - e : step, block);
    }
}

}  // namespace MASTERLESS_ISA
}  // namespace masterless
