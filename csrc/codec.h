// Encode and decode a span of one stored tensor, whatever its format: `codec.py` of the specification.
//
// Contract:
//   * A span is a run of a row that starts at a chunk, and at a block unless one block covers all of it.
//   * Float buffers hold the span's n numbers, then zeros up to a whole vector.
//   * Metadata is explicit: decoding reads what is stored; encoding is given the metadata to use, so that the
//     scale of a block can be known before (held scales) or from elsewhere (rows longer than a span).
#pragma once

#include <cstddef>

#include "grid.h"
#include "log_code.h"
#include "packing.h"

namespace masterless {
inline namespace MASTERLESS_ISA {

struct Span {
    int64_t row, col;
    int n;
    uint64_t chunk;  // number of its first chunk in the whole parameter, for the random bits
};

struct Codes {  // one byte a code; the finer bits of a weight apart
    uint8_t* visible;
    uint8_t* hidden;
};

struct Metadata {  // of one block
    float scale = 0.0f;
    LogBlock log;
};

inline bool is_scaled(const MlStorage& s) { return s.kind >= ML_LINEAR && s.kind <= ML_LOG; }

inline int64_t metadata_index(const MlStorage& s, const Span& span) {
    return s.per_tensor ? 0 : span.row * s.blocks_per_row + span.col / s.block;
}

inline int block_count(const MlStorage& s, int n) { return (int)((n + s.block - 1) / s.block); }

// Calls f(e, length, block) for the pieces of a span that share both a block and a chunk.
template <class F>
inline void for_each_run(const Span& span, int64_t block, F&& f) {
    const int run = block < kChunk ? (int)block : kChunk;
    for (int e = 0; e < span.n; e += run) f(e, span.n - e < run ? span.n - e : run, (int)(e / block));
}

// --- metadata -----------------------------------------------------------------------------------------------

inline Metadata read_metadata(const MlStorage& s, int64_t index) {
    Metadata block;
    if (s.kind == ML_LOG)
        block.log = read_log_block(s, index);
    else
        block.scale = read_scale(s, index);
    return block;
}

inline void write_metadata(const MlStorage& s, int64_t index, const Metadata& block) {
    if (s.kind == ML_LOG)
        write_log_block(s, index, block.log);
    else
        write_scale(s, index, block.scale);
}

// What must be known of a block before it is encoded, gathered piece by piece.
class Summary {
  public:
    Summary(const MlStorage& s, int64_t block_length) : storage_(s), log_(block_length) {}

    void add(const float* x, int n) {
        if (storage_.kind == ML_LOG) return log_.add(x, n);
        const float piece = absmax(x, n);
        absmax_ = piece > absmax_ ? piece : absmax_;
    }

    float largest() const { return absmax_; }

    Metadata fresh() const {
        Metadata block;
        if (storage_.kind == ML_LOG)
            block.log = log_.finish(storage_);
        else
            block.scale = scale_for(storage_, absmax_);
        return block;
    }

  private:
    const MlStorage& storage_;
    float absmax_ = 0.0f;
    LogStatistics log_;
};

// --- plain floats -------------------------------------------------------------------------------------------

// fp32 to bf16 on the bits; a carry past the largest finite number is stopped there.
inline vi round_bf16(vf x, bool stochastic, vu words) {
    const vu b = (vu)bits(x), magnitude = b & 0x7FFFFFFFu;
    const vu add = stochastic ? dither(words) : 0x7FFFu + ((magnitude >> 16) & 1u);
    const vu rounded = min((magnitude + add) & 0xFFFF0000u, splat(kBf16Max));
    return (vi)(rounded | (b & 0x80000000u));
}

inline void copy_floats(float* out, const float* in, int n) { std::memcpy(out, in, (size_t)n * sizeof(float)); }

inline void widen_floats(float* out, const uint16_t* in, int n) {
    int e = 0;
    for (; e + kLanes <= n; e += kLanes) store(out + e, widen_bf16(load<vh>(in + e)));
    for (; e < n; ++e) out[e] = from_bits((uint32_t)in[e] << 16);
}

inline void encode_bf16(uint16_t* out, const float* x, int n, bool stochastic, uint64_t key, uint64_t chunk,
                        float* decoded) {
    for (int start = 0; start < n; start += kChunk) {
        const ChunkRandom random(key, chunk + (uint64_t)(start / kChunk));
        const int stop = n - start < kChunk ? n : start + kChunk;
        for (int e = start; e < stop; e += kLanes) {
            const vi rounded = round_bf16(load<vf>(x + e), stochastic, random.words(e - start));
            const vh upper = upper_half(rounded);
            std::memcpy(out + e, &upper, (size_t)(stop - e < kLanes ? stop - e : kLanes) * sizeof(uint16_t));
            if (decoded) store(decoded + e, from_bits(rounded));
        }
    }
}

// --- scaled formats -----------------------------------------------------------------------------------------

template <class Grid>
inline void decode_scaled(const Grid& grid, const MlStorage& s, const Span& span, const Codes& codes, float* out) {
    const int64_t first = metadata_index(s, span);
    const float unit = 1.0f / (float)(1 << s.hidden);
    for_each_run(span, s.block, [&](int e, int length, int block) {
        const float scale = read_scale(s, first + block) * unit;
        for (int i = e; i < e + length; i += kLanes) {
            vi code = widen(load<vb>(codes.visible + i));
            if (s.hidden) code = (code << s.hidden) + widen(load<vb>(codes.hidden + i));
            store(out + i, grid.level(code) * scale);
        }
    });
}

template <bool kStochastic, class Grid>
inline void encode_scaled(const Grid& grid, const MlStorage& s, const Span& span, const float* x,
                          const Metadata* blocks, const Codes& codes, float* decoded) {
    alignas(64) float quotients[kChunk];
    for_each_run(span, s.block, [&](int e, int length, int block) {
        const float scale = blocks[block].scale, unit = scale * (1.0f / (float)(1 << s.hidden));
        const Divisor divisor(scale, s.hidden);
        const ChunkRandom random(s.key, span.chunk + (uint64_t)(e / kChunk));
        if (divisor.by_reciprocal())
            for (int i = 0; i < length; i += kLanes) store(quotients + i, divisor.by_multiplication(load<vf>(x + e + i)));
        else
            for (int i = 0; i < length; i += kLanes) store(quotients + i, divisor.by_division(load<vf>(x + e + i)));
        for (int i = 0; i < length; i += kLanes) {
            const vu words = kStochastic ? random.words(e % kChunk + i) : vu{};
            vi code;
            const vf level = grid.template encode<kStochastic>(load<vf>(quotients + i), words, code);
            if (!s.is_signed) code -= (load<vf>(x + e + i) > 0.0f) & (code == s.zero_code);
            if (s.hidden) store(codes.hidden + e + i, narrow(code & ((1 << s.hidden) - 1)));
            store(codes.visible + e + i, narrow(code >> s.hidden));
            if (decoded) store(decoded + e + i, level * unit);
        }
    });
}

template <int kRounding>
inline void encode_log(const MlStorage& s, const Span& span, const float* x, const Metadata* blocks,
                       const Codes& codes) {
    for_each_run(span, s.block, [&](int e, int length, int block) {
        const LogGrid grid(blocks[block].log, s.bits);
        const ChunkRandom random(s.key, span.chunk + (uint64_t)(e / kChunk));
        for (int i = 0; i < length; i += kLanes) {
            const vu words = kRounding == ML_NEAREST ? vu{} : random.words(e % kChunk + i);
            store(codes.visible + e + i, narrow(grid.encode<kRounding>(load<vf>(x + e + i), words)));
        }
    });
}

inline void decode_log(const MlStorage& s, const Span& span, const Codes& codes, float* out) {
    const int64_t first = metadata_index(s, span);
    for_each_run(span, s.block, [&](int e, int length, int block) {
        const LogGrid grid(read_log_block(s, first + block), s.bits);
        for (int i = e; i < e + length; i += kLanes) store(out + i, grid.level(widen(load<vb>(codes.visible + i))));
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

inline void decode(const MlStorage& s, int64_t cols, const Span& span, const Codes& codes, float* out) {
    const int64_t at = span.row * cols + span.col;
    if (s.kind == ML_BFLOAT16) {
        widen_floats(out, (const uint16_t*)s.values + at, span.n);
    } else if (s.values) {  // fp32, or a master copy
        copy_floats(out, (const float*)s.values + at, span.n);
    } else {
        unpack(s.codes + span.row * s.row_bytes + packed_offset(span.col, s.bits), span.n, s.bits, codes.visible);
        if (s.hidden)
            unpack(s.hidden_codes + span.row * s.hidden_row_bytes + packed_offset(span.col, s.hidden), span.n, s.hidden,
                   codes.hidden);
        if (s.kind == ML_LOG)
            decode_log(s, span, codes, out);
        else
            with_grid(s, [&](const auto& grid) { decode_scaled(grid, s, span, codes, out); });
    }
    for (int e = span.n; e % kLanes; ++e) out[e] = 0.0f;
}

// Stores a span; `blocks` is its metadata (scaled formats). `decoded`, if asked for, receives what decoding would give;
// with `dry` nothing is written.
inline void encode(const MlStorage& s, int64_t cols, const Span& span, const float* x, const Metadata* blocks,
                   const Codes& codes, float* decoded, bool dry = false) {
    const int64_t at = span.row * cols + span.col;
    const bool master = s.values && is_scaled(s), stochastic = s.rounding != ML_NEAREST && !master;
    if (s.kind == ML_BFLOAT16) {
        uint16_t* out = dry ? (uint16_t*)codes.visible : (uint16_t*)s.values + at;
        encode_bf16(out, x, span.n, stochastic, s.key, span.chunk, decoded);
        return;
    }
    if (s.values) {
        if (!dry) copy_floats((float*)s.values + at, x, span.n);
        if (decoded) copy_floats(decoded, x, span.n);
        if (s.kind == ML_FLOAT32) return;
    }
    if (s.kind == ML_LOG) {
        if (s.rounding == ML_NEAREST) encode_log<ML_NEAREST>(s, span, x, blocks, codes);
        if (s.rounding == ML_STOCHASTIC) encode_log<ML_STOCHASTIC>(s, span, x, blocks, codes);
        if (s.rounding == ML_STOCHASTIC_LOG) encode_log<ML_STOCHASTIC_LOG>(s, span, x, blocks, codes);
    } else {
        float* values = master ? nullptr : decoded;
        with_grid(s, [&](const auto& grid) {
            stochastic ? encode_scaled<true>(grid, s, span, x, blocks, codes, values)
                       : encode_scaled<false>(grid, s, span, x, blocks, codes, values);
        });
    }
    if (dry) return;
    pack(codes.visible, span.n, s.bits, s.codes + span.row * s.row_bytes + packed_offset(span.col, s.bits));
    if (s.hidden)
        pack(codes.hidden, span.n, s.hidden,
             s.hidden_codes + span.row * s.hidden_row_bytes + packed_offset(span.col, s.hidden));
}

}  // namespace MASTERLESS_ISA
}  // namespace masterless
