"""Flow control over several workers: one worker's shard, what the shards show each other in shared memory, and eviction.

The policies and the queues are in `epp.flow`.
"""
