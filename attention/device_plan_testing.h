// A layer's table of slots for a batch whose pages a test lists.
#pragma once

#include <cstdint>
#include <deque>
#include <vector>

#include "attention/device_plan.h"

namespace kvmanager {

class DeviceTables {
 public:
  void Add(const std::vector<DevicePage>& pages, uint32_t aged, uint64_t first_position, int tokens) {
    DeviceSequence sequence;
    PageRuns not_encoded, not_raw;
    sequence.raw_table = uint32_t(slots_.size());
    for (const DevicePage& page : pages) slots_.push_back(page.raw);
    sequence.encoded_table = uint32_t(slots_.size());
    for (const DevicePage& page : pages) slots_.push_back(page.encoded);
    for (uint32_t j = 0; j < pages.size(); ++j) {
      if (pages[j].raw == DevicePage::kNoSlot) not_raw.Add(j, j + 1);
      if (pages[j].encoded == DevicePage::kNoSlot) not_encoded.Add(j, j + 1);
    }
    runs_.push_back(std::move(not_encoded));
    sequence.not_encoded = runs_.back().runs();
    runs_.push_back(std::move(not_raw));
    sequence.not_raw = runs_.back().runs();
    sequence.aged = aged;
    sequence.first_position = first_position;
    sequence.tokens = tokens;
    sequences_.push_back(sequence);
  }
  const std::vector<DeviceSequence>& sequences() const { return sequences_; }
  const std::vector<uint32_t>& slots() const { return slots_; }

 private:
  std::vector<DeviceSequence> sequences_;
  std::vector<uint32_t> slots_;
  std::deque<PageRuns> runs_;  // stay where they are
};

}  // namespace kvmanager
