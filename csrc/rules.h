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

struct Scalars {
    float step_size, decay, l2, keep1, rate1, keep2, rate2, bias2, eps, clip, inject;

    explicit Scalars(const MlTask& t)
        : step_size(t.step_size), decay(t.decay), l2(t.l2), keep1(t.keep1), rate1(t.rate1), keep2(t.keep2),
          rate2(t.rate2), bias2(t.bias2), eps(t.eps), clip(t.clip), inject(t.inject) {}
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
        const vf normalised = g / (sqrt(v) * c.bias2 + c.eps);
        u = kFirst ? ema(u, normalised, c) : normalised;
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

// v <- a v + (1-a) g^2;  buf <- mu buf + g / (sqrt(v) + eps);  step buf
struct RmsProp {
    static constexpr bool kSecond = true;
    template <bool kFirst> static constexpr bool has_denominator() { return !kFirst; }
    template <bool kFirst> static Update step(vf g, vf buf, const SecondMoment& second_moment, const Scalars& c) {
        const vf v = second_moment(g * g);
        const vf d = sqrt(v) + c.eps;
        if (!kFirst) return {vf{}, v, g, d};
        buf = buf * c.keep1 + g / d;
        return {buf, v, buf, vf{}};
    }
};

// buf <- mu buf + (1-dampening) g;  step buf  (Nesterov: g + mu buf)
template <bool kNesterov>
struct Sgd {
    static constexpr bool kSecond = false;
    template <bool kFirst> static constexpr bool has_denominator() { return false; }
    template <bool kFirst> static Update step(vf g, vf buf, const SecondMoment&, const Scalars& c) {
        if (!kFirst) return {vf{}, vf{}, g, vf{}};
        buf = buf * c.keep1 + g * c.rate1;
        return {buf, vf{}, kNesterov ? g + buf * c.keep1 : buf, vf{}};
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
        const vf d = max(sqrt(v), splat(c.eps));
        if (!kFirst) return {vf{}, v, g, d};
        m = ema(m, (g / d) * c.clip, c);
        return {m, v, m, vf{}};
    }
};

// Gradient to descend on, from the one as stored.
inline vf descent_gradient(vf g, vf w, float sign, bool has_l2, float l2) {
    g = g * sign;  // exact
    return has_l2 ? g + w * l2 : g;
}

// What the next span will read, asked for a little at a time while this one is computed: the larger streams only.
struct Upcoming {
    const char* start;
    int bits;  // an element

    void ask_for(int e) const { __builtin_prefetch(start + e * bits / 8, 1); }
};

struct TileBuffers {
    const float* g;
    float *w, *m, *v, *unit;
    Draw weight, first, second;
    Upcoming next_gradient, next_weight;
};

// One rule over a span: w becomes the target W~, m and v the new moments, unit the factor of error injection.
// The random words of the span are drawn along the way, for a rule mostly waits for division and square root.
template <class Rule, bool kFirst>
void apply_rule(const MlTask& task, int n, uint64_t chunk, const TileBuffers& b) {
    const Scalars c(task);
    const bool second_is_current = task.second.kind == ML_FACTORED, inject = task.inject_error && kFirst;
    const float sign = task.maximize ? -1.0f : 1.0f;
    const bool has_l2 = task.has_l2;
    float *const weights = b.w, *const firsts = b.m, *const seconds = b.v, *const units = b.unit;
    const float* const gradients = b.g;
    uint32_t *const weight_words = b.weight.words, *const first_words = b.first.words,
                   *const second_words = b.second.words;
    const Upcoming next_gradient = b.next_gradient, next_weight = b.next_weight;
    for (int start = 0; start < n; start += kChunk, ++chunk) {
        const ChunkRandom weight_random(b.weight.key, chunk), first_random(b.first.key, chunk),
            second_random(b.second.key, chunk);
        const int stop = n - start < kChunk ? n : start + kChunk;
        for (int e = start; e < stop; e += kLanes) {
            next_gradient.ask_for(e);
            next_weight.ask_for(e);
            const vf w = load<vf>(weights + e);
            const vf g = descent_gradient(load<vf>(gradients + e), w, sign, has_l2, c.l2);
            const SecondMoment second{Rule::kSecond ? load<vf>(seconds + e) : vf{}, second_is_current, c};
            const Update u = Rule::template step<kFirst>(g, kFirst ? load<vf>(firsts + e) : vf{}, second, c);
            constexpr bool kDenominator = Rule::template has_denominator<kFirst>();
            const vf moved = kDenominator ? u.direction / u.denominator : u.direction;
            store(weights + e, w * c.decay - moved * c.step_size);
            if (kFirst) store(firsts + e, u.first);
            if (Rule::kSecond) store(seconds + e, u.second);
            if (inject) store(units + e, kDenominator ? u.denominator * c.inject : splat(c.inject));
            if (weight_words) store(weight_words + e, weight_random.words(e - start));
            if (first_words) store(first_words + e, first_random.words(e - start));
            if (second_words) store(second_words + e, second_random.words(e - start));
        }
    }
}

using RuleFunction = void (*)(const MlTask&, int, uint64_t, const TileBuffers&);

template <class Rule>
RuleFunction choose(bool has_first) {
    return has_first ? apply_rule<Rule, true> : apply_rule<Rule, false>;
}

inline RuleFunction rule_function(int32_t rule, bool has_first) {
    switch (rule) {
        case ML_ADAM: return choose<Adam>(has_first);
        case ML_ADAM_UPDATE_UNITS: return choose<AdamUpdateUnits>(has_first);
        case ML_ADABELIEF: return choose<AdaBelief>(has_first);
        case ML_RMSPROP: return choose<RmsProp>(has_first);
        case ML_SGD: return choose<Sgd<false>>(has_first);
        case ML_SGD_NESTEROV: return choose<Sgd<true>>(has_first);
        case ML_LION: return choose<Lion>(has_first);
        default: return choose<Adafactor>(has_first);
    }
}

}  // namespace MASTERLESS_ISA
}  // namespace masterless
