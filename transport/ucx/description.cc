#include "transport/ucx/description.h"

#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>

#include <algorithm>
#include <array>

#include "absl/strings/str_cat.h"
#include "kvmanager/base/status.h"

namespace kvmanager::ucx {
namespace {

constexpr size_t kFixedBytes = 40;
constexpr char kPurpose[] = "kvmanager ucx memory 1";  // of a key that may be used for more some day

void Append(std::string& out, uint64_t value, int bytes) {
  for (int i = 0; i < bytes; ++i) out.push_back(static_cast<char>(value >> (8 * i)));
}
uint64_t Load(const uint8_t* p, int bytes) {
  uint64_t value = 0;
  for (int i = bytes - 1; i >= 0; --i) value = value << 8 | p[i];
  return value;
}

std::array<uint8_t, kSealBytes> SealOf(absl::Span<const uint8_t> body, absl::Span<const uint8_t> context,
                                       absl::Span<const uint8_t> key) {
  std::string all(kPurpose, sizeof(kPurpose));
  Append(all, context.size(), 8);
  all.append(context.begin(), context.end());
  all.append(body.begin(), body.end());
  std::array<uint8_t, kSealBytes> seal;
  unsigned size = 0;
  KV_CHECK(HMAC(EVP_sha256(), key.data(), static_cast<int>(key.size()), reinterpret_cast<const uint8_t*>(all.data()),
                all.size(), seal.data(), &size) != nullptr &&
           size == seal.size());
  return seal;
}

absl::Status CheckRange(absl::string_view field, uint64_t value, uint64_t low, uint64_t high) {
  if (value >= low && value <= high) return absl::OkStatus();
  return InvalidField(field, value, absl::StrCat(low, "..", high));
}

}  // namespace

std::string Seal(const Description& d, absl::Span<const uint8_t> context, absl::Span<const uint8_t> key) {
  KV_CHECK(!d.address.empty() && d.address.size() <= kAddressBytesMax);
  std::string out;
  Append(out, d.major, 2);
  Append(out, d.minor, 2);
  Append(out, d.address.size(), 4);
  Append(out, d.memory, 4);
  Append(out, 0, 4);
  Append(out, d.bytes, 8);
  out.append(d.ticket.begin(), d.ticket.end());
  out += d.address;
  const auto seal = SealOf({reinterpret_cast<const uint8_t*>(out.data()), out.size()}, context, key);
  out.append(seal.begin(), seal.end());
  return out;
}

absl::StatusOr<Description> Unseal(absl::Span<const uint8_t> sealed, absl::Span<const uint8_t> context,
                                   absl::Span<const uint8_t> key) {
  if (sealed.size() < kFixedBytes + kSealBytes) {
    return absl::UnavailableError("the peer's UCX memory is described in too few bytes");
  }
  const absl::Span<const uint8_t> body = sealed.subspan(0, sealed.size() - kSealBytes);
  const auto seal = SealOf(body, context, key);
  if (CRYPTO_memcmp(seal.data(), sealed.data() + body.size(), kSealBytes) != 0) {
    return absl::UnavailableError("the peer's UCX memory is sealed with another key, or for another hand-off");
  }
  Description d;
  d.major = static_cast<uint16_t>(Load(&body[0], 2));
  d.minor = static_cast<uint16_t>(Load(&body[2], 2));
  const uint64_t address_bytes = Load(&body[4], 4);
  d.memory = static_cast<uint32_t>(Load(&body[8], 4));
  d.bytes = Load(&body[16], 8);
  std::copy_n(&body[24], d.ticket.size(), d.ticket.begin());
  KV_RETURN_IF_ERROR(CheckRange("UCX address bytes", address_bytes, 1, kAddressBytesMax));
  KV_RETURN_IF_ERROR(CheckRange("UCX memory", d.memory, 0, kMemoriesMax - 1));
  KV_RETURN_IF_ERROR(CheckRange("UCX reserved", Load(&body[12], 4), 0, 0));
  KV_RETURN_IF_ERROR(CheckRange("UCX memory bytes", d.bytes, 1, kMemoryBytesMax));
  KV_RETURN_IF_ERROR(
      CheckRange("UCX description bytes", body.size(), kFixedBytes + address_bytes, kFixedBytes + address_bytes));
  d.address.assign(reinterpret_cast<const char*>(body.data()) + kFixedBytes, address_bytes);
  return d;
}

}  // namespace kvmanager::ucx
