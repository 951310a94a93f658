#include "rpc/calls/reflection.h"

#include <google/protobuf/descriptor.h>
#include <google/protobuf/descriptor.pb.h>
#include <google/protobuf/unknown_field_set.h>
#include <grpcpp/impl/server_builder_option.h>
#include <grpcpp/impl/server_builder_plugin.h>
#include <grpcpp/impl/server_initializer.h>

#include <memory>
#include <set>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace shardmesh {
namespace {

namespace pb = ::google::protobuf;

constexpr char kMethod[] = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo";

// Field numbers of grpc/reflection/v1alpha/reflection.proto.
enum RequestField {
  kFileByFilename = 3,
  kFileContainingSymbol = 4,
  kFileContainingExtension = 5,
  kAllExtensions = 6,
  kListServices = 7
};
enum ResponseField { kOriginalRequest = 2, kFileDescriptors = 4, kExtensionNumbers = 5, kServices = 6, kError = 7 };

void AddError(absl::StatusCode code, const std::string& message, pb::UnknownFieldSet* reply) {
  pb::UnknownFieldSet fields;
  fields.AddVarint(1, static_cast<uint64_t>(code));
  *fields.AddLengthDelimited(2) = message;
  fields.SerializeToString(reply->AddLengthDelimited(kError));
}

// `file` and what it imports, each once.
void AddFile(const pb::FileDescriptor* file, std::set<std::string>* seen, pb::UnknownFieldSet* files) {
  if (!seen->insert(file->name()).second) return;
  pb::FileDescriptorProto proto;
  file->CopyTo(&proto);
  proto.SerializeToString(files->AddLengthDelimited(1));
  for (int i = 0; i < file->dependency_count(); ++i) AddFile(file->dependency(i), seen, files);
}

void AddFiles(const pb::FileDescriptor* file, const std::string& asked, pb::UnknownFieldSet* reply) {
  if (file == nullptr) return AddError(absl::StatusCode::kNotFound, absl::StrCat("no descriptor of ", asked), reply);
  std::set<std::string> seen;
  pb::UnknownFieldSet files;
  AddFile(file, &seen, &files);
  files.SerializeToString(reply->AddLengthDelimited(kFileDescriptors));
}

void AddExtensionFile(const std::string& request, pb::UnknownFieldSet* reply) {
  pb::UnknownFieldSet fields;
  std::string type;
  int number = 0;
  if (fields.ParseFromString(request)) {
    for (int i = 0; i < fields.field_count(); ++i) {
      const pb::UnknownField& field = fields.field(i);
      if (field.number() == 1 && field.type() == pb::UnknownField::TYPE_LENGTH_DELIMITED)
        type = field.length_delimited();
      if (field.number() == 2 && field.type() == pb::UnknownField::TYPE_VARINT)
        number = static_cast<int>(field.varint());
    }
  }
  const auto* pool = pb::DescriptorPool::generated_pool();
  const pb::Descriptor* message = pool->FindMessageTypeByName(type);
  const pb::FieldDescriptor* extension = message == nullptr ? nullptr : pool->FindExtensionByNumber(message, number);
  AddFiles(extension == nullptr ? nullptr : extension->file(), absl::StrCat("extension ", number, " of ", type), reply);
}

void AddExtensionNumbers(const std::string& type, pb::UnknownFieldSet* reply) {
  const auto* pool = pb::DescriptorPool::generated_pool();
  const pb::Descriptor* message = pool->FindMessageTypeByName(type);
  if (message == nullptr) return AddError(absl::StatusCode::kNotFound, absl::StrCat("no message type ", type), reply);
  std::vector<const pb::FieldDescriptor*> extensions;
  pool->FindAllExtensions(message, &extensions);
  pb::UnknownFieldSet numbers;
  *numbers.AddLengthDelimited(1) = type;
  for (const pb::FieldDescriptor* extension : extensions)
    numbers.AddVarint(2, static_cast<uint64_t>(extension->number()));
  numbers.SerializeToString(reply->AddLengthDelimited(kExtensionNumbers));
}

void AddServices(const std::vector<std::string>& services, pb::UnknownFieldSet* reply) {
  pb::UnknownFieldSet list;
  for (const std::string& name : services) {
    pb::UnknownFieldSet service;
    *service.AddLengthDelimited(1) = name;
    service.SerializeToString(list.AddLengthDelimited(1));
  }
  list.SerializeToString(reply->AddLengthDelimited(kServices));
}

// False when `field` asks for nothing known.
bool Answer(const pb::UnknownField& field, const std::vector<std::string>& services, pb::UnknownFieldSet* reply) {
  if (field.type() != pb::UnknownField::TYPE_LENGTH_DELIMITED) return false;
  const std::string& value = field.length_delimited();
  const auto* pool = pb::DescriptorPool::generated_pool();
  switch (field.number()) {
    case kFileByFilename:
      AddFiles(pool->FindFileByName(value), value, reply);
      return true;
    case kFileContainingSymbol:
      AddFiles(pool->FindFileContainingSymbol(value), value, reply);
      return true;
    case kFileContainingExtension:
      AddExtensionFile(value, reply);
      return true;
    case kAllExtensions:
      AddExtensionNumbers(value, reply);
      return true;
    case kListServices:
      AddServices(services, reply);
      return true;
    default:
      return false;
  }
}

class ReflectionReactor final : public grpc::ServerGenericBidiReactor {
 public:
  explicit ReflectionReactor(const std::vector<std::string>& services) : services_(services) { StartRead(&buffer_); }

