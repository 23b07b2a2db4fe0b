"""What is built with CUDA: the one place in BUILD files that knows whether there is a CUDA Toolkit."""

load("@cuda//:found.bzl", "CUDA_FOUND", "NVCC")
load("@rules_cc//cc:defs.bzl", "cc_binary", "cc_library", "cc_test")

# Hopper alone: the kernels use its own instructions, and no later processor runs code for sm_90a.
_TARGET = ["-gencode", "arch=compute_90a,code=sm_90a"]

def _cuda_objects_impl(ctx):
    used = cc_common.merge_cc_infos(cc_infos = [dep[CcInfo] for dep in ctx.attr.deps])
    context = used.compilation_context
    includes = []
    for path in context.quote_includes.to_list() + context.includes.to_list() + context.system_includes.to_list():
        includes += ["-I", path]
    objects = []
    for source in ctx.files.srcs:
        if source.extension != "cu":
            continue
        out = ctx.actions.declare_file("%s/%s.o" % (ctx.label.name, source.basename))
        objects.append(out)
        ctx.actions.run(
            outputs = [out],
            inputs = depset(ctx.files.srcs + ctx.files.hdrs, transitive = [context.headers]),
            executable = NVCC,
            arguments = _TARGET + includes + [
                "-I",
                ".",
                "-std=c++20",
                "-O3",
                "--expt-relaxed-constexpr",
                "-Xcompiler",
                "-fPIC,-Wall,-Wno-unknown-pragmas",
            ] + ctx.attr.nvcc_options + ["-c", source.path, "-o", out.path],
            # nvcc runs the host's compiler and its own tools, found by PATH.
            use_default_shell_env = True,
            mnemonic = "CudaCompile",
            progress_message = "Compiling %s" % source.short_path,
        )
    toolchain = ctx.attr._toolchain[cc_common.CcToolchainInfo]
    features = cc_common.configure_features(ctx = ctx, cc_toolchain = toolchain)
    linking, _ = cc_common.create_linking_context_from_compilation_outputs(
        actions = ctx.actions,
        name = ctx.label.name,
        feature_configuration = features,
        cc_toolchain = toolchain,
        compilation_outputs = cc_common.create_compilation_outputs(
            objects = depset(objects),
            pic_objects = depset(objects),
        ),
        linking_contexts = [used.linking_context],
        disallow_dynamic_library = True,
        alwayslink = False,
    )
    headers = cc_common.create_compilation_context(headers = depset(ctx.files.hdrs))
    return [
        DefaultInfo(files = depset(objects)),
        cc_common.merge_cc_infos(cc_infos = [CcInfo(compilation_context = headers, linking_context = linking), used]),
    ]

_cuda_objects = rule(
    implementation = _cuda_objects_impl,
    attrs = {
        "srcs": attr.label_list(allow_files = [".cu", ".cuh", ".h"]),
        "hdrs": attr.label_list(allow_files = [".cuh", ".h"]),
        "deps": attr.label_list(providers = [CcInfo]),
        "nvcc_options": attr.string_list(),
        "_toolchain": attr.label(default = "@bazel_tools//tools/cpp:current_cc_toolchain"),
    },
    fragments = ["cpp"],
    toolchains = ["@bazel_tools//tools/cpp:toolchain_type"],
)

def cuda_library(name, srcs, hdrs = [], deps = [], nvcc_options = [], visibility = None):
    """A library of CUDA sources; where there is no CUDA Toolkit, its headers alone.

    Args:
      name: as of cc_library.
      srcs: .cu files, each compiled by nvcc, and private headers.
      hdrs: public headers; those that C++ includes are free of CUDA's. A function that is called where there is no
        Toolkit is declared with KV_NEEDS_CUDA (kvmanager/base/needs_cuda.h).
      deps: as of cc_library; CUDA's runtime is added.
      nvcc_options: such as "-fmad=false".
      visibility: as of cc_library.
    """
    if CUDA_FOUND:
        _cuda_objects(
            name = name,
            srcs = srcs,
            hdrs = hdrs,
            deps = deps + ["@cuda//:cudart"],
            nvcc_options = nvcc_options,
            visibility = visibility,
        )
    else:
        cc_library(name = name, hdrs = hdrs, deps = deps, visibility = visibility)

def cuda_cc_library(name, cuda_srcs, srcs = [], deps = [], **kwargs):
    """A library of C++ that includes CUDA's headers or calls kernels; where there is no Toolkit, the rest of it.

    Args:
      name: as of cc_library.
      cuda_srcs: what is compiled only with a Toolkit.
      srcs: what is always compiled.
      deps: as of cc_library; CUDA's runtime is added.
      **kwargs: as of cc_library.
    """
    cc_library(
        name = name,
        srcs = srcs + (cuda_srcs if CUDA_FOUND else []),
        deps = deps + ["@cuda//:cudart"],
        # A shared library could not see the CUDA runtime, whose archive hides its symbols.
        linkstatic = True,
        **kwargs
    )

def cuda_test(name, srcs, deps, size = "small", data = []):
    """A test that wants a GPU: it skips where there is none (device_testing.h), and where there is no CUDA Toolkit."""
    cc_test(
        name = name,
        size = size,
        srcs = srcs if CUDA_FOUND else ["//bazel:cuda_absent_test.cc"],
        data = data,
        deps = (deps if CUDA_FOUND else ["//kvmanager/base:needs_cuda"]) + ["//bazel:gtest_main"],
        linkstatic = True,  # one file that runs on another machine
        tags = ["gpu"],
    )

def cuda_binary(name, srcs, deps, **kwargs):
    """A benchmark of a GPU; where there is no CUDA Toolkit, a program that says so."""
    cc_binary(
        name = name,
        srcs = srcs if CUDA_FOUND else ["//bazel:cuda_absent_main.cc"],
        deps = deps + ["@cuda//:cudart"] if CUDA_FOUND else ["//kvmanager/base:needs_cuda"],
        **kwargs
    )

def without_cuda(defines):
    """These defines where there is no CUDA Toolkit: of //kvmanager/base:needs_cuda alone."""
    return [] if CUDA_FOUND else defines
