#include "codecs/abi/codec_plugin.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <filesystem>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "kvmanager/base/status.h"

namespace kvmanager {
namespace {

constexpr size_t kHelpBytesMax = 400;
constexpr size_t kErrorTextBytes = 512;
constexpr int kVersionsTried = 9;

struct RequiredEntry {
  const char* name;
  size_t offset;
};

constexpr RequiredEntry kRequired[] = {
#define KVMC_ENTRY(entry) \
  { #entry, offsetof(kvmc_codec_api, entry) }
    KVMC_ENTRY(name),         KVMC_ENTRY(help),     KVMC_ENTRY(probe),           KVMC_ENTRY(describe),
    KVMC_ENTRY(create),       KVMC_ENTRY(destroy),  KVMC_ENTRY(workspace_bytes), KVMC_ENTRY(encode_batch),
    KVMC_ENTRY(decode_batch), KVMC_ENTRY(validate), KVMC_ENTRY(last_error),
#undef KVMC_ENTRY
};

absl::Status Refused(absl::string_view path, absl::string_view what, absl::string_view value, absl::string_view bound) {
  return FieldError(absl::StatusCode::kInvalidArgument, absl::StrCat("codec plug-in ", path, " ", what), value, bound);
}

absl::StatusCode CodeOf(kvmc_status status) {
  switch (status) {
    case KVMC_INVALID_ARGUMENT:
      return absl::StatusCode::kInvalidArgument;
    case KVMC_FAILED_PRECONDITION:
      return absl::StatusCode::kFailedPrecondition;
    case KVMC_DATA_LOSS:
      return absl::StatusCode::kDataLoss;
    case KVMC_UNAVAILABLE:
      return absl::StatusCode::kUnavailable;
    default:
      return absl::StatusCode::kInternal;
  }
}

}  // namespace

bool IsPluginName(absl::string_view name) {
  if (name.size() > KVMC_NAME_BYTES_MAX) return false;
  for (absl::string_view word : absl::StrSplit(name, '+')) {
    if (word.empty()) return false;
    for (char c : word) {
      if (!(c >= 'a' && c <= 'z') && !(c >= '0' && c <= '9') && c != '_') return false;
    }
  }
  return true;
}

std::string PrintablePluginText(const char* text, size_t bytes_max) {
  std::string shown;
  for (size_t i = 0; i < bytes_max && text[i] != '\0'; ++i) {
    shown.push_back(text[i] >= ' ' && text[i] <= '~' ? text[i] : '?');
  }
  return shown;
}

absl::Status PluginStatus(kvmc_status status, absl::string_view name, absl::string_view path, absl::string_view entry,
                          absl::string_view text) {
  if (status == KVMC_OK) return absl::OkStatus();
  return absl::Status(CodeOf(status), absl::StrCat("codec ", name, " (", path, ") ", entry, ": ",
                                                   text.empty() ? absl::StrCat("error ", status) : text));
}

absl::StatusOr<std::shared_ptr<const CodecPlugin>> CodecPlugin::Load(const std::string& path) {
  std::error_code error;
  if (!std::filesystem::is_regular_file(path, error)) {
    return FieldError(absl::StatusCode::kNotFound, "codec plug-in", path, "a shared object that exists");
  }
  // Without a slash, dlopen would look elsewhere.
  const std::string file = path.find('/') == std::string::npos ? absl::StrCat("./", path) : path;
  void* const object = dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (object == nullptr) return Refused(path, "file", "not loadable", absl::StrCat("a shared object: ", dlerror()));
  using Entry = const kvmc_codec_api* (*)();
  const auto entry = reinterpret_cast<Entry>(dlsym(object, KVMC_SYMBOL));
  if (entry == nullptr) {
    std::string exported = "missing";
    for (int version = 2; version <= kVersionsTried; ++version) {
      const std::string other = absl::StrCat("kvmanager_codec_v", version);
      if (dlsym(object, other.c_str()) != nullptr) exported = absl::StrCat("missing (it has ", other, ")");
    }
    return Refused(path, "symbol " KVMC_SYMBOL, exported,
                   "exported, as C: KVMC_EXPORT const kvmc_codec_api* " KVMC_SYMBOL "(void)");
  }
  return Adopt(entry(), path);
}

absl::StatusOr<std::shared_ptr<const CodecPlugin>> CodecPlugin::Adopt(const kvmc_codec_api* table, std::string source) {
  if (table == nullptr) return Refused(source, "table", "NULL", "what " KVMC_SYMBOL " returns: a kvmc_codec_api");
  constexpr size_t kHead = offsetof(kvmc_codec_api, abi_version) + sizeof table->abi_version;
  if (table->struct_size < kHead) {
    return Refused(source, "table struct_size", absl::StrCat(table->struct_size), "sizeof(kvmc_codec_api)");
  }
  if (table->abi_version != KVMC_ABI_VERSION) {
    return Refused(source, "table abi_version", absl::StrCat(table->abi_version),
                   absl::StrCat(KVMC_ABI_VERSION, ", which is all that this build understands"));
  }
  std::shared_ptr<CodecPlugin> plugin(new CodecPlugin);  // shared by its codecs and the registry's factory
  plugin->path_ = std::move(source);
  // Whole entries only: one that struct_size cuts is not there.
  constexpr size_t kEntry = sizeof(void*);
  const size_t taken = std::min(table->struct_size, sizeof(kvmc_codec_api)) / kEntry * kEntry;
  std::memcpy(&plugin->api_, table, taken);
  for (const RequiredEntry& required : kRequired) {
    const std::string what = absl::StrCat("table entry ", required.name);
    if (required.offset + kEntry > taken) {
      return Refused(plugin->path_, what, absl::StrCat("beyond struct_size = ", table->struct_size),
                     absl::StrCat("inside it, at byte ", required.offset, ": it is required"));
    }
    const void* value;
    std::memcpy(&value, reinterpret_cast<const char*>(&plugin->api_) + required.offset, sizeof value);
    if (value == nullptr) return Refused(plugin->path_, what, "NULL", "there: it is required");
  }
  plugin->name_ = PrintablePluginText(plugin->api_.name, KVMC_NAME_BYTES_MAX + 1);
  plugin->help_ = PrintablePluginText(plugin->api_.help, kHelpBytesMax);
  if (!IsPluginName(plugin->name_)) {
    return Refused(plugin->path_, "name", absl::StrCat("\"", plugin->name_, "\""),
                   absl::StrCat("1..", KVMC_NAME_BYTES_MAX, " of a-z, 0-9 and _, or such words joined by +"));
  }
  KV_RETURN_IF_ERROR(plugin->StatusOf(plugin->api_.probe(), "probe"));
  return plugin;
}

OptionalEntries CodecPlugin::optional_entries() const {
  return {api_.attend_batch != nullptr, api_.map_queries != nullptr, api_.expand_output != nullptr,
          api_.project_output != nullptr, api_.output_factor != nullptr};
}

std::string CodecPlugin::LastError() const {
  char text[kErrorTextBytes] = "";
  api_.last_error(text, sizeof text);
  return PrintablePluginText(text, sizeof text - 1);
}

absl::Status CodecPlugin::StatusOf(kvmc_status status, absl::string_view entry) const {
  if (status == KVMC_OK) return absl::OkStatus();
  return PluginStatus(status, name_, path_, entry, LastError());
}

}  // namespace kvmanager
