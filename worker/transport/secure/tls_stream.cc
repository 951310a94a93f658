#include "worker/transport/secure/tls_stream.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <openssl/err.h>
#include <openssl/ssl.h>
#include <signal.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/status.h"
#include "rpc/tls/revocation.h"
#include "worker/transport/secure/socket_bio.h"

namespace shardmesh {
namespace {

constexpr int64_t kMostAtOnce = int64_t{1} << 30;
constexpr char kCiphers[] = "TLS_AES_128_GCM_SHA256:TLS_AES_256_GCM_SHA384:TLS_CHACHA20_POLY1305_SHA256";
constexpr char kBindingLabel[] = "EXPORTER-shardmesh-group";

void IgnoreSigpipe() {
  struct sigaction now = {};
  if (sigaction(SIGPIPE, nullptr, &now) == 0 && now.sa_handler == SIG_DFL) signal(SIGPIPE, SIG_IGN);
}

void ForgetErrors() {
  ERR_clear_error();
  errno = 0;
}

// The oldest error of this thread, and none is left.
std::string TakeError() {
  const unsigned long error = ERR_get_error();
  ERR_clear_error();
  const char* const reason = ERR_reason_error_string(error);
  return reason != nullptr ? reason : "TLS failed";
}

bool IsUnknownAuthority(long verified) {
  return verified == X509_V_ERR_UNABLE_TO_GET_ISSUER_CERT_LOCALLY || verified == X509_V_ERR_SELF_SIGNED_CERT_IN_CHAIN ||
         verified == X509_V_ERR_DEPTH_ZERO_SELF_SIGNED_CERT;
}

// A verify_cb of OpenSSL's: keeps in the connection which certificate it is that is wrong.
int NoteWrong(int ok, X509_STORE_CTX* context) {
  if (PassWithoutList(ok, context) == 1) return 1;
  const auto* const ssl =
      static_cast<const SSL*>(X509_STORE_CTX_get_ex_data(context, SSL_get_ex_data_X509_STORE_CTX_idx()));
  X509* const wrong = IsUnknownAuthority(X509_STORE_CTX_get_error(context)) ? X509_STORE_CTX_get0_cert(context)
                                                                            : X509_STORE_CTX_get_current_cert(context);
  if (wrong != nullptr) *static_cast<std::string*>(SSL_get_app_data(ssl)) = DescribeCertificate(wrong);
  return 0;
}

// Whether the peer said so of this end's certificate (RFC 8446, 6.2).
bool IsOfOwnCertificate(int reason) {
  return reason == SSL_R_TLSV1_ALERT_UNKNOWN_CA || reason == SSL_R_SSLV3_ALERT_BAD_CERTIFICATE ||
         reason == SSL_R_SSLV3_ALERT_UNSUPPORTED_CERTIFICATE || reason == SSL_R_SSLV3_ALERT_CERTIFICATE_REVOKED ||
         reason == SSL_R_SSLV3_ALERT_CERTIFICATE_EXPIRED || reason == SSL_R_SSLV3_ALERT_CERTIFICATE_UNKNOWN;
}

class TlsStream final : public Stream {
 public:
  TlsStream(UniqueFd fd, SSL* ssl, const TlsSending& sending, std::shared_ptr<const TlsOptions> files)
      : Stream(std::move(fd)), buffer_(Stream::fd()), ssl_(ssl), sending_(sending), files_(std::move(files)) {
    SSL_set_app_data(ssl_, &wrong_);
  }
  ~TlsStream() override { SSL_free(ssl_); }

  // False: there is no memory.
  bool Open() {
    BIO* const reads = buffer_.NewBio();
    BIO* const writes = sending_.in_kernel ? BIO_new_socket(fd(), BIO_NOCLOSE) : buffer_.NewBio();
    SSL_set0_rbio(ssl_, reads);
    SSL_set0_wbio(ssl_, writes);
    return reads != nullptr && writes != nullptr;
  }

  Shaken Shake() override {
    ForgetErrors();
    const int done = SSL_do_handshake(ssl_);
    if (done == 1) return Shaken::kDone;
    return Judge(done) == 0 ? Shaken::kLater : Shaken::kEnded;
  }

  int64_t Read(char* to, int64_t bytes) override {
    ForgetErrors();
    size_t got = 0;
    const int done = SSL_read_ex(ssl_, to, static_cast<size_t>(std::min(bytes, kMostAtOnce)), &got);
    return done == 1 ? static_cast<int64_t>(got) : Judge(done);
  }

  // One record at a time (SSL_MODE_ENABLE_PARTIAL_WRITE).
  int64_t Write(const char* from, int64_t bytes) override {
    ForgetErrors();
    size_t sent = 0;
    const int done = SSL_write_ex(ssl_, from, static_cast<size_t>(std::min(bytes, kMostAtOnce)), &sent);
    if (done != 1) return Judge(done);
    if (++records_ >= sending_.records_per_key && !InKernel()) {
      records_ = 0;
      SSL_key_update(ssl_, SSL_KEY_UPDATE_NOT_REQUESTED);
    }
    return static_cast<int64_t>(sent);
  }

  bool Flush() override {
    if (buffer_.Flush()) return true;
    if (buffer_.failed() != 0) Ended(End::kClosed, std::strerror(buffer_.failed()));
    return false;
  }
  bool flushed() const override { return buffer_.flushed(); }

  bool WantsToWrite() const override { return wants_to_write_; }

