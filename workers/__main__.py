"""`python -m workers`: the same as the `epp` command."""

from workers.cli import main

if __name__ == "__main__":
    main(prog_name="epp")
