// The part of a device step whose queries choose what they read: which tokens, and attention over those.
//
// How many rows a query reads follows from its position, so lists, scratch memory and the division of work are planned
// on the host, as pages are; which rows they are, the device finds out between two kernels. Plans name places in the
// tables of slots and are the same for all layers. A plan is cut into rounds, one behind the other, each of which fits
// the memory for lists and scores.
//
// Codes are made on the device: those of tokens that were there before the step when it is prepared, of all that there
// are as soon as one of them leaves the local window, so that this is seldom; those of the step's own tokens, which
// only entries of several need, behind its append. Who shares a chunk of codes writes the same bytes there.
//
// Owned by a DeviceStep, whose thread and stream it uses. Nothing waits for the device.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "attention/device_step.h"
#include "attention/device_step_kernels.h"
#include "attention/selected_plan.h"
#include "attention/step_tables.h"
#include "attention/upload_piece.h"
#include "attention/upload_ring.h"
#include "codecs/device/device_selection.h"
#include "kvmanager/memory/device_memory.h"

namespace kvmanager {

/// What the options of a step come to.
struct SelectionSizes {
  size_t tokens_max = 0;   // that choose, of a step
  size_t selects_max = 0;  // with those that stand in the place of none
  size_t items_max = 0;
  size_t codes_max = 0;                 // items of one launch
  uint32_t runs_max = 0, rows_max = 0;  // of a round
  /// Of a plan, in the ring.
  size_t plan_bytes() const {
    return selects_max * sizeof(device::Select) + items_max * sizeof(device::AttendItem) +
           codes_max * sizeof(device::EncodeCodes);
  }
};

class StepSelection {
 public:
  static constexpr int kTokensMax = 1024;  // that choose, of a step

  /// Errors: FAILED_PRECONDITION where there are no kernels for these options.
  static absl::StatusOr<SelectionSizes> SizesOf(const DeviceStep::Options& options);

  StepSelection(const DeviceStep::Options& options, const SelectionSizes& sizes);
  /// Once, before anything else. Errors: CUDA's.
  absl::Status Init();

  /// Codes of a sequence from `token` on are not there, in one layer or in all.
  void NoCodes(uint32_t place, int layer, uint64_t token);
  void NoCodes(uint32_t place);

  /// Plans the sparse selection of the queries of `entries`. Errors: RESOURCE_EXHAUSTED, where a query's context or the
  /// whole is too much.
  absl::Status Plan(absl::Span<const DeviceStepEntry> entries, const StepTables& tables);
  /// Passes the plan to the device, if it has another one.
  absl::Status Upload(UploadRing* ring, uint64_t* done, uint32_t* arrived);
  /// Enqueues the coding of what stands before the entries, where the plan's queries need it. device_tables: as
  /// StepTables' of all layers.
  absl::Status CodeEarlier(int first_layer, int end_layer, absl::Span<const DeviceStepEntry> entries,
                           const StepTables& tables, const uint32_t* device_tables, UploadRing* ring, uint64_t* done,
                           uint32_t* arrived);
  /// A layer's sparse selection and attention. base: of the step, but for what a plan says.
  absl::Status Launch(const device::AttendParams& base);

  /// Token pairs that the plan's queries read in a layer.
  uint64_t pairs() const { return pairs_; }
  /// Equal where Launch enqueues the same.
  uint64_t launches() const { return launches_; }

 private:
  struct Round {
    uint32_t first = 0, count = 0;  // in selects_
    uint32_t middle_max = 0;
    int blocks = 0;
    uint32_t first_item = 0;
  };
  absl::Status AddRound(absl::Span<const device::Select> queries);
  void AddOwnCodes(const DeviceStepEntry& entry, const StepTables& tables);
  /// Items for tokens first .. end - 1.
  static void CutCodes(uint32_t index, uint32_t table, uint64_t first, uint64_t end,
                       std::vector<device::EncodeCodes>* items);
  /// Codes that the entry's queries need, as tokens from the first on.
  uint64_t CodesWanted(const DeviceStepEntry& entry) const;
  uint64_t& CodesOf(uint32_t place, int layer) { return codes_of_[size_t(place) * o_.layers + layer]; }

  struct Piece {
    const void* from;
    void* to;
    size_t bytes;
  };
  absl::Status Send(absl::Span<const Piece> pieces, UploadRing* ring, uint64_t* done, uint32_t* arrived);

  const DeviceStep::Options o_;
  const DeviceSelection& selection_;
  const SelectionSizes sizes_;
  SelectedPlanner planner_;
  DeviceArray<uint8_t> device_;
  // Of device_:
  device::Select* d_selects_ = nullptr;
  device::AttendItem* d_items_ = nullptr;
  device::EncodeCodes* d_own_codes_ = nullptr;
  device::EncodeCodes* d_earlier_codes_ = nullptr;
  uint32_t* d_rows_ = nullptr;
  uint8_t* d_scratch_ = nullptr;

  std::vector<uint64_t> codes_of_;  // [sequences_max][layers] tokens whose codes the stream has made
  // The plan.
  std::vector<device::Select> selects_;
  std::vector<device::AttendItem> items_;
  size_t item_count_ = 0;
  std::vector<device::EncodeCodes> own_codes_;
  std::vector<Round> rounds_;
  uint64_t pairs_ = 0, launches_ = 0;
  bool sent_ = false;
  // Scratch.
  std::vector<device::Select> queries_;
  std::vector<SelectedList> lists_;
  std::vector<device::EncodeCodes> codes_, sent_codes_;
};

}  // namespace kvmanager
