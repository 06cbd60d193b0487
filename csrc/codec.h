// Encode and decode a span of one stored tensor, whatever its format: `codec.py` of the specification.
//
// Contract:
//   * A span is a run of a row that starts at a chunk, and at a block unless one block covers all of it; or some whole
//     short rows, whose codes, metadata and chunks follow each other as they are stored.
//   * Float buffers hold a row's numbers, then zeros up to a whole vector.
//   * Metadata is explicit: decoding reads what is stored; encoding is given the metadata to use, so that the
//     scale of a block can be known before (held scales) or from elsewhere (rows longer than a span).
#pragma once

#include <cstddef>

#include "chunks.h"

namespace masterless {
inline namespace MASTERLESS_ISA {

struct Codes {  // one byte a code; the finer bits of a weight apart
    uint8_t* visible;
    uint8_t* hidden;
    bool is_packed = false;  // `visible` is as stored
};

// --- plain floats -------------------------------------------------------------------------------------------

// fp32 to bf16 on the bits; a carry past the largest finite number is stopped there.
inline vi round_bf16(vf x, const ChunkDraw* draw, int i) {
    const vu b = (vu)bits(x), magnitude = b & 0x7FFFFFFFu;
    const vu add = draw ? draw->dither(i) : 0x7FFFu + ((magnitude >> 16) & 1u);
    const vu rounded = min((magnitude + add) & 0xFFFF0000u, splat(kBf16Max));
    return (vi)(rounded | (b & 0x80000000u));
}

inline void copy_floats(float* out, const float* in, int n) {
    if (out != in) std::memcpy(out, in, (size_t)n * sizeof(float));
}

inline void widen_floats(float* out, const uint16_t* in, int n) {
    int e = 0;
    for (; e + kLanes <= n; e += kLanes) store(out + e, load_bf16(in + e));
    for (; e < n; ++e) out[e] = from_bits((uint32_t)in[e] << 16);
}

// The rows of a span from where they are stored into a buffer.
inline void copy_rows_in(float* out, const float* in, const Span& span) {
    for_each_row(span, [&](int e, int i) { copy_floats(out + e, in + i, span.length); });
}

inline void widen_rows(float* out, const uint16_t* in, const Span& span) {
    for_each_row(span, [&](int e, int i) { widen_floats(out + e, in + i, span.length); });
}

inline void encode_bf16(uint16_t* out, const float* x, int n, const ChunkDraw* draw, const Injection& inject) {
    for (int e = 0; e < n; e += kLanes) {
        const vf number = load<vf>(x + e);
        const vi rounded = round_bf16(number, draw, e);
        const vh upper = upper_half(rounded);
        std::memcpy(out + e, &upper, (size_t)(n - e < kLanes ? n - e : kLanes) * sizeof(uint16_t));
        if (inject) inject(e, number - from_bits(rounded));
    }
}

// --- scaled formats -----------------------------------------------------------------------------------------

// Codes that a table can decode without unpacking: its lookup takes no notice of what stands above a code.
inline bool has_table_codes(const MlStorage& s) {
    return (s.bits == 2 || s.bits == 4) && s.bits <= kTableBits && !s.hidden && !s.adjacent;
}
inline bool decodes_packed(const MlStorage& s, const Span& span) {
    return has_table_codes(s) && s.block >= kChunk && span.has_whole_chunks();
}

template <int kBits>
inline void decode_packed_chunk(const uint8_t* data, const Table& table, float* out) {
    constexpr int kHeight = FullPlane<kBits>::kHeight;
    for (int i = 0; i < kHeight; i += kLanes) {
        const vi bytes = load_bytes(data + i);
        for (int j = 0; j < FullPlane<kBits>::kPerByte; ++j)
            store(out + j * kHeight + i, lookup(table, bytes >> (j * kBits)));
    }
}

// Stores value(code) for the codes of a run, which starts at element e; by a table if there are few different ones.
template <class Value>
inline void decode_run(const Codes& codes, int e, int length, int bits, float* out, Value&& value) {
    if (bits <= kTableBits) {
        const Table table = table_of([&](vi index) { return value(index & ((1 << bits) - 1)); });
        if (codes.is_packed) {
            const uint8_t* const data = codes.visible + packed_offset(e, bits);
            return bits == 2 ? decode_packed_chunk<2>(data, table, out + e) : decode_packed_chunk<4>(data, table, out + e);
        }
        for (int i = e; i < e + length; i += kLanes) store(out + i, lookup(table, load_bytes(codes.visible + i)));
    } else {
        for (int i = e; i < e + length; i += kLanes) store(out + i, value(load_bytes(codes.visible + i)));
    }
}

template <class Grid>
inline void decode_scaled(const Grid& grid, const MlStorage& s, const Span& span, const Codes& codes, float* out) {
    const int64_t first = metadata_index(s, span);
    const int hidden = s.hidden, bits = s.bits;
    for_each_run(span, s.block, [&](int e, int length, int block, Place) {
        const float scale = read_scale(s, span.row, first + block) * (1.0f / (float)(1 << hidden));
        if (!hidden)
            return decode_run(codes, e, length, bits, out, [&](vi code) { return grid.level(code) * scale; });
        for (int i = e; i < e + length; i += kLanes) {
            const vi code = (load_bytes(codes.visible + i) << hidden) + load_bytes(codes.hidden + i);
            store(out + i, grid.level(code) * scale);
        }
    });
}

template <bool kStochastic, class Grid>
inline void encode_scaled(const Grid& grid, const MlStorage& s, const Span& span, const float* x, const Draw& draw,
                          const Blocks& blocks, const Codes& codes, const Injection& inject) {
    uint8_t *const visible = codes.visible, *const finer = codes.hidden;
    const int hidden = s.hidden, zero_code = s.zero_code;
    const bool is_signed = s.is_signed;
    for_each_run(span, s.block, [&](int e, int length, int block, Place place) {
        const ChunkDraw random = kStochastic ? draw.at(place.chunk, place.element) : ChunkDraw{};
        vf peak{};
        const float scale = blocks.scale[block], unit = scale * (1.0f / (float)(1 << hidden));
        const Units units(scale, hidden);
        for (int i = 0; i < length; i += kLanes) {
            vi code;
            const vf level = grid.template encode<kStochastic, false>(load<vf>(x + e + i) * units.power, splat(units.inverse),
                                                                      random, i, code);
            code = (code >> Grid::template code_at<kStochastic>()) & ((1 << (s.bits + hidden)) - 1);
            if (!is_signed) code -= (load<vf>(x + e + i) > 0.0f) & (code == zero_code);
            if (hidden) {
                store_bytes(finer + e + i, code & ((1 << hidden) - 1));
                code >>= hidden;
            }
            store_bytes(visible + e + i, code);
            if (inject) peak = larger_magnitude(peak, inject(e + i, load<vf>(x + e + i) - level * unit));
        }
        if (inject.peaks) inject.peaks[place.chunk] = max(inject.peaks[place.chunk], peak);
    });
}

template <int kRounding>
inline void encode_log(const MlStorage& s, const Span& span, const float* x, const Draw& draw, const Blocks& blocks,
                       const Codes& codes) {
    uint8_t* const visible = codes.visible;
    for_each_run(span, s.block, [&](int e, int length, int block, Place place) {
        const LogGrid grid(blocks.log[block], s.bits);
        const bool draws = kRounding != ML_NEAREST;
        const ChunkDraw random = draws ? draw.at(place.chunk, place.element) : ChunkDraw{};
        for (int i = 0; i < length; i += kLanes)
            store_bytes(visible + e + i, grid.encode<kRounding>(load<vf>(x + e + i), random, i));
    });
}

inline void decode_log(const MlStorage& s, const Span& span, const Codes& codes, float* out) {
    const int64_t first = metadata_index(s, span);
    for_each_run(span, s.block, [&](int e, int length, int block, Place) {
        const LogGrid grid(read_log_block(s, first + block), s.bits);
        decode_run(codes, e, length, s.bits, out, [&](vi code) { return grid.level(code); });
    });
}

// --- the two entry points -----------------------------------------------------------------------------------

// The visible part of a weight with hidden bits or a master copy, as a storage of its own.
inline MlStorage visible_part(MlStorage s) {
    if (s.hidden) s.zero_code = 1 << (s.bits - 1);
    s.hidden = 0;
    if (is_scaled(s)) s.values = nullptr;
    return s;
}

// The codes of a span's rows; `adjacent` ones of four bits have their neighbour in the same byte.
inline void unpack_rows(const uint8_t* data, int64_t row_bytes, const Span& span, int bits, bool adjacent,
                        uint8_t* codes) {
    for (int e = 0; e < span.n; e += span.pitch, data += row_bytes)
        adjacent && bits == 4 ? unpack_pairs(data, span.length, codes + e) : unpack(data, span.length, bits, codes + e);
}

inline void pack_rows(const uint8_t* codes, int64_t row_bytes, const Span& span, int bits, bool adjacent, uint8_t* data) {
    for (int e = 0; e < span.n; e += span.pitch, data += row_bytes)
        adjacent && bits == 4 ? pack_pairs(codes + e, span.length, data) : pack(codes + e, span.length, bits, data);
}

// Codes of eight bits are one byte each as they are stored, and need no buffer but for loose ends of a row.
inline bool is_unpacked(const MlStorage& s, const Span& span) { return s.bits == 8 && span.has_whole_vectors(); }

inline void decode(const MlStorage& s, int64_t cols, const Span& span, Codes codes, float* out) {
    const int64_t at = span.row * cols + span.col;
    if (s.kind == ML_BFLOAT16) {
        widen_rows(out, (const uint16_t*)s.values + at, span);
    } else if (s.values) {  // fp32, or a master copy
        copy_rows_in(out, (const float*)s.values + at, span);
    } else {
        codes.is_packed = decodes_packed(s, span);
        if (codes.is_packed || is_unpacked(s, span))
            codes.visible = packed_codes(s, span);
        else
            unpack_rows(packed_codes(s, span), s.row_bytes, span, s.bits, s.adjacent, codes.visible);
        if (s.hidden) unpack_rows(packed_hidden_codes(s, span), s.hidden_row_bytes, span, s.hidden, false, codes.hidden);
        if (s.kind == ML_LOG)
            decode_log(s, span, codes, out);
        else
            with_grid(s, [&](const auto& grid) { decode_scaled(grid, s, span, codes, out); });
    }
    clear_rest(span, out);
}

// Stores a span; `blocks` is its metadata (scaled formats), `draw` its random numbers (none: to nearest).
// What rounding loses is injected; with `dry` nothing is stored. `next` is asked for meanwhile, where there are chunks.
inline void encode(const MlStorage& s, int64_t cols, const Span& span, const float* x, const Draw& draw,
                   const Blocks& blocks, Codes codes, Injection inject = {}, bool dry = false, NextSpan next = {}) {
    const int64_t at = span.row * cols + span.col;
    if (s.kind == ML_BFLOAT16) {
        uint16_t* out = dry ? (uint16_t*)codes.visible : (uint16_t*)s.values + at;
        return for_each_run(span, kChunk, [&](int e, int length, int, Place place) {
            const ChunkDraw random = draw ? draw.at(place.chunk) : ChunkDraw{};
            const int i = e / span.pitch * span.length + e % span.pitch;  // where it is stored
            encode_bf16(out + i, x + e, length, draw ? &random : nullptr, inject.from(e));
        });
    }
    if (s.values) {  // fp32, or a master copy
        if (!dry) for_each_row(span, [&](int e, int i) { copy_floats((float*)s.values + at + i, x + e, span.length); });
        if (inject)  // nothing is lost, and a negative zero becomes a positive one as it does everywhere
            for (int e = 0; e < span.n; e += kLanes) inject(e, vf{});
        if (s.kind == ML_FLOAT32) return;
        inject = {};
    }
    if (!dry && encode_chunks({s, span, x, draw, blocks, inject, packed_codes(s, span), packed_hidden_codes(s, span), next}))
        return;
    const bool in_place = is_unpacked(s, span) && !dry;
    if (in_place) codes.visible = packed_codes(s, span);
    if (s.kind == ML_LOG) {
        if (!draw)
            encode_log<ML_NEAREST>(s, span, x, draw, blocks, codes);
        else if (s.rounding == ML_STOCHASTIC_LOG)
            encode_log<ML_STOCHASTIC_LOG>(s, span, x, draw, blocks, codes);
        else if (s.rounding == ML_STOCHASTIC_VALUE)
            encode_log<ML_STOCHASTIC_VALUE>(s, span, x, draw, blocks, codes);
        else
            encode_log<ML_STOCHASTIC>(s, span, x, draw, blocks, codes);
    } else {
        with_grid(s, [&](const auto& grid) {
            draw ? encode_scaled<true>(grid, s, span, x, draw, blocks, codes, inject)
                 : encode_scaled<false>(grid, s, span, x, draw, blocks, codes, inject);
        });
    }
    if (dry) return;
    if (!in_place) pack_rows(codes.visible, s.row_bytes, span, s.bits, s.adjacent, packed_codes(s, span));
    if (s.hidden) pack_rows(codes.hidden, s.hidden_row_bytes, span, s.hidden, false, packed_hidden_codes(s, span));
}

}  // namespace MASTERLESS_ISA
}  // namespace masterless
