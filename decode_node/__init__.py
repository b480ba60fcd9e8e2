"""Pulls finished KV blocks and runs continuous batching; as `both`, computes whole prompts too."""
