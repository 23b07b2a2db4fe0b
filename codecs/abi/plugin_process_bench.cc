// What a plug-in's process costs: encoding and attention of one codec in this process and in one of its own, by one
// thread, beside a copy of the same pages by memcpy, which is the least that the process's way can cost.
//
//   plugin_process_bench PLUGIN_HOST OBJECT.so [KEY=VALUE...]
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "codecs/abi/plugin_codec.h"
#include "codecs/abi/plugin_process.h"
#include "codecs/abi/process_entries.h"
#include "kvmanager/base/aligned_buffer.h"
#include "kvmanager/base/half.h"
#include "kvmanager/base/status.h"

namespace kvmanager {
namespace {

constexpr PageLayout kLayout = {DType::kFloat16, 8, 128, 64};
constexpr int kPages = 256, kRows = 4, kRepetitions = 9;

/// Median microseconds of one run.
double MedianUs(const std::function<void()>& run) {
  std::vector<double> us;
  for (int i = 0; i < kRepetitions; ++i) {
    const auto begin = std::chrono::steady_clock::now();
    run();
    us.push_back(std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - begin).count());
  }
  std::nth_element(us.begin(), us.begin() + kRepetitions / 2, us.end());
  return us[kRepetitions / 2];
}

struct Pages {
  std::vector<AlignedBuffer> raw, encoded;
};

void Encode(const Codec& codec, Pages& pages, size_t at_once) {
  AlignedBuffer workspace(codec.encode_workspace_bytes() + 64);
  for (size_t begin = 0; begin < kPages; begin += at_once) {
    std::vector<EncodeItem> items;
    for (size_t i = begin; i < begin + at_once; ++i) items.push_back({pages.raw[i].data(), pages.encoded[i].data()});
    codec.Encode(absl::MakeSpan(items), workspace.span());
    for (const EncodeItem& item : items) KV_CHECK(!item.declined);
  }
}

/// All heads of all pages, `at_once` pages a call, as attention/ goes through them.
void Attend(const Codec& codec, const Pages& pages, size_t at_once) {
  const PageAttention& attention = codec.attention();
  AlignedBuffer q(kRows * kLayout.head_dim * 4), acc(size_t{kLayout.kv_heads} * kRows * kLayout.head_dim * 4);
  AlignedBuffer workspace(attention.workspace_bytes(kRows) + 64);
  std::memset(q.data(), 0, q.size());
  std::memset(acc.data(), 0, acc.size());
  std::vector<float> max(kLayout.kv_heads * kRows, -std::numeric_limits<float>::infinity()), sum(max.size());
  std::vector<const uint8_t*> all;
  for (const AlignedBuffer& page : pages.encoded) all.push_back(page.data());
  PageAttentionTask task;
  task.q = reinterpret_cast<const float*>(q.data());
  task.rows = kRows;
  for (size_t begin = 0; begin < kPages; begin += at_once) {
    task.pages = absl::MakeConstSpan(all).subspan(begin, at_once);
    for (int head = 0; head < kLayout.kv_heads; ++head) {
      task.kv_head = head;
      task.announced = head > 0 || begin > 0;
      float* const rows = reinterpret_cast<float*>(acc.data()) + size_t(head) * kRows * kLayout.head_dim;
      attention.Attend(task, {&max[head * kRows], &sum[head * kRows], rows}, workspace.span());
    }
  }
  KV_CHECK(sum[0] > 0);
}

absl::Status Run(const std::string& host, const std::string& object, const CodecParameters& parameters) {
  CodecContext context;
  context.layout = kLayout;
  context.query_heads = kLayout.kv_heads * kRows;
  KV_ASSIGN_OR_RETURN(auto plugin, CodecPlugin::Load(object));
  KV_ASSIGN_OR_RETURN(const std::unique_ptr<Codec> here, MakePluginCodec(plugin, context, parameters, nullptr));
  PluginProcess::Options options;
  options.program = {host};
  options.path = object;
  KV_ASSIGN_OR_RETURN(const auto process, PluginProcess::Start(std::move(options)));
  KV_ASSIGN_OR_RETURN(const std::unique_ptr<Codec> there,
                      MakePluginCodec(MakeProcessSource(process), context, parameters, nullptr));
  Pages pages;
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  const size_t encoded_bytes = here->info().encoded_bytes;
  for (int i = 0; i < kPages; ++i) {
    AlignedBuffer& raw = pages.raw.emplace_back(kLayout.raw_bytes());
    for (size_t e = 0; e < kLayout.raw_bytes() / 2; ++e) StoreElement(raw.data(), kLayout.dtype, e, normal(random));
    pages.encoded.emplace_back(encoded_bytes);
  }
  std::printf("%s: pages of %zu bytes raw, %zu encoded; us per page, median of %d\n", here->info().spec.c_str(),
              size_t{kLayout.raw_bytes()}, encoded_bytes, kRepetitions);
  AlignedBuffer copy(kLayout.raw_bytes());
  const double copied = MedianUs([&] {
    for (int i = 0; i < kPages; ++i) {
      std::memcpy(copy.data(), pages.raw[i].data(), kLayout.raw_bytes());
      std::memcpy(pages.encoded[i].data(), copy.data(), encoded_bytes);
    }
  });
  std::printf("%-36s %10.2f\n", "memcpy of raw and encoded", copied / kPages);
  std::printf("%-36s %10s %10s\n", "", "here", "process");
  for (const size_t at_once : {1, 4}) {
    const double a = MedianUs([&] { Encode(*here, pages, at_once); });
    const double b = MedianUs([&] { Encode(*there, pages, at_once); });
    std::printf("encode, %3zu pages a call              %10.2f %10.2f\n", at_once, a / kPages, b / kPages);
  }
  for (const size_t at_once : {1, 4, 16, 64}) {
    const double a = MedianUs([&] { Attend(*here, pages, at_once); });
    const double b = MedianUs([&] { Attend(*there, pages, at_once); });
    std::printf("attend, %3zu pages a call, %d heads     %10.2f %10.2f\n", at_once, int(kLayout.kv_heads), a / kPages,
                b / kPages);
  }
  return absl::OkStatus();
}

}  // namespace
}  // namespace kvmanager

int main(int argc, char** argv) {
  kvmanager::CodecParameters parameters;
  for (int i = 3; i < argc; ++i) {
    const std::string text = argv[i];
    const size_t equals = text.find('=');
    if (equals != std::string::npos) parameters[text.substr(0, equals)] = text.substr(equals + 1);
  }
  const absl::Status status = argc < 3 ? absl::InvalidArgumentError("PLUGIN_HOST OBJECT.so [KEY=VALUE...]")
                                       : kvmanager::Run(argv[1], argv[2], parameters);
  if (status.ok()) return 0;
  std::fprintf(stderr, "plugin_process_bench: %s\n", std::string(status.message()).c_str());
  return 1;
}
