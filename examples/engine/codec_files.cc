#include "examples/engine/codec_files.h"

#include <algorithm>
#include <filesystem>
#include <memory>
#include <set>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "kvmanager/base/safetensors.h"
#include "kvmanager/base/status.h"

namespace kvmanager::engine {
namespace {

namespace fs = std::filesystem;

constexpr absl::string_view kKey = "calibration=";
constexpr char kSuffix[] = ".safetensors";
constexpr char kField[] = "codec parameter calibration";

/// Where each value of calibration= is in `codec`: begin and length.
std::vector<std::pair<size_t, size_t>> Values(const std::string& codec) {
  std::vector<std::pair<size_t, size_t>> values;
  for (size_t at = codec.find(std::string(kKey)); at != std::string::npos; at = codec.find(std::string(kKey), at)) {
    const bool begins = at > 0 && (codec[at - 1] == ':' || codec[at - 1] == ',');
    at += kKey.size();
    if (!begins) continue;
    values.push_back({at, std::min(codec.find_first_of(",;>", at), codec.size()) - at});
  }
  return values;
}

bool IsFile(const std::string& path) {
  std::error_code error;
  return fs::is_regular_file(path, error);
}

absl::StatusOr<std::string> DigestIn(const std::string& path) {
  KV_ASSIGN_OR_RETURN(const std::unique_ptr<Safetensors> file, Safetensors::Open(path));
  const auto digest = file->metadata().find("digest");
  if (digest == file->metadata().end()) {
    return InvalidField(kField, path, "a calibration artifact, which has a digest: make one with kvctl calibrate");
  }
  return digest->second;
}

}  // namespace

absl::StatusOr<CodecFiles> ResolveCodecFiles(const std::string& codec, bool own_daemon) {
  struct Named {
    size_t begin, length;
    std::string path;    // empty: not here
    std::string digest;  // empty likewise
  };
  std::vector<Named> every;
  std::set<std::string> digests, directories;
  bool all_here = true;
  for (const auto& [begin, length] : Values(codec)) {
    Named named = {begin, length, codec.substr(begin, length), ""};
    if (!IsFile(named.path) && IsFile(named.path + kSuffix)) named.path += kSuffix;
    if (IsFile(named.path)) {
      if (!absl::EndsWith(named.path, kSuffix)) {
        return InvalidField(kField, named.path, absl::StrCat("a file whose name ends in ", kSuffix));
      }
      KV_ASSIGN_OR_RETURN(named.digest, DigestIn(named.path));
      digests.insert(named.digest);
      const std::string directory = fs::path(named.path).parent_path().string();
      directories.insert(directory.empty() ? "." : directory);
    } else if (own_daemon) {
      return FieldError(
          absl::StatusCode::kNotFound, kField, named.path,
          "the path of a file that kvctl calibrate wrote, or the name of a running daemon's with --connect");
    } else {
      named.path.clear();
      all_here = false;
    }
    every.push_back(std::move(named));
  }
  if (own_daemon && directories.size() > 1) {
    return InvalidField(kField, absl::StrCat("in ", *directories.begin(), " and in ", *std::next(directories.begin())),
                        "in one directory, as a daemon has one: put the files together");
  }
  CodecFiles files;
  files.codec = codec;
  if (!directories.empty()) files.directory = *directories.begin();
  if (all_here && digests.size() == 1) files.calibration_digest = *digests.begin();
  // From the end, so that places before stay right.
  for (auto named = every.rbegin(); named != every.rend(); ++named) {
    const fs::path path = named->path.empty() ? codec.substr(named->begin, named->length) : named->path;
    // One of several artifacts is named by its digest, since one digest cannot vouch for all of them.
    const bool by_digest = files.calibration_digest.empty() && !named->digest.empty() && !own_daemon;
    files.codec.replace(named->begin, named->length, by_digest ? named->digest : path.filename().string());
  }
  return files;
}

}  // namespace kvmanager::engine
