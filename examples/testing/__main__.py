"""Run the tests of this folder, as ``pytest examples/testing`` does."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

# The fixture is named here for those who run this from a checkout; an installed dramatiq-saga brings it along.
FIXTURE = "pytest_dramatiq_saga"

if __name__ == "__main__":
    here = str(Path(__file__).parent)
    sys.exit(pytest.main(["-q", "-c", os.devnull, "-p", "no:cacheprovider", "-p", FIXTURE, *sys.argv[1:], here]))
