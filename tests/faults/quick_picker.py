"""`python -m tests.faults.quick_picker serve ...`: the real picker, but the parent may recycle a worker after one second."""

import os

os.environ["OPENBLAS_NUM_THREADS"] = "1"

from workers.cli import main
from workers.host import memory
from workers.worker import main as worker

AGE_MIN_S = 1.0
LOOK_S = 0.1

if __name__ == "__main__":
    memory.AGE_MIN_S = AGE_MIN_S
    worker.LOOK_S = LOOK_S
    main()
