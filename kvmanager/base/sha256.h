// SHA-256 of bytes that come in pieces. A value of one thread.
#pragma once

#include <openssl/evp.h>

#include <cstdint>
#include <memory>

#include "absl/types/span.h"
#include "kvmanager/base/ids.h"
#include "kvmanager/base/status.h"

namespace kvmanager {

class Sha256Stream {
 public:
  Sha256Stream() : context_(EVP_MD_CTX_new(), EVP_MD_CTX_free) {
    KV_CHECK(context_ != nullptr && EVP_DigestInit_ex(context_.get(), EVP_sha256(), nullptr) == 1);
  }
  Sha256Stream& Add(absl::Span<const uint8_t> data) {
    KV_CHECK(EVP_DigestUpdate(context_.get(), data.data(), data.size()) == 1);
    return *this;
  }
  /// Once.
  Digest Finish() {
    Digest digest;
    KV_CHECK(EVP_DigestFinal_ex(context_.get(), digest.bytes.data(), nullptr) == 1);
    return digest;
  }

 private:
  std::unique_ptr<EVP_MD_CTX, void (*)(EVP_MD_CTX*)> context_;
};

}  // namespace kvmanager
