// Every operator, norm, pattern, score function and executor. What is built of them, layers and blocks, is included by name from layer/.
// Single headers may be included instead; each compiles alone.
#pragma once

#include "attention/attention.hpp"
#include "attention/eigen.hpp"
#include "attention/focused_linear_attention.hpp"
#include "attention/linear_attention.hpp"
#include "attention/linformer_attention.hpp"
#include "attention/merge.hpp"
#include "attention/pooling.hpp"
#include "attention/project.hpp"
#include "attention/random_projection.hpp"
#include "attention/simplified_linear_attention.hpp"
#include "attention/softmax_attention.hpp"
#include "attention/sparse_attention.hpp"
#include "attention/talking_heads_attention.hpp"
#include "core/heads.hpp"
#include "core/tensor.hpp"
#include "norm/fold.hpp"
#include "norm/gamma_schedule.hpp"
#include "norm/layer_norm.hpp"
#include "norm/progressive_rep_batch_norm.hpp"
#include "norm/recalibration.hpp"
#include "norm/rep_batch_norm.hpp"
#include "norm/rms_norm.hpp"
#include "parallel/openmp.hpp"
#include "parallel/thread_pool.hpp"
#include "pattern/block_diagonal.hpp"
#include "pattern/block_sparse.hpp"
#include "pattern/causal.hpp"
#include "pattern/dilated_window.hpp"
#include "pattern/fixed.hpp"
#include "pattern/global.hpp"
#include "pattern/lengths.hpp"
#include "pattern/local.hpp"
#include "pattern/on_heads.hpp"
#include "pattern/predicate.hpp"
#include "pattern/prefix.hpp"
#include "pattern/segments.hpp"
#include "pattern/strided.hpp"
#include "pattern/tiles.hpp"
#include "score/additive_bias.hpp"
#include "score/alibi.hpp"
#include "score/composed_score.hpp"
#include "score/soft_cap.hpp"
#include "version.hpp"

/// Attention operators for CPUs, and what they are made of: patterns, score functions, projections, feature maps, norms, layers, executors.
namespace attn {}

/// The operators' definitions: the printed formulas, slow and obvious, which kernels are held to.
namespace attn::inline ATTN_INSTRUCTION_SET::reference {}
