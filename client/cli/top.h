// kvctl top: what a daemon does now, drawn again and again.
//
// One thread; the Client is the caller's.
#pragma once

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/client.h"
#include "monitoring/frame.h"

namespace kvmanager::client::cli {

struct TopArguments {
  double interval_s = 1;  // between two readings: kIntervalMinS..kIntervalMaxS
  bool once = false;      // one picture, of the interval that begins now
  static constexpr double kIntervalMinS = 0.1, kIntervalMaxS = 3600;
};

/// All that one picture is drawn from.
struct TopPicture {
  DaemonDescription status;
  std::vector<CacheDescription> caches;
  std::vector<SequenceDescription> sequences;
  std::vector<PeerDescription> peers;
  Frame frame;
  struct Errors {
    std::string method, code;
    double count = 0;
  };
  std::vector<Errors> errors;  // since the daemon's start, most first
};

/// At most `columns` wide and `lines` high (0: as high as it gets); ends with a newline.
std::string FormatTop(const TopPicture& picture, int columns, int lines);

/// Draws until the process is ended, or once: over the last picture on a terminal, one behind the other elsewhere.
/// While the daemon is away it says so and connects again. Errors: of the first picture.
absl::Status RunTop(Client& client, const TopArguments& arguments, const std::string& address, bool json);

}  // namespace kvmanager::client::cli
