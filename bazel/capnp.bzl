"""capnp_library: C++ from Cap'n Proto schemas, made by Debian's capnp at build time."""

load("@rules_cc//cc:defs.bzl", "cc_library")

def capnp_library(name, srcs, visibility = None):
    """A cc_library of the code that `capnp compile -oc++` makes from `srcs`; include it as `<path>/<src>.h`."""
    outs = [s + suffix for s in srcs for suffix in [".c++", ".h"]]
    native.genrule(
        name = name + "_generate",
        srcs = srcs,
        outs = outs,
        # capnp writes beside the path it is given, below the output root.
        cmd = "PATH=/usr/bin:/bin:$$PATH capnp compile --src-prefix=$$(pwd) -oc++:$(RULEDIR)/../.. $(SRCS) || exit 1; " +
              "",
        visibility = ["//visibility:private"],
    )
    cc_library(
        name = name,
        srcs = [o for o in outs if o.endswith(".c++")],
        hdrs = [o for o in outs if o.endswith(".h")],
        deps = ["//bazel:capnp_rpc"],
        visibility = visibility,
    )
