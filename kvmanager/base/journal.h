// The journal of systemd, where stderr goes there. Any thread.
#pragma once

namespace kvmanager {

/// What a line in the journal begins with: its priority (sd-daemon(3)).
inline constexpr char kJournalError[] = "<3>", kJournalWarning[] = "<4>", kJournalInfo[] = "<6>",
                      kJournalDebug[] = "<7>";

/// Whether stderr goes there, as systemd says: JOURNAL_STREAM=DEVICE:INODE.
bool IsJournal();
/// What an error that is written to stderr begins with: its priority in the journal, or nothing.
const char* ErrorPrefix();

}  // namespace kvmanager
