// What the rule wants of the codes of chunks: their scales, and tables of what codes of few bits stand for.
//
// Contract: made for up to kTogether chunks at a time, from vectors of their metadata. One chunk's would be a chain of
// dependent operations, and much else beside few numbers.
#pragma once

#include "codec.h"
#include "rules.h"

namespace masterless {
inline namespace MASTERLESS_ISA {

constexpr int kTogether = kRows;

// The levels of a scaled format of few bits, in units of the scale; otherwise nothing.
inline Table code_levels(const MlStorage& s) {
    Table levels{};
    if (is_scaled(s) && s.kind != ML_LOG && s.bits <= kTableBits)
        with_grid(s, [&](const auto& grid) {
            levels = table_of([&](vi index) { return grid.level(index & ((1 << s.bits) - 1)); });
        });
    return levels;
}

// Whether the metadata of a span's chunks lies side by side, because they are blocks, or rows that are blocks.
inline bool has_chunk_metadata(const MlStorage& s, const Span& span) { return s.block == kChunk || span.length <= kChunk; }

// Calls f(k, block) for `count` chunks of a span from number `first` on whose blocks are its rows, counted from its first.
template <class F>
inline void for_each_row_block(const Span& span, int first, int count, F&& f) {
    const int per_row = span.chunks_of_row();
    int row = span.rows() == 1 ? 0 : first / per_row, left = (row + 1) * per_row - first;
    for (int k = 0; k < count; ++k) {
        f(k, row);
        if (--left == 0) ++row, left = per_row;
    }
}

// The scales of chunks, which are blocks, or share those of their rows, or have groups of their own.
class ChunkScales {
  public:
    float operator[](int k) const { return scales_[k]; }

    // Of `count` chunks of a span from number `first` on.
    void read(const MlStorage& s, const Span& span, int first, int count) {
        if (has_chunk_metadata(s, span)) return read_blocks(s, span, first, count, 1.0f);
        const int64_t index = metadata_index(s, span);
        for_each_row_block(span, first, count, [&](int k, int row) { scales_[k] = read_scale(s, span.row, index + row); });
    }

    // Of all groups of kTogether chunks, the first of which starts at element `start` of the span: those of the finest levels.
    void read_groups(const MlStorage& s, const Span& span, int start) {
        const int left = (span.n - start) / kGroup, all = kTogether * kGroups;
        read_blocks(s, span, start / kGroup, left < all ? left : all, 1.0f / (float)(1 << s.hidden));
    }

  private:
    static constexpr int kGroups = kChunk / kGroup;

    void read_blocks(const MlStorage& s, const Span& span, int first, int count, float unit) {
        const int64_t index = metadata_index(s, span) + first;
        for (int k = 0; k < count; k += kLanes)
            store(scales_ + k, read_scales(s, span.row, index + k, count - k < kLanes ? count - k : kLanes) * unit);
    }

    alignas(64) float scales_[kTogether * kGroups];
};

// The stored metadata of logarithmic blocks, one for each of some chunks.
class StoredLogBlocks {
  public:
    const int16_t *tops, *steps;

    // Of `count` chunks of a span from number `first` on.
    StoredLogBlocks(const MlStorage& s, const Span& span, int first, int count) {
        const int64_t index = metadata_index(s, span);
        tops = s.top + index + first, steps = s.step + index + first;
        if (has_chunk_metadata(s, span)) return;
        tops = of_chunks_[0], steps = of_chunks_[1];
        for_each_row_block(span, first, count, [&](int k, int row) {
            of_chunks_[0][k] = s.top[index + row], of_chunks_[1][k] = s.step[index + row];
        });
    }
    StoredLogBlocks(const StoredLogBlocks&) = delete;

  private:
    int16_t of_chunks_[2][kTogether];
};

// The levels of second moments whose codes are bytes.
class LogLevels {
  public:
    // Of `count` chunks of a span from number `first` on.
    void read(const MlStorage& s, const Span& span, int first, int count, const Scalars& c) {
        const StoredLogBlocks stored(s, span, first, count);
        may_be_zero_ = false;
        for (int k = 0; k < count; k += kLanes) {
            const int some = count - k < kLanes ? count - k : kLanes;
            const vi top = load_some_halves((const uint16_t*)stored.tops + k, some) << 16;
            const vi raw = load_some_halves((const uint16_t*)stored.steps + k, some), step = raw & 0x7FFF;
            const vi zero_flag = -(raw >> 15);
            const vf lowest = level(splat(kLast), top, step << kStepUnit);  // modulo 2^32, hence the other look
            const vi is_positive = ((top >> kStepUnit) > kLast * step) & (lowest * c.keep2 > 0.0f);
            may_be_zero_ |= !all((is_positive & (zero_flag == 0)) | (lane_numbers() >= some));
            store(tops_ + k, top);
            store(steps_ + k, step << kStepUnit);
            store(zero_flags_ + k, zero_flag);
        }
    }

    // Whether some second moment is zero, before or after.
    bool may_be_zero() const { return may_be_zero_; }

    vi top(int k) const { return splat(tops_[k]); }
    vi step(int k) const { return splat(steps_[k]); }
    vi zero_flag(int k) const { return splat(zero_flags_[k]); }

    static vf level(vi code, vi top, vi step) { return from_bits((vi)((vu)top - (vu)code * (vu)step)); }

    // The same where some may be zero.
    static vf level(vi code, vi top, vi step, vi zero_flag) {
        return from_bits(select(zero_flag & (code == kLast), vi{}, max(bits(level(code, top, step)), -(top > 0))));
    }

  private:
    static constexpr int kLast = 255;
    bool may_be_zero_ = true;
    int32_t tops_[kTogether], steps_[kTogether], zero_flags_[kTogether];
};

// Levels of the second moment as they stay, and (kCarries) what Adam divided by when it was at them.
template <bool kCarries>
class LogTables {
  public:
    // Of `count` chunks of a span from number `first` on.
    void make(const MlStorage& s, const Span& span, int first, int count, const Scalars& c) {
        const StoredLogBlocks stored(s, span, first, count);
        make(s, stored.tops, stored.steps, count, c);
    }

    // Whether some second moment is zero, before or after.
    bool may_be_zero() const { return may_be_zero_; }

    Table kept(int k, bool two_bits) const { return table(kept_, k, two_bits); }
    Table before(int k, bool two_bits) const { return table(before_, k, two_bits); }

  private:
    static constexpr int kTableLength = 16;

    // Of `count` blocks, whose metadata is as stored.
    void make(const MlStorage& s, const int16_t* tops, const int16_t* steps, int count, const Scalars& c) {
        vi lowest = splat(0x7FFFFFFF);
        const vi last = splat((1 << s.bits) - 1);
        const auto add = [&](vi top, vi step, vi code, int at) {
            const vi bottom = (vi)((vu)(top << 16) - (vu)code * (vu)((step & 0x7FFF) << kStepUnit));
            const vi level = select((step < 0) & (code == last), vi{}, max(bottom, -(top > 0)));
            const vf kept = from_bits(level) * c.keep2;
            store(kept_ + at, kept);
            if (kCarries) store(before_ + at, root_before(from_bits(level), c));
            lowest = min(lowest, bits(kept));
        };
        if (s.bits == 2)  // four levels a block, of several blocks in a vector
            for (int k = 0; k < count; k += kLanes / 4)
                add(spread_quarters(tops + k, count - k), spread_quarters(steps + k, count - k), lane_numbers() & 3, 4 * k);
        else
            for (int k = 0; k < count; ++k)
                for (int i = 0; i < kTableLength; i += kLanes)
                    add(splat((int32_t)tops[k]), splat((int32_t)steps[k]), lane_numbers() + i, kTableLength * k + i);
        may_be_zero_ = !all(lowest > 0);
    }

    static Table table(const float* levels, int k, bool two_bits) {
        return two_bits ? repeated_quarter(levels + 4 * k) : load_table(levels + kTableLength * k);
    }

    bool may_be_zero_ = true;
    alignas(64) float kept_[kTogether * kTableLength], before_[kTogether * kTableLength];
};

}  // namespace MASTERLESS_ISA
}  // namespace masterless
