"""Repositories that replace downloads: Debian 12's bazel needs no network with them."""

_CC_RULES = ["cc_binary", "cc_import", "cc_library", "cc_proto_library", "cc_test", "cc_toolchain", "cc_toolchain_suite", "objc_library"]

def _rules_cc_impl(ctx):
    ctx.file("BUILD", "")
    ctx.file("cc/BUILD", "exports_files([\"defs.bzl\"])\n")
    ctx.file("cc/defs.bzl", "".join(["%s = native.%s\n" % (r, r) for r in _CC_RULES]))

rules_cc_repository = repository_rule(implementation = _rules_cc_impl, local = True)

def _coverage_impl(ctx):
    ctx.file("coverage.sh", "#!/bin/sh\nexit 1\n", executable = True)
    ctx.file("BUILD", "sh_binary(name = \"coverage_report_generator\", srcs = [\"coverage.sh\"], visibility = [\"//visibility:public\"])\n")

remote_coverage_tools_repository = repository_rule(implementation = _coverage_impl, local = True)

def _header_impl(ctx):
    folder = ctx.os.environ.get("KVMANAGER_INCLUDE", "/usr/local/include")
    header = ctx.path(folder + "/kvmanager_codec.h")
    if not header.exists:
        fail("no %s: run kvmanager's tools/install_codec_header DIR, and set KVMANAGER_INCLUDE=DIR" % header)
    ctx.symlink(header, "kvmanager_codec.h")
    ctx.file("BUILD", """
cc_library(
    name = "kvmanager_codec",
    hdrs = ["kvmanager_codec.h"],
    includes = ["."],
    visibility = ["//visibility:public"],
)
""")

kvmanager_header_repository = repository_rule(
    implementation = _header_impl,
    local = True,
    environ = ["KVMANAGER_INCLUDE"],
)
