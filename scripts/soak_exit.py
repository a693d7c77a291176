"""Count unclean ends of short training jobs: `python scripts/soak_exit.py 50`.

A gloo group can abort the interpreter when it exits, after all work is done: no single run proves that it
does not. See fsdp_ckpt.ranks.process_groups. Prints one JSON line; exit code 0 only if all runs ended clean.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parent
TINY = SCRIPTS.parent / "configs" / "tiny.toml"


def main() -> int:
    """Run the jobs one after the other and print what came of them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("num_runs", type=int)
    parser.add_argument("--config", type=Path, default=TINY, help="of scripts/train.py")
    parser.add_argument("--nproc-per-node", type=int, default=2, help="ranks per run")
    args = parser.parse_args()
    start = time.perf_counter()
    unclean = []
    for number in range(args.num_runs):
        with tempfile.TemporaryDirectory() as folder:
            done = subprocess.run(
                [
                    *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
                    *("--nproc-per-node", str(args.nproc_per_node)),
                    *(SCRIPTS / "train.py", args.config, "--root", folder),
                ],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        # torchrun fails with any of its ranks; what a rank says as it aborts is kept in any case.
        if done.returncode != 0 or "terminate called" in done.stdout:
            unclean.append({"run": number, "exit_code": done.returncode, "output": done.stdout})
    seconds = round(time.perf_counter() - start, 1)
    print(json.dumps({"runs": args.num_runs, "unclean": len(unclean), "seconds": seconds}))
    for record in unclean:
        print(json.dumps(record), file=sys.stderr)
    return 1 if unclean else 0


if __name__ == "__main__":
    sys.exit(main())
