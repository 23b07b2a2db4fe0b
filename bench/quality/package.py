"""Makes `kvmanager.quality` importable: from the built package, or from the source tree where nothing is built.

The package needs its client library at import; kvmanager.quality does not. A machine that measures arithmetic in torch
alone has no daemon and no build.
"""

import pathlib
import sys
import types

SOURCE = pathlib.Path(__file__).resolve().parents[2] / "client" / "python" / "kvmanager"


def find() -> bool:
    """Whether the whole package is there, so that models can attend in a daemon."""
    try:
        import kvmanager.client  # noqa: F401
        return True
    except (ImportError, OSError):
        for name in [each for each in sys.modules if each == "kvmanager" or each.startswith("kvmanager.")]:
            del sys.modules[name]
        alone = types.ModuleType("kvmanager")
        alone.__path__ = [str(SOURCE)]
        sys.modules["kvmanager"] = alone
        return False
