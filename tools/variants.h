// Programs of variants, which are run one at a time: each under a tool, for itself.
#pragma once

#include <cstdio>
#include <cstring>

struct Variant {
  char const* name;
  bool (*run)();  // whether all sums are right
};

/// Runs the variant that the program is given the name of; without one, lists all. Returns the exit status.
template <int kCount>
int run_variant(int count, char** words, Variant const (&variants)[kCount]) {
  for (Variant const& variant : variants) {
    if (count < 2) std::printf("%s\n", variant.name);
    if (count < 2 || std::strcmp(variant.name, words[1]) != 0) continue;
    std::printf("sums are %s\n", variant.run() ? "right" : "WRONG");
    return 0;
  }
  return count < 2 ? 0 : 2;
}
