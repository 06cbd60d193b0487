// One rule over a span: from gradient, weight and moments to the target and the new moments.
//
// Contract:
//   * `advance_any` takes every task: weight and moments were decoded to buffers.
//   * `advance_chunks` takes whole chunks of what presets are made of, to the same result. It reads codes where they are
//     stored: those of few bits through tables of a chunk's levels, which hold what the rule wants of them, so that Adam's
//     roots of the second moment before are taken once for every level. And it notes what the blocks' scales need.
//   * What does not change within a span is a template's parameter there: a loop with branches costs half as much again.
#pragma once

#include "chunk_tables.h"

namespace masterless {
inline namespace MASTERLESS_ISA {

// What the rule works on. Buffers are as long as the span.
struct Tile {
    const float* g;
    const uint16_t* narrow_g;  // bf16, in its place; null: g
    float *w, *m, *v;          // in: as decoded, unless they are read where they are stored; out: target, new moments
    float* backup;             // of w, or null; of `advance_chunks`, where tiles are chunks, only that of the last chunk
    int* stopped;              // out, `advance_chunks`: the chunk whose target is not finite, if it went no further
    // Out, `advance_chunks`: the largest magnitudes of every chunk, by lanes; of weights in groups, of every group.
    vf *weight_peaks, *first_peaks;
    LogChunk* second_statistics;     // out, likewise
    Upcoming next_gradient, next_weight, next_first, next_second;
    const Scalars* scalars;
    const Table *weight_levels, *first_levels;  // of codes that tables are made for
};

// How a weight comes: from its buffer, where it lies as fp32, or as stored codes: integers of a byte, few bits that a table
// decodes, INT6, or INT4 with four hidden bits, also in groups of kGroup.
enum class From { kBuffer, kPlace, kBytes, kTable, kSix, kHidden, kGroups };

// How the moments come: from their buffers; as packed codes of few bits, through tables; or as codes of a byte.
enum class Moments { kBuffer, kPacked, kBytes };

// --- whatever it is -------------------------------------------------------------------------------------------------

template <class Rule, bool kFirst, Root kRoot>
bool advance_any(const MlTask& task, const Span& span, const Tile& tile) {
    const Tile b = tile;  // a copy, which no store below can change
    const Scalars c = *b.scalars;
    const bool ascends = task.maximize, has_l2 = task.has_l2, whole_step = task.step_size == 1.0f;
    const bool pays_back = task.pays_back && task.payback != 0.0f;
    constexpr bool kDenominator = Rule::template has_denominator<kFirst, kRoot>();
    constexpr bool kInUnits = has_root_unit<Rule, kFirst, kRoot>();
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
                const SecondMoment second{v, v * c.keep2, before, kRoot == Root::kFactored, true, &c};
                const Update u = Rule::template step<kFirst, kRoot>(g, Rule::kTakesKept ? m * c.keep1 : m, second, c);
                const vf moved = kDenominator ? quotient(u.direction, u.denominator, c) : u.direction;
                vf target = fms(w, c.decay, kInUnits ? moved * c.unit_step : whole_step ? moved : moved * c.step_size);
                vf first = u.first;
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
constexpr int kHalf = kChunk / 2, kUsual = 3 * kPair;  // the usual length of a short chunk

// Packed codes of two bits or of four, so that a byte has that of element o and, four bits higher, that of the element half a
// chunk later: as four-bit codes are stored. Two-bit ones are widened in the caller's room, once for a chunk, for a loop that
// asks which they are takes longer. What stands above a code there is another's.
inline const uint8_t* readable_codes(const uint8_t* data, int bits, int length, uint8_t* room) {
    if (bits != 2) return data;
    if (length == kChunk) {
        const Words32 codes = load<Words32>(data);
        store(room, codes);
        store(room + kHalf / 2, codes >> 2);
        return room;
    }
    const int height = length / 4;  // 24 at the most
    const Words64 codes = load_some<Words64>(data, height);
    store_side_by_side(room, codes, codes >> 2, height);
    return room;
}

// A code whose upper four bits and kFiner lower ones are stored apart; what stands above them is not theirs.
template <int kFiner>
inline vi joined(vi upper, vi lower) {
    return ((upper & 15) << kFiner) | (lower & ((1 << kFiner) - 1));
}

// Whether all of a chunk has one scale, and codes that `readable_codes` takes, or bytes.
inline bool has_chunk_scales(const MlStorage& s, const Span& span) {
    return is_scaled(s) && !s.values && span.has_even_chunks() && (s.block == kChunk || s.block == span.length);
}
inline bool is_packed(const MlStorage& s, const Span& span) {
    return has_chunk_scales(s, span) && has_table_codes(s);
}

inline bool is_in_bytes(const MlStorage& s, MlKind kind, const Span& span) {
    return has_chunk_scales(s, span) && s.kind == kind && s.bits == 8 && !s.hidden;
}

// Which of the stored codes a weight's are that the rule reads; or none.
inline From stored_codes(const MlStorage& s, const Span& span) {
    if (is_packed(s, span)) return From::kTable;
    const bool in_groups = s.kind == ML_LINEAR && s.block == kGroup && s.bits == 4 && s.hidden == 4;
    if (in_groups && !s.adjacent && !s.values && span.has_even_chunks()) return From::kGroups;
    if (!has_chunk_scales(s, span) || s.adjacent || s.kind != ML_LINEAR) return From::kBuffer;
    const int form = s.bits * 10 + s.hidden;
    return form == 80 ? From::kBytes : form == 60 ? From::kSix : form == 44 ? From::kHidden : From::kBuffer;
}

// Where the codes of a span's chunks lie, one after the other.
class CodeCursor {
  public:
    CodeCursor(const uint8_t* codes, int bits) : codes_(codes), bits_(bits) {}

    const uint8_t* codes() const { return codes_; }
    void next(int length) { codes_ += length / 8 * bits_; }

  private:
    const uint8_t* codes_;
    int bits_;
};

// The first moment is stored, and its largest magnitudes are noted unless errors are injected into it (`kInjects`). With
// kWhole no chunk is short.
template <class Rule, Root kRoot, From kWeight, bool kNarrow, Moments kMoments, bool kInjects, bool kPaysBack, bool kWhole>
bool advance_chunks(const MlTask& task, const Span& span, const Tile& tile) {
    static_assert(kRoot != Root::kExact, "exact roots are `advance_any`'s");
    constexpr bool kCoarse = kRoot == Root::kCoarse, kPacked = kMoments == Moments::kPacked;
    constexpr bool kSecondPacked = kPacked && kCoarse, kBytes = kMoments == Moments::kBytes;
    static_assert(!kBytes || (kCoarse && !Rule::kTakesKept), "only Adam's moments are read as bytes");
    constexpr bool kWholeStep = Rule::kTakesKept, kCarries = kCoarse && Rule::kTakesKept;
    constexpr bool kInUnits = has_root_unit<Rule, true, kRoot>();
    constexpr bool kWeightStored = kWeight != From::kBuffer && kWeight != From::kPlace;
    constexpr bool kHasHidden = kWeight == From::kHidden || kWeight == From::kGroups;
    constexpr bool kInTwo = kWeight == From::kSix || kHasHidden;
    constexpr int kFiner = kWeight == From::kSix ? 2 : 4;
    const Tile b = tile;  // a copy, which no store below can change
    Scalars c = *b.scalars;
    c.has_eps_square = true;  // `passage` asks for it
    const Table weight_levels = *b.weight_levels, first_levels = *b.first_levels;
    // Where a table takes two vectors, that of two-bit codes has the same numbers in both.
    constexpr bool kLongTables = sizeof(Table) > sizeof(vf);
    const bool two_bit_seconds = task.second.bits == 2, few_seconds = kSecondPacked && kLongTables && two_bit_seconds;
    const vi weight_zero = splat(task.weight.zero_code), first_zero = splat(task.first.zero_code);
    const uint8_t* hidden = kHasHidden ? packed_hidden_codes(task.weight, span) : nullptr;
    CodeCursor weight_at(packed_codes(task.weight, span), task.weight.bits),
        first_at(packed_codes(task.first, span), task.first.bits),
        second_at(packed_codes(task.second, span), task.second.bits);
    Upcoming next_gradient = b.next_gradient, next_weight = b.next_weight, next_first = b.next_first,
             next_second = b.next_second;
    vi largest_target{}, largest_second{};
    ChunkWalk walk(span);
    const int all_chunks = span.chunks();
    int start = 0, groups_start = 0;
    // A chunk that stands or falls alone is all that may have to be put back: its backup stays in the first cache.
    const bool stops = kWeight == From::kPlace && task.tile <= kChunk && (span.rows() == 1 || span.length <= kChunk);
    ChunkScales weight_scales, first_scales;
    LogTables<kCarries> seconds_of;
    LogLevels second_levels;
    for (int chunk = 0; chunk < all_chunks; ++chunk) {
        const int k = chunk % kTogether;
        if (k == 0) {
            const int count = all_chunks - chunk < kTogether ? all_chunks - chunk : kTogether;
            if (kWeight == From::kGroups)
                weight_scales.read_groups(task.weight, span, start), groups_start = start;
            else if (kWeightStored)
                weight_scales.read(task.weight, span, chunk, count);
            if (kPacked || kBytes) first_scales.read(task.first, span, chunk, count);
            if (kSecondPacked) seconds_of.make(task.second, span, chunk, count, c);
            if (kBytes) second_levels.read(task.second, span, chunk, count, c);
        }
        const int length = kWhole ? kChunk : walk.length();
        uint8_t rooms[3][kChunk];
        Table weight_table, first_table, kept_table, before_table;
        vf weight_scale;
        const uint8_t *weight_codes = nullptr, *finer_codes = nullptr, *first_codes = nullptr, *second_codes = nullptr;
        const auto readable = [&](const uint8_t* codes, int bits, int room) {
            return readable_codes(codes, bits, length, rooms[room]);
        };
        if (kWeightStored) {
            const float scale = kWeight == From::kGroups ? 1.0f : weight_scales[k];
            if (kWeight == From::kTable)
                weight_table = mapped(weight_levels, [&](vf level) { return level * scale; });
            else
                weight_scale = splat(kWeight == From::kHidden ? scale * (1.0f / (1 << kFiner)) : scale);
            weight_codes = weight_at.codes(), weight_at.next(length);
            if (kWeight == From::kTable) weight_codes = readable(weight_codes, task.weight.bits, 0);
            if (kWeight == From::kSix) finer_codes = readable(weight_codes + length / 2, 2, 0);
            if (kHasHidden) finer_codes = hidden, hidden += length / 2;
        }
        if (kPacked) {
            const float scale = first_scales[k];
            first_table = mapped(first_levels, [&](vf level) {
                return Rule::kTakesKept ? level * scale * c.keep1 : level * scale;
            });
            first_codes = readable(first_at.codes(), task.first.bits, 1);
            first_at.next(length);
        }
        if (kSecondPacked) {
            kept_table = seconds_of.kept(k, two_bit_seconds);
            if (kCarries) before_table = seconds_of.before(k, two_bit_seconds);
            second_codes = readable(second_at.codes(), task.second.bits, 2);
            second_at.next(length);
        }
        vf first_scale;
        vi second_top, second_step, second_zero;
        if (kBytes) {
            first_scale = splat(first_scales[k]);
            second_top = second_levels.top(k), second_step = second_levels.step(k), second_zero = second_levels.zero_flag(k);
            first_codes = first_at.codes(), first_at.next(length);
            second_codes = second_at.codes(), second_at.next(length);
        }
        next_first.ask_for_all();
        next_second.ask_for_all();
        if (kWeight != From::kPlace) next_weight.ask_for_all();
        float* const backup = kWeight == From::kPlace ? b.backup + (stops ? 0 : start) : nullptr;
        // Inlined once for every kind of chunk: what is known of it is then no variable.
        const auto advance = [&](int elements, bool may_be_zero, bool few_seconds) __attribute__((always_inline)) {
            const bool is_short = elements != kChunk;
            const int half = elements / 2;
            // Of groups that end within a half of a chunk there is one at a time in either half.
            const int first_group = (start - groups_start) / kGroup;
            vi weight_peak{}, group_peaks[2]{};
            vf first_peak{};
            LogChunk statistics;
            for (int i = 0; i < half; i += kLanes) {
                if (kWeight != From::kPlace) next_gradient.ask_for_lines<kNarrow ? 2 : 4>(i);
                vi weight_pair{}, finer_pair{}, first_pair{}, second_pair{};
                if (kWeight == From::kTable || kInTwo) weight_pair = load_bytes(weight_codes + i);
                if (kInTwo) finer_pair = load_bytes(finer_codes + i);
                if (kPacked) first_pair = load_bytes(first_codes + i);
                if (kSecondPacked) second_pair = load_bytes(second_codes + i);
                vf weights[2];
                SecondMoment seconds[2];
                Begun begun[2];
#pragma GCC unroll 2
                for (int j = 0; j < 2; ++j) {
                    const int o = j * half + i, e = start + o;
                    if (kWeight == From::kPlace) {  // many lines, so a few at a time
                        next_gradient.ask_for_part(i, j);
                        next_weight.ask_for_part(i, j);
                    }
                    vf& w = weights[j];
                    if (kWeight == From::kTable)
                        w = lookup(weight_table, weight_pair >> 4 * j);
                    else if (kWeight == From::kBytes)
                        w = to_float(load_bytes(weight_codes + o) - weight_zero) * weight_scale;
                    else if (kInTwo)
                        w = to_float(joined<kFiner>(weight_pair >> 4 * j, finer_pair >> 4 * j) - weight_zero) *
                            (kWeight == From::kGroups ? splat(weight_scales[first_group + (uint32_t)o / kGroup]) : weight_scale);
                    else
                        w = load<vf>(b.w + e);
                    const vf g = kNarrow ? load_bf16(b.narrow_g + e) : load<vf>(b.g + e);
                    vf m, kept{}, stored{}, before{};
                    if (kPacked)
                        m = lookup(first_table, first_pair >> 4 * j);
                    else if (kBytes)
                        m = to_float(load_bytes(first_codes + o) - first_zero) * first_scale;
                    else
                        m = Rule::kTakesKept ? load<vf>(b.m + e) * c.keep1 : load<vf>(b.m + e);
                    if (kSecondPacked) {
                        kept = lookup(kept_table, second_pair >> 4 * j, few_seconds);
                        if (kCarries) before = lookup(before_table, second_pair >> 4 * j, few_seconds);
                    } else if (kBytes) {
                        const vi code = load_bytes(second_codes + o);
                        kept = c.keep2 * (may_be_zero ? LogLevels::level(code, second_top, second_step, second_zero)
                                                      : LogLevels::level(code, second_top, second_step));
                    } else {
                        stored = load<vf>(b.v + e);
                        kept = stored * c.keep2;
                        if (kCarries) before = root_before(stored, c);
                    }
                    seconds[j] = {stored, kept, before, !kCoarse, may_be_zero, &c};
                    begun[j] = Rule::template begin<true>(g, m, seconds[j], c);
                }
#pragma GCC unroll 2
                for (int j = 0; j < 2; ++j) {
                    const int o = j * half + i, e = start + o;
                    const vf w = weights[j];
                    const Update u = Rule::template end<true>(begun[j], seconds[j], c);
                    const vf moved = kWholeStep ? u.direction : u.direction * (kInUnits ? c.unit_step : c.step_size);
                    vf target = fms(w, c.decay, moved), first = u.first;
                    if (kPaysBack) pay_back(target, first, c);
                    store(b.w + e, target);
                    if (kWeight == From::kPlace) store(backup + o, w);
                    vi& peak = kWeight != From::kGroups || is_short ? weight_peak : group_peaks[j];
                    peak = max(peak, bits(target) & 0x7FFFFFFF);  // infinity and NaN are above the numbers
                    store(b.m + e, first);
                    if (!kInjects) first_peak = larger_magnitude(first_peak, first);
                    if (kCoarse) {
                        store(b.v + e, u.second);
                        may_be_zero ? statistics.add(bits(u.second), o) : statistics.add_positive(bits(u.second), o);
                    }
                }
                if (kWeight == From::kGroups && !is_short && (i + kLanes) % kGroup == 0)  // the ends of two groups
                    for (int j = 0; j < 2; ++j) {
                        b.weight_peaks[(start + j * half + i) / kGroup] = from_bits(group_peaks[j]);
                        weight_peak = max(weight_peak, group_peaks[j]), group_peaks[j] = vi{};
                    }
            }
            if (kWeight == From::kGroups && is_short)
                for (int from = start; from < start + elements; from += kGroup) {  // of targets that were stored just now
                    vf largest{};
                    for (int i = 0; i < kGroup; i += kLanes) largest = larger_magnitude(largest, load<vf>(b.w + from + i));
                    b.weight_peaks[from / kGroup] = largest;
                }
            if (kWeight != From::kPlace && kWeight != From::kGroups) b.weight_peaks[chunk] = from_bits(weight_peak);
            largest_target = max(largest_target, weight_peak);
            if (!kInjects) b.first_peaks[chunk] = first_peak;
            if (kCoarse) {
                if (!may_be_zero) statistics.close_positive();
                if (is_short) statistics.fold_to(log_lanes(length));
                largest_second = max(largest_second, statistics.top());
                b.second_statistics[chunk] = statistics;
            }
        };
        const bool may_be_zero = kBytes ? second_levels.may_be_zero() : !kSecondPacked || seconds_of.may_be_zero();
        // Every copy of the loop takes the compiler its time: rows that end in a short chunk have one for their whole ones.
        if constexpr (!kSecondPacked && !kBytes)
            !kWhole && length < kChunk ? advance(length, true, false) : advance(kChunk, true, false);
        else if (!kWhole && length < kChunk)
            may_be_zero                        ? advance(length, true, false)
            : kLanes == 16 && length == kUsual ? advance(kUsual, false, false)
                                               : advance(length, false, false);
        else if (!kWhole || may_be_zero)
            kLongTables && kWhole && few_seconds ? advance(kChunk, true, true) : advance(kChunk, true, false);
        else
            kLongTables && few_seconds ? advance(kChunk, false, true) : advance(kChunk, false, false);
        if (kWeight == From::kPlace && stops && !all(largest_target < 0x7F800000)) {
            *b.stopped = chunk;
            break;
        }
        next_gradient.at += length * (kNarrow ? 2 : 4);
        if (kWeight == From::kPlace) next_weight.at += length * 4;
        start += length;
        if (!kWhole) walk.next();
    }
    if (kCoarse && !all(largest_second < 0x7F800000))  // rare: what overflows stops short of infinity
        for (int e = 0; e < span.n; e += kLanes) store(b.v + e, min(load<vf>(b.v + e), splat(kLargest)));
    return horizontal_max(largest_target) < 0x7F800000;
}

}  // namespace MASTERLESS_ISA
}  // namespace masterless
