#include "rpc/tls/revocation.h"

#include <openssl/err.h>
#include <openssl/pem.h>
#include <openssl/x509.h>
#include <openssl/x509v3.h>
#include <spdlog/spdlog.h>

#include <functional>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "core/base/plain_text.h"

namespace shardmesh {
namespace {

using grpc::experimental::TlsCustomVerificationCheckRequest;

constexpr size_t kMostName = 200;  // characters

template <auto Free>
struct Freed {
  template <typename T>
  void operator()(T* object) const {
    Free(object);
  }
};
using Store = std::unique_ptr<X509_STORE, Freed<X509_STORE_free>>;
using Context = std::unique_ptr<X509_STORE_CTX, Freed<X509_STORE_CTX_free>>;
using Bio = std::unique_ptr<BIO, Freed<BIO_free>>;

void FreeInfos(STACK_OF(X509_INFO) * infos) { sk_X509_INFO_pop_free(infos, X509_INFO_free); }
using Infos = std::unique_ptr<STACK_OF(X509_INFO), Freed<FreeInfos>>;

// Null: it holds something that cannot be read.
Infos ReadAll(absl::string_view pem) {
  const Bio bio(BIO_new_mem_buf(pem.data(), static_cast<int>(pem.size())));
  return Infos(bio == nullptr ? nullptr : PEM_X509_INFO_read_bio(bio.get(), nullptr, nullptr, nullptr));
}

Store StoreOf(absl::string_view pem) {
  Store store(X509_STORE_new());
  const Infos infos = ReadAll(pem);
  for (int i = 0; infos != nullptr && i < sk_X509_INFO_num(infos.get()); ++i) {
    const X509_INFO* const info = sk_X509_INFO_value(infos.get(), i);
    if (info->x509 != nullptr) X509_STORE_add_cert(store.get(), info->x509);
    if (info->crl != nullptr) X509_STORE_add_crl(store.get(), info->crl);
  }
  UseRevocationLists(store.get());
  X509_STORE_set_verify_cb(store.get(), PassWithoutList);
  return store;
}

std::string NameText(const X509_NAME* name) {
  const Bio bio(BIO_new(BIO_s_mem()));
  if (bio == nullptr || X509_NAME_print_ex(bio.get(), name, 0, XN_FLAG_ONELINE) < 0) return "?";
  const char* text = nullptr;
  const auto length = static_cast<size_t>(BIO_get_mem_data(bio.get(), &text));
  return PlainText({text, length}, kMostName);
}

// Whether an authority of this name is there that may.
bool MaySignLists(STACK_OF(X509_INFO) * infos, const X509_NAME* name) {
  for (int i = 0; i < sk_X509_INFO_num(infos); ++i) {
    X509* const certificate = sk_X509_INFO_value(infos, i)->x509;
    if (certificate == nullptr || X509_NAME_cmp(X509_get_subject_name(certificate), name) != 0) continue;
    if ((X509_get_key_usage(certificate) & KU_CRL_SIGN) != 0) return true;  // all bits, where it lists none
  }
  return false;
}

absl::string_view View(grpc::string_ref text) { return {text.data(), text.size()}; }

class RevocationVerifier final : public grpc::experimental::ExternalCertificateVerifier {
 public:
  RevocationVerifier(absl::string_view authorities_pem, bool dials) : store_(StoreOf(authorities_pem)), dials_(dials) {}

  // At once, so the callback is not used.
  bool Verify(TlsCustomVerificationCheckRequest* request, std::function<void(grpc::Status)>,
              grpc::Status* status) override {
    if (dials_ && !names_.Verify(
                      request, [](const grpc::Status&) {}, status)) {
      *status = grpc::Status(grpc::StatusCode::INTERNAL, "the check of the server's name takes its time");
    }
    if (!status->ok()) return true;
    const std::string why = WhyNot(*request);
    if (why.empty()) return true;
    spdlog::warn("event=certificate_refused because=\"{}\"", why);
    *status = grpc::Status(grpc::StatusCode::UNAUTHENTICATED, why);
    return true;
  }
  void Cancel(TlsCustomVerificationCheckRequest*) override {}

