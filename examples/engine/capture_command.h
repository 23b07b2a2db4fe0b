// `kvctl capture`: Q, K and V of a model over a text, in the capture format.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/status.h"

namespace CLI {
class App;
}

namespace kvmanager::engine {

struct CaptureArguments {
  std::string model, text, out, dtype = "f16";
  int64_t tokens = 0;
  int window = 4096, threads = 0;
  bool output_projection = false, quiet = false;
};

/// Adds the subcommand's options to `app`, which fill `arguments`.
void AddCaptureOptions(CLI::App& app, CaptureArguments& arguments);

/// Runs it: a summary on stdout, progress on stderr. Errors: those of files and options.
absl::Status RunCapture(const CaptureArguments& arguments);

}  // namespace kvmanager::engine
