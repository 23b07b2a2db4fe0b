"""Repositories that replace downloads, so that a build needs Debian's packages and nothing else."""

_CC_RULES = ["cc_binary", "cc_import", "cc_library", "cc_proto_library", "cc_test", "cc_toolchain", "cc_toolchain_suite", "objc_library"]

def _rules_cc_impl(ctx):
    # Debian's bazel-rules-cc 0.0.4 does not load under its bazel 4.2.3; the native rules are what it wraps.
    ctx.file("BUILD", "")
    ctx.file("cc/BUILD", "exports_files([\"defs.bzl\"])\n")
    ctx.file("cc/defs.bzl", "".join(["%s = native.%s\n" % (r, r) for r in _CC_RULES]))

rules_cc_repository = repository_rule(implementation = _rules_cc_impl, local = True)

def _coverage_impl(ctx):
    # cc_test depends on this repository even where coverage is never asked for.
    ctx.file("coverage.sh", "#!/bin/sh\necho 'coverage is not wired up' >&2\nexit 1\n", executable = True)
    ctx.file("BUILD", "sh_binary(name = \"coverage_report_generator\", srcs = [\"coverage.sh\"], visibility = [\"//visibility:public\"])\n")

remote_coverage_tools_repository = repository_rule(implementation = _coverage_impl, local = True)

def _cuda_impl(ctx):
    nvcc = ctx.which("nvcc")
    home, runtime = None, None
    for candidate in ["/usr/local/cuda", "/usr/lib/cuda", "/usr"]:
        for library in ["lib64", "lib/x86_64-linux-gnu", "lib"]:
            archive = "%s/%s/libcudart_static.a" % (candidate, library)
            if home == None and ctx.path(candidate + "/include/cuda.h").exists and ctx.path(archive).exists:
                home, runtime = candidate, archive
    found = nvcc != None and home != None
    ctx.file("found.bzl", "CUDA_FOUND = %s\nNVCC = %s\n" % (found, repr(str(nvcc)) if found else "None"))
    if found:
        ctx.symlink(home + "/include", "include")
    ctx.file("BUILD", """
# The runtime is linked in whole, and finds the driver when the program runs: one binary serves machines with and without a GPU.
cc_library(
    name = "cudart",
    hdrs = glob(["include/**"]) if %s else [],
    includes = ["include"],
    linkopts = %s,
    visibility = ["//visibility:public"],
)
""" % (found, [runtime, "-ldl", "-lrt", "-lpthread"] if found else []))

cuda_repository = repository_rule(
    doc = "The CUDA Toolkit, if nvcc is on PATH: `@cuda//:found.bzl` says so; nothing on a CPU-only build depends on it.",
    implementation = _cuda_impl,
    local = True,
    environ = ["PATH"],
)

def _ucx_impl(ctx):
    found = ctx.path("/usr/include/ucp/api/ucp.h").exists
    ctx.file("found.bzl", "UCX_FOUND = %s\n" % found)
    ctx.file("BUILD", "")

ucx_repository = repository_rule(
    doc = "UCX's headers, if they are installed: `@ucx//:found.bzl` says so. The library is looked for when a program asks for it.",
    implementation = _ucx_impl,
    local = True,
)
