"""Opening a database; ``write()`` and ``read()``; what waits for a commit.  (CONTRACT: to be implemented)"""
