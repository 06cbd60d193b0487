// Whole chunks of the formats that presets are made of, encoded and packed in registers: to the same bytes as `codec.h`.
//
// Contract: a chunk is whole, or the even end of a row (`Span::has_even_chunks`). It has one scale (or one block's metadata;
// INT4 with hidden bits in whole chunks: or one for every kGroup elements); codes are signed integers of 2, 4, 6 or 8 bits,
// INT4 with four hidden bits, FP8, or logarithmic of 2, 4 or 8 bits. All else is `codec.h`'s.
#pragma once

#include <type_traits>

#include "blocks.h"
#include "grid.h"
#include "packing.h"

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

// Bits `kLow` to `kLow + P` of a chunk's codes as a plane (`packing.h`). Above those a code may have others, unless kTop:
// then there is nothing that a byte would hold.
template <int P, int kLow, bool kTop>
inline void pack_vectors(const vi* codes, int length, uint8_t* data) {
    if (P < 4 && length % (8 / P * kLanes)) {  // vectors do not start where bytes do
        alignas(64) uint8_t unpacked[kChunk];
        for (int e = 0; e < length; e += kLanes) store_bytes(unpacked + e, codes[e / kLanes]);
        return pack_plane<P>(unpacked, length, kLow, data);
    }
    const int height = length / kLanes * P / 8;  // in vectors
    for (int i = 0; i < height; ++i) {
        vi bytes{};
        for (int j = 0; j < 8 / P; ++j) {
            const vi code = kLow ? codes[i + j * height] >> kLow : codes[i + j * height];
            bytes |= (kTop ? code : code & ((1 << P) - 1)) << (j * P);
        }
        store_bytes(data + i * kLanes, bytes);
    }
}

// The codes of a chunk of so many bits, of which kHidden are stored apart.
template <int kBits, int kHidden>
inline void pack_chunk_codes(const vi* codes, int length, uint8_t* data, uint8_t* hidden) {
    if constexpr (kHidden == 4) {
        static_assert(kBits == 8, "INT4 with four hidden bits");
        pack_vectors<4, 4, true>(codes, length, data);
        pack_vectors<4, 0, false>(codes, length, hidden);
    } else if constexpr (kBits == 6) {
        pack_vectors<4, 2, true>(codes, length, data);
        pack_vectors<2, 0, false>(codes, length, data + length / 2);
    } else {
        pack_vectors<kBits, 0, true>(codes, length, data);
    }
}

// One scaled chunk of kScales blocks. What rounding loses is injected into the moment, of which `peak` then has the largest
// magnitudes.
template <class Grid, int kBits, int kHidden, int kScales, bool kStochastic, bool kInjects, bool kClamps>
inline void encode_scaled_chunk(const Grid& shared_grid, const Metadata* blocks, float limit, const float* x, int length,
                                const ChunkDraw& random, float* moment, vf share, vf& peak, uint8_t* data,
                                uint8_t* hidden) {
    const vf high = splat(limit), low = -high;
    const Grid grid = shared_grid;  // a copy, which no store below can change; so are these:
    Divisor quotients[kScales];
    for (int k = 0; k < kScales; ++k)
        quotients[k] = Divisor(blocks[k].scale * (1.0f / (float)(1 << kHidden)), blocks[k].inverse);
    vi codes[kVectors];
    vf largest = peak;
#pragma GCC unroll 8
    for (int i = 0; i < length / kLanes; ++i) {
        const Divisor& quotient = quotients[i * kScales / kVectors];
        const vf number = held(load<vf>(x + i * kLanes));
        vf t = quotient(number);
        if (kClamps) t = min(max(t, low), high);
        const vf level = grid.template encode<kStochastic>(t, kStochastic ? random.threshold(i * kLanes) : vf{}, codes[i]);
        if (kInjects) {
            // The product is exact: a level has at most 8 bits, and the scale, which suits, as many.
            const vf lost = multiply_add(-level, quotient.divisor, number);
            const vf sum = load<vf>(moment + i * kLanes) + lost * share;
            store(moment + i * kLanes, sum);
            largest = larger_magnitude(largest, sum);
        }
    }
    pack_chunk_codes<kBits, kHidden>(codes, length, data, hidden);
    peak = largest;
}

