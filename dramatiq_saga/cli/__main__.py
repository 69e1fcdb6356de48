"""``python -m dramatiq_saga.cli``: the same program where its command is not on the path.

Nothing here but the call.
"""

import sys

from .program import main

sys.exit(main())
