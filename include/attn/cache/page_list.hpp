// The pages that a sequence has taken of a pool.
#pragma once

#include "key_value_pool.hpp"

#include <algorithm>
#include <utility>

namespace attn::inline ATTN_INSTRUCTION_SET::detail {

/// The pages of one sequence, by number, which go back to the pool with it: null where all tokens of a page are evicted. A copy uses the
/// same pages; who writes to one makes it its own before.
template <Scalar T>
class page_list {
public:
    explicit page_list(key_value_pool<T>& pool) : pool_(&pool) {}
    page_list(const page_list& other) : pool_(other.pool_), pages_(other.pages_) {
        for (const auto* page : pages_)
            if (page) ++pool_->uses(page);
    }
    page_list(page_list&& other) noexcept : pool_(other.pool_), pages_(std::move(other.pages_)) {}
    page_list& operator=(page_list other) noexcept {
        std::swap(pool_, other.pool_);
        std::swap(pages_, other.pages_);
        return *this;
    }
    ~page_list() { drop_from(0); }

    key_value_pool<T>& pool() const { return *pool_; }
    /// How many pages there are, and how many of them are not evicted.
    index_t count() const { return std::ssize(pages_); }
    index_t used() const { return count() - std::count(pages_.begin(), pages_.end(), nullptr); }
    std::byte* operator[](index_t number) const { return pages_[static_cast<std::size_t>(number)]; }
    /// The pages from one on.
    const std::byte* const* from(index_t number) const { return pages_.data() + number; }
    /// Whether others use a page too.
    bool is_shared(index_t number) const { return (*this)[number] && pool_->uses((*this)[number]) > 1; }
    /// How many pages from one on others use too.
    index_t shared_from(index_t number) const {
        index_t shared = 0;
        for (; number < count(); ++number) shared += is_shared(number);
        return shared;
    }

    /// Room for so many pages: to extend them to as many does not throw then.
    void reserve(index_t all) { pages_.reserve(to_size(all)); }
    /// Takes pages until there are so many. The pool has them.
    void extend(index_t all) {
        while (count() < all) pages_.push_back(pool_->take());
    }
    /// Adds places of pages, which are not taken, until there are so many.
    void extend_evicted(index_t all) { pages_.resize(to_size(all)); }
    /// Makes a page one that nobody else has, with what was in it, if it is not evicted. The pool has one.
    void own(index_t number) {
        auto* const own = pool_->take();
        if (const auto* const shared = std::exchange(pages_[static_cast<std::size_t>(number)], own)) {
            std::copy_n(shared, pool_->places_.bytes, own);
            pool_->give_back(shared);
        }
    }
    /// Gives a page back, all of whose tokens are evicted.
    void evict(index_t number) {
        if (const auto* const page = std::exchange(pages_[static_cast<std::size_t>(number)], nullptr)) pool_->give_back(page);
    }
    /// Gives back the pages from one on.
    void drop_from(index_t number) {
        for (; count() > number; pages_.pop_back())
            if (pages_.back()) pool_->give_back(pages_.back());
    }

private:
    key_value_pool<T>* pool_;
    std::vector<std::byte*> pages_;
};

} // namespace attn::detail
