"""Makes the modules of examples/bench importable in the scripts of this folder."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "bench"))
