#include "kvmanager/disk/disk_jobs.h"

#include <utility>

#include "kvmanager/disk/disk_index.h"
#include "kvmanager/disk/index_record.h"

namespace kvmanager {

std::shared_ptr<WriteJob> MakeWriteJob(DiskRecord record, absl::string_view payer, std::vector<const uint8_t*> sources,
                                       int64_t now_ns) {
  auto job = std::make_shared<WriteJob>();
  for (const DiskPage& page : record.pages) job->page_bytes.push_back(page.bytes);
  if (sources.size() != record.pages.size() || !IsRecord(job->page_bytes)) return nullptr;
  job->layout = RecordLayout::Of(job->page_bytes);
  job->header = EncodeRecordHeader(record);
  job->header_checksum =
      RecordHeaderChecksum({reinterpret_cast<const uint8_t*>(job->header.data()), job->header.size()});
  job->payer = std::string(payer.substr(0, kPayerBytesMax));
  job->record = std::move(record);
  job->sources = std::move(sources);
  job->begun_ns = now_ns;
  return job;
}

std::shared_ptr<ReadJob> MakeReadJob(DiskEntry* entry, uint32_t layers, const CacheDigest& cache, const BlockKey& key,
                                     absl::Span<const BlockDisk::Target> targets, int64_t now_ns) {
  auto job = std::make_shared<ReadJob>();
  for (const BlockDisk::Target& target : targets) job->page_bytes.push_back(target.bytes);
  if (IsRecord(job->page_bytes)) job->layout = RecordLayout::Of(job->page_bytes);
  if (targets.size() != layers || job->layout.bytes != entry->bytes) return nullptr;
  for (const BlockDisk::Target& target : targets) job->targets.push_back(target.to);
  job->place = entry->place();
  job->entry = entry;
  job->cache = cache;
  job->key = key;
  job->tokens = entry->token_digest;
  job->index = entry->index;
  job->header_check = entry->header_check;
  job->begun_ns = now_ns;
  return job;
}

}  // namespace kvmanager
