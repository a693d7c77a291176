"""Run an S3 server on loopback, with a bucket, until the command ends that is run beside it.

    python scripts/local_s3.py torchrun --nproc-per-node 2 examples/fsdp2.py s3://bucket/run-1

The command finds server and credentials in its environment, as it would find AWS's. Needs the s3 and dev
extras.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import s3fs

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.s3.servers import serve_s3

BUCKET = "bucket"


def main() -> int:
    """Serve, run the command, and return its exit code."""
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    with serve_s3("juicefs") as server:
        s3fs.S3FileSystem(**server.storage_options()).mkdir(BUCKET)
        environment = {
            "AWS_ENDPOINT_URL_S3": server.endpoint,
            "AWS_ACCESS_KEY_ID": server.key,
            "AWS_SECRET_ACCESS_KEY": server.secret,
            "AWS_DEFAULT_REGION": "us-east-1",
        }
        return subprocess.run(
            sys.argv[1:], env={**os.environ, **environment}, check=False
        ).returncode


if __name__ == "__main__":
    sys.exit(main())
