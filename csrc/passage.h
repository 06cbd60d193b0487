// Which rule's function takes a span, and how: for every task one of `advance_any`, for whole chunks of what presets are
// made of one of `advance_chunks`.
#pragma once

#include "advance.h"

namespace masterless {
inline namespace MASTERLESS_ISA {

using RuleFunction = bool (*)(const MlTask&, const Span&, const Tile&);

inline Root root_of(const MlTask& task) {
    const int32_t kind = task.second.kind;
    const bool is_float = kind == ML_NONE || kind == ML_FLOAT32 || kind == ML_BFLOAT16;
    return is_float ? Root::kExact : kind == ML_FACTORED ? Root::kFactored : Root::kCoarse;
}

template <class Rule, bool kFirst>
RuleFunction any(Root root) {
    if (!Rule::kSecond || root == Root::kExact) return advance_any<Rule, kFirst, Root::kExact>;
    return root == Root::kFactored ? advance_any<Rule, kFirst, Root::kFactored> : advance_any<Rule, kFirst, Root::kCoarse>;
}

template <class Rule>
RuleFunction any(const MlTask& task) {
    return task.first.kind != ML_NONE ? any<Rule, true>(root_of(task)) : any<Rule, false>(root_of(task));
}

inline RuleFunction any_function(const MlTask& task) {
    switch (task.rule) {
        case ML_ADAM: return any<Adam>(task);
        case ML_ADAM_UPDATE_UNITS: return any<AdamUpdateUnits>(task);
        case ML_ADABELIEF: return any<AdaBelief>(task);
        case ML_ADAM_WEIGHT_UNITS: return any<AdamWeightUnits>(task);
        case ML_RMSPROP:
        case ML_RMSPROP_WEIGHT_UNITS: return any<RmsProp>(task);
        case ML_SGD:
        case ML_SGD_WEIGHT_UNITS: return any<Sgd<false>>(task);
        case ML_SGD_NESTEROV:
        case ML_SGD_NESTEROV_WEIGHT_UNITS: return any<Sgd<true>>(task);
        case ML_LION: return any<Lion>(task);
        case ML_ADAFACTOR_WEIGHT_UNITS: return any<AdafactorWeightUnits>(task);
        default: return any<Adafactor>(task);
    }
}

// How a span goes through `advance_chunks`; `function` is null if it does not.
struct Passage {
    RuleFunction function = nullptr;
    From weight = From::kBuffer;
    Moments moments = Moments::kBuffer;
};

// What `advance_chunks` is asked for besides: a bf16 gradient that is read where it lies, injection, no short chunks.
struct Occasion {
    bool narrow, injects, whole;
};

template <class Rule, Root kRoot, From kWeight, bool kNarrow, Moments kMoments, bool kWhole>
RuleFunction injecting_chunks(const MlTask& task) {
    return task.pays_back && task.payback != 0.0f
               ? advance_chunks<Rule, kRoot, kWeight, kNarrow, kMoments, true, true, kWhole>
               : advance_chunks<Rule, kRoot, kWeight, kNarrow, kMoments, true, false, kWhole>;
}

// Only what occurs is compiled: weights that lie in place lose nothing and have gradients of their own kind, and where
// errors are injected the momentum is in units of the weight. Some weights are read in registers only as presets use them,
// among them INT6 without errors beside factored second moments.
template <class Rule, Root kRoot, From kWeight, bool kNarrow, Moments kMoments, bool kWhole>
RuleFunction chunks(const MlTask& task, bool injects) {
    constexpr bool kMayInject = Rule::kTakesKept && kWeight != From::kPlace;
    constexpr bool kOnlyInjects = kWeight > From::kTable;
    if constexpr (kMayInject)
        if (kOnlyInjects || injects) return injecting_chunks<Rule, kRoot, kWeight, kNarrow, kMoments, kWhole>(task);
    if constexpr (!kOnlyInjects) return advance_chunks<Rule, kRoot, kWeight, kNarrow, kMoments, false, false, kWhole>;
    return nullptr;
}

template <class Rule, Root kRoot, From kWeight, bool kNarrow, Moments kMoments>
RuleFunction chunks(const MlTask& task, const Occasion& at) {
    return at.whole ? chunks<Rule, kRoot, kWeight, kNarrow, kMoments, true>(task, at.injects)
                    : chunks<Rule, kRoot, kWeight, kNarrow, kMoments, false>(task, at.injects);
}

template <class Rule, Root kRoot, From kWeight, Moments kMoments>
RuleFunction chunks(const MlTask& task, const Occasion& at) {
    if constexpr (kWeight > From::kTable)
        return chunks<Rule, kRoot, kWeight, true, kMoments>(task, at);
    else
        return at.narrow && kWeight != From::kPlace ? chunks<Rule, kRoot, kWeight, kWeight != From::kPlace, kMoments>(task, at)
                                                    : chunks<Rule, kRoot, kWeight, false, kMoments>(task, at);
}

template <class Rule, Root kRoot>
RuleFunction chunks(const MlTask& task, const Passage& how, const Occasion& at) {
    if constexpr (Rule::kTakesKept) switch (how.weight) {
            case From::kTable: return chunks<Rule, kRoot, From::kTable, Moments::kPacked>(task, at);
            case From::kBytes: return chunks<Rule, kRoot, From::kBytes, Moments::kPacked>(task, at);
            case From::kSix: return chunks<Rule, kRoot, From::kSix, Moments::kPacked>(task, at);
            case From::kGroups: return chunks<Rule, kRoot, From::kGroups, Moments::kPacked>(task, at);
            case From::kHidden: return chunks<Rule, kRoot, From::kHidden, Moments::kPacked>(task, at);
            default: break;
        }
    if constexpr (std::is_same_v<Rule, AdamUpdateUnits> && kRoot == Root::kFactored)
        if (how.weight == From::kSix)
            return at.whole ? advance_chunks<Rule, kRoot, From::kSix, true, Moments::kPacked, false, false, true>
                            : advance_chunks<Rule, kRoot, From::kSix, true, Moments::kPacked, false, false, false>;
    const bool packed = how.moments == Moments::kPacked;
    if constexpr (std::is_same_v<Rule, Adam> && kRoot == Root::kCoarse)  // what eight-bit Adam is
        if (how.moments == Moments::kBytes) return chunks<Rule, kRoot, From::kPlace, Moments::kBytes>(task, at);
    if (how.weight == From::kPlace)
        return packed ? chunks<Rule, kRoot, From::kPlace, Moments::kPacked>(task, at)
                      : chunks<Rule, kRoot, From::kPlace, Moments::kBuffer>(task, at);
    return packed ? chunks<Rule, kRoot, From::kBuffer, Moments::kPacked>(task, at)
                  : chunks<Rule, kRoot, From::kBuffer, Moments::kBuffer>(task, at);
}

template <class Rule>
RuleFunction chunks(const MlTask& task, const Passage& how, const Occasion& at) {
    return task.second.kind == ML_FACTORED ? chunks<Rule, Root::kFactored>(task, how, at)
                                           : chunks<Rule, Root::kCoarse>(task, how, at);
}

// Vectors of four elements go through `advance_any`, always.
inline Passage passage(const MlTask& t, const Scalars& c, const Span& span, bool narrow, bool in_place, bool injects) {
    Passage how;
    const bool in_weight_units = t.rule == ML_ADAM_WEIGHT_UNITS, in_update_units = t.rule == ML_ADAM_UPDATE_UNITS;
    const bool usual = span.has_even_chunks() && is_scaled(t.first) && !t.maximize && !t.has_l2 && c.has_eps_square &&
                       (t.second.kind == ML_LOG || t.second.kind == ML_FACTORED) &&
                       (in_weight_units ? t.step_size == 1.0f : in_update_units || t.rule == ML_ADAM) &&
                       (injects ? in_weight_units && !in_place : !t.pays_back || t.payback == 0.0f) &&
                       !(in_place && narrow);
    if (!usual || kLanes < 8) return how;
    const bool are_bytes = is_in_bytes(t.first, ML_LINEAR, span) && is_in_bytes(t.second, ML_LOG, span);
    if (is_packed(t.first, span) && (t.second.kind == ML_FACTORED || is_packed(t.second, span)))
        how.moments = Moments::kPacked;
    else if (are_bytes && in_place && t.rule == ML_ADAM)
        how.moments = Moments::kBytes;
    if (in_place)
        how.weight = From::kPlace;
    else if (how.moments == Moments::kPacked)
        how.weight = stored_codes(t.weight, span);
    const bool is_usual_six = how.weight == From::kSix && in_update_units && t.second.kind == ML_FACTORED;
    const bool is_common = in_weight_units ? how.weight <= From::kTable || (narrow && injects)
                                           : how.weight <= From::kPlace || (narrow && is_usual_six);
    if (!is_common) how.weight = From::kBuffer;
    const Occasion at{narrow, injects, span.has_whole_chunks()};
    if constexpr (kLanes >= 8)
        how.function = in_weight_units   ? chunks<AdamWeightUnits>(t, how, at)
                       : in_update_units ? chunks<AdamUpdateUnits>(t, how, at)
                                         : chunks<Adam>(t, how, at);
    return how;
}

}  // namespace MASTERLESS_ISA
}  // namespace masterless
