// The metadata of a span's blocks, from the numbers that are about to be stored: `scaling.py` and `codec.py` of the
// specification. Several blocks at a time: one block's would be a long chain of dependent operations.
#pragma once

#include "log_chunk.h"
#include "metadata.h"
#include "span.h"

namespace masterless {
inline namespace MASTERLESS_ISA {

inline bool is_scaled(const MlStorage& s) { return s.kind >= ML_LINEAR && s.kind <= ML_LOG; }

inline int64_t metadata_index(const MlStorage& s, const Span& span) {
    const int64_t in_row = s.block == kChunk ? span.col / kChunk : span.col ? span.col / s.block : 0;  // mostly no division
    return s.per_tensor ? 0 : span.row * s.blocks_per_row + in_row;
}

inline void write_metadata(const MlStorage& s, int64_t row, int64_t index, const Metadata& block) {
    if (s.kind == ML_LOG)
        write_log_block(s, index, block.log);
    else
        write_scale(s, row, index, block.scale);
}

// The blocks of a span, as many at a time as a vector has lanes: `look(e, length, k)` sees each, then `finish(first, count)`
// computes the metadata of `count` blocks from `first` on.
template <class Look, class Finish>
inline void for_blocks_together(const Span& span, int64_t block_length, Look&& look, Finish&& finish) {
    int last = 0;
    for_each_block(span, block_length, [&](int e, int length, int k) {
        look(e, length, k % kLanes);
        last = k;
        if (k % kLanes == kLanes - 1) finish(k - (kLanes - 1), kLanes);
    });
    const int left = (last + 1) % kLanes;
    if (left) finish(last + 1 - left, left);
}

// The largest magnitude of a block as its scale needs it, of the chunks' where those are known and its own.
inline float block_peak(const MlStorage& s, const Span& span, const float* x, int e, int length, const vf* of_chunks) {
    const bool has_chunks = s.block % kChunk == 0 || s.block == span.length;
    if (!of_chunks || !has_chunks || s.negative_factor != 1.0f) return block_peak(s, x + e, length);
    const int row = e / span.length, first = row * span.chunks_of_row() + (e - row * span.length) / kChunk;
    vf peak{};
    for (int i = 0; i * kChunk < length; ++i) peak = max(peak, of_chunks[first + i]);
    return horizontal_max(peak);
}

// Whether the blocks of a span are its chunks, and vectors long enough to look at kRows of them at once.
inline bool are_chunks(const MlStorage& s, const Span& span) {
    const bool is_block = s.block == kChunk || (s.block == span.length && span.length < kChunk);
    return kLanes >= kRows && is_block && span.has_even_chunks();
}

// Calls f(first, count) for the chunks of a span, up to kRows at a time.
template <class F>
inline void for_chunks_together(const Span& span, F&& f) {
    const int chunks = span.chunks();
    for (int first = 0; first < chunks; first += kRows) f(first, chunks - first < kRows ? chunks - first : kRows);
}

// What is known of the numbers that are about to be stored, chunk by chunk: null if it is not.
struct Noted {
    const vf* peaks = nullptr;
    const LogChunk* statistics = nullptr;
    bool by_groups = false;  // the peaks are those of every block of a chunk's
};

// The scales of a span's blocks: those that `choose(peaks, first, count)` makes of their largest magnitudes. They are stored,
// unless `dry`.
template <class Choose>
inline void scale_blocks(const MlStorage& s, const Span& span, const float* x, const Noted& noted, BlockArrays& blocks,
                         bool dry, Choose&& choose) {
    const int64_t index = metadata_index(s, span);
    const vf* const of_chunks = noted.by_groups ? nullptr : noted.peaks;
    const auto finish = [&](vf peaks, int first, int count) {
        const vf scales = choose(peaks, first, count), inverses = 1.0f / (scales * (1.0f / (float)(1 << s.hidden)));
        if (!dry) write_scales(s, span.row, index + first, scales, count);
        const vi fits = peaks <= scales * s.max_level;
        const vi are_plain = (scales >= 1.0f / Units::kFarthest) & (scales <= Units::kFarthest);
        store(blocks.scale + first, scales);
        store(blocks.inverse + first, inverses);
        store(blocks.known + first, (fits & Metadata::kFits) | (are_plain & Metadata::kPlain));
    };
    const auto larger = [](vf a, vf b) __attribute__((always_inline)) { return max(a, b); };
    if constexpr (kLanes >= kRows)
        if (noted.peaks && (noted.by_groups || are_chunks(s, span)) && s.negative_factor == 1.0f) {
            const int all = noted.by_groups ? span.n / (int)s.block : span.chunks();
            for (int first = 0; first < all; first += kRows) {
                const int count = all - first < kRows ? all - first : kRows;
                const auto peak = [&](int k) __attribute__((always_inline)) { return noted.peaks[first + k]; };
                finish(fold_rows(count, peak, larger), first, count);
            }
            return;
        }
    if constexpr (kLanes >= kRows)
        if (s.block < kChunk && s.block % kLanes == 0 && span.has_whole_chunks() && s.negative_factor == 1.0f) {
            const int block = (int)s.block, all = span.n / block;
            for (int first = 0; first < all; first += kRows) {
                const auto peak = [=](int k) {
                    vf largest{};
                    for (int e = (first + k) * block; e < (first + k + 1) * block; e += kLanes)
                        largest = larger_magnitude(largest, load<vf>(x + e));
                    return largest;
                };
                const int count = all - first < kRows ? all - first : kRows;
                finish(fold_rows(count, peak, larger), first, count);
            }
            return;
        }
    vf peaks{};
    for_blocks_together(
        span, s.block, [&](int e, int length, int k) { peaks[k] = block_peak(s, span, x, e, length, of_chunks); },
        [&](int first, int count) { finish(peaks, first, count); });
}

inline LogSummary log_summary(const MlStorage& s, const float* x, int length) {
    LogStatistics statistics(length);
    statistics.add(x, length);
    return statistics.summary(s.low_rank);
}

// New metadata for whole blocks; it is stored.
inline void fresh_blocks(const MlStorage& s, const Span& span, const float* x, const Noted& noted, BlockArrays& blocks) {
    if (s.kind != ML_LOG)
        return scale_blocks(s, span, x, noted, blocks, false, [&](vf peaks, int, int) {
            return scale_for(s, peaks, scale_unit(s, span.row));
        });
    const int64_t index = metadata_index(s, span);
    vi tops{}, zeros{}, lows{};
    for_blocks_together(
        span, s.block,
        [&](int e, int length, int k) {
            const LogSummary block = log_summary(s, x + e, length);
            tops[k] = block.top, zeros[k] = block.zeros, lows[k] = block.low;
        },
        [&](int first, int count) {
            const LogBlocks fresh(s, tops, lows, zeros);
            fresh.write(s, index + first, count);
            for (int k = 0; k < count; ++k) blocks.log[first + k] = fresh[k];
        });
}

// The same for a block that is longer than a span, gathered piece by piece.
class Summary {
  public:
    Summary(const MlStorage& s, int64_t block_length) : storage_(s), log_(block_length) {}

    void add(const float* x, int n) {
        if (storage_.kind == ML_LOG) return log_.add(x, n);
        const float piece = block_peak(storage_, x, n);
        absmax_ = piece > absmax_ ? piece : absmax_;
    }

    float largest() const { return absmax_; }

    Metadata fresh() const {
        // Blocks that long have no tensor scale: their unit is one.
        if (storage_.kind != ML_LOG) return scaled_block(storage_, scale_for(storage_, splat(absmax_), 1.0f)[0], absmax_);
        Metadata block;
        const LogSummary log = log_.summary(storage_.low_rank);
        block.log = LogBlocks(storage_, splat(log.top), splat(log.low), splat(log.zeros))[0];
        return block;
    }

  private:
    const MlStorage& storage_;
    float absmax_ = 0.0f;
    LogStatistics log_;
};

}  // namespace MASTERLESS_ISA
}  // namespace masterless
