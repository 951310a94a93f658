#include "rpc/tls/tls_files.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <cstdlib>
#include <fstream>
#include <iterator>

#include "absl/strings/str_cat.h"
#include "core/base/matchers.h"
#include "local/testing/temp_folder.h"

namespace shardmesh {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

class TlsFiles : public ::testing::Test {
 protected:
  void SetUp() override {
    cert_ = folder_.File("c.pem");
    key_ = folder_.File("c.key");
    const std::string command =
        absl::StrCat("openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=w",
                     " -keyout ", key_, " -out ", cert_, " 2>/dev/null");
    ASSERT_EQ(std::system(command.c_str()), 0);
    ASSERT_EQ(chmod(key_.c_str(), 0600), 0);
    std::ifstream file(cert_);
    pem_.assign(std::istreambuf_iterator<char>(file), {});
    ASSERT_OK_AND_ASSIGN(times_, ReadCertificateTimes(pem_));
  }

  testing::TempFolder folder_;
  std::string cert_, key_, pem_;
  CertificateTimes times_;
};

TEST_F(TlsFiles, Times_AreTheCertificates) { EXPECT_EQ(times_.not_after - times_.not_before, absl::Hours(48)); }

TEST_F(TlsFiles, GoodFiles_GiveNoWarning) {
  EXPECT_THAT(TlsFileWarnings(cert_, key_, times_.not_before + absl::Hours(1)), IsEmpty());
}

TEST_F(TlsFiles, Expired_OrNotYetValid) {
  EXPECT_THAT(TlsFileWarnings(cert_, key_, times_.not_after + absl::Seconds(1)),
              ElementsAre(AllOf(HasSubstr("--tls-cert"), HasSubstr(cert_), HasSubstr("expired on"))));
  EXPECT_THAT(TlsFileWarnings(cert_, key_, times_.not_before - absl::Seconds(1)),
              ElementsAre(AllOf(HasSubstr(cert_), HasSubstr("is valid from"))));
}

TEST_F(TlsFiles, KeyThatOthersMayRead) {
  ASSERT_EQ(chmod(key_.c_str(), 0644), 0);
  EXPECT_THAT(TlsFileWarnings(cert_, key_, times_.not_before + absl::Hours(1)),
              ElementsAre(AllOf(HasSubstr("--tls-key"), HasSubstr(key_), HasSubstr("0644"), HasSubstr("chmod 600"))));
}

TEST_F(TlsFiles, CertificateForClientsAlone) {
  const auto warnings_of = [&](const std::string& purposes) {
    const std::string command =
        absl::StrCat("openssl req -x509 -key ", key_, " -days 2 -subj /CN=w -addext extendedKeyUsage=", purposes,
                     " -out ", cert_, " 2>/dev/null");
    EXPECT_EQ(std::system(command.c_str()), 0);
    return TlsFileWarnings(cert_, key_, absl::Now());
  };
  EXPECT_THAT(warnings_of("clientAuth"), ElementsAre(AllOf(HasSubstr(cert_), HasSubstr("for clients alone"))));
  EXPECT_THAT(warnings_of("clientAuth,serverAuth"), IsEmpty());
  EXPECT_THAT(warnings_of("anyExtendedKeyUsage"), IsEmpty());
}

TEST_F(TlsFiles, DamagedCertificates_AreRefused) {
  for (size_t cut = 0; cut < pem_.size(); cut += 7) {
    const std::string front = pem_.substr(0, cut) + "\n-----END CERTIFICATE-----";
    (void)ReadCertificateTimes(front);  // whatever it says, it reads nothing that is not there
  }
  EXPECT_THAT(ReadCertificateTimes(""), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("PEM")));
  EXPECT_THAT(ReadCertificateTimes("-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----"),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("PEM")));
}

}  // namespace
}  // namespace shardmesh
