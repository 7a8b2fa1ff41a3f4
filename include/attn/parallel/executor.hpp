// Where work runs. An executor is two functions; the library does the rest (tiles, workspace slices, exceptions).
#pragma once

#include "../core/function_ref.hpp"
#include "../core/workspace.hpp"

#include <algorithm>
#include <atomic>
#include <exception>
#include <memory>
#include <optional>

namespace attn::inline ATTN_INSTRUCTION_SET {

/// A reference to a callable void(index_t), for the duration of a call. Two pointers: passing it never allocates.
using function_ref = detail::call_ref<index_t>;

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

/// Runs everything on the calling thread.
struct sequential {
    index_t concurrency() const noexcept { return 1; }
    void parallel_for(index_t count, function_ref body) const {
        for (index_t i = 0; i < count; ++i) body(i);
    }
};

namespace detail {

/// The first exception of bodies that run at once, kept until all of them are done: until then nothing that they refer to may be unwound.
class first_exception {
public:
    void keep_of(const auto& body) noexcept {
        try_catch(body, [&] {
            if (!thrown_.test_and_set()) exception_ = std::current_exception();
        });
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

/// So many bodies are handed to an executor at most, whatever it says: each has memory of its own.
inline constexpr index_t most_threads = 4096;

/// How many bodies of an executor run at once: 1 for one that says fewer.
index_t concurrency_of(Executor auto& executor) { return std::clamp<index_t>(executor.concurrency(), 1, most_threads); }

/// What runs on the calling thread where no executor is given.
inline constexpr sequential calling_thread;

} // namespace detail

/// An executor and the workspace its bodies share: what `forward` needs besides its tensors. Refers to the executor, which outlives it. A
/// workspace that it is given it refers to as well, and calls that need more are refused; without, it has one of its own, which grows to
/// what calls need: an execution that is kept serves a whole model, and allocates only until its workspace is large enough. Two calls at a
/// time need two of them.
class execution {
public:
    /// The calling thread, and a workspace of its own.
    execution() : execution(detail::calling_thread) {}
    /// An executor, which outlives it, and a workspace of its own.
    template <Executor E>
    explicit execution(E& executor)
        : executor_(const_cast<void*>(static_cast<const void*>(std::addressof(executor)))),
          parallel_for_([](void* e, index_t count, function_ref body) { static_cast<E*>(e)->parallel_for(count, body); }),
          concurrency_(detail::concurrency_of(executor)) {}
    /// An executor and a workspace, which both outlive it.
    execution(Executor auto& executor, attn::workspace& workspace) : execution(executor) {
        lent_ = &workspace;
        grows_ = false;
    }
    template <class E, class... Workspace>
        requires(Executor<E> && !std::is_lvalue_reference_v<E>)
    explicit execution(E&& temporary, Workspace&&...) = delete;

    index_t concurrency() const noexcept { return concurrency_; }
    /// The memory that the bodies share.
    attn::workspace& workspace() const noexcept { return lent_ ? *lent_ : own_; }
    /// Whether the workspace grows to what an operation wants.
    bool grows() const noexcept { return grows_; }
    /// Sees to so many bytes of workspace for an operation on `what`, of that shape. Throws argument_error if it has fewer and cannot grow.
    void reserve(std::string_view operation, std::string_view what, const shape& s, std::size_t bytes) const {
        auto& memory = workspace();
        if (grows_) memory.reserve(bytes);
        else if (memory.size_bytes() < bytes) refuse(operation, what, s, bytes);
    }

    /// Calls body(task, slice) for every task in [0, count). At any moment no two running bodies have the same slice, and
    /// slice < concurrency(), so a slice names a piece of the workspace. Tasks are handed out by an atomic counter: a thread that
    /// is done early takes the next one. The first exception stops the hand-out and reaches the caller.
    void for_each(index_t count, detail::call_ref<index_t, index_t> body) const {
        const auto at_once = !pause_ ? count : concurrency_ == 1 ? 1 : 4 * concurrency_; // so that few threads wait for the last
        for (index_t first = 0; first < count; first += at_once) {
            hand_out(first, std::min(count, first + at_once), body);
            if (pause_) (*pause_)(first);
        }
    }
    /// Whether the calling thread does something else between tasks, which should be short then.
    bool pauses() const noexcept { return pause_.has_value(); }

protected:
    struct refer {};
    /// Refers to what another refers to and to what it owns.
    execution(const execution& other, refer) noexcept
        : pause_(other.pause_), executor_(other.executor_), parallel_for_(other.parallel_for_), concurrency_(other.concurrency_),
          lent_(&other.workspace()), grows_(other.grows_) {}
    std::optional<function_ref> pause_ = {};

private:
    /// Calls body(task, slice) for the tasks first .. end - 1.
    void hand_out(index_t first, index_t end, detail::call_ref<index_t, index_t> body) const {
        const auto slices = std::min(end - first, concurrency_);
        if (slices <= 1) {
            for (auto task = first; task < end; ++task) body(task, index_t{0});
            return;
        }
        std::atomic<index_t> next = first;
        detail::first_exception failure;
        const auto work = [&](index_t slice) {
            failure.keep_of([&] {
                detail::try_catch(
                    [&] {
                        for (auto task = next++; task < end; task = next++) body(task, slice);
                    },
                    [&] {
                        next = end;
                        detail::throw_again();
                    });
            });
        };
        parallel_for_(executor_, slices, work);
        failure.rethrow();
    }

    [[noreturn, gnu::cold]] void refuse(std::string_view operation, std::string_view what, const shape& s, std::size_t bytes) const {
        detail::raise(
            argument_error(operation, "workspace",
                           detail::joined({"has ", std::to_string(workspace().size_bytes()), " bytes, but ", what, " of shape ",
                                           to_string(s), " on ", std::to_string(concurrency_), " threads needs ", std::to_string(bytes)})));
    }

    void* executor_;
    void (*parallel_for_)(void*, index_t, function_ref);
    index_t concurrency_;
    attn::workspace* lent_ = nullptr;
    mutable attn::workspace own_; ///< where none is lent
    bool grows_ = true;
};

namespace detail {

/// An execution whose calling thread calls pause(task) between tasks, which it interrupts for that: so messages move on meanwhile that no
/// other thread may ask for. It refers to `pause` and to the execution.
class pausing_execution : public execution {
public:
    pausing_execution(const execution& run, function_ref pause) noexcept : execution(run, refer()) { pause_ = pause; }
};

/// How a call runs, for as long as it runs: an execution, or an executor, which may be a temporary, with a workspace that is made for the
/// call; of neither, the calling thread.
class call_execution : public execution {
public:
    call_execution() = default;
    call_execution(const execution& run) noexcept : execution(run, refer()) {}
    template <class E>
        requires Executor<std::remove_reference_t<E>>
    call_execution(E&& executor) : execution(executor) {}
};

} // namespace detail

} // namespace attn
