"""`python -m ssm_tune` is `ssm-tune`."""

import sys

from ssm_tune.cli import main

if __name__ == "__main__":
    sys.exit(main())
