// The names of tensors: what a training framework's wrappers added is taken off, exactly, and nothing else.
//
// A name is split on "."; a whole segment is dropped when a wrapper put it there:
//   _orig_mod, _checkpoint_wrapped_module, _fsdp_wrapped_module      at any depth
//   module (data parallel)                                         only where NameRules declares it
// The last segment is the tensor's own name and always stays. Substrings are never touched. Examples:
//   _orig_mod.layers.0._orig_module.w     ->  layers.0._orig_module.w
//   my_orig_mod.w                         ->  my_orig_mod.w
//   module.encoder.w                      ->  module.encoder.w, or encoder.w with root_wrappers {"module"}
// Everything else is data: parametrizations.*, lora_*, base_layer, _extra_state, ...
//
// Pure functions and a plain container: const access from many threads is safe, AliasTable::Add needs exclusive access.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace shardmesh {

inline constexpr size_t kMaxNameBytes = 4096;

// What the names alone cannot tell; whoever has the module tree reads it off there. Prefixes are of names AS GIVEN,
// wrappers included, whole segments, without a "." at the end.
struct NameRules {
  // The wrapper segments that stand at the head of the names, in order, e.g. {"_orig_mod", "module"} for a compiled
  // data-parallel model. They are dropped from names that start with all of them.
  std::vector<std::string> root_wrappers;
  // Modules that are data-parallel wrappers: one `module` directly behind such a prefix is dropped.
  std::set<std::string, std::less<>> wrapped_at;
  // Children that a user happened to name like a wrapper: the last segment of such a prefix is kept. Wins over all
  // others.
  std::set<std::string, std::less<>> literal;

  bool empty() const { return root_wrappers.empty() && wrapped_at.empty() && literal.empty(); }
};

// OK when `name` can be the name of a tensor. InvalidArgument: empty, an empty segment, a NUL byte, not UTF-8 (RFC
// 3629), or longer than kMaxNameBytes; the message has the name, escaped and cut.
absl::Status ValidateName(absl::string_view name);

// OK when `text`, which may be empty, is text. InvalidArgument: a NUL byte, not UTF-8, or longer than kMaxNameBytes;
// the message begins with `what`.
absl::Status ValidateText(absl::string_view what, absl::string_view text);

// A name as it stands in messages: in quotes, escaped, and cut.
std::string QuotedName(absl::string_view name);

// InvalidArgument: a root wrapper that is no wrapper segment, or a prefix that ValidateName refuses.
absl::Status ValidateNameRules(const NameRules& rules);

// The canonical name of `raw`. InvalidArgument as the two above.
// Idempotent: a canonical name is its own canonical name, under CanonicalRules(rules) always, and under `rules` too
// unless a user's child named like a wrapper stands directly behind one. (Under root_wrappers {"module"} the name as
// given module.module.w means module.w, and the name as given module.w means w: one rule cannot know which it is
// given.)
absl::StatusOr<std::string> Canonical(absl::string_view raw, const NameRules& rules = {});

// Names in one stretch of memory, in their order. The views live as long as it does.
class PackedNames {
 public:
  size_t size() const { return ends_.size(); }
  absl::string_view operator[](size_t i) const {  // REQUIRES: i < size()
    const size_t begin = i == 0 ? 0 : ends_[i - 1];
    return absl::string_view(bytes_.get() + begin, ends_[i] - begin);
  }

 private:
  friend class Canonicalizer;
  std::unique_ptr<char[]> bytes_;
  std::vector<size_t> ends_;
};

// Rules made ready for many names: they are checked and copied once. Immutable, so safe to use from many threads.
class Canonicalizer {
 public:
  Canonicalizer() = default;  // of no rules

  // Errors as ValidateNameRules.
  static absl::StatusOr<Canonicalizer> Create(const NameRules& rules);

  // As the function above, with the rules given to Create. InvalidArgument as ValidateName.
  absl::StatusOr<std::string> Canonical(absl::string_view raw) const;

  // The same for each name, several times as fast. The error of the first name that has one.
  absl::StatusOr<PackedNames> CanonicalAll(absl::Span<const std::string> raw) const;

 private:
  NameRules rules_;
};

// The rules for names that are canonical already: the literals, as they read in canonical names.
// Errors as ValidateNameRules.
absl::StatusOr<NameRules> CanonicalRules(const NameRules& rules);

// The rules under which each of these canonical names stays as it is: segments that are named like wrappers are the
// user's own. A job that is made again from its own names needs them.
NameRules RulesOfCanonical(absl::Span<const std::string> names);

// One client's names: raw <-> canonical, and which names share one storage.
//   Add("_orig_mod.embed.w")                 -> embed.w, a storage of its own
//   Add("head.w", "_orig_mod.embed.w")       -> head.w, tied: the storage of embed.w; both names appear on export
//   Add("embed.w")                           -> AlreadyExists: two raw names, one canonical name, not declared as a tie
class AliasTable {
 public:
  explicit AliasTable(const NameRules& rules = {});

  // Adds a raw name and returns its canonical one. With `tied_to`, a raw name added before, it shares that one's
  // storage and may have the same canonical name. Adding the same again changes nothing and is OK. On any error nothing
  // changed. InvalidArgument: as Canonical, for either name or the rules. NotFound: `tied_to` was not added.
  // AlreadyExists: the canonical name belongs to another storage, or `raw` was added with another tie; names both raw
  // names and the canonical one.
  absl::StatusOr<std::string> Add(absl::string_view raw, std::optional<absl::string_view> tied_to = std::nullopt);

  // NotFound: never added, here and below.
  absl::StatusOr<std::string> CanonicalOf(absl::string_view raw) const;
  // The raw names of a canonical one, oldest first; more than one only when they are ties.
  absl::StatusOr<std::vector<std::string>> RawOf(absl::string_view canonical) const;
  // The canonical name under which the bytes are stored: the first one added of its ties.
  absl::StatusOr<std::string> StorageOf(absl::string_view canonical) const;
  // Every raw name of the storage of `canonical`, oldest first: the names to write on export.
  absl::StatusOr<std::vector<std::string>> ExportNames(absl::string_view canonical) const;

  // The canonical names that own a storage, oldest first.
  std::vector<std::string> Storages() const;
  size_t num_raw_names() const { return by_raw_.size(); }

 private:
  struct Storage {
    std::string canonical;         // of the first name added
    std::vector<std::string> raw;  // every name, oldest first
  };
  struct Entry {
    std::string canonical;
    size_t storage;
  };

  absl::StatusOr<const Storage*> Find(absl::string_view canonical) const;
  absl::Status CheckFree(absl::string_view raw, const Entry& entry, bool tied) const;

  // Constant after construction. An error of the rules given is what every Add returns.
  absl::StatusOr<Canonicalizer> canonicalizer_;
  // Changed by Add. Storages are indices into storages_.
  std::vector<Storage> storages_;
  absl::flat_hash_map<std::string, Entry> by_raw_;
  absl::flat_hash_map<std::string, size_t> by_canonical_;
};

}  // namespace shardmesh
