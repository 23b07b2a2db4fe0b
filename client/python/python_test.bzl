"""python_test: the unittest cases of a file, as a Bazel test that counts them one by one."""

def python_test(name, src, engine = None, data = [], size = "medium", tags = [], env = {}, daemon = True):
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
      daemon: False for a test that needs neither kvmanagerd nor the package.
    """
    native.sh_test(
        name = name,
        size = size,
        srcs = ["//client/python/testing:run_tests.py"],
        args = ["$(location %s)" % src] + ([engine] if engine else []),
        data = data + [
            src,
            "//client/python/testing",
        ] + ([
            "//client/python:package",
            "//kvmanager/daemon:kvmanagerd",
        ] if daemon else []),
        tags = tags,
        env = env,
    )
