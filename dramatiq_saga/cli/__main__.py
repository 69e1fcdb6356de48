"""``python -m dramatiq_saga.cli``: the program, where its command is not on the path.

It is the same program with the same options and the same ending.
Nothing here but the call.
"""

import sys

from .program import main

sys.exit(main())
