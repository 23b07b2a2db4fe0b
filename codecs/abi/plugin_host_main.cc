// A plug-in's process as a program of its own: for tests and benchmarks. kvmanagerd runs itself as one.
#include "codecs/abi/plugin_host.h"

int main() { return kvmanager::RunPluginHost(); }