  std::string Binding() const override {
    std::string binding(32, '\0');
    SSL_export_keying_material(ssl_, reinterpret_cast<unsigned char*>(&binding[0]), binding.size(), kBindingLabel,
                               sizeof(kBindingLabel) - 1, nullptr, 0, 0);
    return binding;
  }
  std::string Protection() const override {
    return absl::StrCat(SSL_get_version(ssl_), " ", SSL_get_cipher_name(ssl_), InKernel() ? " by the kernel" : "");
  }

 private:
  bool InKernel() const { return BIO_get_ktls_send(SSL_get_wbio(ssl_)); }

  // What became of a call of OpenSSL's that did not succeed, as Read and Write return it.
  int64_t Judge(int done) {
    const int error = errno, kind = SSL_get_error(ssl_, done);
    wants_to_write_ = kind == SSL_ERROR_WANT_WRITE;
    if (kind == SSL_ERROR_WANT_READ || kind == SSL_ERROR_WANT_WRITE) return 0;
    if (kind == SSL_ERROR_SYSCALL && error != 0) return Ended(End::kClosed, std::strerror(error));
    const bool eof = ERR_GET_REASON(ERR_peek_error()) == SSL_R_UNEXPECTED_EOF_WHILE_READING;
    if (kind != SSL_ERROR_SSL || eof) return Ended(End::kClosed, "the connection was closed");
    return Ended(End::kRefused, WhyRefused());
  }
  // Whose certificate is wrong, and what is wrong with it, if it is that.
  std::string WhyRefused() {
    const long verified = SSL_get_verify_result(ssl_);
    const bool own = IsOfOwnCertificate(ERR_GET_REASON(ERR_peek_error()));
    std::string why = TakeError();
    if (own) return absl::StrCat(why, ", the peer's word for this side's certificate, ", files_->cert_file);
    if (verified == X509_V_OK) return why;
    absl::StrAppend(&why, ": ", X509_verify_cert_error_string(verified), ", of the peer's certificate, ", wrong_);
    return IsUnknownAuthority(verified) ? absl::StrCat(why, ", who is not in ", files_->ca_file) : why;
  }

  SocketBuffer buffer_;
  SSL* const ssl_;
  const TlsSending sending_;
  const std::shared_ptr<const TlsOptions> files_;
  std::string wrong_;  // the peer's certificate that is not accepted
  int64_t records_ = 0;
  bool wants_to_write_ = false;
};

// Null: `tls` cannot be used, TakeError says why.
SSL_CTX* NewContext(const TlsOptions& tls) {
  SSL_CTX* const context = SSL_CTX_new(TLS_method());
  if (context == nullptr) return nullptr;
  SSL_CTX_set_verify(context, SSL_VERIFY_PEER | SSL_VERIFY_FAIL_IF_NO_PEER_CERT, NoteWrong);
  SSL_CTX_set_mode(context, SSL_MODE_ENABLE_PARTIAL_WRITE | SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER);
  SSL_CTX_set_options(context, SSL_OP_ENABLE_KTLS | SSL_OP_NO_TICKET);
  SSL_CTX_set_session_cache_mode(context, SSL_SESS_CACHE_OFF);
  const bool made = SSL_CTX_set_min_proto_version(context, TLS1_3_VERSION) == 1 &&
                    SSL_CTX_set_num_tickets(context, 0) == 1 && SSL_CTX_set_ciphersuites(context, kCiphers) == 1 &&
                    SSL_CTX_use_certificate_chain_file(context, tls.cert_file.c_str()) == 1 &&
                    SSL_CTX_use_PrivateKey_file(context, tls.key_file.c_str(), SSL_FILETYPE_PEM) == 1 &&
                    SSL_CTX_check_private_key(context) == 1 &&
                    SSL_CTX_load_verify_file(context, tls.ca_file.c_str()) == 1;
  if (made) UseRevocationLists(SSL_CTX_get_cert_store(context));
  if (made) return context;
  SSL_CTX_free(context);
  return nullptr;
}

}  // namespace

// Of a socket that is not connected the kernel says that it must be, if it knows TLS at all.
bool KernelOffersTls() {
  static const bool offers = [] {
    const UniqueFd fd(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    return setsockopt(fd.get(), IPPROTO_TCP, TCP_ULP, "tls", sizeof("tls")) == 0 || errno == ENOTCONN;
  }();
  return offers;
}

absl::StatusOr<std::shared_ptr<const TlsContext>> TlsContext::Load(const TlsOptions& tls) {
  RETURN_IF_ERROR(NewServerCredentials(tls).status());
  IgnoreSigpipe();
  ERR_clear_error();
  SSL_CTX* const context = NewContext(tls);
  if (context != nullptr) return std::shared_ptr<const TlsContext>(new TlsContext(context, tls));
  return absl::InvalidArgumentError(
      absl::StrCat("OpenSSL cannot use ", tls.cert_file, ", ", tls.key_file, " and ", tls.ca_file, ": ", TakeError()));
}

TlsContext::~TlsContext() { SSL_CTX_free(static_cast<SSL_CTX*>(context_)); }

std::unique_ptr<Stream> TlsContext::NewStream(UniqueFd fd, bool dials, const TlsSending& sending) const {
  SSL* const ssl = SSL_new(static_cast<SSL_CTX*>(context_));
  if (ssl == nullptr) return nullptr;
  auto stream = std::make_unique<TlsStream>(std::move(fd), ssl, sending, files_);
  if (!stream->Open()) return nullptr;
  dials ? SSL_set_connect_state(ssl) : SSL_set_accept_state(ssl);
  return stream;
}

}  // namespace shardmesh
