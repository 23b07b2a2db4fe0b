// Listening sockets that go from a daemon to the program that takes its place in the same process (upgrade.h): no
// connection is refused meanwhile. An environment variable names them.
#pragma once

#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace kvmanager {

struct HandedSocket {
  std::string flag;     // "--listen"
  std::string address;  // its value, as the options have it
  int fd = -1;
};

/// A line for each: "FD FLAG ADDRESS".
inline constexpr char kHandedSocketsVariable[] = "KVMANAGER_HANDED_SOCKETS";

/// Those that this process was given; the variable is gone then. While it has one thread.
std::vector<HandedSocket> TakeHandedSockets();
/// Closes them. A Unix socket's file goes if no line of `kept` has its address.
void CloseHandedSockets(absl::Span<const HandedSocket> sockets, absl::Span<const std::string> kept);
/// The descriptor of one, which stays the list's; -1: there is none.
int FindHanded(absl::Span<const HandedSocket> sockets, absl::string_view flag, absl::string_view address);
/// Adds a duplicate of `fd`, if it is one, which exec() closes until the variable is set.
void HandSocket(absl::string_view flag, absl::string_view address, int fd, std::vector<HandedSocket>* sockets);
/// Sets the variable; exec() leaves these open, and no other but the standard ones.
void PassHandedSockets(absl::Span<const HandedSocket> sockets);

}  // namespace kvmanager