struct Chunks {  // of a span
    const MlStorage& s;
    const Span& span;
    const float* x;
    const Draw& draw;
    const Metadata* blocks;
    const Injection& inject;
    uint8_t *data, *hidden;
};

template <class Grid, int kBits, int kHidden, int kScales, bool kStochastic, bool kInjects>
inline void encode_scaled_chunks(const Grid& grid, const Chunks& c) {
    const int per_block = c.s.block <= kChunk ? 1 : c.span.chunks_of_row();
    uint8_t *data = c.data, *hidden = c.hidden;
    const Metadata* blocks = c.blocks;
    ChunkWalk walk(c.span);
    for (int chunk = 0, left = per_block; chunk < c.span.chunks(); ++chunk, walk.next()) {
        const int e = walk.start(), length = walk.length();
        const ChunkDraw random = kStochastic ? c.draw.at(c.span.chunk + (uint64_t)chunk, e) : ChunkDraw{};
        vf unused{};
        vf& peak = kInjects && c.inject.peaks ? c.inject.peaks[chunk] : unused;
        float* const moment = kInjects ? c.inject.moment + e : nullptr;
        const auto encode = [&](auto clamps, int elements) __attribute__((always_inline)) {
            encode_scaled_chunk<Grid, kBits, kHidden, kScales, kStochastic, kInjects, decltype(clamps)::value>(
                grid, blocks, c.s.limit, c.x + e, elements, random, moment, c.inject.share, peak, data, hidden);
        };
        bool fits = length == kChunk;
        for (int k = 0; k < kScales; ++k) fits &= blocks[k].fits;
        fits ? encode(std::false_type{}, kChunk) : encode(std::true_type{}, length);
        data += packed_offset(length, kBits - kHidden), hidden += packed_offset(length, kHidden);
        if (--left == 0) blocks += kScales, left = per_block;
    }
}

template <class Grid, int kBits, int kHidden, int kScales = 1>
inline bool encode_scaled_chunks(const Grid& grid, const Chunks& c) {
    if (c.draw)
        c.inject ? encode_scaled_chunks<Grid, kBits, kHidden, kScales, true, true>(grid, c)
                 : encode_scaled_chunks<Grid, kBits, kHidden, kScales, true, false>(grid, c);
    else
        c.inject ? encode_scaled_chunks<Grid, kBits, kHidden, kScales, false, true>(grid, c)
                 : encode_scaled_chunks<Grid, kBits, kHidden, kScales, false, false>(grid, c);
    return true;
}

inline bool encode_scaled_chunks(const Chunks& c) {
    const MlStorage& s = c.s;
    if (!s.is_signed || s.adjacent || s.values || !c.span.has_even_chunks()) return false;
    const bool in_groups = s.block == kGroup && s.bits == 4 && s.hidden == 4 && c.span.has_whole_chunks();
    if (s.block != kChunk && s.block != c.span.length && !in_groups) return false;
    const int64_t blocks = s.block == kChunk ? c.span.chunks() : c.span.n / s.block;
    for (int64_t k = 0; k < blocks; ++k)
        if (!Divisor::suits(c.blocks[k].scale)) return false;
    if (s.kind == ML_MINIFLOAT && s.exponent_bits == 4 && s.mantissa_bits == 3)
        return encode_scaled_chunks<MinifloatGrid<4, 3, true>, 8, 0>(MinifloatGrid<4, 3, true>(s), c);
    if (s.kind != ML_LINEAR || !LinearGrid<true>::suits(s)) return false;
    const LinearGrid<true> grid(s);
    switch (s.bits * 10 + s.hidden) {
        case 20: return encode_scaled_chunks<LinearGrid<true>, 2, 0>(grid, c);
        case 40: return encode_scaled_chunks<LinearGrid<true>, 4, 0>(grid, c);
        case 60: return encode_scaled_chunks<LinearGrid<true>, 6, 0>(grid, c);
        case 80: return encode_scaled_chunks<LinearGrid<true>, 8, 0>(grid, c);
        case 44:
            return in_groups ? encode_scaled_chunks<LinearGrid<true>, 8, 4, kChunk / kGroup>(grid, c)
                             : encode_scaled_chunks<LinearGrid<true>, 8, 4>(grid, c);
        default: return false;
    }
}

