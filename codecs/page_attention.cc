#include "codecs/page_attention.h"

#include "kvmanager/base/status.h"

namespace kvmanager {

// Called only where maps() or folds_output() say so, which these do not.
void PageAttention::MapQueries(int, int, int, const float*, float*) const { KV_CHECK(false); }
void PageAttention::ExpandOutput(int, int, int, const float*, float*) const { KV_CHECK(false); }
void PageAttention::ProjectOutput(int, int, int, const float*, float*) const { KV_CHECK(false); }

}  // namespace kvmanager
