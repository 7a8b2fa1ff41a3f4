// An executor over OpenMP, present where the compiler has it switched on (-fopenmp).
#pragma once

#include "executor.hpp"

#ifdef _OPENMP

#include <omp.h>

namespace attn::inline ATTN_INSTRUCTION_SET {

/// OpenMP's threads. Inside somebody's parallel region it follows OpenMP's rule for nested ones: inline, unless allowed otherwise.
struct openmp {
    index_t threads = omp_get_max_threads(); ///< at most

    index_t concurrency() const noexcept { return std::max<index_t>(1, threads); }
    void parallel_for(index_t count, function_ref body) const {
        [[maybe_unused]] const auto team = static_cast<int>(std::clamp<index_t>(count, 1, concurrency()));
        detail::first_exception failure; // none may leave OpenMP's loop
#pragma omp parallel for schedule(static, 1) num_threads(team)
        for (index_t i = 0; i < count; ++i) failure.keep_of([&] { body(i); });
        failure.rethrow();
    }
};

} // namespace attn

#endif
