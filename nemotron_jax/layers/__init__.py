"""The blocks' mixers, one kind a file. They run inside ``jax.shard_map`` and see one rank's share of every array."""
