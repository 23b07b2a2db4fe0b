#include "kvmanager/daemon/options_places.h"

#include <filesystem>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "kvmanager/base/address.h"
#include "kvmanager/base/status.h"

namespace kvmanager {
namespace {

struct Place {
  const char* flag;
  std::string given;
  std::string place;  // equal for equal ones; empty: like no other
};

// Where a path leads, whether or not all of it is there.
std::string PlaceOf(const std::string& path) {
  std::error_code error;
  std::filesystem::path place = std::filesystem::weakly_canonical(std::filesystem::absolute(path, error), error);
  if (error) place = std::filesystem::path(path).lexically_normal();
  if (!place.has_filename()) place = place.parent_path();  // "/a/" is "/a"
  return place.string();
}

std::string PlaceOf(const HostPort& address) {
  return address.port == 0 ? "" : absl::StrCat("tcp:", absl::AsciiStrToLower(address.host), ":", address.port);
}

Place Listener(const char* flag, const std::string& given) {
  const auto address = ParseListenAddress(flag, given);
  if (!address.ok()) return {flag, given, ""};
  const std::string& path = address->unix_path;
  if (path.empty()) return {flag, given, PlaceOf(address->tcp)};
  // A link at the end is not followed by who binds.
  const std::filesystem::path socket(path);
  const std::string folder = socket.has_parent_path() ? socket.parent_path().string() : ".";
  return {flag, given, absl::StrCat("unix:", PlaceOf(folder), "/", socket.filename().string())};
}

absl::Status CheckApart(const std::vector<Place>& places, absl::string_view what) {
  for (size_t i = 0; i < places.size(); ++i) {
    for (size_t other = 0; other < i; ++other) {
      if (places[i].place.empty() || places[i].place != places[other].place) continue;
      return InvalidField(places[i].flag, places[i].given,
                          absl::StrCat("another ", what, " than that of ", places[other].flag, " ", places[other].given,
                                       ", which this command names too"));
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status CheckPlaces(const Options& options) {
  std::vector<Place> folders, addresses;
  for (const auto& [flag, path] :
       {std::pair("--disk-path", &options.disk_path), std::pair("--state-dir", &options.state_dir)}) {
    if (!path->empty()) folders.push_back({flag, *path, PlaceOf(*path)});
  }
  KV_RETURN_IF_ERROR(CheckApart(folders, "folder"));
  for (const std::string& listen : options.listen) addresses.push_back(Listener("--listen", listen));
  if (const std::string admin = AdminAddress(options); !admin.empty()) {
    addresses.push_back(Listener("--admin-listen", admin));
  }
  for (const auto& [flag, text] :
       {std::pair("--metrics-listen", &options.metrics_listen), std::pair("--http-listen", &options.http_listen),
        std::pair("--peer-listen", &options.peer_listen)}) {
    const auto address = ParseHostPort(flag, *text);
    if (address.ok()) addresses.push_back({flag, *text, PlaceOf(*address)});
  }
  return CheckApart(addresses, "address");
}

}  // namespace kvmanager
