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

// The scales of chunks, which are blocks, or share those of their rows, or have groups of their own.
class ChunkScales {
  public:
    float operator[](int k) const { return scales_[k]; }

    // Of `count` chunks of a span from number `first` on.
    void read(const MlStorage& s, const Span& span, int first, int count) {
        if (s.block == kChunk) return read_blocks(s, span, first, count, 1.0f);
        const int64_t index = metadata_index(s, span);
        const int per_row = span.chunks_of_row();
        for (int k = 0; k < count; ++k) scales_[k] = read_scale(s, span.row, index + (first + k) / per_row);
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

// The levels of second moments whose codes are bytes.
class LogLevels {
  public:
    // Of `count` chunks of a span from number `first` on.
    void read(const MlStorage& s, const Span& span, int first, int count, const Scalars& c) {
        const int64_t index = metadata_index(s, span);
        const int per_block = s.block == kChunk ? 1 : span.chunks_of_row();
        may_be_zero_ = false;
        for (int k = 0; k < count; ++k) {
            const LogBlock block = read_log_block(s, index + (first + k) / per_block);
            tops_[k] = block.top, steps_[k] = block.step << kStepUnit, zero_flags_[k] = -(int32_t)block.zero_flag;
            const int64_t lowest = block.top - (int64_t)steps_[k] * kLast;
            may_be_zero_ |= block.zero_flag || lowest <= 0 || !(from_bits((uint32_t)lowest) * c.keep2[0] > 0.0f);
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
        const int64_t index = metadata_index(s, span);
        if (s.block == kChunk) return make(s, s.top + index + first, s.step + index + first, count, c);
        int16_t tops[kTogether], steps[kTogether];
        for (int k = 0; k < count; ++k) {
            const int64_t block = index + (first + k) / span.chunks_of_row();
            tops[k] = s.top[block], steps[k] = s.step[block];
        }
        make(s, tops, steps, count, c);
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
