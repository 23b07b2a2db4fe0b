#include "kvmanager/base/journal.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <string>

namespace kvmanager {

bool IsJournal() {
  const char* const stream = std::getenv("JOURNAL_STREAM");
  struct stat file;
  if (stream == nullptr || fstat(STDERR_FILENO, &file) != 0) return false;
  return std::to_string(file.st_dev) + ":" + std::to_string(file.st_ino) == stream;
}

const char* ErrorPrefix() { return IsJournal() ? kJournalError : ""; }

}  // namespace kvmanager