  void OnReadDone(bool ok) override {
    grpc::Slice request;
    if (!ok || !buffer_.DumpToSingleSlice(&request).ok()) return Finish(grpc::Status::OK);
    const std::string reply =
        ReflectionReply(absl::string_view(reinterpret_cast<const char*>(request.begin()), request.size()), services_);
    const grpc::Slice slice(reply);
    buffer_ = grpc::ByteBuffer(&slice, 1);
    StartWrite(&buffer_);
  }
  void OnWriteDone(bool ok) override {
    if (!ok) return Finish(grpc::Status::OK);
    buffer_.Clear();
    StartRead(&buffer_);
  }
  void OnDone() override { delete this; }

 private:
  const std::vector<std::string>& services_;
  grpc::ByteBuffer buffer_;
};

// The only way to a server's list of service names is a plugin, and to a plugin an option.
class ListPlugin final : public grpc::ServerBuilderPlugin {
 public:
  explicit ListPlugin(const std::vector<std::string>** list) : list_(list) {}
  std::string name() override { return "shardmesh_service_list"; }
  void InitServer(grpc::ServerInitializer* initializer) override { *list_ = initializer->GetServiceList(); }
  void Finish(grpc::ServerInitializer*) override {}
  void ChangeArguments(const std::string&, void*) override {}

 private:
  const std::vector<std::string>** list_;
};

class ListOption final : public grpc::ServerBuilderOption {
 public:
  explicit ListOption(const std::vector<std::string>** list) : list_(list) {}
  void UpdateArguments(grpc::ChannelArguments*) override {}
  void UpdatePlugins(std::vector<std::unique_ptr<grpc::ServerBuilderPlugin>>* plugins) override {
    plugins->push_back(std::make_unique<ListPlugin>(list_));
  }

 private:
  const std::vector<std::string>** list_;
};

}  // namespace

std::string ReflectionReply(absl::string_view request, const std::vector<std::string>& services) {
  pb::UnknownFieldSet fields, reply;
  *reply.AddLengthDelimited(kOriginalRequest) = std::string(request);
  bool answered = false;
  if (fields.ParseFromString(std::string(request))) {
    for (int i = 0; i < fields.field_count() && !answered; ++i) answered = Answer(fields.field(i), services, &reply);
  }
  if (!answered)
    AddError(absl::StatusCode::kInvalidArgument, "not a ServerReflectionRequest that asks for anything", &reply);
  std::string bytes;
  reply.SerializeToString(&bytes);
  return bytes;
}

void ReflectionService::AddTo(grpc::ServerBuilder& builder) {
  builder.SetOption(std::make_unique<ListOption>(&services_));
}

grpc::ServerGenericBidiReactor* ReflectionService::CreateReactor(grpc::GenericCallbackServerContext* context) {
  if (context->method() == kMethod && services_ != nullptr) return new ReflectionReactor(*services_);
  class Unknown final : public grpc::ServerGenericBidiReactor {
   public:
    explicit Unknown(const std::string& method) {
      Finish(grpc::Status(
          grpc::StatusCode::UNIMPLEMENTED,
          absl::StrCat("no method ", method.substr(0, 200), " here; server reflection lists what there is")));
    }
    void OnDone() override { delete this; }
  };
  return new Unknown(context->method());
}

}  // namespace shardmesh
