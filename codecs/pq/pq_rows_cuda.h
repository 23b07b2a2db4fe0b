// Attention on a GPU over rows of K and V that stand anywhere: what sparse selection of tokens reads.
//
// The kernels are those of raw pages, but for the addresses: AttendParams::slots is a list of rows of K (SelectParams),
// an AttendItem's first_page is a place in that list and its pages are runs of page_tokens rows there. A row's V is
// where it is in a raw page with that K. AttendParams::codec: nullptr, or a SecondPlace.
#pragma once

#include "codecs/device/attend_launch.h"

namespace kvmanager::pq {

/// nullptr: no kernel for this head_dim (64 and 128 have one), or built without CUDA.
const device::AttendKernels* SelectedRowsKernels(int head_dim);

}  // namespace kvmanager::pq
