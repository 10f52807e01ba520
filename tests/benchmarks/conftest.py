"""Benchmarks are scripts that import each other by name: so do their tests."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
