#!/usr/bin/python3
"""Writes the wheel: make_wheel.py OUT.whl README LICENSE FILE...

FILEs lie in a folder kvmanager/; one is libkvmanager_client.so. FILEs named kvmanagerd and kvctl go to kvmanager/bin, and
become commands. What these three need and glibc and gcc do not bring is bundled in kvmanager/libs, each under a name of its
own contents: a process that has another build of such a library keeps it. libstdc++ and libgcc_s are not bundled for them,
either: every Linux that runs Python wheels of C++ has them. Uses ldd, dpkg, patchelf and strip; no network. Equal inputs
make equal bytes.
"""

from __future__ import annotations

import ast
import base64
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile

_LIBRARY = "libkvmanager_client.so"
_PROGRAMS = ("kvmanagerd", "kvctl")
_PYTHON = ">=3.11"
# What every glibc system has. libstdc++ and libgcc_s must be the process's own: exceptions cross them.
_SYSTEM = re.compile(r"(linux-vdso|ld-linux-x86-64|libc|libm|libdl|librt|libpthread|libgcc_s|libstdc\+\+)\.so[.0-9]*$")
_DATE = (1980, 1, 1, 0, 0, 0)


def run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def check_tools() -> None:
    missing = [tool for tool in ("ldd", "dpkg", "patchelf") if shutil.which(tool) is None]
    if missing:
        raise SystemExit(f"make_wheel: {', '.join(missing)} is not installed; tools/setup installs what building needs")


def needed(library: str) -> dict[str, str]:
    """Name -> path of all that `library` needs to be bundled."""
    found = {}
    for line in run("ldd", library).splitlines():
        match = re.match(r"\s*(\S+) => (\S+)", line)
        if match and not _SYSTEM.match(match[1]):
            if match[2] == "not":
                raise SystemExit(f"make_wheel: {match[1]} of {library} is not found")
            found[match[1]] = os.path.realpath(match[2])
    return found


def direct(library: str) -> list[str]:
    return run("patchelf", "--print-needed", library).split()


def bundle(files: dict[str, str], folder: str) -> list[str]:
    """Copies `files` (path in the folder -> source) and what they need to `folder`. Returns the copyright files."""
    sources: dict[str, str] = {}
    for source in files.values():
        sources |= needed(source)
    names = {}
    for name, path in sources.items():
        with open(path, "rb") as file:
            digest = hashlib.sha256(file.read()).hexdigest()[:8]
        stem, rest = name.split(".so", 1)
        names[name] = f"{stem}-{digest}.so{rest}"
    os.makedirs(os.path.join(folder, "libs"))
    copies = [(source, os.path.join(folder, path), "$ORIGIN/" + "../" * path.count("/") + "libs", None)
              for path, source in files.items()]
    copies += [(path, os.path.join(folder, "libs", names[name]), "$ORIGIN", names[name]) for name, path in sources.items()]
    for source, copy, rpath, soname in copies:
        os.makedirs(os.path.dirname(copy), exist_ok=True)
        shutil.copyfile(source, copy)
        os.chmod(copy, 0o755)
        if os.path.basename(copy) in _PROGRAMS:
            run("strip", "--strip-unneeded", copy)
        # One change a call: Debian's patchelf gives all of a call the last one's text.
        replaced = [option for name in direct(copy) if name in names for option in ("--replace-needed", name, names[name])]
        if replaced:
            run("patchelf", *replaced, copy)
        if soname is not None:
            run("patchelf", "--set-soname", soname, copy)
        run("patchelf", "--set-rpath", rpath, copy)
    return sorted({copyright_of(path) for path in sources.values()})


def copyright_of(library: str) -> str:
    """Of the Debian package that has it, whichever name of a merged /usr dpkg knows."""
    names = [library, library.removeprefix("/usr"), "/usr" + library]
    for name in names:
        found = subprocess.run(["dpkg", "-S", name], capture_output=True, text=True, check=False).stdout
        if found:
            return f"/usr/share/doc/{found.split(':')[0]}/copyright"
    raise SystemExit(f"make_wheel: no Debian package has {library}")


