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
    KV_CHECK(context_ != nullptr);
    Begin();
  }
  Sha256Stream& Add(absl::Span<const uint8_t> data) {
    KV_CHECK(EVP_DigestUpdate(context_.get(), data.data(), data.size()) == 1);
    return *this;
  }
  /// Of what was added since it was made, or since the last time.
  Digest Finish() {
    Digest digest;
    KV_CHECK(EVP_DigestFinal_ex(context_.get(), digest.bytes.data(), nullptr) == 1);
    Begin();
    return digest;
  }

 private:
  void Begin() {
    // EVP_sha256() is looked up anew by each EVP_DigestInit_ex(), which takes longer than to hash a block's name.
    static EVP_MD* const method = EVP_MD_fetch(nullptr, "SHA256", nullptr);
    KV_CHECK(method != nullptr && EVP_DigestInit_ex(context_.get(), method, nullptr) == 1);
  }

  std::unique_ptr<EVP_MD_CTX, void (*)(EVP_MD_CTX*)> context_;
};

}  // namespace kvmanager
