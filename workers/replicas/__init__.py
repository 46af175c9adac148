"""What replicas of the picker tell each other through a store: Redis or Valkey. Only the supervisor uses it, and only with a store."""
