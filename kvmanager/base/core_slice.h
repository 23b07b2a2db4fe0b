// How soon a thread that has become ready is given a core that other threads keep busy.
#pragma once

#include <chrono>

namespace kvmanager {

/// Asks for slices of this length for the calling thread: 100 us to 100 ms. Linux 6.12 and later run whoever is due
/// first, and whoever has a shorter slice is due sooner, at once if it comes back from a wait. The share of the cores
/// is the same. Earlier kernels take no notice, nor is a refusal an error.
void AskForSlice(std::chrono::microseconds slice);

}  // namespace kvmanager
