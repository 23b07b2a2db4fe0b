// A daemon in the test's own process: exact attention over float16 keys and values, with the client's interface.
//
// FakeHost stands for a daemon and its store, FakeClient for a connection. A codec says how large its pages are and its
// pairs are counted as the protocol says, but every page is read raw. One thread; hosts outlive clients, clients
// outlive handles.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "client/client.h"
#include "codecs/calibration.h"

namespace kvmanager::engine {

class FakeHost {
 public:
  struct Layer {
    std::vector<float> k, v;  // [kv_heads][tokens][head_dim], by head
  };
  struct SequenceState {
    std::vector<std::vector<Layer>> layers;  // [layer][kv head]
    std::vector<uint64_t> tokens;            // per layer
    int hit_blocks = 0;
  };
  struct Ticket {
    SequenceState sequence;
    std::string blob;
  };

  bool has_arenas = true;
  uint64_t pair_error = 0;  // added to every step's encoded pairs
  std::map<std::string, FakeHost*> peers;
  std::map<std::string, Ticket> tickets;
  std::map<uint64_t, SequenceState> sequences;
  std::map<Digest, std::pair<TokenDigest, SequenceState>> blocks;  // a block's key: the sequence up to its end
  uint64_t next_sequence = 1;
  uint64_t steps = 0, inline_steps = 0;
  uint64_t infos = 0;                         // calls of Sequence::Info
  CalibrationSource* calibrations = nullptr;  // of codecs; nullptr: without artifacts

  std::unique_ptr<client::Client> Connect();
};

}  // namespace kvmanager::engine
