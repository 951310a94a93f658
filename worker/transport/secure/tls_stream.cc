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

class TlsStream final : public Stream {
 public:
  TlsStream(UniqueFd fd, SSL* ssl, const TlsSending& sending)
      : Stream(std::move(fd)), buffer_(Stream::fd()), ssl_(ssl), sending_(sending) {}
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
    const long verified = SSL_get_verify_result(ssl_);
    std::string why = TakeError();
    if (verified != X509_V_OK) absl::StrAppend(&why, ": ", X509_verify_cert_error_string(verified));
    return Ended(End::kRefused, std::move(why));
  }

  SocketBuffer buffer_;
  SSL* const ssl_;
  const TlsSending sending_;
  int64_t records_ = 0;
  bool wants_to_write_ = false;
};

// Null: `tls` cannot be used, TakeError says why.
SSL_CTX* NewContext(const TlsOptions& tls) {
  SSL_CTX* const context = SSL_CTX_new(TLS_method());
  if (context == nullptr) return nullptr;
  SSL_CTX_set_verify(context, SSL_VERIFY_PEER | SSL_VERIFY_FAIL_IF_NO_PEER_CERT, nullptr);
  SSL_CTX_set_mode(context, SSL_MODE_ENABLE_PARTIAL_WRITE | SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER);
  SSL_CTX_set_options(context, SSL_OP_ENABLE_KTLS | SSL_OP_NO_TICKET);
  SSL_CTX_set_session_cache_mode(context, SSL_SESS_CACHE_OFF);
  const bool made = SSL_CTX_set_min_proto_version(context, TLS1_3_VERSION) == 1 &&
                    SSL_CTX_set_num_tickets(context, 0) == 1 && SSL_CTX_set_ciphersuites(context, kCiphers) == 1 &&
                    SSL_CTX_use_certificate_chain_file(context, tls.cert_file.c_str()) == 1 &&
                    SSL_CTX_use_PrivateKey_file(context, tls.key_file.c_str(), SSL_FILETYPE_PEM) == 1 &&
                    SSL_CTX_check_private_key(context) == 1 &&
                    SSL_CTX_load_verify_file(context, tls.ca_file.c_str()) == 1;
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
  if (context != nullptr) return std::shared_ptr<const TlsContext>(new TlsContext(context));
  return absl::InvalidArgumentError(
      absl::StrCat("OpenSSL cannot use ", tls.cert_file, ", ", tls.key_file, " and ", tls.ca_file, ": ", TakeError()));
}

TlsContext::~TlsContext() { SSL_CTX_free(static_cast<SSL_CTX*>(context_)); }

std::unique_ptr<Stream> TlsContext::NewStream(UniqueFd fd, bool dials, const TlsSending& sending) const {
  SSL* const ssl = SSL_new(static_cast<SSL_CTX*>(context_));
  if (ssl == nullptr) return nullptr;
  auto stream = std::make_unique<TlsStream>(std::move(fd), ssl, sending);
  if (!stream->Open()) return nullptr;
  dials ? SSL_set_connect_state(ssl) : SSL_set_accept_state(ssl);
  return stream;
}

}  // namespace shardmesh
