// One rule over a span: from gradient, weight and moments to the target and the new moments.
//
// Contract:
//   * `advance_any` takes every task: weight and moments were decoded to buffers.
//   * `advance_chunks` takes whole chunks of what presets are made of, to the same result. It reads codes where they are
//     stored: those of few bits through tables of a chunk's levels, which hold what the rule wants of them, so that Adam's
//     roots of the second moment before are taken once for every level. And it notes what the blocks' scales need.
//   * What does not change within a span is a template's parameter there: a loop with branches costs half as much again.
#pragma once

#include "codec.h"
#include "rules.h"

namespace masterless {
inline namespace MASTERLESS_ISA {

// What the next span will read, asked for a little at a time while this one is computed. Into the second cache: the first
// is full of this span.
struct Upcoming {
    static constexpr int kCacheLine = 64;
    const char* at;
    int bytes;  // to ask for at a time

    __attribute__((always_inline)) static void ask_for(const char* line) { __builtin_prefetch(line, 1, 2); }

    void ask_for_more() {
        ask_for(at);
        at += bytes;
    }

    // The lines of 2 kLanes numbers from number 2i on, of so many bytes each. Inlined: GCC takes a function that only asks
    // for one without any effect.
    template <int kBytes>
    __attribute__((always_inline)) void ask_for_lines(int i) const {
        for (int line = 0; line < 2 * kLanes * kBytes; line += kCacheLine) ask_for(at + 2 * i * kBytes + line);
    }

    void ask_for_all() {
        for (int line = 0; line < bytes; line += kCacheLine) ask_for(at + line);
        at += bytes;
    }
};

// What the rule works on. Buffers are as long as the span.
struct Tile {
    const float* g;
    const uint16_t* narrow_g;  // bf16, in its place; null: g
    float *w, *m, *v;          // in: as decoded, unless they are read where they are stored; out: target, new moments
    float* backup;             // of w, or null
    vf *weight_peaks, *first_peaks;  // out, `advance_chunks`: the largest magnitudes of every chunk, by lanes
    LogChunk* second_statistics;     // out, likewise
    Upcoming next_gradient, next_weight, next_first, next_second;
    const Scalars* scalars;
    const Table *weight_levels, *first_levels;  // of codes that tables are made for
};

// How a weight comes: from its buffer, where it lies as fp32, or as stored codes: integers of a byte, few bits that a table
// decodes, INT6, or INT4 with four hidden bits.
enum class From { kBuffer, kPlace, kBytes, kTable, kSix, kHidden };

// --- whatever it is -------------------------------------------------------------------------------------------------

template <class Rule, bool kFirst, Root kRoot>
bool advance_any(const MlTask& task, const Span& span, const Tile& tile) {
    const Tile b = tile;  // a copy, which no store below can change
    const Scalars c = *b.scalars;
    const bool ascends = task.maximize, has_l2 = task.has_l2, whole_step = task.step_size == 1.0f;
    const bool pays_back = task.pays_back && task.payback != 0.0f;
    constexpr bool kDenominator = Rule::template has_denominator<kFirst, kRoot>();
    Upcoming next_gradient = b.next_gradient, next_weight = b.next_weight, next_first = b.next_first,
             next_second = b.next_second;
    vf finite{};  // zero times a number is zero, zero times anything else is NaN and stays so
    const vf zero{}, largest = splat(kLargest);
    for (int row = 0; row < span.n; row += span.pitch)
        for (int start = row, end = row + span.length; start < end; start += kChunk) {
            next_first.ask_for_all();
            next_second.ask_for_all();
            for (int e = start; e < (end - start < kChunk ? end : start + kChunk); e += kLanes) {
                next_gradient.ask_for_more();
                next_weight.ask_for_more();
                const vf w = load<vf>(b.w + e);
                const vf as_stored = b.narrow_g ? load_bf16(b.narrow_g + e) : load<vf>(b.g + e);
                const vf g = descent_gradient(as_stored, w, ascends, has_l2, c.l2);
                const vf m = kFirst ? load<vf>(b.m + e) : vf{}, v = Rule::kSecond ? load<vf>(b.v + e) : vf{};
                const vf before = kFirst && Rule::kTakesKept && kRoot == Root::kCoarse ? root_before(v, c) : vf{};
                const SecondMoment second{v, v * c.keep2, before, kRoot == Root::kFactored, true, c};
                const Update u = Rule::template step<kFirst, kRoot>(g, Rule::kTakesKept ? m * c.keep1 : m, second, c);
                const vf moved = kDenominator ? quotient(u.direction, u.denominator, c) : u.direction;
                vf target = w * c.decay - (whole_step ? moved : moved * c.step_size), first = u.first;
                if (kFirst && pays_back) pay_back(target, first, c);
                store(b.w + e, target);
                if (b.backup) store(b.backup + e, w);
                finite = multiply_add(target, zero, finite);
                if (kFirst) store(b.m + e, first);
                if (Rule::kSecond) store(b.v + e, min(u.second, largest));
            }
        }
    return all(finite == 0.0f);
}

// --- whole chunks, in the formats of presets ------------------------------------------------------------------------

// A chunk is gone through in pairs of vectors, half a chunk apart: packed codes of two or four bits that are half a chunk
// apart stand in the same byte, four bits apart, so that two vectors of them are read at once.
constexpr int kHalf = kChunk / 2;

// The codes of a packed chunk: of elements o and, four bits higher, those half a chunk later. What stands above a code is
// another's.
class PackedReader {
  public:
    explicit PackedReader(int bits) : mask_(16 * bits - 1), is_two_bits_(bits == 2) {}

    vi pair(const uint8_t* data, int o) const {
        const vi bytes = load_bytes(data + (o & mask_));
        return is_two_bits_ && o >= kHalf / 2 ? bytes >> 2 : bytes;
    }

  private:
    int mask_;
    bool is_two_bits_;
};

// Codes as `PackedReader` reads them: two-bit codes of a short chunk become four-bit ones, in the caller's room, for
// vectors of them need not start where bytes do.
inline const uint8_t* readable_codes(const uint8_t* data, int bits, int length, uint8_t* room) {
    if (bits != 2 || length == kChunk) return data;
    const int height = length / 4;  // 24 at the most
    const Words64 codes = load_some<Words64>(data, height);
    store(room, codes & 0x33333333u);
    store(room + height, (codes >> 2) & 0x33333333u);
    return room;
}

// A code whose upper four bits and kFiner lower ones are stored apart; what stands above them is not theirs.
template <int kFiner>
inline vi joined(vi upper, vi lower) {
    return ((upper & 15) << kFiner) | (lower & ((1 << kFiner) - 1));
}

// Whether all of a chunk has one scale, and codes that `PackedReader` reads, or bytes.
inline bool has_chunk_scales(const MlStorage& s, const Span& span) {
    return is_scaled(s) && !s.values && span.has_even_chunks() && (s.block == kChunk || s.block == span.length);
}
inline bool is_packed(const MlStorage& s, const Span& span) {
    return has_chunk_scales(s, span) && has_table_codes(s);
}

// Which of the stored codes a weight's are that the rule reads; or none.
inline From stored_codes(const MlStorage& s, const Span& span) {
    if (is_packed(s, span)) return From::kTable;
    if (!has_chunk_scales(s, span) || s.adjacent || s.kind != ML_LINEAR) return From::kBuffer;
    const int form = s.bits * 10 + s.hidden;
    return form == 80 ? From::kBytes : form == 60 ? From::kSix : form == 44 ? From::kHidden : From::kBuffer;
}

// Goes through the chunks of a span: the number of each one's scale (or metadata), and its codes.
class ChunkCursor {
  public:
    ChunkCursor(const MlStorage& s, const Span& span)
        : block_(metadata_index(s, span)), codes_(packed_codes(s, span)), bits_(s.bits),
          per_block_(s.block == kChunk ? 1 : span.chunks_of_row()), left_(per_block_) {}

    int64_t block() const { return block_; }
    const uint8_t* codes() const { return codes_; }

    void next(int length) {
        codes_ += packed_offset(length, bits_);
        if (--left_ == 0) ++block_, left_ = per_block_;
    }

  private:
    int64_t block_;
    const uint8_t* codes_;
    int bits_, per_block_, left_;
};

// The levels of a scaled format of few bits, in units of the scale; otherwise nothing.
inline Table code_levels(const MlStorage& s) {
    Table levels{};
    if (is_scaled(s) && s.kind != ML_LOG && s.bits <= kTableBits)
        with_grid(s, [&](const auto& grid) {
            levels = table_of([&](vi index) { return grid.level(index & ((1 << s.bits) - 1)); });
        });
    return levels;
}

// What the rule wants of a chunk's codes. Tables of several chunks are made at a time: each is a chain of dependent
// operations, and several of them overlap.
struct ChunkTables {
    Table weight, first, kept, before;  // of the weight: what stays of it
    vf weight_scale;                    // if it has no table
    const uint8_t *weight_codes, *finer_codes, *first_codes, *second_codes;  // finer: the lower bits of a weight's
    int start, half;   // in the span; half its length
    bool may_be_zero;  // some second moment, before or after
};

// The first moment is stored, and its largest magnitudes are noted unless errors are injected into it (`kInjects`).
template <class Rule, Root kRoot, From kWeight, bool kNarrow, bool kPacked, bool kInjects, bool kPaysBack>
bool advance_chunks(const MlTask& task, const Span& span, const Tile& tile) {
    static_assert(kRoot != Root::kExact, "exact roots are `advance_any`'s");
    constexpr bool kCoarse = kRoot == Root::kCoarse, kSecondPacked = kPacked && kCoarse;
    constexpr bool kWholeStep = Rule::kTakesKept, kCarries = kCoarse && Rule::kTakesKept;
    constexpr bool kWeightStored = kWeight != From::kBuffer && kWeight != From::kPlace;
    constexpr bool kInTwo = kWeight == From::kSix || kWeight == From::kHidden;
    constexpr int kFiner = kWeight == From::kSix ? 2 : 4;
    constexpr int kTogether = 8;
    const Tile b = tile;  // a copy, which no store below can change
    Scalars c = *b.scalars;
    c.has_eps_square = true;  // `passage` asks for it
    const vf largest = splat(kLargest);
    const Table weight_levels = *b.weight_levels, first_levels = *b.first_levels;
    // Where a table takes two vectors, that of two-bit codes has the same numbers in both.
    constexpr bool kLongTables = sizeof(Table) > sizeof(vf);
    const bool few_seconds = kSecondPacked && kLongTables && task.second.bits == 2;
    const vi weight_zero = splat(task.weight.zero_code);
    const uint8_t* const hidden = kWeight == From::kHidden ? packed_hidden_codes(task.weight, span) : nullptr;
    const PackedReader of_weights(kInTwo ? 4 : task.weight.bits), of_finer(kFiner), of_firsts(task.first.bits),
        of_seconds(task.second.bits), of_short_chunks(4);
    ChunkCursor weight_at(task.weight, span), first_at(task.first, span), second_at(task.second, span);
    Upcoming next_gradient = b.next_gradient, next_weight = b.next_weight, next_first = b.next_first,
             next_second = b.next_second;
    vi largest_target{};
    ChunkWalk walk(span);
    const int all_chunks = span.chunks();
    for (int group = 0; group < all_chunks; group += kTogether) {
        const int chunks = all_chunks - group < kTogether ? all_chunks - group : kTogether;
        ChunkTables tables[kTogether];
        uint8_t rooms[kTogether][3][kChunk];
        for (int k = 0; k < chunks; ++k, walk.next()) {
            ChunkTables& t = tables[k];
            const int length = walk.length();
            t.start = walk.start(), t.half = length / 2;
            if (kWeightStored) {
                const float scale = read_scale(task.weight, span.row, weight_at.block());
                if (kWeight == From::kTable)
                    t.weight = mapped(weight_levels, [&](vf level) { return level * scale * c.decay; });
                else
                    t.weight_scale = splat(kWeight == From::kHidden ? scale * (1.0f / (1 << kFiner)) : scale);
                t.weight_codes = weight_at.codes(), weight_at.next(length);
                if (kWeight == From::kTable)
                    t.weight_codes = readable_codes(t.weight_codes, task.weight.bits, length, rooms[k][0]);
                if (kWeight == From::kSix) t.finer_codes = readable_codes(t.weight_codes + t.half, 2, length, rooms[k][0]);
                if (kWeight == From::kHidden) t.finer_codes = hidden + t.start / 2;
            }
            if (kPacked) {
                const float scale = read_scale(task.first, span.row, first_at.block());
                t.first = mapped(first_levels, [&](vf level) {
                    return Rule::kTakesKept ? level * scale * c.keep1 : level * scale;
                });
                t.first_codes = readable_codes(first_at.codes(), task.first.bits, length, rooms[k][1]);
                first_at.next(length);
            }
            t.may_be_zero = true;
            if (kSecondPacked) {
                const LogBlock block = read_log_block(task.second, second_at.block());
                const Table levels = log_levels(block, task.second.bits);
                t.may_be_zero = false;
                t.kept = mapped(levels, [&](vf level) {
                    const vf kept = level * c.keep2;
                    t.may_be_zero |= !all(kept > 0.0f);
                    return kept;
                });
                if (kCarries) t.before = mapped(levels, [&](vf level) { return root_before(level, c); });
                t.second_codes = readable_codes(second_at.codes(), task.second.bits, length, rooms[k][2]);
                second_at.next(length);
            }
        }
        for (int k = 0; k < chunks; ++k) {
            const ChunkTables& t = tables[k];
            const int chunk = group + k, start = t.start;
            const Table weight_table = t.weight, first_table = t.first, kept_table = t.kept, before_table = t.before;
            const vf weight_scale = t.weight_scale;
            next_first.ask_for_all();
            next_second.ask_for_all();
            if (kWeight != From::kPlace) next_weight.ask_for_all();
            // Inlined once for every kind of chunk: what is known of it is then no variable.
            const auto advance = [&](bool is_short, bool may_be_zero, bool few_seconds) __attribute__((always_inline)) {
                const int half = is_short ? t.half : kHalf;
                const auto reader = [&](const PackedReader& whole) { return is_short ? of_short_chunks : whole; };
                const PackedReader weights = reader(of_weights), finer = reader(of_finer), firsts = reader(of_firsts),
                                   seconds = reader(of_seconds);
                vi weight_peak{};
                vf first_peak{};
                LogChunk statistics;
                for (int i = 0; i < half; i += kLanes) {
                    next_gradient.ask_for_lines<kNarrow ? 2 : 4>(i);
                    if (kWeight == From::kPlace) next_weight.ask_for_lines<4>(i);
                    vi weight_codes{}, finer_codes{}, first_codes{}, second_codes{};
                    if (kWeight == From::kTable || kInTwo) weight_codes = weights.pair(t.weight_codes, i);
                    if (kInTwo) finer_codes = finer.pair(t.finer_codes, i);
                    if (kPacked) first_codes = firsts.pair(t.first_codes, i);
                    if (kSecondPacked) second_codes = seconds.pair(t.second_codes, i);
#pragma GCC unroll 2
                    for (int j = 0; j < 2; ++j) {
                        const int o = j * half + i, e = start + o;
                        vf w;
                        if (kWeight == From::kTable)
                            w = lookup(weight_table, weight_codes >> 4 * j);
                        else if (kWeight == From::kBytes)
                            w = to_float(load_bytes(t.weight_codes + o) - weight_zero) * weight_scale;
                        else if (kInTwo)
                            w = to_float(joined<kFiner>(weight_codes >> 4 * j, finer_codes >> 4 * j) - weight_zero) *
                                weight_scale;
                        else
                            w = load<vf>(b.w + e);
                        const vf g = kNarrow ? load_bf16(b.narrow_g + e) : load<vf>(b.g + e);
                        vf m, kept{}, stored{}, before{};
                        if (kPacked)
                            m = lookup(first_table, first_codes >> 4 * j);
                        else
                            m = Rule::kTakesKept ? load<vf>(b.m + e) * c.keep1 : load<vf>(b.m + e);
                        if (kSecondPacked) {
                            kept = lookup(kept_table, second_codes >> 4 * j, few_seconds);
                            if (kCarries) before = lookup(before_table, second_codes >> 4 * j, few_seconds);
                        } else {
                            stored = load<vf>(b.v + e);
                            kept = stored * c.keep2;
                            if (kCarries) before = root_before(stored, c);
                        }
                        const SecondMoment second{stored, kept, before, !kCoarse, may_be_zero, c};
                        const Update u = Rule::template step<true, kRoot>(g, m, second, c);
                        const vf stays = kWeight == From::kTable ? w : w * c.decay;
                        vf target = stays - (kWholeStep ? u.direction : u.direction * c.step_size), first = u.first;
                        if (kPaysBack) pay_back(target, first, c);
                        store(b.w + e, target);
                        if (kWeight == From::kPlace) store(b.backup + e, w);
                        weight_peak = max(weight_peak, bits(target) & 0x7FFFFFFF);  // infinity and NaN are above the numbers
                        store(b.m + e, first);
                        if (!kInjects) first_peak = larger_magnitude(first_peak, first);
                        if (kCoarse) {
                            store(b.v + e, u.second);
                            may_be_zero ? statistics.add(bits(u.second), o) : statistics.add_positive(bits(u.second), o);
                        }
                    }
                }
                if (kWeight != From::kPlace) b.weight_peaks[chunk] = from_bits(weight_peak);
                largest_target = max(largest_target, weight_peak);
                if (!kInjects) b.first_peaks[chunk] = first_peak;
                if (kCoarse) {
                    if (!may_be_zero) statistics.close_positive();
                    if (!all(statistics.top() < 0x7F800000))  // rare: what overflows stops short of infinity
                        for (int e = start; e < start + 2 * half; e += kLanes)
                            store(b.v + e, min(load<vf>(b.v + e), largest));
                    b.second_statistics[chunk] = statistics;
                }
            };
            if (t.half < kHalf)
                advance(true, true, false);
            else if constexpr (!kSecondPacked)  // every copy of the loop takes the compiler its time
                advance(false, true, false);
            else if constexpr (!kLongTables)
                t.may_be_zero ? advance(false, true, false) : advance(false, false, false);
            else if (few_seconds)
                t.may_be_zero ? advance(false, true, true) : advance(false, false, true);
            else
                t.may_be_zero ? advance(false, true, false) : advance(false, false, false);
            next_gradient.at += 2 * t.half * (kNarrow ? 2 : 4);
            if (kWeight == From::kPlace) next_weight.at += 2 * t.half * 4;
        }
    }
    return horizontal_max(largest_target) < 0x7F800000;
}

}  // namespace MASTERLESS_ISA
}  // namespace masterless
