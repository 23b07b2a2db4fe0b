// The keeper alone, for its test.
#include "kvmanager/keep/keeper.h"

int main(int argc, char** argv) { return kvmanager::RunKeeper(argc, argv); }
