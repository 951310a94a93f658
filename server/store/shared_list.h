// SharedList: a list that never changes, which copies share: a copy costs a counter, and lists that share are equal
// without being looked at. A job of 16,384 ranks has one list of its members, however many records, batches and
// assignments have it.
//
// Thread-compatible; lists that share may be used and destroyed by different threads.
//
//   SharedList<int> a = {1, 2};
//   std::vector<int> changed = a.ToVector();   // to change it: copy, change, replace
//   changed[0] = 3;
//   a = std::move(changed);
#pragma once

#include <algorithm>
#include <cstddef>
#include <initializer_list>
#include <memory>
#include <utility>
#include <vector>

namespace shardmesh {

template <typename T>
class SharedList {
 public:
  using value_type = T;
  using const_reference = const T&;
  using size_type = size_t;
  using const_iterator = const T*;
  using iterator = const_iterator;

  SharedList() = default;
  SharedList(std::vector<T> values)  // NOLINT: a vector is a list
      : values_(values.empty() ? nullptr : std::make_shared<const std::vector<T>>(std::move(values))) {}
  SharedList(std::initializer_list<T> values) : SharedList(std::vector<T>(values)) {}

  size_t size() const { return values_ == nullptr ? 0 : values_->size(); }
  bool empty() const { return values_ == nullptr; }
  const T* begin() const { return values_ == nullptr ? nullptr : values_->data(); }
  const T* end() const { return begin() + size(); }
  // REQUIRES: index < size().
  const T& operator[](size_t index) const { return (*values_)[index]; }

  std::vector<T> ToVector() const { return std::vector<T>(begin(), end()); }
  void clear() { values_ = nullptr; }

  // Both are copies of one list, or empty.
  bool SharesWith(const SharedList& other) const { return values_ == other.values_; }

  friend bool operator==(const SharedList& a, const SharedList& b) {
    return a.SharesWith(b) || std::equal(a.begin(), a.end(), b.begin(), b.end());
  }
  friend bool operator!=(const SharedList& a, const SharedList& b) { return !(a == b); }

 private:
  std::shared_ptr<const std::vector<T>> values_;  // null: it is empty
};

}  // namespace shardmesh
