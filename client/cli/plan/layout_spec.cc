#include "client/cli/plan/layout_spec.h"

#include <nlohmann/json.hpp>
#include <set>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "core/base/status.h"

namespace shardmesh {
namespace {

using Json = nlohmann::json;

absl::Status Wrong(absl::string_view where, absl::string_view right) {
  return absl::InvalidArgumentError(absl::StrCat(where, " is not ", right));
}

// InvalidArgument: no JSON, or an object with a key twice.
absl::StatusOr<Json> ParseJson(absl::string_view text) {
  std::vector<std::set<std::string>> keys;  // of the open objects
  std::string twice;
  const auto note = [&](int, Json::parse_event_t event, Json& parsed) {
    if (event == Json::parse_event_t::object_start) keys.emplace_back();
    if (event == Json::parse_event_t::object_end) keys.pop_back();
    if (event == Json::parse_event_t::key && !keys.back().insert(parsed.get<std::string>()).second) {
      twice = parsed.get<std::string>();
    }
    return true;
  };
  try {
    Json json = Json::parse(text.begin(), text.end(), note);
    if (twice.empty()) return json;
    return absl::InvalidArgumentError(absl::StrCat("an object has the key \"", absl::CHexEscape(twice.substr(0, 80)),
                                                   "\" twice; write each key once"));
  } catch (const Json::exception& error) {
    const auto* parsing = dynamic_cast<const Json::parse_error*>(&error);
    return absl::InvalidArgumentError(absl::StrCat("the specification is no JSON",
                                                   parsing == nullptr ? "" : absl::StrCat(" at byte ", parsing->byte),
                                                   "; see the example of shardctl plan --help"));
  }
}

absl::Status CheckKeys(const Json& object, absl::string_view where, const std::vector<std::string>& known) {
  if (!object.is_object()) return Wrong(where, "an object");
  for (const auto& [key, value] : object.items()) {
    if (absl::c_linear_search(known, key)) continue;
    return absl::InvalidArgumentError(absl::StrCat(where, " has the key \"", absl::CHexEscape(key.substr(0, 80)),
                                                   "\"; known are ", absl::StrJoin(known, ", ")));
  }
  return absl::OkStatus();
}

// Leaves `out` as it is when there is no such key.
absl::Status ReadText(const Json& object, const char* key, const std::string& where, std::string& out) {
  const auto it = object.find(key);
  if (it == object.end()) return absl::OkStatus();
  if (!it->is_string()) return Wrong(absl::StrCat(where, ".", key), "a string");
  out = it->get<std::string>();
  return absl::OkStatus();
}

absl::Status ReadInteger(const Json& value, const std::string& where, int64_t& out) {
  if (!value.is_number_integer() || (value.is_number_unsigned() && value.get<uint64_t>() > uint64_t{1} << 62)) {
    return Wrong(where, "an integer below 2^62");
  }
  out = value.get<int64_t>();
  return absl::OkStatus();
}

absl::StatusOr<LayoutTensor> ReadTensor(const Json& json, const std::string& where) {
  RETURN_IF_ERROR(CheckKeys(json, where, {"name", "shape", "format", "granule", "tied_to"}));
  LayoutTensor tensor;
  tensor.space = "fp32";
  if (!json.contains("name")) return Wrong(where + ".name", "there; every tensor has one");
  RETURN_IF_ERROR(ReadText(json, "name", where, tensor.name));
  RETURN_IF_ERROR(ReadText(json, "format", where, tensor.space));
  if (tensor.space.empty()) return Wrong(where + ".format", "a text; leave it out for fp32");
  RETURN_IF_ERROR(ReadText(json, "tied_to", where, tensor.tied_to));
  std::string granule = tensor.granule.ToString();
  RETURN_IF_ERROR(ReadText(json, "granule", where, granule));
  absl::StatusOr<Granule> parsed = ParseGranule(granule);
  if (!parsed.ok()) return Annotate(parsed.status(), where);
  tensor.granule = *parsed;
  const auto shape = json.find("shape");
  if (shape == json.end() || !shape->is_array()) return Wrong(where + ".shape", "an array of sizes");
  if (shape->size() > kMaxTensorDims) {
    return Wrong(where + ".shape", absl::StrCat("of at most ", kMaxTensorDims, " dimensions"));
  }
  for (size_t d = 0; d < shape->size(); ++d) {
    int64_t size = 0;
    RETURN_IF_ERROR(ReadInteger((*shape)[d], absl::StrCat(where, ".shape[", d, "]"), size));
    tensor.shape.push_back(size);
  }
  return tensor;
}

}  // namespace

absl::StatusOr<LayoutSpec> ParseLayoutSpec(absl::string_view text) {
  ASSIGN_OR_RETURN(const Json json, ParseJson(text));
  RETURN_IF_ERROR(CheckKeys(json, "the specification", {"mesh", "bucket_elements", "tensors"}));
  LayoutSpec spec;
  std::string mesh;
  if (!json.contains("mesh")) return Wrong("mesh", "there; write one like \"ddp=2,fsdp=4\"");
  RETURN_IF_ERROR(ReadText(json, "mesh", "the specification", mesh));
  ASSIGN_OR_RETURN(spec.mesh, ParseMeshSpec(mesh));
  if (const auto it = json.find("bucket_elements"); it != json.end()) {
    RETURN_IF_ERROR(ReadInteger(*it, "bucket_elements", spec.options.bucket_elements));
  }
  const auto tensors = json.find("tensors");
  if (tensors == json.end() || !tensors->is_array()) return Wrong("tensors", "an array");
  for (size_t i = 0; i < tensors->size(); ++i) {
    ASSIGN_OR_RETURN(LayoutTensor tensor, ReadTensor((*tensors)[i], absl::StrCat("tensors[", i, "]")));
    spec.tensors.push_back(std::move(tensor));
  }
  return spec;
}

absl::StatusOr<StoredPlan> PlanOf(LayoutSpec spec) {
  ASSIGN_OR_RETURN(const Mesh mesh, Mesh::Create(spec.mesh));
  std::vector<std::string> replicate;
  for (const MeshDim& dim : spec.mesh.dims) {
    if (dim.role == DimRole::kReplicate) replicate.push_back(dim.name);
  }
  return StoredPlan::Create(std::move(spec.tensors), spec.options, mesh, replicate);
}

}  // namespace shardmesh
