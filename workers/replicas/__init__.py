"""What replicas of the picker tell each other through a store: Redis or Valkey. Only the supervisor uses it, and only with a store.

May import: shared and all below it. Imported by: process and all above it.
"""
