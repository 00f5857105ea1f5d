"""Import this before timm and transformers: torchvision, which both import, then imports with any torch.

The work is that of tests/torchvision_operators.py.
"""

import importlib
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
importlib.import_module("tests.torchvision_operators")
