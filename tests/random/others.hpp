// What draws and checks a problem of each family.
#pragma once

#include "families.hpp"

namespace attn::fuzz {

outcome check_softmax(draw&);
outcome check_pointwise(draw&);
outcome check_talking_heads(draw&);
/// Linear attention, causal or not, with feature maps and patterns of the library's.
outcome check_linear(draw&);
/// Simplified and focused linear attention, with their convolution.
outcome check_convolved(draw&);
outcome check_linformer(draw&);
/// Projecting tokens by itself.
outcome check_projection(draw&);
/// Patterns composed at random: integers, ranges, lanes, schedules and passes agree.
outcome check_pattern(draw&);
/// Layer, RMS, unit, batch and rep batch norm, and the curves in their place.
outcome check_norm(draw&);
/// The depthwise convolution by itself.
outcome check_convolution(draw&);
/// The causal convolution with its states, whole, in pieces and ragged.
outcome check_causal_convolution(draw&);
/// LSH attention.
outcome check_hashed(draw&);
/// Rotary positions.
outcome check_rotation(draw&);
/// Two halves of the keys, merged.
outcome check_merge(draw&);
/// Programs on caches.
outcome check_cache(draw&);
/// Programs on states of linear attention.
outcome check_linear_state(draw&);
/// Recurrent attention, by every rule.
outcome check_recurrent(draw&);
/// Programs on states of recurrent attention.
outcome check_recurrent_state(draw&);
/// Log decays of a kind, 0 .. 3.
double draw_log_decay(draw&, index_t kind);
/// Attention over ranks.
outcome check_ranks(draw&);
/// Recurrent attention over ranks.
outcome check_recurrent_over_ranks(draw&);

} // namespace attn::fuzz
