"""What bad_codec.c can be, and the shared objects of it."""

load("@rules_cc//cc:defs.bzl", "cc_binary")

# Each is -D of its name in capitals.
VARIANTS = [
    "good",
    "older_table",
    "newer_table",
    "bad_answers",
    "bad_attend_error",
    "bad_attend_loops",
    "bad_attend_nan",
    "bad_attend_wrong",
    "bad_attends_without_entry",
    "bad_crashes",
    "bad_create",
    "bad_decode_error",
    "bad_encode_error",
    "bad_escapes",
    "bad_exits",
    "bad_first_head_ignored",
    "bad_name",
    "bad_not_deterministic",
    "bad_null_entry",
    "bad_null_table",
    "bad_parameters_without_end",
    "bad_probe",
    "bad_reads_past",
    "bad_size_huge",
    "bad_size_not_aligned",
    "bad_size_too_small",
    "bad_stride",
    "bad_struct_size_small",
    "bad_struct_size_zero",
    "bad_symbol",
    "bad_takes_nan",
    "bad_unknown_flag",
    "bad_validate_follows_bytes",
    "bad_version",
    "bad_workspace_huge",
    "bad_workspace_past",
    "bad_writes_before",
    "bad_writes_input",
    "bad_writes_past",
]

def bad_codecs():
    """Targets bad/VARIANT.so."""
    for variant in VARIANTS:
        cc_binary(
            name = "bad/%s.so" % variant,
            testonly = True,
            srcs = ["bad_codec.c"],
            # They are caught by guard pages in any build: a sanitizer in them would only speak first.
            copts = ["-D" + variant.upper(), "-fno-sanitize=all", "-Wno-unused-function", "-Wno-array-bounds"],
            linkshared = True,
            visibility = ["//tests:__subpackages__"],
            deps = [":kvmanager_codec"],
        )
