// Whole chunks of the formats that presets are made of, encoded and packed in registers: to the same bytes as `codec.h`.
//
// Contract: a chunk is whole, or the even end of a row (`Span::has_even_chunks`). It has one scale (or one block's metadata;
// INT4 with hidden bits: or one for every kGroup elements); codes are signed integers of 2, 4, 6 or 8 bits,
// INT4 with four hidden bits, FP8, or logarithmic of 2, 4 or 8 bits. All else is `codec.h`'s.
#pragma once

#include <type_traits>

#include "blocks.h"
#include "grid.h"
#include "packing.h"
#include "upcoming.h"

namespace masterless {
inline namespace MASTERLESS_ISA {

// Where a span's codes are stored.
inline uint8_t* packed_codes(const MlStorage& s, const Span& span) {
    return s.codes + span.row * s.row_bytes + packed_offset(span.col, s.bits);
}

inline uint8_t* packed_hidden_codes(const MlStorage& s, const Span& span) {
    return s.hidden_codes + span.row * s.hidden_row_bytes + packed_offset(span.col, s.hidden);
}

constexpr int kVectors = kChunk / kLanes;  // of a chunk
constexpr int kGroup = 32;                 // elements that share a scale in the INT4 of served checkpoints

// How often loops over a chunk's vectors are unrolled: wholly, so that the compiler knows every vector's place among the random
// numbers. With a sanitizer's checks in it that code takes minutes to compile.
#if defined(__SANITIZE_ADDRESS__)
constexpr int kUnrolled = 1;
#else
constexpr int kUnrolled = kVectors;
#endif

// Calls f with the length of an even chunk as a constant: its loops are then unrolled, and its codes are packed by vectors.
template <bool kWhole = false, class F>
__attribute__((always_inline)) inline void with_length(int length, F&& f) {
    if (kWhole || length == kChunk) return f(std::integral_constant<int, kChunk>{});
    if (length == 3 * kPair) return f(std::integral_constant<int, 3 * kPair>{});
    if (length == 2 * kPair) return f(std::integral_constant<int, 2 * kPair>{});
    f(std::integral_constant<int, kPair>{});
}

// Bits `kLow` to `kLow + P` of a chunk's codes as a plane (`packing.h`). Above those a code may have others, unless kTop:
// then there is nothing that a byte would hold. With kBelow there is anything below them.
template <int P, int kLow, bool kTop, bool kBelow, int kLength>
__attribute__((always_inline)) inline void pack_vectors(const vi* codes, uint8_t* data) {
    constexpr int kHeight = plane_bytes<P>(kLength);
#pragma GCC unroll kUnrolled
    for (int i = 0; i < kHeight; i += kLanes) {
        vi bytes{};
#pragma GCC unroll 4
        for (int j = 0; j < 8 / P; ++j) {
            const int from = i + j * kHeight, rest = from % kLanes;
            vi code = codes[from / kLanes];
            if (kHeight % kLanes && rest)
                code = from_lane(code, from / kLanes + 1 < kLength / kLanes ? codes[from / kLanes + 1] : code, rest);
            const int right = kLow - j * P;
            const vi placed = right > 0 ? code >> right : right < 0 ? code << -right : code;
            const bool is_alone = kTop && (j == 0 || !kBelow);
            bytes |= is_alone ? placed : placed & (((1 << P) - 1) << (j * P));
        }
        if (kHeight - i >= kLanes)
            store_bytes(data + i, bytes);
        else
            store_some_bytes(data + i, bytes, kHeight - i);
    }
}

// The codes of a chunk of so many bits, which stand from bit kAt on, and of which kHidden are stored apart.
template <int kBits, int kHidden, int kAt, int kLength>
inline void pack_chunk_codes(const vi* codes, uint8_t* data, uint8_t* hidden) {
    if constexpr (kHidden == 4) {
        static_assert(kBits == 8, "INT4 with four hidden bits");
        pack_vectors<4, kAt + 4, kAt == 0, true, kLength>(codes, data);
        pack_vectors<4, kAt, false, kAt != 0, kLength>(codes, hidden);
    } else if constexpr (kBits == 6) {
        pack_vectors<4, kAt + 2, kAt == 0, true, kLength>(codes, data);
        pack_vectors<2, kAt, false, kAt != 0, kLength>(codes, data + kLength / 2);
    } else {
        pack_vectors<kBits, kAt, true, kAt != 0, kLength>(codes, data);
    }
}

// One scaled chunk, of one block or (kGroups) of groups. What rounding loses is injected into the moment, of which `peak` then
// has the largest magnitudes. kPlain: all scales have plain units. kFits: no number lies beyond the outermost levels.
template <class Grid, int kBits, int kHidden, bool kGroups, bool kStochastic, bool kInjects, bool kPlain, bool kFits, int kLength>
inline void encode_scaled_chunk(const Grid& grid, const Blocks& blocks, int first, const float* numbers, const ChunkDraw& random,
                                float* moment, vf share, vf& peak, uint8_t* data, uint8_t* hidden) {
    vi codes[kVectors];
    vf largest = peak;
    constexpr int vectors = (kGroups ? kGroup : kLength) / kLanes;  // of a block
#pragma GCC unroll 4
    for (int k = 0; k < (kGroups ? kLength / kGroup : 1); ++k) {
        const vf scale = splat(blocks.scale[first + k] * (1.0f / (float)(1 << kHidden)));
        vf power, inverse = splat(blocks.inverse[first + k]);
        if (!kPlain) {
            const Units units(blocks.scale[first + k], kHidden);
            power = splat(units.power), inverse = splat(units.inverse);
        }
#pragma GCC unroll kUnrolled
        for (int i = k * vectors; i < (k + 1) * vectors; ++i) {
            const vf number = held(load<vf>(numbers + i * kLanes));
            const vf x = kPlain ? number : number * power;
            const vf level = grid.template encode<kStochastic, kFits>(x, inverse, random, i * kLanes, codes[i]);
            if (kInjects) {
                // The product is exact: a level has at most 8 bits, and a scale 14.
                const vf lost = fnma(level, scale, number);
                const vf sum = fma(lost, share, load<vf>(moment + i * kLanes));
                store(moment + i * kLanes, sum);
                largest = larger_magnitude(largest, sum);
            }
        }
    }
    pack_chunk_codes<kBits, kHidden, Grid::template code_at<kStochastic>(), kLength>(codes, data, hidden);
    peak = largest;
}

struct Chunks {  // of a span
    const MlStorage& s;
    const Span& span;
    const float* x;
    const Draw& draw;
    Blocks blocks;
    const Injection& inject;
    uint8_t *data, *hidden;
    NextSpan next;

    int chunks_per_block() const { return s.block <= kChunk ? 1 : span.chunks_of_row(); }
};

// Those of a span. What is known of all its blocks is no question of each: held scales leave a weight of one block or another
// beyond its levels, and whose nobody foretells.
template <class Grid, int kBits, int kHidden, bool kGroups, bool kStochastic, bool kInjects, bool kPlain, bool kFits, bool kWhole>
inline void encode_scaled_chunks(const Grid& shared_grid, const Chunks& c) {
    // Copies, which no store below can change.
    const Grid grid = shared_grid;
    const int per_block = c.chunks_per_block(), chunks = c.span.chunks();
    const float* x = c.x;
    const uint64_t* const words = c.draw.words;
    uint8_t *data = c.data, *hidden = c.hidden;
    const Blocks blocks = c.blocks;
    float* moment = c.inject.moment;
    const vf share = c.inject.share;
    vf unused{}, *peaks = kInjects ? c.inject.peaks : nullptr;
    NextSpan next = c.next;
    ChunkWalk walk(c.span);
    for (int chunk = 0, block = 0, left = per_block; chunk < chunks; ++chunk, walk.next()) {
        const int length = kWhole ? kChunk : walk.length();
        const ChunkDraw random(kStochastic ? words[chunk] : 0, 0);
        if (!kInjects) next.ask_for_more();
        vf& peak = peaks ? peaks[chunk] : unused;
        with_length<kWhole>(length, [&](auto known) __attribute__((always_inline)) {
            encode_scaled_chunk<Grid, kBits, kHidden, kGroups, kStochastic, kInjects, kPlain, kFits, known()>(
                grid, blocks, block, x, random, moment, share, peak, data, hidden);
        });
        x += length, data += packed_offset(length, kBits - kHidden);
        if (kInjects) moment += length;
        if (kHidden) hidden += packed_offset(length, kHidden);
        if (--left == 0) block += kGroups ? length / kGroup : 1, left = per_block;
    }
}

template <class Grid, int kBits, int kHidden, bool kGroups, bool kStochastic, bool kInjects>
inline void encode_scaled_chunks(const Grid& grid, const Chunks& c) {
    int32_t known = Metadata::kFits | Metadata::kPlain;
    const int count = kGroups ? c.span.n / kGroup : (c.span.chunks() + c.chunks_per_block() - 1) / c.chunks_per_block();
    for (int k = 0; k < count; ++k) known &= c.blocks.known[k];
    const auto encode = [&](auto is_plain, auto fits, auto is_whole) {
        encode_scaled_chunks<Grid, kBits, kHidden, kGroups, kStochastic, kInjects, is_plain(), fits(), is_whole()>(grid, c);
    };
    const std::true_type yes;
    const std::false_type no;
    if (!(known & Metadata::kPlain))
        encode(no, no, no);
    else if (known & Metadata::kFits)
        c.span.has_whole_chunks() ? encode(yes, yes, yes) : encode(yes, yes, no);
    else
        c.span.has_whole_chunks() ? encode(yes, no, yes) : encode(yes, no, no);
}

template <class Grid, int kBits, int kHidden, bool kGroups = false>
inline bool encode_scaled_chunks(const Grid& grid, const Chunks& c) {
    if (c.draw)
        c.inject ? encode_scaled_chunks<Grid, kBits, kHidden, kGroups, true, true>(grid, c)
                 : encode_scaled_chunks<Grid, kBits, kHidden, kGroups, true, false>(grid, c);
    else
        c.inject ? encode_scaled_chunks<Grid, kBits, kHidden, kGroups, false, true>(grid, c)
                 : encode_scaled_chunks<Grid, kBits, kHidden, kGroups, false, false>(grid, c);
    return true;
}

inline bool encode_scaled_chunks(const Chunks& c) {
    const MlStorage& s = c.s;
    if (!s.is_signed || s.adjacent || s.values || !c.span.has_even_chunks()) return false;
    const bool in_groups = s.block == kGroup && s.bits == 4 && s.hidden == 4;
    if (s.block != kChunk && s.block != c.span.length && !in_groups) return false;
    if (s.kind == ML_MINIFLOAT && s.exponent_bits == 4 && s.mantissa_bits == 3)
        return encode_scaled_chunks<MinifloatGrid<4, 3, true>, 8, 0>(MinifloatGrid<4, 3, true>(s), c);
    if (s.kind != ML_LINEAR || !NarrowGrid::suits(s)) return false;
    const NarrowGrid grid(s);
    switch (s.bits * 10 + s.hidden) {
        case 20: return encode_scaled_chunks<NarrowGrid, 2, 0>(grid, c);
        case 40: return encode_scaled_chunks<NarrowGrid, 4, 0>(grid, c);
        case 60: return encode_scaled_chunks<NarrowGrid, 6, 0>(grid, c);
        case 80: return encode_scaled_chunks<NarrowGrid, 8, 0>(grid, c);
        case 44:
            return in_groups ? encode_scaled_chunks<NarrowGrid, 8, 4, true>(grid, c)
                             : encode_scaled_chunks<NarrowGrid, 8, 4>(grid, c);
        default: return false;
    }
}

// Logarithmic codes of one chunk, rounded stochastically as a rule uses them. Plain chunks go apart: masks that only
// sometimes count cost more than all the arithmetic. (Not inlined: what this one needs would be computed for plain ones, too.)
template <int kBits>
__attribute__((noinline)) void encode_log_chunk(const LogBlock& block, const float* x, int length, const ChunkDraw& random,
                                                uint8_t* data) {
    const LogGrid grid(block, kBits);
    vi codes[kVectors];
    for (int i = 0; i < length / kLanes; ++i)
        codes[i] = grid.encode<ML_STOCHASTIC>(load<vf>(x + i * kLanes), random, i * kLanes);
    with_length(length, [&](auto known) { pack_vectors<kBits, 0, true, false, known()>(codes, data); });
}

template <int kBits, int kLength>
__attribute__((always_inline)) inline void encode_plain_chunk(const PlainLogGrid& grid, const float* x, const ChunkDraw& random,
                                                              uint8_t* data) {
    vi codes[kLength / kLanes];
#pragma GCC unroll kUnrolled
    for (int i = 0; i < kLength / kLanes; ++i) codes[i] = grid.encode(load<vf>(x + i * kLanes), random, i * kLanes);
    pack_vectors<kBits, kFraction, true, true, kLength>(codes, data);
}

// Whether a span is such chunks of a log code, of which metadata is made several at a time. `statistics` are the chunks', or
// null: then all are whole.
inline bool are_log_chunks(const MlStorage& s, const Span& span, const LogChunk* statistics, const Draw& draw) {
    return s.kind == ML_LOG && draw && s.rounding == ML_STOCHASTIC && are_chunks(s, span) && s.bits != 3 &&
           (statistics || span.has_whole_chunks());
}

// Their metadata, which is stored: that of kRows chunks in each of `blocks`.
inline void fresh_log_chunks(const MlStorage& s, const Span& span, const float* x, const LogChunk* statistics,
                             LogBlocks* blocks) {
    const int64_t index = metadata_index(s, span);
    for_chunks_together(span, [&](int first, int count) {
        const LogSummaries chunks = statistics ? LogSummaries(statistics + first, count, s.low_rank)
                                               : look_at_chunks(x + first * kChunk, count, s.low_rank);
        const LogBlocks fresh(s, chunks.top, chunks.low, chunks.zeros);
        fresh.write(s, index + first, count);
        blocks[first / kRows] = fresh;
    });
}

template <int kBits, bool kWhole>
inline void encode_log_chunks(const MlStorage& s, const Span& span, const float* x, const Draw& draw,
                              const LogBlocks* all_blocks, NextSpan next) {
    uint8_t* data = packed_codes(s, span);
    ChunkWalk walk(span);
    for_chunks_together(span, [&](int first, int count) {
        const LogBlocks blocks = all_blocks[first / kRows];
        const vi are_plain = blocks.are_plain(kBits);
        for (int k = 0; k < count; ++k) {
            const int length = kWhole ? kChunk : walk.length();
            const ChunkDraw random = draw.at(first + k);
            next.ask_for_more();
            if (!are_plain[k])
                encode_log_chunk<kBits>(blocks[k], x, length, random, data);
            else
                with_length<kWhole>(length, [&](auto known) __attribute__((always_inline)) {
                    encode_plain_chunk<kBits, known()>(PlainLogGrid(blocks, k, kBits), x, random, data);
                });
            x += length, data += packed_offset(length, kBits);
            if (!kWhole) walk.next();
        }
    });
}

// Their codes.
inline void encode_log_chunks(const MlStorage& s, const Span& span, const float* x, const Draw& draw, const LogBlocks* blocks,
                              NextSpan next = {}) {
    const auto encode = [&](auto bits) {
        span.has_whole_chunks() ? encode_log_chunks<bits(), true>(s, span, x, draw, blocks, next)
                                : encode_log_chunks<bits(), false>(s, span, x, draw, blocks, next);
    };
    switch (s.bits) {
        case 2: return encode(std::integral_constant<int, 2>{});
        case 4: return encode(std::integral_constant<int, 4>{});
        default: return encode(std::integral_constant<int, 8>{});
    }
}

// The same of scaled formats, whose metadata is known.
inline bool encode_chunks(const Chunks& c) {
    if constexpr (kLanes >= 8)
        return c.s.kind != ML_LOG && encode_scaled_chunks(c);
    else
        return false;
}

}  // namespace MASTERLESS_ISA
}  // namespace masterless