def version_of(init: str) -> str:
    with open(init, encoding="utf-8") as file:
        for node in ast.parse(file.read()).body:
            if isinstance(node, ast.Assign) and node.targets[0].id == "__version__":
                return node.value.value
    raise SystemExit(f"make_wheel: {init} has no __version__")


def metadata(version: str, readme: str) -> str:
    with open(readme, encoding="utf-8") as file:
        description = file.read()
    return "\n".join([
        "Metadata-Version: 2.1",
        "Name: kvmanager",
        f"Version: {version}",
        "Summary: Attention keys and values in a daemon of their own: kvmanagerd, its client, and calibration",
        "License: Apache-2.0",
        f"Requires-Python: {_PYTHON}",
        "Classifier: Operating System :: POSIX :: Linux",
        "Classifier: Programming Language :: Python :: 3",
        "Classifier: Typing :: Typed",
        "Description-Content-Type: text/markdown",
        "",
        description,
    ])


def main() -> None:
    out, readme, license_file, *files = sys.argv[1:]
    check_tools()
    version = version_of(next(file for file in files if file.endswith("kvmanager/__init__.py")))
    glibc = os.confstr("CS_GNU_LIBC_VERSION").split()[1].replace(".", "_")
    tag = f"py3-none-manylinux_{glibc}_x86_64"
    name = f"kvmanager-{version}-{tag}.whl"
    if os.path.basename(out) != name:
        raise SystemExit(f"make_wheel: the wheel of this version and glibc is {name}, not {os.path.basename(out)}")
    info = f"kvmanager-{version}.dist-info"
    contents: dict[str, bytes] = {}

    def add(path: str, source: str) -> None:
        with open(source, "rb") as file:
            contents[path] = file.read()

    with tempfile.TemporaryDirectory() as folder:
        binaries = {}
        for file in files:
            base = os.path.basename(file)
            if base == _LIBRARY:
                binaries[base] = file
            elif base in _PROGRAMS:
                binaries["bin/" + base] = file
            else:
                add("kvmanager/" + file.rpartition("/kvmanager/")[2], file)
        copyrights = bundle(binaries, folder)
        for path in [*binaries, *("libs/" + name for name in os.listdir(os.path.join(folder, "libs")))]:
            add("kvmanager/" + path, os.path.join(folder, path))
    add(f"{info}/LICENSE", license_file)
    for file in copyrights:
        add(f"{info}/licenses/{os.path.basename(os.path.dirname(file))}", file)
    scripts = "".join(f"{name} = kvmanager.programs:{name}\n" for name in _PROGRAMS)
    contents[f"{info}/entry_points.txt"] = f"[console_scripts]\n{scripts}".encode()
    contents[f"{info}/METADATA"] = metadata(version, readme).encode()
    contents[f"{info}/WHEEL"] = f"Wheel-Version: 1.0\nGenerator: kvmanager\nRoot-Is-Purelib: false\nTag: {tag}\n".encode()
    record = ""
    for path, data in sorted(contents.items()):
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        record += f"{path},sha256={digest},{len(data)}\n"
    contents[f"{info}/RECORD"] = (record + f"{info}/RECORD,,\n").encode()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as wheel:
        for path, data in sorted(contents.items(), key=lambda item: (item[0].startswith(info), item[0])):
            entry = zipfile.ZipInfo(path, _DATE)
            entry.compress_type = zipfile.ZIP_DEFLATED
            # The regular-file bit, too: pip keeps programs executable by it alone.
            executable = ".so" in path or path.startswith("kvmanager/bin/")
            entry.external_attr = (0o100755 if executable else 0o100644) << 16
            wheel.writestr(entry, data)


if __name__ == "__main__":
    main()
