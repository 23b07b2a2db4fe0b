// `kvctl calibrate`: trains an artifact on a model and a text, or on a capture, and writes it; or adds to an artifact
// what was measured of it elsewhere.
#pragma once

#include <string>
#include <vector>

#include "absl/status/status.h"

namespace CLI {
class App;
}

namespace kvmanager::engine {

struct CalibrateArguments {
  std::string model, text, capture, artifact, measured, out, json;
  std::vector<std::string> codecs;
  int windows = 16, window = 4096, threads = 0, seed = 0, iterations = 25, choice_windows = 2;
  bool quiet = false;
};

/// Adds the subcommand's options to `app`, which fill `arguments`.
void AddCalibrateOptions(CLI::App& app, CalibrateArguments& arguments);

/// Runs it: a summary on stdout, progress on stderr. Errors: those of files, options and codecs.
absl::Status RunCalibrate(const CalibrateArguments& arguments);

}  // namespace kvmanager::engine
