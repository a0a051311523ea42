"""A worker's process that stands by (`executors/spares.py`): it imports at the lowest priority."""

import sys

from coserve.wire.launch import import_uncollected

if __name__ == "__main__":
    import_uncollected("coserve.worker.service", low_priority=True).run(sys.argv[1:])
