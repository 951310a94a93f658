#include "core/names/names.h"

#include <algorithm>
#include <cstdint>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "core/base/status.h"
#include "core/base/utf8.h"
#include "core/names/name_scan.h"

namespace shardmesh {
namespace {

constexpr size_t kMaxQuotedBytes = 160;
constexpr absl::string_view kDataParallel = "module";

bool IsWrapper(absl::string_view segment) { return absl::c_linear_search(internal::kWrapperSegments, segment); }

absl::Status Bad(absl::string_view what, absl::string_view text, absl::string_view problem) {
  return absl::InvalidArgumentError(absl::StrCat(what, " ", QuotedName(text), " ", problem));
}

// True for most names: in one pass they are seen to be valid, in ASCII, and without a segment that rules might drop.
bool IsPlain(absl::string_view name) {
  if (name.empty() || name.size() > kMaxNameBytes) return false;
  for (size_t start = 0, at = 0;; ++at) {
    if (at < name.size() && name[at] != '.') {
      if (static_cast<signed char>(name[at]) <= 0) return false;
      continue;
    }
    if (at == start) return false;
    const absl::string_view segment = name.substr(start, at - start);
    if ((segment[0] == '_' && IsWrapper(segment)) || segment == kDataParallel) return false;
    if (at == name.size()) return true;
    start = at + 1;
  }
}

// Drops the wrappers of a valid name. REQUIRES: valid name and rules.
std::string DropWrappers(absl::string_view raw, const NameRules& rules) {
  const std::vector<absl::string_view> segments = absl::StrSplit(raw, '.');
  const auto prefix = [&](size_t n) {  // the first n segments of the name as given
    return n == 0 ? raw.substr(0, 0) : raw.substr(0, segments[n - 1].data() + segments[n - 1].size() - raw.data());
  };
  const auto& root = rules.root_wrappers;
  const bool wrapped_root = segments.size() > root.size() && std::equal(root.begin(), root.end(), segments.begin());
  std::string canonical;
  for (size_t i = 0; i < segments.size(); ++i) {
    const bool last = i + 1 == segments.size();
    const bool declared = (wrapped_root && i < root.size()) ||
                          (segments[i] == kDataParallel && i > 0 && rules.wrapped_at.count(prefix(i)) > 0);
    const bool droppable = !last && (declared || IsWrapper(segments[i]));
    if (droppable && rules.literal.count(prefix(i + 1)) == 0) continue;
    absl::StrAppend(&canonical, canonical.empty() ? "" : ".", segments[i]);
  }
  return canonical;
}

// `rules` that know their literals also as they read in canonical names, so that these stay as they are. Left out is a
// literal like a._orig_mod._orig_mod (a wrapper around a child of that name): a._orig_mod as given is then the wrapper.
NameRules WithCanonicalLiterals(const NameRules& rules) {
  NameRules extended = rules;
  for (const std::string& prefix : rules.literal) {
    std::string canonical = DropWrappers(prefix, rules);
    if (!absl::StartsWith(prefix, absl::StrCat(canonical, "."))) extended.literal.insert(std::move(canonical));
  }
  return extended;
}

}  // namespace

std::string QuotedName(absl::string_view name) {
  const bool cut = name.size() > kMaxQuotedBytes;
  return absl::StrCat("\"", absl::CHexEscape(name.substr(0, kMaxQuotedBytes)), cut ? "...\"" : "\"");
}

absl::Status ValidateText(absl::string_view what, absl::string_view text) {
  if (text.size() > kMaxNameBytes) {
    return Bad(what, text, absl::StrCat("has ", text.size(), " bytes; at most ", kMaxNameBytes, " are allowed"));
  }
  const size_t nul = text.find('\0');
  if (nul != text.npos)
    return Bad(what, text, absl::StrCat("has a NUL byte at offset ", nul, "; ", what, "s are text"));
  for (size_t at = 0; at < text.size();) {
    const size_t length = Utf8Length(text.substr(at));
    if (length == 0) return Bad(what, text, absl::StrCat("is not UTF-8 at offset ", at, "; encode it as UTF-8"));
    at += length;
  }
  return absl::OkStatus();
}

absl::Status ValidateName(absl::string_view name) {
  if (name.empty()) return Bad("name", name, "is empty; a name has at least one segment");
  RETURN_IF_ERROR(ValidateText("name", name));
  for (const absl::string_view segment : absl::StrSplit(name, '.')) {
    if (!segment.empty()) continue;
    return Bad("name", name,
               absl::StrCat("has an empty segment at offset ", segment.data() - name.data(),
                            "; write one \".\" between segments and none at the ends"));
  }
  return absl::OkStatus();
}

absl::Status ValidateNameRules(const NameRules& rules) {
  for (const std::string& wrapper : rules.root_wrappers) {
    if (IsWrapper(wrapper) || wrapper == kDataParallel) continue;
    return absl::InvalidArgumentError(absl::StrCat("root wrapper ", QuotedName(wrapper),
                                                   " is no wrapper segment; these are _orig_mod, ",
                                                   "_checkpoint_wrapped_module, _fsdp_wrapped_module and module"));
  }
  for (const auto* prefixes : {&rules.wrapped_at, &rules.literal}) {
    for (const std::string& prefix : *prefixes) {
      const absl::Status status = ValidateName(prefix);
      if (status.ok()) continue;
      return absl::InvalidArgumentError(
          absl::StrCat(prefixes == &rules.literal ? "literal" : "wrapped-at", " prefix: ", status.message()));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<std::string> Canonical(absl::string_view raw, const NameRules& rules) {
  ASSIGN_OR_RETURN(const Canonicalizer canonicalizer, Canonicalizer::Create(rules));
  return canonicalizer.Canonical(raw);
}

absl::StatusOr<Canonicalizer> Canonicalizer::Create(const NameRules& rules) {
  RETURN_IF_ERROR(ValidateNameRules(rules));
  Canonicalizer canonicalizer;
  canonicalizer.rules_ = WithCanonicalLiterals(rules);
  return canonicalizer;
}

absl::StatusOr<std::string> Canonicalizer::Canonical(absl::string_view raw) const {
  if (rules_.empty() && raw.size() <= kMaxNameBytes) {
    char scanned[internal::ScanRoom(kMaxNameBytes)];
    const char* end = internal::ScanName(raw, scanned);
    if (end != nullptr) return std::string(scanned, end - scanned);
  } else if (IsPlain(raw)) {
    return std::string(raw);
  }
  RETURN_IF_ERROR(ValidateName(raw));
  return DropWrappers(raw, rules_);
}

absl::StatusOr<PackedNames> Canonicalizer::CanonicalAll(absl::Span<const std::string> raw) const {
  size_t bytes = 0;
  for (const std::string& name : raw) {
    if (name.size() > kMaxNameBytes) RETURN_IF_ERROR(ValidateName(name));
    bytes += name.size();
  }
  PackedNames names;
  names.bytes_.reset(new char[internal::ScanRoom(bytes)]);
  names.ends_.reserve(raw.size());
  char* out = names.bytes_.get();
  const bool scan = rules_.empty();
  for (const std::string& name : raw) {
    char* end = scan ? internal::ScanName(name, out) : nullptr;
    if (end == nullptr) {
      ASSIGN_OR_RETURN(const std::string canonical, Canonical(name));  // never longer than `name`
      end = std::copy(canonical.begin(), canonical.end(), out);
    }
    out = end;
    names.ends_.push_back(out - names.bytes_.get());
  }
  return names;
}

absl::StatusOr<NameRules> CanonicalRules(const NameRules& rules) {
  RETURN_IF_ERROR(ValidateNameRules(rules));
  NameRules canonical;
  // As a name, a prefix keeps its last segment: just what it has in canonical names.
  for (const std::string& prefix : rules.literal) canonical.literal.insert(DropWrappers(prefix, rules));
  return canonical;
}

NameRules RulesOfCanonical(absl::Span<const std::string> names) {
  NameRules rules;
  for (const std::string& name : names) {
    for (size_t start = 0, end; (end = name.find('.', start)) != name.npos; start = end + 1) {
      if (IsWrapper(absl::string_view(name).substr(start, end - start))) rules.literal.insert(name.substr(0, end));
    }
  }
  return rules;
}

AliasTable::AliasTable(const NameRules& rules) : canonicalizer_(Canonicalizer::Create(rules)) {}

absl::StatusOr<std::string> AliasTable::Add(absl::string_view raw, std::optional<absl::string_view> tied_to) {
  RETURN_IF_ERROR(canonicalizer_.status());
  ASSIGN_OR_RETURN(std::string canonical, canonicalizer_->Canonical(raw));
  Entry entry{std::move(canonical), storages_.size()};
  if (tied_to.has_value()) {
    RETURN_IF_ERROR(ValidateName(*tied_to));
    const auto target = by_raw_.find(*tied_to);
    if (target == by_raw_.end()) {
      return absl::NotFoundError(absl::StrCat("name ", QuotedName(raw), " is to be tied to ", QuotedName(*tied_to),
                                              ", which was not added; add that one first, by its raw name"));
    }
    entry.storage = target->second.storage;
  }
  if (const auto old = by_raw_.find(raw); old != by_raw_.end()) {
    const bool owner = storages_[old->second.storage].raw.front() == raw;
    if (tied_to.has_value() ? old->second.storage == entry.storage : owner) return entry.canonical;
  }
  RETURN_IF_ERROR(CheckFree(raw, entry, tied_to.has_value()));
  if (!tied_to.has_value()) storages_.push_back({entry.canonical, {}});
  storages_[entry.storage].raw.emplace_back(raw);
  by_canonical_.emplace(entry.canonical, entry.storage);
  return by_raw_.emplace(raw, std::move(entry)).first->second.canonical;
}

// OK when neither the raw name nor its canonical one belongs to another storage.
absl::Status AliasTable::CheckFree(absl::string_view raw, const Entry& entry, bool tied) const {
  const auto taken = by_canonical_.find(entry.canonical);
  if (taken == by_canonical_.end() || (tied && taken->second == entry.storage)) return absl::OkStatus();
  const Storage& storage = storages_[taken->second];
  const auto other = absl::c_find_if(
      storage.raw, [&](const std::string& name) { return by_raw_.find(name)->second.canonical == entry.canonical; });
  if (by_raw_.find(raw) != by_raw_.end()) {
    return absl::AlreadyExistsError(absl::StrCat("name ", QuotedName(raw), " (canonical ", QuotedName(entry.canonical),
                                                 ") was added before, in one storage with ",
                                                 QuotedName(storage.raw.front()),
                                                 "; add a name once, or again with the same tie"));
  }
  return absl::AlreadyExistsError(
      absl::StrCat("names ", QuotedName(*other), " and ", QuotedName(raw), " both have the canonical name ",
                   QuotedName(entry.canonical),
                   "; if they are one tensor declare the second as tied to the first, else rename one of the modules"));
}

absl::StatusOr<std::string> AliasTable::CanonicalOf(absl::string_view raw) const {
  const auto entry = by_raw_.find(raw);
  if (entry == by_raw_.end()) {
    return absl::NotFoundError(
        absl::StrCat("raw name ", QuotedName(raw), " was not added; ", by_raw_.size(), " others were"));
  }
  return entry->second.canonical;
}

absl::StatusOr<const AliasTable::Storage*> AliasTable::Find(absl::string_view canonical) const {
  const auto storage = by_canonical_.find(canonical);
  if (storage == by_canonical_.end()) {
    return absl::NotFoundError(absl::StrCat("canonical name ", QuotedName(canonical),
                                            " belongs to no name that was added; ", by_canonical_.size(),
                                            " others do"));
  }
  return &storages_[storage->second];
}

absl::StatusOr<std::vector<std::string>> AliasTable::RawOf(absl::string_view canonical) const {
  ASSIGN_OR_RETURN(const Storage* storage, Find(canonical));
  std::vector<std::string> raw;
  for (const std::string& name : storage->raw) {
    if (by_raw_.find(name)->second.canonical == canonical) raw.push_back(name);
  }
  return raw;
}

absl::StatusOr<std::string> AliasTable::StorageOf(absl::string_view canonical) const {
  ASSIGN_OR_RETURN(const Storage* storage, Find(canonical));
  return storage->canonical;
}

absl::StatusOr<std::vector<std::string>> AliasTable::ExportNames(absl::string_view canonical) const {
  ASSIGN_OR_RETURN(const Storage* storage, Find(canonical));
  return storage->raw;
}

std::vector<std::string> AliasTable::Storages() const {
  std::vector<std::string> names;
  for (const Storage& storage : storages_) names.push_back(storage.canonical);
  return names;
}

}  // namespace shardmesh
