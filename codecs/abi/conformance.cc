#include "codecs/abi/conformance.h"

#include <errno.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "codecs/abi/conformance_capture.h"
#include "codecs/abi/conformance_checks.h"
#include "codecs/abi/guarded_buffer.h"
#include "codecs/calibration.h"
#include "kvmanager/base/status.h"

namespace kvmanager {
namespace {

using Outcome = ConformanceCheck::Outcome;

#ifdef KVMANAGER_SANITIZED
constexpr int kSlowdown = 8;
#else
constexpr int kSlowdown = 1;
#endif
constexpr int kHeadsGroup = 4;  // query heads per KV head, where nothing says

// What a check's process says: 'P' or 'F', then the note.
void WriteVerdict(int fd, const absl::StatusOr<std::string>& result) {
  std::string text = result.ok() ? "P" + *result : absl::StrCat("F", result.status().message());
  for (size_t done = 0; done < text.size();) {
    const ssize_t n = write(fd, text.data() + done, text.size() - done);
    if (n <= 0 && errno != EINTR) break;
    done += std::max<ssize_t>(n, 0);
  }
}

std::string HowItEnded(int status, int seconds_max) {
  if (WIFSIGNALED(status) && WTERMSIG(status) == SIGALRM) return absl::StrCat("it did not end in ", seconds_max, " s");
  if (WIFSIGNALED(status)) {
    return absl::StrCat("it crashed: signal ", WTERMSIG(status), " (", strsignal(WTERMSIG(status)), ")");
  }
  return absl::StrCat("it ended the process with exit status ", WEXITSTATUS(status));
}

absl::StatusOr<ConformanceCheck> RunCheck(const conformance::Check& check, const conformance::Case& c) {
  ConformanceCheck result;
  result.name = check.name;
  int fds[2];
  if (pipe(fds) != 0) return absl::ResourceExhaustedError(absl::StrCat("pipe: ", std::strerror(errno)));
  const int seconds_max = c.options->check_seconds_max * kSlowdown;
  const pid_t pid = fork();
  if (pid < 0) return absl::ResourceExhaustedError(absl::StrCat("fork: ", std::strerror(errno)));
  if (pid == 0) {
    close(fds[0]);
    InstallFaultHandler(fds[1]);
    alarm(seconds_max);
    WriteVerdict(fds[1], check.run(c));
    _exit(0);
  }
  close(fds[1]);
  std::string said;
  char buffer[4096];
  for (ssize_t n; (n = read(fds[0], buffer, sizeof buffer)) != 0;) {
    if (n > 0) said.append(buffer, n);
    if (n < 0 && errno != EINTR) break;
  }
  close(fds[0]);
  int status = 0;
  while (waitpid(pid, &status, 0) < 0 && errno == EINTR) {
  }
  if (said.empty() || !WIFEXITED(status) || WEXITSTATUS(status) != 0) {
    result.note = HowItEnded(status, seconds_max);
    return result;
  }
  result.outcome = said[0] == 'P' ? Outcome::kPassed : Outcome::kFailed;
  result.note = said.substr(1);
  absl::string_view note = result.note;
  if (result.outcome == Outcome::kPassed && absl::ConsumePrefix(&note, conformance::kNotTaken)) {
    result.outcome = Outcome::kNotTaken;
  }
  return result;
}

void Print(const ConformanceCheck& check, FILE* out) {
  if (out == nullptr) return;
  constexpr const char* kWords[] = {"passed ", "FAILED ", "skipped"};
  std::fprintf(out, "%s  %-14s %s%s%s\n", kWords[static_cast<int>(check.outcome)], check.where.c_str(),
               check.name.c_str(), check.note.empty() ? "" : ": ", check.note.c_str());
  std::fflush(out);
}

/// Unlike in everything: type, heads, sizes.
std::vector<PageLayout> UsualLayouts() {
  return {{DType::kFloat16, 2, 128, 64},
          {DType::kBFloat16, 3, 64, 64},
          {DType::kFloat16, 1, 128, 128},
          {DType::kFloat16, 2, 32, 16},
          {DType::kBFloat16, 1, 256, 32}};
}

std::vector<PageLayout> LayoutsOf(const CalibrationModel& model) {
  const PageLayout fits = {DType::kFloat16, uint16_t(model.kv_heads), uint16_t(model.head_dim), 64};
  return {fits, {DType::kBFloat16, fits.kv_heads, fits.head_dim, 32}};
}

absl::StatusOr<std::vector<conformance::Case>> Cases(const ConformanceOptions& options) {
  conformance::Case c;
  c.options = &options;
  std::vector<PageLayout> layouts = options.layouts;
  int group = kHeadsGroup;
  if (!options.calibration_path.empty()) {
    KV_ASSIGN_OR_RETURN(const std::shared_ptr<const Calibration> calibration,
                        Calibration::Load(options.calibration_path));
    const CalibrationModel& model = calibration->model();
    c.calibration = SerializeCalibration(model, calibration->tensors(), calibration->metadata());
    c.layers = model.layers;
    group = std::max(model.query_heads / model.kv_heads, 1);
    if (layouts.empty()) layouts = LayoutsOf(model);
  }
  if (!options.capture_path.empty()) {
    KV_ASSIGN_OR_RETURN(c.capture, calibrate::Capture::Open(options.capture_path));
    const CalibrationModel& model = c.capture->model();
    const int capture_group = model.query_heads / model.kv_heads;
    if (!c.calibration.empty() && model.layers != c.layers) {
      return InvalidField("capture's layers", model.layers, absl::StrCat(c.layers, ", as the artifact's"));
    }
    if (!c.calibration.empty() && capture_group != group) {
      return InvalidField("capture's query heads per KV head", capture_group,
                          absl::StrCat(group, ", as the artifact's"));
    }
    c.layers = model.layers;
    group = capture_group;
    if (layouts.empty()) layouts = LayoutsOf(model);
    for (const PageLayout& layout : layouts) KV_RETURN_IF_ERROR(conformance::CheckCapture(*c.capture, layout));
  }
  if (layouts.empty()) layouts = UsualLayouts();
  std::vector<conformance::Case> cases;
  for (const PageLayout& layout : layouts) {
    c.layout = layout;
    c.query_heads = group * layout.kv_heads;
    cases.push_back(c);
  }
  return cases;
}

}  // namespace

int ConformanceReport::count(ConformanceCheck::Outcome outcome) const {
  return static_cast<int>(
      std::count_if(checks.begin(), checks.end(), [&](const ConformanceCheck& c) { return c.outcome == outcome; }));
}

absl::StatusOr<ConformanceReport> RunConformance(const ConformanceOptions& options, FILE* out) {
  if (access(options.path.c_str(), R_OK) != 0) {
    return FieldError(absl::StatusCode::kNotFound, "codec plug-in", options.path, "a file that can be read");
  }
  KV_ASSIGN_OR_RETURN(const std::vector<conformance::Case> cases, Cases(options));
  ConformanceReport report;
  const auto run = [&](const conformance::Check& check, const conformance::Case& c,
                       const std::string& where) -> absl::StatusOr<Outcome> {
    KV_ASSIGN_OR_RETURN(ConformanceCheck result, RunCheck(check, c));
    result.where = where;
    Print(result, out);
    report.checks.push_back(result);
    return result.outcome;
  };
  bool usable = true;
  for (const conformance::Check& check : conformance::TableChecks()) {
    KV_ASSIGN_OR_RETURN(const Outcome outcome, run(check, cases[0], ""));
    usable = usable && outcome == Outcome::kPassed;
  }
  size_t taken = 0;
  for (const conformance::Case& c : usable ? cases : std::vector<conformance::Case>()) {
    // Nothing can be tried in pages of sizes that are not sound.
    bool described = false;
    for (const conformance::Check& check : conformance::LayoutChecks()) {
      KV_ASSIGN_OR_RETURN(const Outcome outcome, run(check, c, LayoutText(c.layout)));
      taken += outcome == Outcome::kNotTaken ? 0 : 1;
      described = described || outcome == Outcome::kPassed;
      if (!described) break;
    }
  }
  if (usable && taken == 0) {
    ConformanceCheck none;
    none.name = "describe: takes a layout";
    none.note = "none of those tried; --layout, --parameters and --calibration name others";
    Print(none, out);
    report.checks.push_back(none);
  }
  if (out != nullptr) std::fprintf(out, "%d passed, %d failed\n", report.passed(), report.failed());
  return report;
}

absl::StatusOr<PageLayout> ParseLayoutText(absl::string_view text) {
  constexpr absl::string_view kBound =
      "TYPExHEADSxDIMxTOKENS such as f16x8x128x64: f16 or bf16, 1..256 KV heads, head_dim and page tokens each a "
      "multiple of 16 in 16..256";
  const std::vector<std::string> parts = absl::StrSplit(text, 'x');
  int heads, dim, tokens;
  const auto in = [](int value, int low, int high, int step) {
    return value >= low && value <= high && value % step == 0;
  };
  if (parts.size() != 4 || (parts[0] != "f16" && parts[0] != "bf16") || !absl::SimpleAtoi(parts[1], &heads) ||
      !absl::SimpleAtoi(parts[2], &dim) || !absl::SimpleAtoi(parts[3], &tokens) ||
      !in(heads, 1, PageLayout::kKvHeadsMax, 1) || !in(dim, PageLayout::kHeadDimMin, PageLayout::kHeadDimMax, 16) ||
      !in(tokens, PageLayout::kPageTokensMin, PageLayout::kPageTokensMax, 16)) {
    return InvalidField("--layout", text, kBound);
  }
  return PageLayout{parts[0] == "f16" ? DType::kFloat16 : DType::kBFloat16, uint16_t(heads), uint16_t(dim),
                    uint16_t(tokens)};
}

std::string LayoutText(const PageLayout& layout) {
  return absl::StrCat(layout.dtype == DType::kFloat16 ? "f16" : "bf16", "x", layout.kv_heads, "x", layout.head_dim, "x",
                      layout.page_tokens);
}

}  // namespace kvmanager
