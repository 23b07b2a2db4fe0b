"""python_test: the unittest cases of a file, as a Bazel test that counts them one by one."""

def python_test(name, src, engine = None, data = [], size = "medium", tags = [], env = {}):
    """Runs by Debian's Python, with the package and kvmanager_testing on its path and kvmanagerd among its data.

    Args:
      name: of the test.
      src: a file with unittest.TestCase classes; modules beside it can be imported.
      engine: the folder of client/python/engines whose requirements the test needs: it runs in that virtual
        environment under `tools/test --engines`, and is skipped elsewhere.
      data: files that it reads, other modules among them.
      size: as of other tests.
      tags: as of other tests.
      env: as of other tests; without, variables given by --test_env stay.
    """
    native.sh_test(
        name = name,
        size = size,
        srcs = ["//client/python/testing:run_tests.py"],
        args = ["$(location %s)" % src] + ([engine] if engine else []),
        data = data + [
            src,
            "//client/python:package",
            "//client/python/testing",
            "//kvmanager/daemon:kvmanagerd",
        ],
        tags = tags,
        env = env,
    )
