"""Access to the machine and the operating system: CPUs, memory, limits, the allocator, logs, exit codes, files."""
