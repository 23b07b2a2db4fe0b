// `kvctl recompute-plan`: the times that the planner weighs for a reload, and what it decides. Pure of daemons and
// files.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>

#include "absl/status/statusor.h"
#include "transport/recompute/plan.h"

namespace CLI {
class App;
}

namespace kvmanager::recompute {

/// As the command line gives them; 0 stands for what plan.h says.
struct PlanArguments {
  ReloadShape shape;
  double link_gbps = 0, link_latency_us = 0, tflops = 0, compute_latency_us = 0;
};

/// Adds the subcommand's options and its help to `app`, which fill `arguments`.
void AddPlanOptions(CLI::App& app, PlanArguments& arguments);

/// Everything that was weighed.
struct PlanExplanation {
  ReloadShape shape;
  MachineRates rates;
  ReloadCosts costs;
  SplitPlan plans[3];  // in kSchedules' order
};
/// Errors: INVALID_ARGUMENT naming the option or plan.h's field.
absl::StatusOr<PlanExplanation> Explain(const PlanArguments& arguments);

/// What one token costs, a row per schedule, and the default schedule's decision in a sentence.
std::string FormatPlan(const PlanExplanation& explanation);
/// The same; times in seconds.
nlohmann::json PlanToJson(const PlanExplanation& explanation);

}  // namespace kvmanager::recompute
