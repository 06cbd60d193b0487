// Whole chunks of the formats that presets are made of, encoded and packed in registers: to the same bytes as `codec.h`.
//
// Contract: a chunk is whole, or the even end of a row (`Span::has_even_chunks`). It has one scale (or one block's metadata; INT4 with hidden bits: or one for every kGroup elements); codes
// are signed integers of 2, 4, 6 or 8 bits, INT4 with four hidden bits, FP8, or logarithmic of 2, 4 or 8 bits. All else is
// `codec.h`'s.
#pragma once

#include <type_traits>

#include "grid.h"
#include "metadata.h"
#include "packing.h"
#include "span.h"

namespace masterless {
inline namespace MASTERLESS_ISA {

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
inline void encode_scaled_chunk(const Grid& grid, const Metadata* blocks, float limit, const float* x,
                                int length, const ChunkDraw& random, float* moment, vf share, vf& peak, uint8_t* data,
                                uint8_t* hidden) {
    const vf high = splat(limit), low = -high;
    Divisor quotients[kScales];  // by values that no store below can change
    for (int k = 0; k < kScales; ++k)
        quotients[k] = Divisor(blocks[k].scale * (1.0f / (float)(1 << kHidden)), blocks[k].inverse);
    vi codes[kVectors];
    vf largest = peak;
#pragma GCC unroll 8
    for (int i = 0; i < length / kLanes; ++i) {
        const Divisor& quotient = quotients[i * kScales / kVectors];
        const vf number = load<vf>(x + i * kLanes);
        vf t = quotient(number);
        if (kClamps) t = min(max(t, low), high);
        const vf level = grid.template encode<kStochastic>(t, kStochastic ? random.threshold(i * kLanes) : vf{}, codes[i]);
        if (kInjects) {
            const vf sum = load<vf>(moment + i * kLanes) + (number - level * quotient.divisor) * share;
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
// sometimes count cost more than all the arithmetic.
template <class Grid, int kBits, bool kPlain>
inline void encode_log_chunk(const Grid& grid, const float* x, int length, const ChunkDraw& random, uint8_t* data) {
    vi codes[kVectors];
#pragma GCC unroll 8
    for (int i = 0; i < length / kLanes; ++i) {
        const vf number = load<vf>(x + i * kLanes), threshold = random.threshold(i * kLanes);
        if constexpr (kPlain)
            codes[i] = grid.template encode<ML_STOCHASTIC, true>(number, threshold);
        else
            codes[i] = grid.with_zeros(number, grid.template encode<ML_STOCHASTIC>(number, threshold));
    }
    pack_vectors<kBits, 0, true>(codes, length, data);
}

template <int kBits>
inline void encode_plain_chunk(const LogGrid& grid, const float* x, const ChunkDraw& random, uint8_t* data) {
    encode_log_chunk<LogGrid, kBits, true>(grid, x, kChunk, random, data);
}

template <int>
inline void encode_plain_chunk(const TwoBitLogGrid& grid, const float* x, const ChunkDraw& random, uint8_t* data) {
    constexpr int kHeight = FullPlane<2>::kHeight, kPerByte = FullPlane<2>::kPerByte;
#pragma GCC unroll 4
    for (int i = 0; i < kHeight; i += kLanes) {
        vi bytes{};
#pragma GCC unroll 4
        for (int j = 0; j < kPerByte; ++j) {
            const int e = j * kHeight + i;
            bytes = grid.add_plain(load<vf>(x + e), random.threshold(e), 1 << (2 * j), bytes);
        }
        store_bytes(data + i, bytes);
    }
}

template <class Grid, int kBits>
inline bool encode_log_chunks(const Chunks& c) {
    uint8_t* data = c.data;
    ChunkWalk walk(c.span);
    for (int chunk = 0; chunk < c.span.chunks(); ++chunk, walk.next()) {
        const Grid grid(c.blocks[chunk].log, kBits);
        const int length = walk.length();
        const float* const x = c.x + walk.start();
        const ChunkDraw random = c.draw.at(c.span.chunk + (uint64_t)chunk, walk.start());
        grid.is_plain() && length == kChunk ? encode_plain_chunk<kBits>(grid, x, random, data)
                                            : encode_log_chunk<Grid, kBits, false>(grid, x, length, random, data);
        data += packed_offset(length, kBits);
    }
    return true;
}

inline bool encode_log_chunks(const Chunks& c) {
    if (!c.draw || c.s.rounding != ML_STOCHASTIC || c.s.block != kChunk || !c.span.has_even_chunks()) return false;
    switch (c.s.bits) {
        case 2: return encode_log_chunks<TwoBitLogGrid, 2>(c);
        case 4: return encode_log_chunks<LogGrid, 4>(c);
        case 8: return encode_log_chunks<LogGrid, 8>(c);
        default: return false;
    }
}

// Encodes a span if all of it is such chunks; says whether it did.
inline bool encode_chunks(const Chunks& c) {
    if constexpr (kLanes >= 8)
        return c.s.kind == ML_LOG ? encode_log_chunks(c) : encode_scaled_chunks(c);
    else
        return false;
}

}  // namespace MASTERLESS_ISA
}  // namespace masterless
