// `kvctl tune`: measures codec policies on a model and a text, and names the smallest that loses little enough.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"

namespace CLI {
class App;
}

namespace kvmanager::engine {

struct TuneArguments {
  std::string model, text, max_loss = "0.5%", json, svg;
  std::string calibration;  // empty: NAME.calibration.safetensors here, NAME being the model's
  std::vector<std::string> codecs;
  int windows = 4, window = 4096, lag_pages = 2, threads = 0;
  int64_t offset = -1;  // bytes of the text to skip; -1: what an artifact was trained on, if enough is left
  bool quiet = false;
};

/// Adds the subcommand's options to `app`, which fill `arguments`.
void AddTuneOptions(CLI::App& app, TuneArguments& arguments);

/// Runs it: the table on stdout, progress on stderr. Errors: those of files, options, codecs and artifacts.
absl::Status RunTune(const TuneArguments& arguments);

}  // namespace kvmanager::engine