 private:
  // Empty: nothing.
  std::string WhyNot(TlsCustomVerificationCheckRequest& request) const {
    // On servers the chain is without the peer's own certificate.
    const Infos own = ReadAll(View(request.peer_cert())), chain = ReadAll(View(request.peer_cert_full_chain()));
    X509* const leaf =
        own == nullptr || sk_X509_INFO_num(own.get()) == 0 ? nullptr : sk_X509_INFO_value(own.get(), 0)->x509;
    if (leaf == nullptr) return "the peer showed no certificate";
    STACK_OF(X509)* const between = sk_X509_new_null();
    for (int i = 0; chain != nullptr && i < sk_X509_INFO_num(chain.get()); ++i) {
      if (X509* const next = sk_X509_INFO_value(chain.get(), i)->x509; next != nullptr) sk_X509_push(between, next);
    }
    const Context context(X509_STORE_CTX_new());
    std::string why;
    if (X509_STORE_CTX_init(context.get(), store_.get(), leaf, between) != 1 || X509_verify_cert(context.get()) != 1) {
      X509* const bad = X509_STORE_CTX_get_current_cert(context.get());
      why = absl::StrCat(X509_verify_cert_error_string(X509_STORE_CTX_get_error(context.get())), ": ",
                         DescribeCertificate(bad != nullptr ? bad : leaf));
    }
    sk_X509_free(between);
    ERR_clear_error();
    return why;
  }

  const Store store_;
  const bool dials_;
  grpc::experimental::HostNameCertificateVerifier names_;
};

}  // namespace

bool HasRevocationList(absl::string_view authorities_pem) {
  return absl::StrContains(authorities_pem, "-----BEGIN X509 CRL-----");
}

absl::Status CheckRevocationLists(absl::string_view authorities_pem) {
  ERR_clear_error();
  const Infos infos = ReadAll(authorities_pem);
  ERR_clear_error();
  if (infos == nullptr) {
    return absl::InvalidArgumentError("has a revocation list (X509 CRL) that is damaged; have it made again");
  }
  for (int i = 0; i < sk_X509_INFO_num(infos.get()); ++i) {
    const X509_CRL* const list = sk_X509_INFO_value(infos.get(), i)->crl;
    if (list != nullptr && !MaySignLists(infos.get(), X509_CRL_get_issuer(list))) {
      return absl::InvalidArgumentError(
          absl::StrCat("has a revocation list of ", NameText(X509_CRL_get_issuer(list)),
                       ", whose certificate there may not sign one (key usage without cRLSign), or is not there; have "
                       "it made again with keyUsage keyCertSign and cRLSign"));
    }
    const ASN1_TIME* const next = list == nullptr ? nullptr : X509_CRL_get0_nextUpdate(list);
    if (next == nullptr || X509_cmp_current_time(next) > 0) continue;
    return absl::InvalidArgumentError(absl::StrCat("has a revocation list of ", NameText(X509_CRL_get_issuer(list)),
                                                   " whose time is over; have a new one made"));
  }
  return absl::OkStatus();
}

void UseRevocationLists(X509_STORE* store) {
  const STACK_OF(X509_OBJECT)* const objects = X509_STORE_get0_objects(store);
  for (int i = 0; i < sk_X509_OBJECT_num(objects); ++i) {
    if (X509_OBJECT_get_type(sk_X509_OBJECT_value(objects, i)) != X509_LU_CRL) continue;
    X509_STORE_set_flags(store, X509_V_FLAG_CRL_CHECK | X509_V_FLAG_CRL_CHECK_ALL);
    return;
  }
}

int PassWithoutList(int ok, X509_STORE_CTX* context) {
  if (ok == 1 || X509_STORE_CTX_get_error(context) != X509_V_ERR_UNABLE_TO_GET_CRL) return ok;
  X509_STORE_CTX_set_error(context, X509_V_OK);
  return 1;
}

std::string DescribeCertificate(X509* certificate) {
  return absl::StrCat(NameText(X509_get_subject_name(certificate)), ", issued by ",
                      NameText(X509_get_issuer_name(certificate)));
}

std::shared_ptr<grpc::experimental::CertificateVerifier> NewRevocationVerifier(absl::string_view authorities_pem,
                                                                               bool dials) {
  return grpc::experimental::ExternalCertificateVerifier::Create<RevocationVerifier>(authorities_pem, dials);
}

}  // namespace shardmesh
