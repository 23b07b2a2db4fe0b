#include "client/cli/daemon_command.h"

#include <sys/socket.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <system_error>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "client/dial.h"

namespace kvmanager::client::cli {
namespace {

std::string Content(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

std::string FolderOf(pid_t pid) { return absl::StrCat("/proc/", pid); }

/// "State" -> what is behind it in /proc/PID/status.
std::string StatusField(const std::string& folder, absl::string_view name) {
  const std::string status = Content(absl::StrCat(folder, "/status"));
  for (absl::string_view line : absl::StrSplit(status, '\n')) {
    if (absl::ConsumePrefix(&line, absl::StrCat(name, ":"))) return std::string(absl::StripAsciiWhitespace(line));
  }
  return "";
}

/// The system's service whose main process this is. What was started by hand within one has another parent.
std::string UnitOf(const std::string& folder) {
  if (StatusField(folder, "PPid") != "1") return "";
  const std::string groups = Content(absl::StrCat(folder, "/cgroup"));
  for (const absl::string_view line : absl::StrSplit(groups, '\n')) {
    if (!absl::StartsWith(line, "0::") && !absl::StrContains(line, ":name=systemd:")) continue;
    const absl::string_view path = line.substr(line.rfind(':') + 1);
    const absl::string_view unit = path.substr(path.rfind('/') + 1);
    const bool is_system = absl::StrContains(path, ".slice/") && !absl::StartsWith(path, "/user.slice/");
    if (is_system && absl::EndsWith(unit, ".service")) return std::string(unit);
  }
  return "";
}

std::string Quoted(const std::string& word) {
  const bool plain = !word.empty() && std::all_of(word.begin(), word.end(), [](char c) {
    return absl::ascii_isalnum(static_cast<unsigned char>(c)) || absl::StrContains("-_./:=,@%+", c);
  });
  return plain ? word : absl::StrCat("'", absl::StrReplaceAll(word, {{"'", "'\\''"}}), "'");
}

}  // namespace

DaemonCommand CommandOf(const std::string& address) {
  constexpr int64_t kDialMs = 500;
  const auto parsed = ParseAddress(address);
  if (!parsed.ok() || !parsed->is_unix) return {};
  const auto socket = Dial(*parsed, kDialMs);
  ucred peer = {};
  socklen_t bytes = sizeof peer;
  if (!socket.ok() || getsockopt(socket->get(), SOL_SOCKET, SO_PEERCRED, &peer, &bytes) != 0 || peer.pid <= 0) {
    return {};
  }
  DaemonCommand command = ReadCommand(FolderOf(peer.pid));
  command.pid = peer.pid;
  return command;
}

DaemonCommand ReadCommand(const std::string& folder) {
  DaemonCommand command;
  const std::string words = Content(absl::StrCat(folder, "/cmdline"));
  if (!words.empty()) command.words = absl::StrSplit(absl::StripSuffix(words, absl::string_view("\0", 1)), '\0');
  std::error_code error;
  command.directory = std::filesystem::read_symlink(absl::StrCat(folder, "/cwd"), error).string();
  command.unit = UnitOf(folder);
  return command;
}

bool Runs(const std::string& folder) {
  const std::string state = StatusField(folder, "State");
  return !state.empty() && state[0] != 'Z' && state[0] != 'X';
}

std::string HowToStartAgain(const DaemonCommand& before, bool runs, const std::string& program, bool cold) {
  std::string text;
  if (before.pid > 0 && runs) {
    text = absl::StrCat("Process ", before.pid,
                        " still runs. If its configuration names another address by now, it may serve "
                        "there: see its log, and `kvctl status --connect` with that address. Else end it (kill ",
                        before.pid, "). ");
  } else if (before.pid > 0) {
    text = absl::StrCat("Process ", before.pid, " has ended. ");
  }
  const std::string memory =
      cold ? "" : "With the same --state-dir it finds what was published, as long as --state-keep-s said.";
  if (program.empty())
    absl::StrAppend(&text, "Install the earlier version again, or take back what was changed in its configuration. ");
  if (!before.unit.empty()) {
    absl::StrAppend(&text, "The daemon was the service ", before.unit, ": `journalctl -u ", before.unit,
                    "` shows its log, and `systemctl restart ", before.unit, "` starts it with its flags. ", memory);
  } else if (!before.words.empty()) {
    absl::StrAppend(
        &text, "Start it with the flags that it had",
        before.directory.empty() ? "" : absl::StrCat(", in ", Quoted(before.directory)), ":\n  ",
        absl::StrJoin(before.words, " ", [](std::string* out, const std::string& word) { out->append(Quoted(word)); }),
        "\n", memory);
  } else {
    absl::StrAppend(
        &text,
        "Start it with the flags that it had, --state-dir among them, which kvctl could not read: `systemctl "
        "cat kvmanagerd` shows those of a service. ",
        memory);
  }
  return std::string(absl::StripTrailingAsciiWhitespace(text));
}

}  // namespace kvmanager::client::cli
