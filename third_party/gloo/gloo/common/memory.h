// gloo::WeakNonOwningPtr and its kin, which headers of Gloo name and Debian's libgloo-dev (0.0~git20220518) does not
// contain. Only what is needed to see how large a gloo::transport::tcp::Pair is and to derive from it: one pointer of the
// standard library each, as in the library that is linked. Who uses them is the library.
#pragma once

#include <memory>

namespace gloo {

template <typename T>
class WeakNonOwningPtr final {
 protected:
  std::weak_ptr<T> ptr_;
};

template <typename T>
class NonOwningPtr final {
 private:
  std::shared_ptr<T> ptr_;
};

template <typename T>
class ShareableNonOwningPtr final {
 protected:
  std::shared_ptr<T> ptr_;
};

}  // namespace gloo
