// Suppression of ThreadSanitizer's false races inside RocksDB. To be included by one source of each program that opens
// a disk: libtsan looks for it in the program itself.
//
// Debian's RocksDB is not instrumented, so its atomics order nothing for ThreadSanitizer; its mutexes do.
#pragma once

#ifdef __SANITIZE_THREAD__
extern "C" const char* __tsan_default_suppressions();  // NOLINT(bugprone-reserved-identifier): libtsan's name
extern "C" const char* __tsan_default_suppressions() { return "race:librocksdb.so\n"; }  // NOLINT: likewise
#endif
