"""The image: a root file system from Debian packages, locked dependencies and the wheel, and its OCI archive."""
