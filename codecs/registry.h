// Codecs by name: an ordinary object that main() fills; read-only afterwards, so any thread may ask it.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "codecs/codec.h"

namespace kvmanager {

/// Parameters as written: "k_bits" -> "3".
using CodecParameters = std::map<std::string, std::string>;

struct CodecSpec {
  std::string name;
  CodecParameters parameters;
};

/// "...,calibration=DIGEST" behind `spec`, which has parameters already or not; `spec` itself without a calibration.
std::string WithCalibration(std::string spec, const std::shared_ptr<const Calibration>& calibration);

/// Refuses the artifact of a codec that has no use for one. why: what the codec does without. Errors: INVALID_ARGUMENT.
absl::Status RefuseCalibration(const CodecContext& context, absl::string_view why);

/// Numbers as parameters are written: decimal digits behind at most a '-'; a double may have a point and an exponent.
/// No blanks, no leading '+', no hexadecimal. false: not such a number, or beyond the type.
bool ParseDecimal(absl::string_view text, int* value);
bool ParseDecimal(absl::string_view text, double* value);

/// Parses "NAME[:key=value,...]". Errors: INVALID_ARGUMENT naming the field.
absl::StatusOr<CodecSpec> ParseCodecSpec(absl::string_view text);

class CodecRegistry {
 public:
  /// `parameters` are without "calibration": the artifact that it names is in the context.
  using Factory = std::function<absl::StatusOr<std::unique_ptr<Codec>>(const CodecContext&, const CodecParameters&)>;
  /// Makes codecs from a text that may be more than one spec (codecs/policy). sinks: tokens at the beginning of a
  /// context that a lossy codec keeps raw where the text has no clause for them; nullopt: none.
  using PolicyFactory = std::function<absl::StatusOr<std::unique_ptr<Codec>>(
      const CodecRegistry&, const CodecContext&, absl::string_view, std::optional<uint64_t> sinks)>;

  /// `name` must be new. `help`: one line for --help and for errors.
  void Register(std::string name, std::string help, Factory factory);
  void SetPolicyFactory(PolicyFactory factory);
  /// Makes codecs from texts that begin with kLadderPrefix (codecs/ladder), in Create and CreateForCache.
  static constexpr char kLadderPrefix[] = "ladder=";
  void SetLadderFactory(PolicyFactory factory);
  /// Where "calibration=NAME" is looked up; outlives the registry. Without one, artifacts are refused.
  void SetCalibrations(CalibrationSource* calibrations);

  /// A codec for `context` from "NAME[:key=value,...]", or from a policy or a ladder, exactly as the text says: no page
  /// is a sink unless a clause says so. For measuring a codec, and for canonical texts. Errors: INVALID_ARGUMENT naming
  /// the codec or the parameter, its value and what is allowed (an unknown codec lists the known ones);
  /// FAILED_PRECONDITION when the artifact is for another model or geometry; those of CalibrationSource::Get.
  absl::StatusOr<std::unique_ptr<Codec>> Create(absl::string_view spec, const CodecContext& context) const;
  /// The codec of a cache that is opened with `spec`: a lossy codec, or a policy with one, keeps the first page of
  /// every context raw unless the text has a clause ";sinks=N". The canonical text says it, so that Create and
  /// CreateForCache make the same codec from it. A registry without a policy factory knows no sinks. Errors: Create's.
  absl::StatusOr<std::unique_ptr<Codec>> CreateForCache(absl::string_view spec, const CodecContext& context) const;
  /// For codecs that need no more than a layout.
  absl::StatusOr<std::unique_ptr<Codec>> Create(absl::string_view spec, const PageLayout& layout) const;

  /// name -> help.
  std::map<std::string, std::string> Names() const;

 private:
  bool IsLadder(absl::string_view spec) const;

  struct Entry {
    std::string help;
    Factory factory;
  };
  std::map<std::string, Entry> entries_;
  PolicyFactory policy_factory_;
  PolicyFactory ladder_factory_;
  CalibrationSource* calibrations_ = nullptr;
};

}  // namespace kvmanager
