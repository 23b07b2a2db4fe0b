"""capnp_library: C++ from Cap'n Proto schemas, made by Debian's capnp at build time."""

load("@rules_cc//cc:defs.bzl", "cc_library")

def capnp_library(name, srcs, visibility = None):
    """A cc_library of the code that `capnp compile -oc++` makes from `srcs`; include it as `<package>/<src>.h`."""
    outs = [s + suffix for s in srcs for suffix in [".c++", ".h"]]
    native.genrule(
        name = name + "_generate",
        srcs = srcs,
        outs = outs,
        # capnp writes each output at its source's path below the directory it is given.
        cmd = "out=$(@D) && capnp compile --src-prefix=$$(dirname $(location {first})) -oc++:$$out $(SRCS)".format(first = srcs[0]),
        visibility = ["//visibility:private"],
    )
    cc_library(
        name = name,
        srcs = [o for o in outs if o.endswith(".c++")],
        hdrs = [o for o in outs if o.endswith(".h")],
        copts = ["-w"],
        deps = ["//bazel:capnp_rpc"],
        visibility = visibility,
    )
