"""The extension points: what plugins implement, how they are registered, guarded and timed."""