// Logarithmic codes of one chunk, rounded stochastically as a rule uses them. Plain chunks go apart: masks that only
// sometimes count cost more than all the arithmetic. (Not inlined: what this one needs would be computed for plain ones, too.)
template <class Grid, int kBits>
__attribute__((noinline)) void encode_log_chunk(const LogBlock& block, const float* x, int length, const ChunkDraw& random,
                                                uint8_t* data) {
    const Grid grid(block, kBits);
    vi codes[kVectors];
    for (int i = 0; i < length / kLanes; ++i) {
        const vf number = load<vf>(x + i * kLanes);
        codes[i] = grid.with_zeros(number, grid.template encode<ML_STOCHASTIC>(number, random.threshold(i * kLanes)));
    }
    pack_vectors<kBits, 0, true>(codes, length, data);
}

template <int kBits>
inline void encode_plain_chunk(const PlainLogGrid& grid, const float* x, const ChunkDraw& random, uint8_t* data) {
    vi codes[kVectors];
#pragma GCC unroll 8
    for (int i = 0; i < kVectors; ++i) codes[i] = grid.encode(held(load<vf>(x + i * kLanes)), random.threshold(i * kLanes));
    pack_vectors<kBits, 0, true>(codes, kChunk, data);
}

template <int>
inline void encode_plain_chunk(const PlainTwoBitLogGrid& grid, const float* x, const ChunkDraw& random, uint8_t* data) {
    constexpr int kHeight = FullPlane<2>::kHeight, kPerByte = FullPlane<2>::kPerByte;
#pragma GCC unroll 4
    for (int i = 0; i < kHeight; i += kLanes) {
        ByteSums bytes;
#pragma GCC unroll 4
        for (int j = 0; j < kPerByte; ++j) {
            const int e = j * kHeight + i;
            grid.add(load<vf>(x + e), random.threshold(e), 1 << (2 * j), bytes);
        }
        bytes.store(data + i);
    }
}

// Metadata and codes of a span's chunks, up to kRows at a time. `statistics` are the chunks', or null: then all are whole.
template <class Grid, class PlainGrid, int kBits>
inline bool store_log_chunks(const MlStorage& s, const Span& span, const float* x, const LogChunk* statistics,
                             const Draw& draw) {
    uint8_t* data = packed_codes(s, span);
    const int64_t index = metadata_index(s, span);
    ChunkWalk walk(span);
    for_chunks_together(span, [&](int first, int count) {
        LogSummaries chunks = statistics ? LogSummaries(statistics + first, count, s.low_rank)
                                         : look_at_chunks(x + first * kChunk, count, s.low_rank);
        ChunkWalk ahead = walk;
        for (int k = 0; k < count && !span.has_whole_chunks(); ++k, ahead.next())  // a short block has fewer lanes
            if (ahead.length() < kChunk) chunks.set(k, log_summary(s, x + ahead.start(), ahead.length()));
        const LogBlocks fresh(s, chunks.top, chunks.low, chunks.zeros);
        const vi are_plain = fresh.are_plain(kBits);
        fresh.write(s, index + first, count);
        for (int k = 0; k < count; ++k, walk.next()) {
            const int e = walk.start(), length = walk.length();
            const ChunkDraw random = draw.at(span.chunk + (uint64_t)(first + k), e);
            are_plain[k] && length == kChunk ? encode_plain_chunk<kBits>(PlainGrid(fresh, k, kBits), x + e, random, data)
                                             : encode_log_chunk<Grid, kBits>(fresh[k], x + e, length, random, data);
            data += packed_offset(length, kBits);
        }
    });
    return true;
}

// Stores a span if all of it is such chunks; says whether it did.
inline bool store_log_chunks(const MlStorage& s, const Span& span, const float* x, const LogChunk* statistics,
                             const Draw& draw) {
    const bool are_known = statistics || span.has_whole_chunks();
    if constexpr (kLanes >= kRows)
        if (s.kind == ML_LOG && draw && s.rounding == ML_STOCHASTIC && are_chunks(s, span) && are_known) switch (s.bits) {
                case 2: return store_log_chunks<TwoBitLogGrid, PlainTwoBitLogGrid, 2>(s, span, x, statistics, draw);
                case 4: return store_log_chunks<LogGrid, PlainLogGrid, 4>(s, span, x, statistics, draw);
                case 8: return store_log_chunks<LogGrid, PlainLogGrid, 8>(s, span, x, statistics, draw);
                default: break;
            }
    return false;
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
