// Ranks that are processes, over MPI: the only header that includes mpi.h, and no other includes it.
#pragma once

#include "communicator.hpp"

#include <mpi.h>

namespace attn::inline ATTN_INSTRUCTION_SET {

/// The processes of an MPI communicator as ranks. Messages of any size: those beyond `longest_message` bytes, which MPI's counts could not
/// hold, go in several. They meet no others of the program: the communicator is a duplicate.
/// MPI has been initialised before, and is finalised after it; at MPI_THREAD_FUNNELED if calls are given executors of several threads. Each
/// process makes and destroys it at the same place of the program. A process that ends with an exception must call MPI_Abort, as in any
/// program of MPI: what attn throws, it throws on all.
/// Throws argument_error if MPI is not running, and rank_error, with MPI's words, if it fails.
class mpi_communicator {
public:
    /// A message, perhaps in several. It is waited for before it goes.
    class request {
    public:
        request() = default;

    private:
        friend mpi_communicator;
        std::vector<MPI_Request> parts_;
    };

    /// All ranks have the same longest_message.
    explicit mpi_communicator(MPI_Comm processes = MPI_COMM_WORLD, index_t longest_message = index_t{1} << 30) : longest_(longest_message) {
        int initialised = 0, finalised = 0;
        MPI_Initialized(&initialised);
        MPI_Finalized(&finalised);
        if (!initialised || finalised) detail::raise(argument_error(name, "MPI", "is not running: MPI_Init comes first"));
        if (longest_ < 1 || longest_ > std::numeric_limits<int>::max())
            detail::raise(argument_error(name, "longest_message", "must be 1 to 2^31 - 1 bytes, not ", longest_));
        check(MPI_Comm_dup(processes, &processes_));
        check(MPI_Comm_set_errhandler(processes_, MPI_ERRORS_RETURN));
        int number = 0;
        check(MPI_Comm_rank(processes_, &number));
        rank_ = number;
        check(MPI_Comm_size(processes_, &number));
        size_ = number;
    }
    mpi_communicator(const mpi_communicator&) = delete;
    mpi_communicator& operator=(const mpi_communicator&) = delete;
    ~mpi_communicator() {
        int finalised = 0;
        MPI_Finalized(&finalised);
        if (!finalised) MPI_Comm_free(&processes_);
    }

    index_t rank() const noexcept { return rank_; }
    index_t size() const noexcept { return size_; }
    request send(index_t to, index_t tag, std::span<const std::byte> bytes) {
        return in_parts(bytes, [&](std::span<const std::byte> part, MPI_Request* sent) {
            return MPI_Isend(part.data(), static_cast<int>(part.size()), MPI_BYTE, static_cast<int>(to), static_cast<int>(tag), processes_,
                             sent);
        });
    }
    request receive(index_t from, index_t tag, std::span<std::byte> bytes) {
        return in_parts(bytes, [&](std::span<std::byte> part, MPI_Request* received) {
            return MPI_Irecv(part.data(), static_cast<int>(part.size()), MPI_BYTE, static_cast<int>(from), static_cast<int>(tag),
                             processes_, received);
        });
    }
    bool test(request& asked) {
        int done = 0;
        check(MPI_Testall(static_cast<int>(asked.parts_.size()), asked.parts_.data(), &done, MPI_STATUSES_IGNORE));
        return done != 0;
    }
    void wait(request& asked) { check(MPI_Waitall(static_cast<int>(asked.parts_.size()), asked.parts_.data(), MPI_STATUSES_IGNORE)); }

private:
    static constexpr std::string_view name = "mpi_communicator";

    template <class Byte, class F>
    request in_parts(std::span<Byte> bytes, const F& begin) {
        request all;
        const auto longest = static_cast<std::size_t>(longest_);
        all.parts_.resize((bytes.size() + longest - 1) / longest, MPI_REQUEST_NULL);
        for (auto& part : all.parts_) {
            const auto size = std::min(bytes.size(), longest);
            check(begin(bytes.first(size), &part));
            bytes = bytes.subspan(size);
        }
        return all;
    }
    static void check(int error) {
        if (error == MPI_SUCCESS) return;
        char text[MPI_MAX_ERROR_STRING] = {};
        int length = 0;
        MPI_Error_string(error, text, &length);
        detail::raise(rank_error("mpi_communicator: " + std::string(text, static_cast<std::size_t>(length))));
    }

    index_t longest_, rank_ = 0, size_ = 1;
    MPI_Comm processes_ = MPI_COMM_NULL;
};

} // namespace attn
