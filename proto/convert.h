// Conversion between the messages of proto/shardmesh/v1 and core's types. Nothing of gRPC.
//
// From messages: "unset" becomes the default that the .proto states, and an enumeration value that this build does not
// know is refused; ranges are left to the core type's own Validate(). To messages: every field is written out, so that
// XFromProto(ToProto(x)) == x for every valid x. Pure functions, thread-safe.
#pragma once

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "core/format/format.h"
#include "core/format/numeric_formats.h"
#include "core/job/job.h"
#include "core/mesh/mesh_spec.h"
#include "core/names/names.h"
#include "proto/shardmesh/v1/job.pb.h"

namespace shardmesh {

// InvalidArgument, naming the field and the value: an enumeration value that is none, or no optimizer.
// An unset mesh stays empty: the coordinator puts its default there. Not validated: call spec.Validate().
absl::StatusOr<JobSpec> JobSpecFromProto(const v1::JobSpec& proto);
v1::JobSpec ToProto(const JobSpec& spec);

// A job's dimensions, slowest first. InvalidArgument: a role that is none. An unset role is the default of its name.
absl::StatusOr<MeshSpec> MeshSpecFromProto(const google::protobuf::RepeatedPtrField<v1::MeshDimension>& dims);
google::protobuf::RepeatedPtrField<v1::MeshDimension> ToProto(const MeshSpec& mesh);

// Not validated: ValidateNameRules() is core's. Repeated prefixes become one.
NameRules NameRulesFromProto(const v1::NameRules& proto);
v1::NameRules ToProto(const NameRules& rules);

// `field` names the field in the message. InvalidArgument: a value that is no format. Unset: `unset`.
absl::StatusOr<Format> FormatFromProto(absl::string_view field, v1::Format proto, Format unset);
v1::Format ToProto(Format format);
v1::Format ToProto(WeightFormat format);
v1::StateFormat ToProto(StateFormat format);
v1::GatherFormat ToProto(GatherFormat format);

}  // namespace shardmesh
