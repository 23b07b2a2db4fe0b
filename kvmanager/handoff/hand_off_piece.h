// How much of a hand-off the loop does at once: a message each, between which others are served.
#pragma once

#include <chrono>

namespace kvmanager {

constexpr std::chrono::microseconds kHandOffPiece{150};

}  // namespace kvmanager
