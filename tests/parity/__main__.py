"""`python -m tests.parity`: writes docs/parity.md from tests/parity/reference.toml."""

from tests.parity.page import PAGE, page

if __name__ == "__main__":
    PAGE.write_text(page())
    print(f"wrote {PAGE}")
