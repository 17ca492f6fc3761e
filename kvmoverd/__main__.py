"""`python -m kvmoverd`."""

import sys

from kvmoverd.cli import main

if __name__ == "__main__":
    sys.exit(main())
