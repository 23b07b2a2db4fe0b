// The process of UcxMemory as a program of its own: for tests and benchmarks. kvmanagerd runs itself as one.
#include "transport/ucx/ucx_process.h"

int main() { return kvmanager::RunUcxProcess(); }
