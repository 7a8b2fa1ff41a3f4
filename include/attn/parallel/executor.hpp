// Where work runs. An executor is two functions; the library does the rest (tiles, workspace slices, exceptions).
#pragma once

#include "../core/workspace.hpp"

#include <algorithm>
#include <atomic>
#include <exception>
#include <memory>
#include <utility>

namespace attn::inline ATTN_INSTRUCTION_SET {

/// A reference to a callable void(index_t), for the duration of a call. Two pointers: passing it never allocates.
class function_ref {
public:
    /// Refers to `function`, which outlives it.
    template <class F>
        requires(!std::same_as<std::remove_cvref_t<F>, function_ref> && std::invocable<F&, index_t>)
    function_ref(F&& function)
        : object_(const_cast<void*>(static_cast<const void*>(std::addressof(function)))),
          call_([](void* object, index_t i) { (*static_cast<std::remove_reference_t<F>*>(object))(i); }) {}

    void operator()(index_t i) const { call_(object_, i); }

private:
    void* object_;
    void (*call_)(void*, index_t);
};

namespace detail {

/// The first exception of bodies that run at once, kept until all of them are done: until then nothing that they refer to may be unwound.
class first_exception {
public:
    template <class F>
    void keep_of(const F& body) noexcept {
        try {
            body();
        } catch (...) {
            if (!thrown_.test_and_set()) exception_ = std::current_exception();
        }
    }
    /// Whether a body has thrown.
    bool any() const noexcept { return thrown_.test(); }
    /// Throws again what a body has thrown. The caller calls it when all are done.
    void rethrow() const {
        if (exception_) std::rethrow_exception(exception_);
    }

private:
    std::atomic_flag thrown_;
    std::exception_ptr exception_;
};

} // namespace detail

namespace detail {

/// An address that no other thread has: which one is calling.
inline const void* this_thread() noexcept {
    static thread_local char own;
    return &own;
}

} // namespace detail

/// Runs bodies in parallel.
/// - `concurrency()`: how many bodies can run at once, at least 1, the same number for the executor's lifetime.
/// - `parallel_for(count, body)`, count <= concurrency(): calls body(0) ... body(count - 1), each once, in any order, on any
///   threads, and returns when all are done. The bodies that attn gives it do not throw; attn's own executors wait for all bodies even
///   if one throws, and then pass on the first exception.
template <class E>
concept Executor = requires(E& executor, index_t count, function_ref body) {
    { executor.concurrency() } -> std::convertible_to<index_t>;
    executor.parallel_for(count, body);
};

/// An executor as calls take it: a variable, or a temporary.
template <class E>
concept ExecutorArgument = Executor<std::remove_reference_t<E>>;

/// Runs everything on the calling thread.
struct sequential {
    index_t concurrency() const noexcept { return 1; }
    void parallel_for(index_t count, function_ref body) const {
        for (index_t i = 0; i < count; ++i) body(i);
    }
};

namespace detail {

/// So many bodies are handed to an executor at most, whatever it says: each has memory of its own.
inline constexpr index_t most_threads = 4096;

/// How many bodies of an executor run at once: 1 for one that says fewer.
template <Executor E>
index_t concurrency_of(E& executor) {
    return std::clamp<index_t>(executor.concurrency(), 1, most_threads);
}

} // namespace detail

/// An executor and the workspace its bodies share: what `forward` needs besides its tensors. Refers to both, owns neither.
class execution {
public:
    /// Refers to an executor and a workspace, which both outlive it.
    template <Executor E>
    execution(E& executor, attn::workspace& workspace)
        : executor_(const_cast<void*>(static_cast<const void*>(std::addressof(executor)))),
          parallel_for_([](void* e, index_t count, function_ref body) { static_cast<E*>(e)->parallel_for(count, body); }),
          concurrency_(detail::concurrency_of(executor)), workspace_(&workspace) {}

    index_t concurrency() const noexcept { return concurrency_; }
    /// The memory that the bodies share.
    attn::workspace& workspace() const noexcept { return *workspace_; }

    /// Calls body(task, slice) for every task in [0, count). At any moment no two running bodies have the same slice, and
    /// slice < concurrency(), so a slice names a piece of the workspace. Tasks are handed out by an atomic counter: a thread that
    /// is done early takes the next one. The first exception stops the hand-out and reaches the caller.
    template <std::invocable<index_t, index_t> Body>
    void for_each(index_t count, const Body& body) const {
        const auto slices = std::min(count, concurrency_);
        if (slices <= 1) {
            for (index_t task = 0; task < count; ++task) body(task, index_t{0});
            return;
        }
        std::atomic<index_t> next = 0;
        detail::first_exception failure;
        const auto work = [&](index_t slice) {
            failure.keep_of([&] {
                try {
                    for (auto task = next++; task < count; task = next++) body(task, slice);
                } catch (...) {
                    next = count;
                    throw;
                }
            });
        };
        parallel_for_(executor_, slices, work);
        failure.rethrow();
    }

private:
    void* executor_;
    void (*parallel_for_)(void*, index_t, function_ref);
    index_t concurrency_;
    attn::workspace* workspace_;
};

namespace detail {

/// Throws argument_error if the workspace is too small for a call on x.
inline void check_workspace(std::string_view operation, const execution& run, std::size_t needed, const shape& x) {
    if (run.workspace().size_bytes() >= needed) return;
    throw argument_error(operation, "workspace",
                         "has " + std::to_string(run.workspace().size_bytes()) + " bytes, but x of shape " + to_string(x) + " on " +
                             std::to_string(run.concurrency()) + " threads needs " + std::to_string(needed));
}

} // namespace detail

} // namespace attn
