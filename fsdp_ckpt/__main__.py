"""``python -m fsdp_ckpt`` is the ``fsdp-ckpt`` command."""

import sys

from fsdp_ckpt.cli import main

if __name__ == "__main__":
    sys.exit(main())
