"""`python -m tests.faults.quick_picker serve ...`: the real picker, but a worker may be recycled as soon as it is a second old."""

import os

os.environ["OPENBLAS_NUM_THREADS"] = "1"

from workers import memory, worker
from workers.cli import main

AGE_MIN_S = 1.0
LOOK_S = 0.1

if __name__ == "__main__":
    memory.AGE_MIN_S = AGE_MIN_S
    worker.LOOK_S = LOOK_S
    main()
