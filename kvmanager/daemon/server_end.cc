#include "kvmanager/daemon/server_end.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kvmanager/base/clock.h"
#include "kvmanager/base/on_worker.h"
#include "kvmanager/base/status.h"
#include "kvmanager/daemon/upgrade.h"

namespace kvmanager {
namespace {

constexpr int64_t kLookMs = 5;

}  // namespace

void ServerEnd::SetRunning(const Running& running) {
  if (terminating_ && running_.disk != nullptr) {
    const uint64_t unwritten = running_.store->report().Use().unwritten_blocks;
    if (unwritten > 0) {
      spdlog::warn("{} blocks are not on the disk, and are not found there after a restart (the disk: {})", unwritten,
                   running_.disk->state());
    }
  }
  running_ = running;
  deadline_ = nullptr;  // it must not outlive the loop
}

void ServerEnd::Stop() {
  successor_.clear();
  stop_ = true;
}

void ServerEnd::Terminate() {
  if (running_.loop == nullptr) return;
  if (terminating_) return Stop();
  terminating_ = true;
  drain_->Set(true);
  if (!successor_.empty()) {
    spdlog::info("the upgrade is given up: the daemon is to end");
    return Stop();
  }
  spdlog::info("draining: {} sequences are held and {} received ones wait to be claimed; waiting at most {} s",
               held_->count(), running_.incoming->tickets().size(), options_.drain_s);
  until_ns_ = SteadyClock().NowNs() + options_.drain_s * 1000000000;
  deadline_ = running_.loop->timer()
                  .afterDelay(options_.drain_s * kj::SECONDS)
                  .then([this] {
                    if (held_->count() > 0) spdlog::warn("{} sequences are still held, and are lost", held_->count());
                    stop_ = true;
                  })
                  .eagerlyEvaluate(nullptr);
}

// What a peer was told is accepted counts as held, until it is claimed or expires.
bool ServerEnd::Over() const {
  return stop_ || (terminating_ && held_->count() == 0 && running_.outgoing->active().all() == 0 &&
                   running_.incoming->tickets().size() == 0 && !AwaitsDisk(until_ns_));
}

// What the disk refuses is not waited for: after an error it takes nothing for a while, or until the next start.
bool ServerEnd::AwaitsDisk(int64_t until_ns) const {
  return running_.store->report().Use().unwritten_blocks > 0 && running_.disk != nullptr &&
         running_.disk->TakesWritesWithin(until_ns - SteadyClock().NowNs());
}

absl::Status ServerEnd::CheckUpgrade(bool cold) const {
  if (terminating_ || stop_ || !successor_.empty()) return absl::FailedPreconditionError("this daemon ends already");
  if (options_.command.empty()) return absl::FailedPreconditionError("this daemon is part of another program");
  if (!options_.state_dir.empty() || cold) return absl::OkStatus();
  return FieldError(absl::StatusCode::kFailedPrecondition, "--state-dir", "not given",
                    "given, so that what is in host memory outlives an upgrade; it is lost else, which `cold` "
                    "(kvctl upgrade --cold) allows");
}

kj::Promise<absl::Status> ServerEnd::Upgrade(const std::string& program, bool cold) {
  if (absl::Status status = CheckUpgrade(cold); !status.ok()) return status;
  using Checked = absl::StatusOr<CheckedSuccessor>;
  return OnWorker<Checked>(running_.background, running_.queue, WorkerPool::kDaemon,
                           [options = options_, program, cold, memory = running_.memory]() -> Checked {
                             KV_ASSIGN_OR_RETURN(CheckedSuccessor checked, CheckSuccessor(options, program, cold));
                             // What nobody keeps would be lost.
                             if (!cold) KV_RETURN_IF_ERROR(memory->KeepOn());
                             return checked;
                           })
      .then([this, cold](Checked checked) {
        absl::Status status = checked.ok() ? CheckUpgrade(cold) : checked.status();
        if (!status.ok()) {
          spdlog::warn("no upgrade: {}", std::string(status.message()));
          return status;
        }
        spdlog::info("upgrading from {} to {}, {}; {} sequences are held, and are lost", std::string(kVersion),
                     checked->version, checked->program, held_->count());
        BeginUpgrade(checked->program, cold);
        return status;
      });
}

// Messages that came are served, connections that come wait for the successor.
void ServerEnd::BeginUpgrade(const std::string& program, bool cold) {
  successor_ = program;
  drain_->Set(true);
  running_.requests->Close();
  // What is only in memory, and does not outlive this daemon there, is written to the disk as when it is told to end.
  const bool writes = cold && !options_.disk_path.empty();
  const int64_t most_ms = writes ? std::max(kSettleMs, options_.drain_s * 1000) : kSettleMs;
  deadline_ = Settle(SteadyClock().NowNs() + most_ms * 1000000, writes, false).eagerlyEvaluate(nullptr);
}

kj::Promise<void> ServerEnd::Settle(int64_t until_ns, bool writes, bool was_quiet) {
  return running_.loop->timer()
      .afterDelay(kLookMs * kj::MILLISECONDS)
      .then([this, until_ns, writes, was_quiet]() -> kj::Promise<void> {
        const StoreUse use = running_.store->report().Use();
        const uint64_t calls = calls_->under_way();
        const bool quiet = calls == 0 && running_.replies->used_bytes() == 0 && use.encoding_pages == 0 &&
                           (!writes || !AwaitsDisk(until_ns));
        // Twice, as the last replies are being written.
        const bool late = SteadyClock().NowNs() >= until_ns;
        if (!late && !(quiet && was_quiet)) return Settle(until_ns, writes, quiet);
        if (!quiet || (writes && use.unwritten_blocks > 0)) {
          spdlog::warn("{} calls under way are given up, {} pages are not encoded, {} blocks not on the disk", calls,
                       use.encoding_pages, use.unwritten_blocks);
        }
        stop_ = true;
        return kj::READY_NOW;
      });
}

}  // namespace kvmanager
