// Update mathematics, one short struct a rule, in the papers' symbols: `rules.py` of the specification.
//
// Contract: one operation at a time in the order written (no contraction), so that results agree with the
// specification to the bit. A rule sees gradient, first moment and second moment of a few elements and returns the new
// moments, a direction and a denominator; without a stored first moment (kFirst false) the gradient stands in
// its place. The step is the same for all:  W~ = decay * W - step_size * (direction / denominator).
#pragma once

#include "abi.h"
#include "random.h"

namespace masterless {
inline namespace MASTERLESS_ISA {

constexpr float kLargest = 0x1.fffffep127f;  // where moments stop short of infinity

struct Scalars {  // as vectors, so that no loop has to spread them
    vf step_size, decay, l2, keep1, rate1, keep2, rate2, bias2, bias2_before, eps, clip, reach, payback;
    bool has_eps;

    explicit Scalars(const MlTask& t)
        : step_size(splat(t.step_size)), decay(splat(t.decay)), l2(splat(t.l2)), keep1(splat(t.keep1)),
          rate1(splat(t.rate1)), keep2(splat(t.keep2)), rate2(splat(t.rate2)), bias2(splat(t.bias2)),
          bias2_before(splat(t.bias2_before)), eps(splat(t.eps)), clip(splat(t.clip)),
          reach(splat(t.reach)), payback(splat(t.payback)), has_eps(t.eps > 0.0f) {}
};

// This step's innovation (g * g for most rules) to the updated average; a factored one was updated before.
struct SecondMoment {
    vf stored;
    bool is_current;
    const Scalars& c;

    vf operator()(vf innovation) const {
        return is_current ? stored : stored * c.keep2 + innovation * c.rate2;
    }
};

struct Update {
    vf first, second, direction, denominator;
};

// What a rule divides by is not negative; where it is zero, which an eps prevents, nothing moves.
inline vf quotient(vf numerator, vf denominator, const Scalars& c) {
    const vf ratio = numerator / denominator;
    return c.has_eps ? ratio : select(denominator > 0.0f, ratio, vf{});
}

inline vf ema(vf m, vf g, const Scalars& c) { return m + (g - m) * c.rate1; }

inline vf sign(vf x) { return select(x > 0.0f, splat(1.0f), select(x < 0.0f, splat(-1.0f), vf{})); }

// v <- b2 v + (1-b2) g^2;  m <- m + (1-b1)(g - m);  step m / (sqrt(v) / sqrt(1-b2^t) + eps)
struct Adam {
    static constexpr bool kSecond = true;
    template <bool kFirst> static constexpr bool has_denominator() { return true; }
    template <bool kFirst> static Update step(vf g, vf m, const SecondMoment& second_moment, const Scalars& c) {
        m = kFirst ? ema(m, g, c) : g;
        const vf v = second_moment(g * g);
        return {m, v, m, sqrt(v) * c.bias2 + c.eps};
    }
};

// Momentum in units of the update: u <- u + (1-b1)(g/d - u);  step u
struct AdamUpdateUnits {
    static constexpr bool kSecond = true;
    template <bool kFirst> static constexpr bool has_denominator() { return false; }
    template <bool kFirst> static Update step(vf g, vf u, const SecondMoment& second_moment, const Scalars& c) {
        const vf v = second_moment(g * g);
        const vf normalised = quotient(g, sqrt(v) * c.bias2 + c.eps, c);
        u = kFirst ? ema(u, normalised, c) : normalised;
        return {u, v, u, vf{}};
    }
};

// Momentum in units of the weight: u <- b1 u d'/d + (1-b1) lr g/d, d' the d before;  step u
struct AdamWeightUnits {
    static constexpr bool kSecond = true;
    template <bool kFirst> static constexpr bool has_denominator() { return !kFirst; }
    template <bool kFirst> static Update step(vf g, vf u, const SecondMoment& second_moment, const Scalars& c) {
        const vf v = second_moment(g * g);
        const vf d = sqrt(v) * c.bias2 + c.eps;
        if (!kFirst) return {vf{}, v, g, d};
        const vf kept = u * c.keep1, stored = second_moment.stored;
        if (second_moment.is_current) {
            u = kept + quotient(g, d, c) * c.rate1;
        } else {
            const vf before = select(stored > 0.0f, sqrt(stored) * c.bias2_before + c.eps, d);
            const vf carried = (kept * before + g * c.rate1) / d;
            u = c.has_eps ? carried : select(d > 0.0f, carried, kept);
        }
        return {u, v, u, vf{}};
    }
};

// s <- b2 s + (1-b2)(g - m)^2;  step m / (sqrt(s + eps) / sqrt(1-b2^t) + eps)
struct AdaBelief {
    static constexpr bool kSecond = true;
    template <bool kFirst> static constexpr bool has_denominator() { return true; }
    template <bool kFirst> static Update step(vf g, vf m, const SecondMoment& second_moment, const Scalars& c) {
        m = kFirst ? ema(m, g, c) : g;
        const vf surprise = g - m;
        const vf s = second_moment(surprise * surprise);
        return {m, s, m, sqrt(s + c.eps) * c.bias2 + c.eps};
    }
};

// v <- a v + (1-a) g^2;  buf <- mu buf + g / (sqrt(v) + eps);  step buf  (in weight units lr enters buf)
struct RmsProp {
    static constexpr bool kSecond = true;
    template <bool kFirst> static constexpr bool has_denominator() { return !kFirst; }
    template <bool kFirst> static Update step(vf g, vf buf, const SecondMoment& second_moment, const Scalars& c) {
        const vf v = second_moment(g * g);
        const vf d = sqrt(v) + c.eps;
        if (!kFirst) return {vf{}, v, g, d};
        buf = buf * c.keep1 + quotient(g, d, c) * c.rate1;
        return {buf, v, buf, vf{}};
    }
};

// buf <- mu buf + (1-dampening) g;  step buf  (Nesterov: g + mu buf; in weight units lr enters both)
template <bool kNesterov>
struct Sgd {
    static constexpr bool kSecond = false;
    template <bool kFirst> static constexpr bool has_denominator() { return false; }
    template <bool kFirst> static Update step(vf g, vf buf, const SecondMoment&, const Scalars& c) {
        if (!kFirst) return {vf{}, vf{}, g, vf{}};
        buf = buf * c.keep1 + g * c.rate1;
        return {buf, vf{}, kNesterov ? g * c.rate1 + buf * c.keep1 : buf, vf{}};
    }
};

// step sign(b1 m + (1-b1) g);  m <- m + (1-b2)(g - m)
struct Lion {
    static constexpr bool kSecond = false;
    template <bool kFirst> static constexpr bool has_denominator() { return false; }
    template <bool kFirst> static Update step(vf g, vf m, const SecondMoment&, const Scalars& c) {
        if (!kFirst) return {vf{}, vf{}, sign(g), vf{}};
        return {m + (g - m) * c.rate2, vf{}, sign(m + (g - m) * c.rate1), vf{}};
    }
};

// u = g / max(sqrt(v), eps1);  step u, or m of the clipped updates
struct Adafactor {
    static constexpr bool kSecond = true;
    template <bool kFirst> static constexpr bool has_denominator() { return !kFirst; }
    template <bool kFirst> static Update step(vf g, vf m, const SecondMoment& second_moment, const Scalars& c) {
        const vf v = second_moment(g * g);
        const vf d = max(sqrt(v), c.eps);
        if (!kFirst) return {vf{}, v, g, d};
        m = ema(m, quotient(g, d, c) * c.clip, c);
        return {m, v, m, vf{}};
    }
};

// In units of the weight: u <- b1 u + (1-b1) alpha clip g/d;  step u
struct AdafactorWeightUnits {
    static constexpr bool kSecond = true;
    template <bool kFirst> static constexpr bool has_denominator() { return !kFirst; }
    template <bool kFirst> static Update step(vf g, vf u, const SecondMoment& second_moment, const Scalars& c) {
        const vf v = second_moment(g * g);
        const vf d = max(sqrt(v), c.eps);
        if (!kFirst) return {vf{}, v, g, d};
        u = u * c.keep1 + quotient(g, d, c) * c.rate1;
        return {u, v, u, vf{}};
    }
};

// Gradient to descend on, from the one as stored.
inline vf descent_gradient(vf g, vf w, bool ascends, bool has_l2, vf l2) {
    if (ascends) g = -g;
    return has_l2 ? g + w * l2 : g;
}

// What the next span will read, asked for a little at a time while this one is computed.
struct Upcoming {
    static constexpr int kCacheLine = 64;
    const char* at;
    int bytes;  // to ask for at a time: those of kLanes elements in a large stream, those of a chunk in a small one

    void ask_for_more() {
        __builtin_prefetch(at, 1);
        at += bytes;
    }

    void ask_for_all() {
        for (int line = 0; line < bytes; line += kCacheLine) __builtin_prefetch(at + line, 1);
        at += bytes;
    }
};

struct TileBuffers {
    const float* g;
    const uint16_t* narrow_g;  // bf16, in its place
    float *w, *m, *v, *backup;
    Draw weight, first, second;
    Upcoming next_gradient, next_weight, next_first, next_second;
};

// Where the rows of a span lie in the buffers, and the number of the first one's first chunk.
struct Rows {
    int n, length, pitch;
    uint64_t first_chunk;
};

// One rule over a span: w becomes the target W~ of what it was (which goes to `backup`, if there is one), m and v the
// new moments. False if a target is not finite: all that can go wrong with a first moment shows there.
// The random numbers of the span are drawn along the way, for a rule mostly waits for division and square root.
template <class Rule, bool kFirst, bool kFactored>
bool apply_rule(const MlTask& task, Rows rows, const TileBuffers& buffers) {
    const TileBuffers b = buffers;  // a copy, which no store below can change
    const Scalars c(task);
    const bool ascends = task.maximize, has_l2 = task.has_l2, whole_step = task.step_size == 1.0f;
    const bool pays_back = task.pays_back && task.payback != 0.0f;
    const bool draws = b.weight.thresholds || b.first.thresholds || b.second.thresholds;
    constexpr bool kDenominator = Rule::template has_denominator<kFirst>();
    Upcoming next_gradient = b.next_gradient, next_weight = b.next_weight, next_first = b.next_first,
             next_second = b.next_second;
    vf finite{};  // zero times a number is zero, zero times anything else is NaN and stays so
    const vf zero{}, largest = splat(kLargest);
    int row = 0;
    uint64_t chunk = rows.first_chunk;
    for (int start = 0; start < rows.n; ++chunk) {
        ChunkRandom random(b.weight.key, chunk);
        const vu weight_offset = chunk_offset(b.weight.key, chunk), first_offset = chunk_offset(b.first.key, chunk),
                 second_offset = chunk_offset(b.second.key, chunk);
        next_first.ask_for_all();
        next_second.ask_for_all();
        const int end = row + rows.length, stop = end - start < kChunk ? end : start + kChunk;
        for (int e = start; e < stop; e += kLanes) {
            next_gradient.ask_for_more();
            next_weight.ask_for_more();
            const vf w = load<vf>(b.w + e);
            const vf stored = b.narrow_g ? load_bf16(b.narrow_g + e) : load<vf>(b.g + e);
            const vf g = descent_gradient(stored, w, ascends, has_l2, c.l2);
            const SecondMoment second{Rule::kSecond ? load<vf>(b.v + e) : vf{}, kFactored, c};
            const Update u = Rule::template step<kFirst>(g, kFirst ? load<vf>(b.m + e) : vf{}, second, c);
            const vf moved = kDenominator ? quotient(u.direction, u.denominator, c) : u.direction;
            vf target = w * c.decay - (whole_step ? moved : moved * c.step_size), first = u.first;
            if (kFirst && pays_back) {  // `tile.paid_back`
                first = min(max(u.first, -c.reach), c.reach);
                target = target - (u.first - first) * c.payback;
            }
            store(b.w + e, target);
            if (b.backup) store(b.backup + e, w);
            finite = multiply_add(target, zero, finite);
            if (kFirst) store(b.m + e, first);
            if (Rule::kSecond) store(b.v + e, min(u.second, largest));
            const vu word = draws ? random.next() : vu{};
            if (b.weight.thresholds) store(b.weight.thresholds + e, threshold(word + weight_offset));
            if (b.first.thresholds) store(b.first.thresholds + e, threshold(word + first_offset));
            if (b.second.thresholds) store(b.second.thresholds + e, threshold(word + second_offset));
        }
        if (stop == end) row += rows.pitch;
        start = stop == end ? row : stop;
    }
    return all(finite == 0.0f);
}

using RuleFunction = bool (*)(const MlTask&, Rows, const TileBuffers&);

template <class Rule, bool kFirst>
RuleFunction choose(bool factored) {
    return Rule::kSecond && factored ? apply_rule<Rule, kFirst, Rule::kSecond> : apply_rule<Rule, kFirst, false>;
}

template <class Rule>
RuleFunction choose(const MlTask& task) {
    const bool factored = task.second.kind == ML_FACTORED;
    return task.first.kind != ML_NONE ? choose<Rule, true>(factored) : choose<Rule, false>(factored);
}

inline RuleFunction rule_function(const MlTask& task) {
    switch (task.rule) {
        case ML_ADAM: return choose<Adam>(task);
        case ML_ADAM_UPDATE_UNITS: return choose<AdamUpdateUnits>(task);
        case ML_ADABELIEF: return choose<AdaBelief>(task);
        case ML_ADAM_WEIGHT_UNITS: return choose<AdamWeightUnits>(task);
        case ML_RMSPROP:
        case ML_RMSPROP_WEIGHT_UNITS: return choose<RmsProp>(task);
        case ML_SGD:
        case ML_SGD_WEIGHT_UNITS: return choose<Sgd<false>>(task);
        case ML_SGD_NESTEROV:
        case ML_SGD_NESTEROV_WEIGHT_UNITS: return choose<Sgd<true>>(task);
        case ML_LION: return choose<Lion>(task);
        case ML_ADAFACTOR_WEIGHT_UNITS: return choose<AdafactorWeightUnits>(task);
        default: return choose<Adafactor>(task);
    }
}

// Whether the first moment stays as it is stored: in units of the weight, while nothing moves.
inline bool keeps_first(const MlTask& t) { return t.rule >= ML_ADAM_WEIGHT_UNITS && t.step_size == 0.0f; }

}  // namespace MASTERLESS_ISA
}  // namespace masterless
