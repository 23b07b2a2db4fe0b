// The factors of ZACK: two bases in which a product of two sides needs few columns.
//
// From second moments alone, in double precision; any thread. left @ A[:, :n] times right @ B[:, :n] transposed stands
// for left right^T; with all columns A B^T = 1, and nothing is lost.
#pragma once

#include <vector>

#include "absl/status/statusor.h"
#include "codecs/calibrate/lapack.h"
#include "codecs/calibrate/plan.h"

namespace kvmanager::calibrate {

/// Second moments sum x x^T of `count` rows.
struct Moment {
  Matrix sum;  // [d][d]
  double count = 0;
};

struct Factors {
  Matrix left, right;           // A, B: columns in the order of weights
  std::vector<double> weights;  // descending
};

/// joint (ZACK, section 4): A = B, the right singular vectors of both sides' rows stacked, uncentred; weights are their
/// singular values. balanced: the pair whose first n columns make the least error of the product itself, for every n,
/// from the SVD of Cl^(1/2) Cr^(1/2) with Cl, Cr the mean second moments; weights are its singular values. Of each
/// column the largest element of A is positive. Errors: INTERNAL (LAPACK).
absl::StatusOr<Factors> MakeFactors(ZackMode mode, const Moment& left, const Moment& right, int d);

/// The artifact's tensor [layers][kv_heads]: mean importance of V's channels, rotated by the Hadamard matrix.
inline constexpr char kHadamardEnergy[] = "zack_hack.v_hadamard";
/// Whether HadamardMatrix(d) is there.
constexpr bool IsPowerOfTwo(int d) { return d > 0 && (d & (d - 1)) == 0; }
/// The normalised Walsh-Hadamard matrix [d][d], its own inverse. REQUIRES: IsPowerOfTwo(d).
Matrix HadamardMatrix(int d);

/// [d] mean of (x . column)^2 over the rows of `moment`, for the columns of `basis`.
std::vector<double> ColumnEnergy(const Moment& moment, const Matrix& basis, int d);

}  // namespace kvmanager::calibrate
