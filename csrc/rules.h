// Update mathematics, one short struct a rule, in the papers' symbols: `rules.py` of the specification.
//
// Contract: one operation at a time in the order written (no contraction but where it is written), so that results agree
// with the specification to the bit. A rule sees gradient, first moment and second moment of a few elements and returns the new
// moments, a direction and a denominator; without a stored first moment (kFirst false) the gradient stands in
// its place. Where kTakesKept it is what stays of the first moment, b1 m. The step is the same for all:
// W~ = decay * W - step_size * (direction / denominator). Where `has_root_unit` the direction is in units of `root_unit`.
#pragma once

#include <type_traits>

#include "abi.h"
#include "random.h"

namespace masterless {
inline namespace MASTERLESS_ISA {

constexpr float kLargest = 0x1.fffffep127f;  // where moments stop short of infinity
constexpr float kRootUnit = 0.703952253f, kRootSquare = kRootUnit * kRootUnit;  // of `inverse_root`

// How the second moment is stored: in floating point; in a code; or as row and column means, which are up to date.
// Without the first, Adam divides by its root through `inverse_root`.
enum class Root { kExact, kCoarse, kFactored };

struct Scalars {  // as vectors, so that no loop has to spread them
    vf step_size, decay, l2, keep1, rate1, keep2, rate2, bias2, bias2_before, eps, clip, reach, payback;
    vf eps_square, rate1_over_bias, root_unit, unit_step, carry;  // for roots that are not exact: `SecondMoment` of rules.py
    bool has_eps, has_eps_square;

    explicit Scalars(const MlTask& t)
        : step_size(splat(t.step_size)), decay(splat(t.decay)), l2(splat(t.l2)), keep1(splat(t.keep1)),
          rate1(splat(t.rate1)), keep2(splat(t.keep2)), rate2(splat(t.rate2)), bias2(splat(t.bias2)),
          bias2_before(splat(t.bias2_before)), eps(splat(t.eps)), clip(splat(t.clip)),
          reach(splat(t.reach)), payback(splat(t.payback)),
          eps_square(splat((t.eps / t.bias2) * (t.eps / t.bias2))), rate1_over_bias(splat(t.rate1 / t.bias2 * kRootUnit)),
          root_unit(splat(1.0f / t.bias2 * kRootUnit)), unit_step(root_unit * step_size),
          carry(splat(t.bias2_before / t.bias2 * kRootSquare)), has_eps(t.eps > 0.0f),
          has_eps_square(eps_square[0] > 0.0f) {}
};

// 1 / sqrt(x) in units of kRootUnit, within 0.07%: `arithmetic.inverse_root`. A guess, and one step of Newton's from it.
struct InverseRoot {
    vf x, guess;

    InverseRoot() = default;
    explicit InverseRoot(vf x) : x(x), guess(from_bits(0x5F1FFFF9 - (bits(x) >> 1))) {}

    vf value() const { return guess * fnma(x * guess, guess, splat((float)(1.68191391 / 0.703952253))); }
};

// A rule's view of its second moment. `stored` is the average as decoded, of a factored one the estimate that this step
// has entered already; of coarse ones it is not asked for, but what stays of it, and what Adam divided by before.
struct SecondMoment {
    vf stored, kept, before;
    bool is_current;
    bool may_be_zero;  // some `before` may be negative, which says that there was none
    const Scalars* c;

    // This step's innovation (g * g for most rules) to the updated average.
    vf operator()(vf innovation) const { return is_current ? stored : fma(innovation, c->rate2, kept); }

    // Of a v that is not exact: 1 / sqrt(v).
    InverseRoot inverse_root(vf v) const { return InverseRoot(v + c->eps_square); }

    // g / sqrt(v), in units of `InverseRoot`.
    vf over_root(vf g, const InverseRoot& root) const {
        const vf ratio = g * root.value();
        return c->has_eps_square ? ratio : select(root.x > 0.0f, ratio, vf{});
    }

    // kept d'/d + rate1 g / d; of which `undivided` needs no root.
    vf carried(vf kept_first, vf g, vf undivided, const InverseRoot& root) const {
        const vf y = root.value();
        vf u;
        if (is_current)
            u = fma(g * y, c->rate1_over_bias, kept_first);
        else if (may_be_zero)
            u = undivided_from(kept_first, g, select(before < 0.0f, root.x * y * kRootSquare, before)) * y;
        else
            u = undivided * y;
        return c->has_eps_square ? u : select(root.x > 0.0f, u, kept_first);
    }

    vf undivided(vf kept_first, vf g) const { return undivided_from(kept_first, g, before); }

  private:
    vf undivided_from(vf kept_first, vf g, vf root) const { return fma(kept_first, root, g * c->rate1_over_bias); }
};

// What Adam divided by when a second moment that is not exact was this; negative where it was zero.
inline vf root_before(vf stored, const Scalars& c) {
    const vf was = stored + c.eps_square;
    return select(stored > 0.0f, was * InverseRoot(was).value() * c.carry, splat(-1.0f));
}

struct Update {
    vf first, second, direction, denominator;
};

// A step that divides by an `InverseRoot`, up to there: a long chain of dependent operations in two halves, so that one of
// some elements can be computed beside the other of others.
struct Begun {
    vf g, first, undivided, second;
    InverseRoot root;
};

// What a rule divides by is not negative; where it is zero, which an eps prevents, nothing moves.
inline vf quotient(vf numerator, vf denominator, const Scalars& c) {
    const vf ratio = numerator / denominator;
    return c.has_eps ? ratio : select(denominator > 0.0f, ratio, vf{});
}

inline vf ema(vf m, vf g, const Scalars& c) { return fma(g - m, c.rate1, m); }

inline vf sign(vf x) { return select(x > 0.0f, splat(1.0f), select(x < 0.0f, splat(-1.0f), vf{})); }

// v <- b2 v + (1-b2) g^2;  m <- m + (1-b1)(g - m);  step m / (sqrt(v) / sqrt(1-b2^t) + eps)
struct Adam {
    static constexpr bool kSecond = true, kTakesKept = false;
    template <bool kFirst, Root kRoot> static constexpr bool has_denominator() { return kRoot == Root::kExact; }
    template <bool kFirst> static Begun begin(vf g, vf m, const SecondMoment& second_moment, const Scalars& c) {
        const vf v = second_moment(g * g);
        return {g, kFirst ? ema(m, g, c) : g, vf{}, v, second_moment.inverse_root(v)};
    }
    template <bool kFirst> static Update end(const Begun& b, const SecondMoment& second_moment, const Scalars&) {
        return {b.first, b.second, second_moment.over_root(b.first, b.root), vf{}};
    }
    template <bool kFirst, Root kRoot> static Update step(vf g, vf m, const SecondMoment& second_moment, const Scalars& c) {
        if (kRoot != Root::kExact) return end<kFirst>(begin<kFirst>(g, m, second_moment, c), second_moment, c);
        m = kFirst ? ema(m, g, c) : g;
        const vf v = second_moment(g * g);
        return {m, v, m, sqrt(v) * c.bias2 + c.eps};
    }
};

// Momentum in units of the update: u <- u + (1-b1)(g/d - u);  step u
struct AdamUpdateUnits {
    static constexpr bool kSecond = true, kTakesKept = false;
    template <bool kFirst, Root kRoot> static constexpr bool has_denominator() { return false; }
    template <bool kFirst> static Begun begin(vf g, vf u, const SecondMoment& second_moment, const Scalars&) {
        const vf v = second_moment(g * g);
        return {g, u, vf{}, v, second_moment.inverse_root(v)};
    }
    template <bool kFirst> static Update end(const Begun& b, const SecondMoment& second_moment, const Scalars& c) {
        return moved<kFirst>(b.first, second_moment.over_root(b.g, b.root) * c.root_unit, b.second, c);
    }
    template <bool kFirst, Root kRoot> static Update step(vf g, vf u, const SecondMoment& second_moment, const Scalars& c) {
        if (kRoot != Root::kExact) return end<kFirst>(begin<kFirst>(g, u, second_moment, c), second_moment, c);
        const vf v = second_moment(g * g);
        return moved<kFirst>(u, quotient(g, sqrt(v) * c.bias2 + c.eps, c), v, c);
    }

  private:
    template <bool kFirst> static Update moved(vf u, vf normalised, vf v, const Scalars& c) {
        u = kFirst ? ema(u, normalised, c) : normalised;
        return {u, v, u, vf{}};
    }
};

// Momentum in units of the weight: u <- b1 u d'/d + (1-b1) lr g/d, d' the d before;  step u
struct AdamWeightUnits {
    static constexpr bool kSecond = true, kTakesKept = true;
    template <bool kFirst, Root kRoot> static constexpr bool has_denominator() {
        return !kFirst && kRoot == Root::kExact;
    }
    template <bool kFirst> static Begun begin(vf g, vf kept, const SecondMoment& second_moment, const Scalars&) {
        const vf v = second_moment(g * g);
        return {g, kept, second_moment.undivided(kept, g), v, second_moment.inverse_root(v)};
    }
    template <bool kFirst> static Update end(const Begun& b, const SecondMoment& second_moment, const Scalars&) {
        const vf u = kFirst ? second_moment.carried(b.first, b.g, b.undivided, b.root) : second_moment.over_root(b.g, b.root);
        return {u, b.second, u, vf{}};
    }
    template <bool kFirst, Root kRoot> static Update step(vf g, vf kept, const SecondMoment& second_moment, const Scalars& c) {
        if (kRoot != Root::kExact) return end<kFirst>(begin<kFirst>(g, kept, second_moment, c), second_moment, c);
        const vf v = second_moment(g * g);
        const vf d = sqrt(v) * c.bias2 + c.eps;
        if (!kFirst) return {vf{}, v, g, d};
        const vf stored = second_moment.stored;
        const vf before = select(stored > 0.0f, sqrt(stored) * c.bias2_before + c.eps, d);
        const vf carried = (kept * before + g * c.rate1) / d;
        const vf u = c.has_eps ? carried : select(d > 0.0f, carried, kept);
        return {u, v, u, vf{}};
    }
};

// s <- b2 s + (1-b2)(g - m)^2;  step m / (sqrt(s + eps) / sqrt(1-b2^t) + eps)
struct AdaBelief {
    static constexpr bool kSecond = true, kTakesKept = false;
    template <bool kFirst, Root kRoot> static constexpr bool has_denominator() { return true; }
    template <bool kFirst, Root kRoot> static Update step(vf g, vf m, const SecondMoment& second_moment, const Scalars& c) {
        m = kFirst ? ema(m, g, c) : g;
        const vf surprise = g - m;
        const vf s = second_moment(surprise * surprise);
        return {m, s, m, sqrt(s + c.eps) * c.bias2 + c.eps};
    }
};

// v <- a v + (1-a) g^2;  buf <- mu buf + g / (sqrt(v) + eps);  step buf  (in weight units lr enters buf)
struct RmsProp {
    static constexpr bool kSecond = true, kTakesKept = false;
    template <bool kFirst, Root kRoot> static constexpr bool has_denominator() { return !kFirst; }
    template <bool kFirst, Root kRoot> static Update step(vf g, vf buf, const SecondMoment& second_moment, const Scalars& c) {
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
    static constexpr bool kSecond = false, kTakesKept = false;
    template <bool kFirst, Root kRoot> static constexpr bool has_denominator() { return false; }
    template <bool kFirst, Root kRoot> static Update step(vf g, vf buf, const SecondMoment&, const Scalars& c) {
        if (!kFirst) return {vf{}, vf{}, g, vf{}};
        buf = buf * c.keep1 + g * c.rate1;
        return {buf, vf{}, kNesterov ? g * c.rate1 + buf * c.keep1 : buf, vf{}};
    }
};

// step sign(b1 m + (1-b1) g);  m <- m + (1-b2)(g - m)
struct Lion {
    static constexpr bool kSecond = false, kTakesKept = false;
    template <bool kFirst, Root kRoot> static constexpr bool has_denominator() { return false; }
    template <bool kFirst, Root kRoot> static Update step(vf g, vf m, const SecondMoment&, const Scalars& c) {
        if (!kFirst) return {vf{}, vf{}, sign(g), vf{}};
        return {m + (g - m) * c.rate2, vf{}, sign(m + (g - m) * c.rate1), vf{}};
    }
};

// u = g / max(sqrt(v), eps1);  step u, or m of the clipped updates
struct Adafactor {
    static constexpr bool kSecond = true, kTakesKept = false;
    template <bool kFirst, Root kRoot> static constexpr bool has_denominator() { return !kFirst; }
    template <bool kFirst, Root kRoot> static Update step(vf g, vf m, const SecondMoment& second_moment, const Scalars& c) {
        const vf v = second_moment(g * g);
        const vf d = max(sqrt(v), c.eps);
        if (!kFirst) return {vf{}, v, g, d};
        m = ema(m, quotient(g, d, c) * c.clip, c);
        return {m, v, m, vf{}};
    }
};

// In units of the weight: u <- b1 u + (1-b1) alpha clip g/d;  step u
struct AdafactorWeightUnits {
    static constexpr bool kSecond = true, kTakesKept = false;
    template <bool kFirst, Root kRoot> static constexpr bool has_denominator() { return !kFirst; }
    template <bool kFirst, Root kRoot> static Update step(vf g, vf u, const SecondMoment& second_moment, const Scalars& c) {
        const vf v = second_moment(g * g);
        const vf d = max(sqrt(v), c.eps);
        if (!kFirst) return {vf{}, v, g, d};
        u = u * c.keep1 + quotient(g, d, c) * c.rate1;
        return {u, v, u, vf{}};
    }
};

// Whether a rule's direction is in units of `root_unit`.
template <class Rule, bool kFirst, Root kRoot>
constexpr bool has_root_unit() {
    constexpr bool kOfGradient = std::is_same_v<Rule, Adam> || (std::is_same_v<Rule, AdamWeightUnits> && !kFirst);
    return kOfGradient && kRoot != Root::kExact;
}

// Gradient to descend on, from the one as stored.
inline vf descent_gradient(vf g, vf w, bool ascends, bool has_l2, vf l2) {
    if (ascends) g = -g;
    return has_l2 ? g + w * l2 : g;
}

// What of a momentum is too large for one must be errors: the weight gets it all, before it is rounded (`tile.paid_back`).
inline void pay_back(vf& target, vf& first, const Scalars& c) {
    const vf momentum = min(max(first, -c.reach), c.reach);
    target = fma(momentum - first, c.payback, target);
    first = momentum;
}

// Whether the first moment stays as it is stored: in units of the weight, while nothing moves.
inline bool keeps_first(const MlTask& t) { return t.rule >= ML_ADAM_WEIGHT_UNITS && t.step_size == 0.0f; }

}  // namespace MASTERLESS_ISA
}  // namespace masterless
